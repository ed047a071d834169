"""Tensor-parallel decoding on one rank: its variants, their turns, the times of their collectives.

A variant is undivided, on rank 0 alone; divided by DTensor's parallelize_module; or divided
plainly, by a model that calls its collectives itself.

The clock of a collective is CLOCK_MONOTONIC, which all processes of a host share. So the time in it
is divided at the moment when the last rank has called it: before it a rank waits for another one's
computing, after it data move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib import import_module
from statistics import median_low
from time import monotonic_ns, perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, parallel

import pycollect
from pycollect._timing import Effort, shuffled

from .llama import DIVIDED, GATHER, Case, Collectives, Llama, dist, weights
from .ranks import Rank, threads_of
from .runner import OURS, PEER, Result, Row, Way, in_turns

ALONE, GLOO = "alone", "gloo"
# Largest error of a divided model's logits: other orders of sums, rounded in the model's dtype, and
# with experts tokens of which two experts are nearly equal. Without one sum it is about 1.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15}
# The calls of a decoder: the logits (batch, vocab) after some tokens that begin at a position.
Decoder = Callable[[Tensor, int], Tensor]
# Without its types, because its functions are replaced.
funcol: Any = import_module("torch.distributed._functional_collectives")
# Begin and end of each stay of a rank in one collective, in nanoseconds: of the call, and of the
# wait for its result if it is asynchronous.
Stays = list[int]
# DTensor's collectives, as far as torch has them: they start a call, whose result is awaited later.
_STARTS = ("all_reduce", "all_gather_single", "all_gather_tensor")


class Stamps:
    """The stays of this rank in torch's collectives from now on, whoever calls them, in order."""

    def __init__(self) -> None:
        self._backend = ""
        self._calls: list[Stays] = []
        self._under_way = 0  # DTensor's calls whose result has not been awaited
        for name in ("all_reduce", "all_to_all_single", GATHER):
            setattr(dist, name, self.timed(getattr(dist, name)))
        for name in filter(partial(hasattr, funcol), _STARTS):
            setattr(funcol, name, self.timed(getattr(funcol, name), awaited=1))
        funcol.wait_tensor = self._awaited(funcol.wait_tensor)

    def start(self, backend: str) -> list[Stays]:
        """Return the calls since the last start; refuse from now on those of other backends than
        this one, unless it is empty.

        Raises:
            RuntimeError: if this torch awaits them in another way, so that times are missing.
        """
        if self._backend and self._under_way:
            raise RuntimeError(f"{self._under_way} of DTensor's collectives were not awaited")
        calls, self._calls, self._under_way, self._backend = self._calls, [], 0, backend
        return calls

    def timed(self, call: Callable[..., Any], awaited: int = 0) -> Callable[..., Any]:
        """Return a function that makes the same call, and records its begin and its end.

        The group, or mesh and dimension, is the call's third argument, or has its name.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            group: Any = kwargs.get("group", args[2] if len(args) > 2 else None)
            if isinstance(group, tuple):
                mesh, dim = group
                group = mesh.get_group(dim)
            if self._backend and (found := dist.get_backend(group)) != self._backend:
                raise RuntimeError(f"a collective of {self._backend} is one of {found}")
            self._under_way += awaited
            stays = [monotonic_ns()]
            self._calls.append(stays)
            result = call(*args, **kwargs)
            stays.append(monotonic_ns())
            return result

        return run

    def _awaited(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that waits likewise, and adds this stay to the last call.

        A call that waits itself, as a gather along the last dimension, has this time already.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            begin, stays = monotonic_ns(), self._calls[-1]
            result = wait(*args, **kwargs)
            if len(stays) % 2 == 0:
                stays += [begin, monotonic_ns()]
            self._under_way -= 1
            return result

        return run


def divided(of_ranks: Sequence[Sequence[Stays]]) -> tuple[float, float]:
    """Return the seconds of waiting and of moving in the same calls, in the mean of all ranks.

    >>> divided([[[0, 4_000, 9_000, 10_000]], [[3_000, 6_000, 8_000, 10_000]]])
    (1.5e-06, 3.5e-06)
    """
    waiting = moving = 0
    for call in zip(*of_ranks, strict=True):
        complete = max(stays[0] for stays in call)
        for stays in call:
            for begin, end in zip(stays[::2], stays[1::2], strict=True):
                waiting += max(0, min(end, complete) - begin)
                moving += max(0, end - max(begin, complete))
    return waiting / len(of_ranks) / 1e9, moving / len(of_ranks) / 1e9


@dataclass(frozen=True)
class Parts:
    """What all variants of a case share on one rank, such as its part of the weights."""

    case: Case
    weights: Mapping[str, Tensor]
    groups: Mapping[str, Any]
    stamps: Stamps
    prompt: Tensor


def undivided(parts: Parts, backend: str) -> Decoder:
    """Make the whole model."""
    return Llama(parts.case, Collectives()).load(weights(parts.case))


def dtensor(parts: Parts, backend: str) -> Decoder:
    """Divide the model by parallelize_module, and give each DTensor its part of the weights."""
    group = parts.groups[backend]
    # DTensor's caches are shared by meshes that are equal, whatever their groups: without the name
    # all models would use the first one's group.
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(backend,))
    model = Llama(parts.case, Collectives(group))
    plan: dict[str, parallel.ParallelStyle] = {
        path: parallel.RowwiseParallel() if DIVIDED[name] else parallel.ColwiseParallel()
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and (name := path.rpartition(".")[2]) in DIVIDED
    }
    plan["lm_head"] = parallel.ColwiseParallel(output_layouts=Replicate())
    parallel.parallelize_module(model, mesh, plan, src_data_rank=None)
    own = dict(parts.weights)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            own[name] = DTensor.from_local(own[name], mesh, parameter.placements, run_check=False)
    return model.load(own)


def plain(parts: Parts, backend: str, direct: bool = False, symmetric: bool = False) -> Decoder:
    """Divide the model by hand: with dist.all_reduce, or directly with the operator, which passes
    by torch.distributed's Python. `symmetric`: sums are in symmetric memory.
    """
    group, all_reduce, sums = parts.groups[backend], dist.all_reduce, None
    if direct:
        operator, name = torch.ops.pycollect.group_all_reduce_.default, group.group_name
        all_reduce = parts.stamps.timed(lambda tensor, group: operator(tensor, "sum", name))
    if symmetric:
        dtype = getattr(torch, parts.case.dtype)
        sums = cache(partial(pycollect.SymmetricAllocator(group).empty, dtype=dtype))
    calls = Collectives(group, partial(all_reduce, group=group), sums)
    return Llama(parts.case, calls).load(parts.weights)


# How each variant is made, and its backend.
VARIANTS: dict[str, tuple[Callable[[Parts, str], Decoder], str]] = {
    ALONE: (undivided, ""),
    "dtensor:gloo": (dtensor, GLOO),
    "dtensor:pycollect": (dtensor, OURS),
    "plain:gloo": (plain, GLOO),
    "plain:pycollect": (plain, OURS),
    "plain:direct": (partial(plain, direct=True), OURS),
    "plain:zero-copy": (partial(plain, direct=True, symmetric=True), OURS),
}


class Turn(NamedTuple):
    """The seconds of the prompt and of a token in one turn, and the calls of all its tokens."""

    first: float = 0.0
    token: float = 0.0
    calls: Sequence[Stays] = ()


class Candidate:
    """A variant on this rank; one rank alone has no decoder on the other ranks."""

    def __init__(self, name: str, parts: Parts, rank: Rank) -> None:
        make, self._backend = VARIANTS[name]
        self._name, self._parts, self._rank = name, parts, rank
        alone = name == ALONE
        self._threads = threads_of(1 if alone else rank.world)
        self._decoder = None if alone and rank.number else make(parts, self._backend)
        self._turns: list[Turn] = []

    @property
    def kind(self) -> str:
        """The kind of its row."""
        return {"": ALONE, GLOO: PEER}.get(self._backend, OURS)

    def logits(self) -> Tensor:
        """Return the logits after the prompt and after one more token, in float32."""
        case, ids, start = self._parts.case, self._parts.prompt, self._parts.stamps.start
        if not self._decoder:
            return torch.empty(2, case.batch, case.vocab)
        start(self._backend)
        found = self._decoder(ids, 0), self._decoder(ids[:, :1], case.prompt)
        logits = torch.stack(found).float()  # which awaits the last collective
        start("")
        return logits

    def sample(self, turns: int) -> list[float]:
        """Return the seconds of a token in each of some turns on the slowest rank; a sampler."""
        for _ in range(turns):
            torch.set_num_threads(self._threads)
            self._turns.append(self._turn())
            dist.barrier()  # of gloo, in which the other ranks sleep while one rank is alone
        return [self._rank.slowest(turn.token) for turn in self._turns[-turns:]]

    def _turn(self) -> Turn:
        if not self._decoder:
            return Turn()
        case, start = self._parts.case, self._parts.stamps.start
        start(self._backend)
        begin = perf_counter()
        ids = self._decoder(self._parts.prompt, 0).argmax(-1, keepdim=True)
        first = perf_counter() - begin
        start(self._backend)
        begin = perf_counter()
        for number in range(case.tokens):
            ids = self._decoder(ids, case.prompt + number).argmax(-1, keepdim=True)
        return Turn(first, (perf_counter() - begin) / case.tokens, start(""))

    def numbers(self, turns: int) -> dict[str, float]:
        """Return what the last turns spent a token on; collective.

        `first` is of the slowest rank, `waiting` and `moving` are parts of a token in the mean of
        the ranks, `calls` is the number of a token's collectives.

        Raises:
            RuntimeError: if a token has not its number of calls, so that times are missing.
        """
        case, everyone = self._parts.case, [Any] * self._rank.world
        dist.all_gather_object(everyone, self._turns[-turns:])
        of_turns = list(zip(*everyone, strict=True))
        of_layer = 5 if case.moe else 2  # a sum, and three exchanges and a gather or another sum
        calls = (case.layers * of_layer + 1) * (self._name != ALONE)
        found = {len(one.calls) / case.tokens for turn in of_turns for one in turn}
        if found != {calls}:
            raise RuntimeError(f"{self._name} makes {found} collectives of a token, not {calls}")
        shares = zip(*(divided([one.calls for one in turn]) for turn in of_turns), strict=True)
        waiting, moving = (median_low(share) / case.tokens for share in shares)
        first = median_low(max(one.first for one in turn) for turn in of_turns)
        return {"first": first, "waiting": waiting, "moving": moving, "calls": calls}


def measured(
    names: Sequence[str], parts: Parts, effort: Effort, seed: int, rank: Rank
) -> Result | None:
    """Measure the variants of these names in turns, and check their logits; rank 0 has the result.

    The `error` of logits is the norm of their difference from those of one rank alone, divided by
    the norm of these.
    """
    case, made = parts.case, {name: Candidate(name, parts, rank) for name in (ALONE, *names)}
    right = made[ALONE].logits()
    dist.broadcast(right, 0)
    errors = {ALONE: 0.0}
    for name in filter(ALONE.__ne__, names):
        error = (made[name].logits() - right).norm() / right.norm()
        errors[name] = rank.slowest(float(error.nan_to_num(torch.inf)))  # of all ranks the largest

    def numbers(row: Row) -> dict[str, float]:
        return made[row.name].numbers(row.timing.count) | {"error": errors[row.name]}

    ways = {name: Way(made[name].sample, made[name].kind) for name in names}
    rows = []
    for row in in_turns(ways, effort, shuffled(seed), rank.slowest, numbers):
        gloo = row.speedup.get(f"{row.name.partition(':')[0]}:{GLOO}")
        speedup = {} if gloo is None else {GLOO: gloo}  # over the model that is divided likewise
        wrong = int(errors[row.name] > TOLERANCE[case.dtype])
        rows.append(replace(row, wrong=wrong, speedup=speedup))
    return None if rank.number else Result({**asdict(case), "world": rank.world}, rows)


def work(rank: Rank, task: tuple[Sequence[str], Effort]) -> None:
    """Measure the variants in each case that is requested."""
    rank.init_process_group()
    groups, stamps = {GLOO: dist.group.WORLD, OURS: dist.new_group(backend=OURS)}, Stamps()
    variants, effort = task
    with torch.no_grad():  # in inference mode DTensor finds the sharding of a linear layer anew
        for seed, case in enumerate(rank.requests()):
            shape, generator = (case.batch, case.prompt), torch.Generator().manual_seed(1)
            prompt = torch.randint(case.vocab, shape, generator=generator)
            parts = Parts(case, weights(case, rank.number, rank.world), groups, stamps, prompt)
            rank.send(measured(variants, parts, effort, seed, rank))
