"""Random numbers of ranks as threads, and random programs of collectives against a reference.

Each rank draws the numbers that it would draw in a process of its own, although the ranks take
turns at every collective.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_soak_calls import COLLECTIVES, GroupRank, Step, draw
from dist_soak_steps import Pending, batch, batch_of_messages, exchange, list_of_calls, message
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pycollect import threads

WORLD = 3
PARALLEL = pytest.mark.parametrize("parallel", [False, True])


# --- random numbers -------------------------------------------------------------------------------


def draws(rank: int, pause: Callable[[], object]) -> list[Tensor]:
    """Draw numbers of all kinds, with a pause after each."""
    torch.manual_seed(100 + rank)
    found = []
    for _ in range(3):
        for call in (
            lambda: torch.rand(5),
            lambda: torch.randn(3),  # an odd number: the generator keeps the other of a pair
            lambda: torch.randn(1, dtype=torch.float64),
            lambda: torch.randperm(7),
            lambda: torch.randint(1000, (4,)),
            lambda: nn.functional.dropout(torch.ones(20), 0.5),
            lambda: torch.nn.init.kaiming_uniform_(torch.empty(3, 3)),
            lambda: torch.bernoulli(torch.full((9,), 0.3)),
        ):
            found.append(call())
            pause()
    return found


def no_pause() -> None:
    pass


PAUSES: dict[str, Callable[[], object]] = {
    "barrier": dist.barrier,
    "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
    "async": lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
    "message": lambda: dist.batch_isend_irecv([
        dist.P2POp(dist.isend, torch.ones(20_000), (dist.get_rank() + 1) % WORLD),
        dist.P2POp(dist.irecv, torch.ones(20_000), (dist.get_rank() - 1) % WORLD),
    ])[-1].wait(),
    "subgroup": lambda: dist.all_reduce(torch.ones(3), group=dist.new_group()),
    "future": lambda: dist.all_reduce(torch.ones(3), async_op=True).get_future().wait(),
    "objects": lambda: dist.all_gather_object([None] * WORLD, "text"),
}  # fmt: skip


@pytest.mark.parametrize("pause", PAUSES)
def test_a_rank_draws_as_a_process_of_its_own(pause):
    found = threads.launch(lambda rank, world: draws(rank, PAUSES[pause]), WORLD, timeout=30)
    for rank in range(WORLD):
        wanted = draws(rank, no_pause)
        assert all(torch.equal(a, b) for a, b in zip(found[rank], wanted, strict=True)), rank


def test_ranks_begin_with_the_random_state_of_the_caller():
    def program(rank: int, world: int) -> Tensor:
        dist.barrier()
        return torch.rand(4)

    torch.manual_seed(11)
    found = threads.launch(program, WORLD)
    wanted = torch.rand(4)
    assert all(torch.equal(x, wanted) for x in found)


def test_a_seed_of_one_rank_is_no_seed_of_another():
    def program(rank: int, world: int) -> tuple[Tensor, int]:
        if rank == 1:
            torch.manual_seed(5)
        dist.barrier()
        return torch.rand(4), torch.initial_seed()

    torch.manual_seed(11)
    found = threads.launch(program, WORLD)
    assert [seed for _, seed in found] == [11, 5, 11]
    assert torch.equal(found[0][0], found[2][0])
    assert not torch.equal(found[0][0], found[1][0])


def test_seeds_for_cuda_wait_for_its_first_use_in_their_rank():
    def queued() -> list[int]:
        calls = [found[0] for found in torch.cuda._lazy_seed_tracker.get_calls() if found]
        return [cell.cell_contents for call in calls for cell in call.__closure__]

    def program(rank: int, world: int) -> list[int]:
        torch.cuda.manual_seed_all(100 + rank)
        dist.barrier()
        return queued()

    before = torch.cuda._lazy_seed_tracker
    assert threads.launch(program, WORLD) == [[100 + rank] for rank in range(WORLD)]
    assert torch.cuda._lazy_seed_tracker is before


@pytest.mark.cuda
def test_a_rank_draws_on_a_gpu_as_a_process_of_its_own():
    def drawn(pause: Callable[[], object]) -> list[Tensor]:
        found = []
        for _ in range(4):
            found.append(nn.functional.dropout(torch.ones(50, device="cuda:0"), 0.5))
            pause()
        return found

    def program(rank: int, world: int) -> Tensor:
        if rank > 0:  # rank 0 keeps the caller's state
            torch.manual_seed(rank)
        return torch.cat(drawn(dist.barrier)).cpu()

    torch.manual_seed(0)
    found = threads.launch(program, WORLD, device="cuda:0")
    for rank in range(WORLD):  # the launch has restored the caller's state, that of seed 0
        if rank > 0:
            torch.manual_seed(rank)
        assert torch.equal(found[rank], torch.cat(drawn(no_pause)).cpu())


def test_a_forked_random_state_is_restored_in_its_rank():
    def program(rank: int, world: int) -> Tensor:
        torch.manual_seed(rank)
        first = torch.rand(2)
        with torch.random.fork_rng():
            torch.manual_seed(77)
            dist.barrier()
            torch.rand(5)
        dist.barrier()
        return torch.cat([first, torch.rand(2)])

    for rank, found in enumerate(threads.launch(program, WORLD)):
        torch.manual_seed(rank)
        assert torch.equal(found, torch.cat([torch.rand(2), torch.rand(2)]))


@PARALLEL
def test_generators_of_ranks_are_their_own(parallel):
    def program(rank: int, world: int) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        parts = []
        for _ in range(4):
            parts.append(torch.randn(3, generator=generator))
            dist.barrier()
        return torch.cat(parts)

    for rank, found in enumerate(threads.launch(program, WORLD, parallel=parallel)):
        generator = torch.Generator().manual_seed(rank)
        assert torch.equal(found, torch.cat([torch.randn(3, generator=generator) for _ in "1234"]))


def test_the_random_tracker_of_dtensor_is_that_of_the_rank():
    from torch.distributed.tensor import _random

    def program(rank: int, world: int) -> list[str]:
        found = []
        for step in range(3):
            _random._rng_tracker = f"tracker {step} of rank {rank}"
            dist.barrier()
            found.append(_random._rng_tracker)
        return found

    before = _random._rng_tracker
    wanted = [[f"tracker {s} of rank {r}" for s in range(3)] for r in range(WORLD)]
    assert threads.launch(program, WORLD) == wanted
    assert _random._rng_tracker is before


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_random_dtensors_are_reproducible():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    def program(rank: int, world: int) -> Tensor:
        mesh = init_device_mesh("cpu", (world,))
        torch.manual_seed(9 + rank)
        x = distribute_tensor(torch.zeros(world, 5), mesh, [Shard(0)])
        dist.barrier()
        return nn.functional.dropout(torch.ones(5), 0.5) + x.uniform_().to_local()[0]

    first, second = (threads.launch(program, WORLD) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_dropout_in_parallel_ranks_is_still_dropout():
    def program(rank: int, world: int) -> Tensor:
        return nn.functional.dropout(torch.ones(10_000), 0.5)

    for found in threads.launch(program, WORLD, parallel=True):
        assert set(found.unique().tolist()) == {0.0, 2.0}
        assert abs(found.mean().item() - 1) < 0.1


def test_the_order_of_prints_is_reproducible(capsys):
    def program(rank: int, world: int) -> None:
        group = dist.new_group([0, 2])
        for step in range(3):
            print(f"rank {rank} step {step}")
            if rank != 1:
                dist.all_reduce(torch.ones(1), group=group)
            dist.barrier()

    texts = []
    for _ in range(4):
        threads.launch(program, WORLD)
        texts.append(capsys.readouterr().out)
    assert len(texts[0].splitlines()) == 9
    assert set(texts) == {texts[0]}


# --- random programs ------------------------------------------------------------------------------

MESSAGES: dict[str, Callable[..., Any]] = {
    "exchange": exchange, "message": message, "batch of messages": batch_of_messages,
    "coalesced": batch, "list of calls": list_of_calls,
}  # fmt: skip
KINDS = (*COLLECTIVES, *MESSAGES)


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that all ranks run: calls in groups, and when asynchronous ones are waited for."""

    world: int
    groups: list[list[int]]
    calls: list[tuple[int, str, bool]]  # group, kind, whether it is waited for later
    seed: int


@st.composite
def programs(draw_from: st.DrawFn) -> Program:
    world = draw_from(st.integers(2, 5))
    ranks = st.lists(st.integers(0, world - 1), min_size=2, max_size=world, unique=True)
    groups = [list(range(world)), *draw_from(st.lists(ranks.map(sorted), max_size=3))]
    call = st.tuples(st.integers(0, len(groups) - 1), st.sampled_from(KINDS), st.booleans())
    calls = draw_from(st.lists(call, min_size=1, max_size=14))
    return Program(world, groups, calls, draw_from(st.integers(0, 2**20)))


def run(rank: int, world: int, program: Program) -> int:
    """Run the program as one rank; each call compares its result with the reference."""
    groups = [dist.new_group(ranks) for ranks in program.groups]
    local = random.Random(f"{program.seed} {rank}")
    pending: list[Pending] = []
    for number, (group, kind, later) in enumerate(program.calls):
        if rank not in program.groups[group]:
            continue
        ranks = program.groups[group]
        me = GroupRank(groups[group], ranks.index(rank), local)
        step = draw("all_reduce" if kind in MESSAGES else kind, number, program.seed, len(ranks))
        step = dataclasses.replace(step, kind=kind, async_op=later)
        pending.append(start(me, step))
        if not later or local.random() < 0.3:
            while pending:
                pending.pop(local.randrange(len(pending))).finish()
    while pending:
        pending.pop(local.randrange(len(pending))).finish()
    return len(program.calls)


def start(me: GroupRank, step: Step) -> Pending:
    if step.kind in MESSAGES:
        return Pending(step, *MESSAGES[step.kind](me, step))
    works, check = COLLECTIVES[step.kind](me, step, group=me.group, async_op=step.async_op)
    return Pending(step, works, check)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@PARALLEL
@settings(max_examples=60)
@given(program=programs())
def test_random_programs_give_the_results_of_the_reference(program, parallel):
    found = threads.launch(run, program.world, program, parallel=parallel, timeout=30)
    assert found == [len(program.calls)] * program.world
