"""Steps of random programs of ranks: collectives, messages, batches, and mistakes.

All ranks of a group derive a step from a seed, and check its exact result. The collectives are the
cases of matrix.py, in flight; the memory of each tensor is the rank's own random choice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from dist_rank import RankContext, Spec
from matrix import (
    INSIDE,
    OF_RANKS,
    REDUCING,
    TORCH_OPS,
    Case,
    axes_of_ranks,
    difference,
    placed,
    wanted,
)
from matrix_sites import TORCH_NAMES, Rank, blocks_of, joined
from reference import DTYPES, OPS, as_bits, assert_same, randoms
from torch import Tensor

import pycollect as pc

_CPU = torch.device("cpu")
_REFUSALS = (TypeError, ValueError)
Works = Sequence[Any]
Check = Callable[[], None]
COLLECTIVES = (*OF_RANKS, "barrier")
# Kinds of steps and their weights; "collective" then selects uniformly among all collectives.
KINDS = {
    "collective": 40,
    "exchange": 8,
    "message": 5,
    "batch of messages": 5,
    "batch": 5,
    "list of calls": 5,
    "mistake": 5,
    "mistake in a list": 3,
    "message too long": 2,
}
MESSAGES = ("exchange", "message", "message too long")


@dataclasses.dataclass(frozen=True)
class Step:
    """A step, as all ranks of a group draw it."""

    kind: str
    number: int  # index within the group
    seed: int
    world: int
    case: Case  # the collective, or the dtype and the number of elements of another step

    def rng(self, what: object) -> random.Random:
        """A generator for further choices that all ranks make alike."""
        return random.Random(f"{self.seed} {what}")

    def values(self, rank: int, block: int = 0, count: int | None = None) -> Tensor:
        """Elements of a rank's block."""
        shape = (self.case.count if count is None else count,)
        return randoms(1, shape, self.case.dtype, seed=self.seed + 7 * rank + 31 * block)[0]

    @property
    def odd(self) -> int:
        """The rank that makes the mistake, in steps with a mistake."""
        return self.rng("odd").randrange(self.world)


def draw(kind: str, number: int, seed: int, world: int) -> Step:
    """Draw a step of this kind; most are small, 4 % have 1 to 4 MiB."""
    rng = random.Random(f"{seed} {number} {kind}")
    op, dtypes = "sum", DTYPES
    if kind in REDUCING:
        op = rng.choice(OPS)
    if kind in OF_RANKS:
        dtypes = axes_of_ranks(kind, op)["dtype"]
    dtype = rng.choice(dtypes)
    nbytes = rng.choice((0, 8, 60, 700, 5000, 40_000, 70_000, 300_000))
    nbytes = (
        rng.randint(2**20, 4 * 2**20) if rng.random() < 0.04 else rng.randint(nbytes // 2, nbytes)
    )
    root = rng.choice(("first", "middle", "last"))
    count = nbytes // dtype.itemsize // world
    case = Case(kind, op, dtype, count, root=root, async_op=rng.random() < 0.6)
    return Step(kind, number, rng.randrange(2**30), world, case)


@dataclasses.dataclass(frozen=True)
class GroupRank:
    """The calling rank of a group, with its own random choices."""

    group: Any
    rank: int
    local: random.Random  # for choices that differ between ranks

    def global_rank(self, rank: int) -> int:
        """The global rank of a rank of the group, as torch.distributed calls take it."""
        return dist.get_global_rank(self.group, rank)

    def copy(self, values: Tensor, flat: bool = False, layout: str = "") -> Tensor:
        """Copy the values into the given kind of memory, or any; `flat`: without gaps."""
        layouts = ("contiguous", "contiguous", "symmetric", "misaligned", "every_other")
        layout = layout or self.local.choice(layouts[: len(layouts) - flat])
        if layout != "symmetric":
            return placed(values, layout)
        made = pc.symmetric_empty(values.numel(), dtype=values.dtype, group=self.group)
        return as_bits(made.view(values.shape)).copy_(as_bits(values)).view(values.dtype)

    def output(self, values: Tensor) -> Tensor:
        """Memory for such values, with others in it."""
        other = as_bits(values).clone().view(torch.uint8) ^ 1
        return self.copy(other.view(values.dtype))


# --- collectives ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class InFlight(Rank):
    """A rank whose calls end later."""

    caller: GroupRank | None = None
    memory: str = ""  # of all tensors; any, if empty
    works: list[Any] = dataclasses.field(default_factory=list)
    received: list[Tensor] = dataclasses.field(default_factory=list)

    def put(self, values: Tensor, layout: str = "") -> Tensor:
        assert self.caller is not None
        return self.caller.copy(values, self.case.collective in INSIDE, self.memory)

    def outputs(self, count: int) -> list[Tensor]:
        self.received.extend(super().outputs(count))
        return self.received

    def call(self, *args: Any, **more: Any) -> None:
        assert self.caller is not None
        more |= {n: self.caller.global_rank(more[n]) for n in ("src", "dst") if n in more}
        if self.case.reduces:
            more["op"] = getattr(dist.ReduceOp, TORCH_OPS[self.case.op])
        call = getattr(dist, TORCH_NAMES.get(self.case.collective, self.case.collective))
        self.works.append(call(*args, **more, group=self.group, async_op=self.case.async_op))


def collective(me: GroupRank, step: Step) -> tuple[Works, Check]:
    case = step.case
    if case.collective == "barrier":
        return [dist.barrier(me.group, async_op=case.async_op)], lambda: None
    inputs = randoms(
        step.world, case.shape(blocks_of(case, step.world)), case.dtype, seed=step.seed
    )
    results = wanted(case, [as_bits(t) for t in inputs])
    me_alone = RankContext(me.rank, Spec(step.world), "")
    # Peers access tensors in place only if all of all ranks are symmetric.
    memory = "symmetric" if step.rng("memory").random() < 0.3 else ""
    rank = InFlight(me_alone, me.group, case, caller=me, memory=memory)
    found = rank.run(inputs[me.rank])

    def check() -> None:
        mine = results[me.rank]
        for n, actual in enumerate([joined(rank.received)] if rank.received and found else found):
            right = (mine if n == 0 else mine[:1]).view(case.dtype)
            assert not (why := difference(actual, right, case)), f"{step}: {why}"
        assert not rank.changed(), (step, rank.changed())

    return rank.works, check


# Collectives that torch itself coalesces (_coalescing_manager without a device).
COALESCED_BY_TORCH = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


def batch(me: GroupRank, step: Step) -> tuple[Works, Check]:
    """Calls of one kind and op, which torch coalesces into one, of several dtypes if it can."""
    rng = step.rng("batch")
    first = draw(rng.choice(COALESCED_BY_TORCH), 0, step.seed, step.world)
    small = dataclasses.replace(first.case, count=min(first.case.count, 50_000), async_op=True)
    more = (torch.float64, torch.int16) if small.op in ("sum", "min", "max", "prod") else ()
    dtypes = [*[small.dtype] * 3, *more]
    rng.shuffle(dtypes)
    calls = [
        dataclasses.replace(first, seed=first.seed + n, case=dataclasses.replace(small, dtype=t))
        for n, t in enumerate(dtypes)
    ]
    return _coalesced(me, calls, None)


def list_of_calls(me: GroupRank, step: Step) -> tuple[Works, Check]:
    """Calls of different kinds, which the backend coalesces."""
    rng, lists = step.rng("list"), (*COALESCED_BY_TORCH, *INSIDE, "all_reduce_coalesced")
    kinds = [kind for kind in COLLECTIVES if kind not in lists]
    calls = [draw(rng.choice(kinds), n, step.seed, step.world) for n in range(rng.randint(0, 4))]
    return _coalesced(me, calls, _CPU)


def _coalesced(
    me: GroupRank, calls: list[Step], device: torch.device | None
) -> tuple[Works, Check]:
    with dist._coalescing_manager(me.group, device, async_ops=True) as manager:
        checks = [collective(me, call)[1] for call in calls]
    return [manager], lambda: [check() for check in checks] and None


def exchange(me: GroupRank, step: Step) -> tuple[Works, Check]:
    """Every rank sends to one rank and receives from another, along a random ring."""
    order = list(range(step.world))
    step.rng("order").shuffle(order)
    place = order.index(me.rank)
    to, source = order[(place + 1) % step.world], order[place - 1]
    wanted = step.values(source)
    sent, out = me.copy(step.values(me.rank)), me.output(wanted)
    calls = [
        lambda: dist.isend(sent, me.global_rank(to), me.group, tag=step.number),
        lambda: dist.irecv(out, me.global_rank(source), me.group, tag=step.number),
    ]
    me.local.shuffle(calls)
    return [call() for call in calls], lambda: assert_same([out], [wanted], step)


def message(me: GroupRank, step: Step, missing: int = 0) -> tuple[Works, Check]:
    """One rank sends to another, which may receive from any source. With `missing` elements, the
    receiver raises, and so may the sender."""
    source, to = step.rng("pair").sample(range(step.world), 2)
    count, refused = step.case.count + missing, False
    values, out = step.values(source, count=count), me.output(step.values(to))
    before, any_source = out.clone(), not missing and me.local.random() < 0.3
    peer = None if any_source else me.global_rank(source)
    try:
        if me.rank == source:
            dist.send(me.copy(values), me.global_rank(to), me.group, tag=step.number)
        if me.rank == to:
            assert dist.recv(out, peer, me.group, tag=step.number) == me.global_rank(source)
    except ValueError:
        refused = True
    if me.rank != to:
        assert missing or not refused
        return (), lambda: None
    assert refused == bool(missing), f"this rank did not refuse {step}"
    return (), lambda: assert_same([out], [before if missing else values], step)


def batch_of_messages(me: GroupRank, step: Step) -> tuple[Works, Check]:
    rng, ops, found = step.rng("batch"), [], []
    for n in range(8):
        source, to = rng.randrange(step.world), rng.randrange(step.world)
        values = step.values(source, n, rng.randint(0, step.case.count))
        if me.rank == source:
            peer = me.global_rank(to)
            ops.append(dist.P2POp(dist.isend, me.copy(values), peer, me.group, step.number))
        if me.rank == to:
            out, peer = me.output(values), me.global_rank(source)
            ops.append(dist.P2POp(dist.irecv, out, peer, me.group, step.number))
            found.append((out, values))
    works = dist.batch_isend_irecv(ops) if ops else []
    return works, lambda: [assert_same([a], [b], step) for a, b in found] and None


# --- mistakes -------------------------------------------------------------------------------------

CollectiveCall = Callable[[Tensor], Any]


def _correct_and_mistaken_call(me: GroupRank, step: Step) -> tuple[CollectiveCall, CollectiveCall]:
    """The call of most ranks, and the mistaken call of the odd rank."""
    options = {"group": me.group, "async_op": step.case.async_op}
    first, last = me.global_rank(0), me.global_rank(step.world - 1)

    def gathers(x: Tensor, more: int = 0) -> Any:
        return dist.all_gather_into_tensor(x.new_empty(step.world * x.numel() + more), x, **options)

    all_reduce: CollectiveCall = lambda x: dist.all_reduce(x, **options)  # noqa: E731
    mistakes: dict[str, tuple[CollectiveCall, CollectiveCall]] = {
        "count": (all_reduce, lambda x: dist.all_reduce(x.new_ones(x.numel() + 1), **options)),
        "dtype": (all_reduce, lambda x: dist.all_reduce(x.double(), **options)),
        "no such dtype": (all_reduce, lambda x: dist.all_reduce(x.to(torch.uint16), **options)),
        "op": (all_reduce, lambda x: dist.all_reduce(x, dist.ReduceOp.BAND, **options)),
        "stride 0": (all_reduce, lambda x: dist.all_reduce(x[:1].expand(x.numel()), **options)),
        "collective": (all_reduce, lambda x: dist.broadcast(x, first, **options)),
        "barrier": (all_reduce, lambda x: dist.barrier(**options)),
        "root": (
            lambda x: dist.broadcast(x, first, **options),
            lambda x: dist.broadcast(x, last, **options),
        ),
        "output size": (gathers, lambda x: gathers(x, 1)),
    }
    return mistakes[step.rng("mistake").choice(sorted(mistakes))]


def mistake(me: GroupRank, step: Step) -> tuple[Works, Check]:
    """One rank makes another, or an invalid, call: every rank refuses, and no data changes."""
    count, works = max(2, step.case.count), ()
    step = dataclasses.replace(
        step, case=dataclasses.replace(step.case, dtype=torch.float32, count=count)
    )
    x = me.copy(step.values(me.rank))
    before = x.clone()
    with contextlib.suppress(*_REFUSALS):
        works = (_correct_and_mistaken_call(me, step)[me.rank == step.odd](x),)
    return works, lambda: assert_same([x], [before], step)


def mistake_in_a_list(me: GroupRank, step: Step) -> tuple[Works, Check]:
    """A mistake among coalesced calls: all ranks raise, after the same number of calls."""
    calls = [draw("broadcast", n, step.seed, step.world) for n in range(3)]
    where, works = step.rng("where").randrange(3), ()
    with contextlib.suppress(*_REFUSALS):
        with dist._coalescing_manager(me.group, _CPU, async_ops=True) as manager:
            for n, call in enumerate(calls):
                if n == where and me.rank == step.odd:  # a size of no root, even as reals
                    x = torch.ones(1).expand(2 * call.case.count + 1)
                    dist.broadcast(x, me.global_rank(0), group=me.group, async_op=True)
                else:
                    collective(me, call)
        works = (manager,)
    return works, lambda: None


# --- all of them ----------------------------------------------------------------------------------


MISTAKES = {"mistake": mistake, "mistake in a list": mistake_in_a_list}
STEPS: dict[str, Callable[[GroupRank, Step], tuple[Works, Check]]] = {
    **dict.fromkeys(COLLECTIVES, collective),
    "exchange": exchange,
    "message": message,
    "message too long": functools.partial(message, missing=1),
    "batch of messages": batch_of_messages,
    "batch": batch,
    "list of calls": list_of_calls,
    **MISTAKES,
}


@dataclasses.dataclass
class Pending:
    """A step in flight on this rank."""

    step: Step
    works: Works
    check: Check

    def finish(self) -> None:
        """Wait for the step and check its result."""
        refused, must_refuse = not self.works, self.step.kind in MISTAKES
        try:
            for work in self.works:
                if work is not None:
                    work.wait()
        except _REFUSALS:
            if not must_refuse:
                raise
            refused = True
        assert refused or not must_refuse, f"this rank did not refuse {self.step}"
        self.check()


def choose(rng: random.Random, only: Sequence[str] = tuple(KINDS)) -> str:
    kind = rng.choices(only, [KINDS[k] for k in only])[0]
    return rng.choice(COLLECTIVES) if kind == "collective" else kind


def begin_step(me: GroupRank, kind: str, number: int, seed: int) -> Pending:
    step = draw(kind, number, seed, dist.get_world_size(me.group))
    return Pending(step, *STEPS[kind](me, step))
