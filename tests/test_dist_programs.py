"""Random programs of collectives over random subgroups, compared with a model of all ranks.

Subgroups overlap and are used in random order; calls are synchronous, or async with a later wait.
Data are small integers, so every order of addition gives the same result.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Pools, RankContext, pools_of_a_module
from dist_soak_calls import GroupRank
from dist_soak_steps import KINDS as STEPS
from dist_soak_steps import SYMMETRIC_CALLS, Pending, begin_step, choose
from hypothesis import strategies as st
from thread_programs import PARALLEL
from torch import Tensor

from pycollect import threads

SLOTS = 3  # tensors of each rank, all of one length
KINDS = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all")
KINDS += ("gather", "scatter", "barrier", "exchange")
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_BOUND = 97  # values are reduced modulo this, so that sums stay exact in every dtype


@dataclasses.dataclass(frozen=True)
class Step:
    kind: str
    members: tuple[int, ...]
    root: int  # index into members
    op: str
    source: int
    target: int
    wait: int  # number of steps until the wait; 0: synchronous
    pause: int  # milliseconds by which the root is late


@dataclasses.dataclass(frozen=True)
class Program:
    world: int
    count: int  # elements of a tensor, divisible by every group size
    dtype: torch.dtype
    steps: tuple[Step, ...]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    world = draw(st.sampled_from([3, 4]))
    subsets = [m for n in range(1, world + 1) for m in itertools.combinations(range(world), n)]
    step = st.builds(
        Step,
        kind=st.sampled_from(KINDS),
        members=st.sampled_from(subsets),
        root=st.integers(0, world - 1),
        op=st.sampled_from(sorted(OPS)),
        source=st.integers(0, SLOTS - 1),
        target=st.integers(0, SLOTS - 1),
        wait=st.sampled_from([0, 0, 1, 3]),
        pause=st.sampled_from([0, 0, 0, 1, 4]),
    )
    count = 12 * draw(st.sampled_from([0, 1, 7, 3000, 40_000]))
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.bfloat16]))
    return Program(world, count, dtype, tuple(draw(st.lists(step, min_size=1, max_size=14))))


def begin(program: Program) -> list[list[Tensor]]:
    """Initial tensors as [rank][slot]."""
    row = torch.arange(program.count) % _BOUND
    return [
        [((row * (3 * r + 1) + 7 * s) % _BOUND).to(program.dtype) for s in range(SLOTS)]
        for r in range(program.world)
    ]


def root_of(step: Step) -> int:
    return step.members[step.root % len(step.members)]


def reduced(x: Tensor) -> Tensor:
    return x.remainder(_BOUND)


# --- the model: the tensors of all ranks in one process -------------------------------------------


@functools.lru_cache(maxsize=1)  # ranks that are threads share it
def model(program: Program) -> list[list[Tensor]]:
    state = begin(program)
    for step in program.steps:
        mine = [state[r][step.source].clone() for r in step.members]
        for rank, value in zip(step.members, model_results(step, mine, state), strict=True):
            if value is not None:
                state[rank][step.target] = reduced(value)
    return state


def model_results(step: Step, mine: list[Tensor], state: list[list[Tensor]]) -> list[Tensor | None]:
    size, root = len(mine), step.root % len(mine)
    fold = {"sum": lambda x: x.sum(0), "max": lambda x: x.amax(0), "min": lambda x: x.amin(0)}
    folded = fold[step.op](torch.stack(mine).double()).to(mine[0].dtype)
    parts = [x.chunk(size) if len(x) else [x] * size for x in mine]
    places = range(size)
    if step.kind == "barrier":
        return [None] * size
    if step.kind == "all_reduce":
        return [folded] * size
    if step.kind == "reduce":
        return [folded if p == root else None for p in places]
    if step.kind == "broadcast":
        return [mine[root]] * size
    if step.kind == "exchange":
        return [mine[p - 1] for p in places]
    if step.kind == "reduce_scatter":
        chunks = folded.chunk(size) if len(folded) else [folded] * size
        return [chunks[p].repeat(size) for p in places]
    if step.kind == "all_to_all":
        return [torch.cat([parts[q][p] for q in places]) for p in places]
    if step.kind == "scatter":
        return [parts[root][p].repeat(size) for p in places]
    gathered = torch.cat([parts[q][q] for q in places])
    return [gathered if step.kind == "all_gather" or p == root else None for p in places]


# --- the ranks: the same through torch.distributed ------------------------------------------------


def start_step(
    step: Step, mine: Tensor, group: dist.ProcessGroup, rank: int
) -> tuple[Tensor | None, list]:
    """Start the step; return this rank's result, valid after its works, and the works."""
    size, place = len(step.members), step.members.index(rank)
    root, later = root_of(step), {"group": group, "async_op": step.wait > 0}
    parts = list(mine.chunk(size)) if len(mine) else [mine] * size
    x, part = mine.clone(), torch.empty_like(parts[0])
    out = [torch.empty_like(p) for p in parts]
    if step.kind == "barrier":
        return None, [dist.barrier(**later)]
    if step.kind == "all_reduce":
        return x, [dist.all_reduce(x, OPS[step.op], **later)]
    if step.kind == "reduce":
        work = dist.reduce(x, root, OPS[step.op], **later)
        return x if rank == root else None, [work]
    if step.kind == "broadcast":
        return x, [dist.broadcast(x, root, **later)]
    if step.kind == "exchange":
        if size == 1:
            return x, []
        to, source = step.members[(place + 1) % size], step.members[place - 1]
        works = [dist.isend(mine, to, group=group), dist.irecv(x, source, group=group)]
        return x, works if step.wait else [work.wait() and None for work in works]
    if step.kind == "reduce_scatter":
        whole = torch.empty_like(mine)
        work = dist.reduce_scatter_tensor(part, x, OPS[step.op], **later)
        return (whole, part), [work]
    if step.kind == "all_to_all":
        return x, [dist.all_to_all_single(x, mine.clone(), **later)]
    if step.kind == "scatter":
        given = [p.clone() for p in parts] if rank == root else None
        return (x, part), [dist.scatter(part, given, root, **later)]
    if step.kind == "gather":
        work = dist.gather(parts[place].clone(), out if rank == root else None, root, **later)
        return (out if rank == root else None), [work]
    return out, [dist.all_gather(out, parts[place].clone(), **later)]


def result_of(result: object, size: int) -> Tensor | None:
    if isinstance(result, tuple):  # one part, to be repeated once per rank
        return reduced(result[1].repeat(size))
    if isinstance(result, list):
        return reduced(torch.cat(result))
    return None if result is None else reduced(result)


@functools.lru_cache
def groups_of(world: int, whole: dist.ProcessGroup) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """A group for every subset of ranks, created once per default group, in one order on all
    ranks."""
    limit = datetime.timedelta(seconds=60)
    subsets = [m for n in range(1, world + 1) for m in itertools.combinations(range(world), n)]
    return {members: dist.new_group(members, timeout=limit) for members in subsets}


def run(me: RankContext, program: Program) -> list[str]:
    groups = groups_of(me.world, dist.group.WORLD)
    state = begin(program)[me.rank]
    in_flight: list[tuple[int, Step, object, list]] = []

    def finish(now: int, needed: set[int]) -> None:
        for entry in list(in_flight):
            until, step, result, works = entry
            if until <= now or {step.target} & needed:
                for work in works:
                    if work is not None:
                        work.wait()
                value = result_of(result, len(step.members))
                if value is not None:
                    state[step.target] = value
                in_flight.remove(entry)

    for n, step in enumerate(program.steps):
        finish(n, set())
        if me.rank not in step.members:
            continue
        finish(n, {step.source, step.target})
        if me.rank == root_of(step):
            me.be_late(step.pause / 1000)
        result, works = start_step(step, state[step.source], groups[step.members], me.rank)
        in_flight.append((n + step.wait, step, result, works))
    finish(len(program.steps) + 10, set())
    wanted = model(program)[me.rank]
    return [
        f"slot {s}: {a[:5].tolist()}, not {w[:5].tolist()}"
        for s, (a, w) in enumerate(zip(state, wanted, strict=True))
        if not torch.equal(a, w)
    ]


@pytest.fixture(scope="module")
def pools(ranks_as: str) -> Iterator[Pools]:
    yield from pools_of_a_module(ranks_as=ranks_as)


# No shrinking, because every failure ends a pool, and every hang takes the full time limit.
SETTINGS: dict[str, Any] = {
    "phases": [hypothesis.Phase.explicit, hypothesis.Phase.generate],
    "suppress_health_check": [hypothesis.HealthCheck.function_scoped_fixture],
}


def check(pools: Pools, program: Program) -> None:
    for rank, wrong in enumerate(pools(program.world).run(run, program, seconds=20)):
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.slow
@hypothesis.settings(**SETTINGS)
@hypothesis.given(program=programs())
def test_programs(pools, program):
    check(pools, program)


# --- calls of the soak, by ranks that are threads -------------------------------------------------


def run_calls(rank: int, world: int, seed: int) -> None:
    """Make random calls, and mistakes, in random groups; each compares with the reference.

    All ranks draw the calls alike. Each waits in an order of its own for those that it can.
    """
    ours, mine = random.Random(seed), random.Random(f"{seed} {rank}")
    members = [range(world)]
    members += [sorted(ours.sample(range(world), ours.randint(2, world))) for _ in range(3)]
    groups = [dist.new_group(list(ranks)) for ranks in members]
    pending: list[Pending] = []
    for number in range(12):
        group = ours.randrange(len(groups))
        kind = choose(ours, tuple(STEPS), frozenset([SYMMETRIC_CALLS]))
        if rank not in members[group]:
            continue
        me = GroupRank(groups[group], members[group].index(rank), mine)
        pending.append(begin_step(me, kind, number, 1000 * seed + number, frozenset()))
        while pending and mine.random() < 0.5:
            pending.pop(mine.randrange(len(pending))).finish()
    for step in pending:
        step.finish()


@pytest.mark.skipif(not OURS, reason="runs pycollect alone")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@PARALLEL
def test_programs_of_threads(parallel):
    for seed in range(60):
        world = 2 + seed % 4
        try:
            threads.launch(run_calls, world, seed, parallel=parallel, timeout=30)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {world} ranks") from error
