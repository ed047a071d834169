"""Training steps of replicas in this process and of DDP processes, in turns.

A step is complete: split, forward, backward, reduction and update, until the devices are done. The
time of its reduction is the time in which the step waits for it. DDP overlaps the reduction, so its
reduction is timed separately, with the same buckets.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pycollect._timing import Effort, Sampler, host_time
from pycollect.gpus import synchronizer
from pycollect.train.cuda_graph import GraphedStep
from pycollect.train.losses import sgd_factory, summed_cross_entropy
from pycollect.train.models import MODELS
from pycollect.train.reduce import GRADIENT_REDUCTIONS
from pycollect.train.replica_trainer import ReplicaTrainer

from .ranks import Rank, Ranks, RanksFailed
from .report import ONE_GPU, devices_named
from .runner import OURS, PEER, Result, Row, Way, in_turns

ONE = "one replica, whole batch"
NAIVE, PYCOLLECT, OVERLAPPED = "naive loop", "pycollect", "pycollect, overlapped"
GRAPH = "pycollect, graph"
WHOLE = "naive loop, whole step"
BY_HOST = (WHOLE, GRAPH)  # timed by the host's clock
DDP_GLOO, DDP_OURS = "DDP, gloo", "DDP, pycollect"
BACKENDS = {DDP_GLOO: "gloo", DDP_OURS: "pycollect"}
SIZE = 28  # height and width of the images
PEERS = (ONE, NAIVE, WHOLE, DDP_GLOO)
# Learning rate: so small that all numbers stay finite after any number of steps on one batch.
_LR = 1e-4
# Number of steps after which parameters are compared, and their learning rate, large for all bits.
_CHECKED, _CHECKED_LR = 3, 0.1
# Timeout in seconds for the answers of DDP's ranks: a step takes seconds at most.
_ANSWER_SECONDS = 300.0
# Elements of DDP's default buckets, 25 MB; the separately timed reduction uses the same buckets.
_BUCKET_ELEMENTS = (25 << 20) // 4


@dataclass(frozen=True)
class TrainingCase:
    """A model, the ranks' devices, and the number of examples in a batch over all ranks."""

    model: str
    batch: int
    devices: tuple[torch.device, ...]

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.devices)

    @property
    def about(self) -> dict[str, Any]:
        """The case for the record."""
        about = {"what": "step", "model": self.model, "batch": self.batch, "world": self.world}
        return about | {"size": SIZE, "devices": devices_named(self.devices)}

    def examples(self) -> tuple[Tensor, Tensor]:
        """Return a batch on the CPU, equal in all runs; its values do not affect the times."""
        generator = torch.Generator().manual_seed(0)
        X = torch.rand((self.batch, 1, SIZE, SIZE), generator=generator)
        return X, torch.randint(10, (self.batch,), generator=generator)


def _names(case: TrainingCase) -> list[str]:
    """Return the candidates of this process.

    With one rank there is no reduction, and most would equal ONE.
    """
    names = [ONE]
    if case.world > 1:
        names += [NAIVE, PYCOLLECT, OVERLAPPED]
        if case.model == "lenet" and devices_named(case.devices) in ONE_GPU:
            names += BY_HOST
    return names


def _steps(name: str, case: TrainingCase, lr: float) -> tuple[Callable[[], object], ReplicaTrainer]:
    """Return the step of a candidate of this process on one batch, and its replicas."""
    replicas = ReplicaTrainer(
        MODELS[case.model](),
        case.devices[:1] if name == ONE else case.devices,
        optimizer=sgd_factory(lr),
        reduction=GRADIENT_REDUCTIONS["naive" if name in (NAIVE, WHOLE) else "pycollect"],
        overlap=name == OVERLAPPED,
        exact_times=name not in BY_HOST,
    )
    X, y = case.examples()
    step = partial(GraphedStep.of(X, y, replicas) if name == GRAPH else replicas.step, X, y)
    return step, replicas


def _sampler(name: str, case: TrainingCase, reductions: list[float]) -> Sampler:
    """Return a sampler of steps, which appends the seconds of reductions to `reductions`.

    A step's own clock waits for the devices at every part. A graph has none.
    """
    step, replicas = _steps(name, case, _LR)
    if name in BY_HOST:
        return host_time(step, synchronize=synchronizer(replicas.devices))

    def sample(calls: int) -> list[float]:
        seconds = []
        for _ in range(calls):
            step()
            seconds.append(replicas.seconds.total)
            reductions.append(replicas.seconds.reduction)
        return seconds

    return sample


def wrong_parameters(case: TrainingCase) -> dict[str, int]:
    """Return, by candidate, the number of parameters whose bits differ from the naive loop's.

    The convolutions are cuDNN's deterministic ones; the bits of others differ from run to run.
    """
    bits = {}
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        for name in _names(case)[1:]:
            step, replicas = _steps(name, case, _CHECKED_LR)
            for _ in range(_CHECKED):
                step()
            parameters = chain.from_iterable(replicas.parameters)
            bits[name] = [p.detach().view(torch.int32).cpu() for p in parameters]
    naive = bits.pop(NAIVE, [])
    return {
        name: sum(not torch.equal(a, b) for a, b in zip(naive, ours, strict=True))
        for name, ours in bits.items()
    }


def ddp_rank(rank: Rank, task: tuple[TrainingCase, str]) -> None:
    """Answer numbers of calls with the seconds of as many steps of DDP, and of as many reductions
    of a step's bytes without other work. Several ranks may share a GPU.
    """
    case, backend = task
    device = case.devices[rank.number]
    rank.init_process_group(backend, device)
    X, y = (part.tensor_split(case.world)[rank.number].to(device) for part in case.examples())
    module = nn.parallel.DistributedDataParallel(MODELS[case.model]().to(device))
    sgd = torch.optim.SGD(module.parameters(), lr=_LR, fused=True)
    numel = sum(param.numel() for param in module.parameters())
    buckets = torch.split(torch.zeros(numel, device=device), _BUCKET_ELEMENTS)
    # DDP averages the gradients over the ranks. This scale makes them those of the batch mean.
    scale = case.world / case.batch

    def step() -> None:
        sgd.zero_grad(set_to_none=True)
        loss = summed_cross_entropy(module(X), y) * scale
        loss.backward()  # type: ignore[no-untyped-call]
        sgd.step()

    def reduce() -> None:
        for bucket in buckets:
            dist.all_reduce(bucket)

    timer = partial(host_time, synchronize=synchronizer([device]))
    steps, reductions = timer(step), timer(reduce, barrier=dist.barrier)
    for calls in rank.requests():
        rank.send((steps(calls), reductions(calls)))


def _ddp_sampler(name: str, ranks: Ranks, reductions: list[float]) -> Sampler:
    """Return a sampler of the slowest rank's steps; it appends its reductions to `reductions`."""

    def sample(calls: int) -> list[float]:
        try:
            steps, reduced = zip(*ranks.ask(calls, _ANSWER_SECONDS), strict=True)
        except RanksFailed as error:
            raise RanksFailed(f"{name}: {error}; --no-ddp leaves it out") from None
        reductions.extend(map(max, zip(*reduced, strict=True)))
        return list(map(max, zip(*steps, strict=True)))

    return sample


def measure(case: TrainingCase, effort: Effort, ddp: bool = True) -> Result:
    """Time a step of all candidates in turns, and compare the bits of those of this process.

    With `ddp` there is a process per rank and backend.

    Raises:
        RanksFailed: if a process of DDP fails.
    """
    reductions: dict[str, list[float]] = defaultdict(list)
    samplers: dict[str, Sampler] = {}
    with ExitStack() as stack:
        for name in _names(case):
            samplers[name] = _sampler(name, case, reductions[name])
        for name, backend in BACKENDS.items() if ddp else ():
            program = f"{__name__}:{ddp_rank.__name__}"
            ranks = stack.enter_context(Ranks(case.world, program, (case, backend)))
            samplers[name] = _ddp_sampler(name, ranks, reductions[name])
        kinds = {name: PEER if name in PEERS else OURS for name in samplers}
        ways = {name: Way(sampler, kinds[name]) for name, sampler in samplers.items()}

        def numbers(row: Row) -> dict[str, float]:
            taken = reductions[row.name][-row.timing.count :]
            return {"reduction": statistics.median(taken)} if taken else {}

        rows = in_turns(ways, effort, numbers=numbers)
    samplers.clear()  # the memory of their replicas, before those of the check
    ways.clear()
    wrong = wrong_parameters(case)
    return Result(case.about, [replace(row, wrong=wrong.get(row.name)) for row in rows])


def share(row: Row) -> float | None:
    """Return the percentage of a step that is its reduction; a graph has none by itself."""
    reduction = row.numbers.get("reduction")
    return None if reduction is None else 100 * reduction / row.seconds
