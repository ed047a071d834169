"""Random numbers of ranks as threads.

Each rank draws the numbers that it would draw in a process of its own, although the ranks take
turns at every collective.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pycollect import threads

WORLD = 3


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


def lose_turn() -> None:
    """Wait outside of the scheduler, which lets others run, because a work's future is open."""
    work, event = dist.all_reduce(torch.ones(3), async_op=True), threading.Event()
    work.get_future()
    if dist.get_rank() == 0:
        threading.Timer(0.03, event.set).start()
        event.wait()
    work.wait()


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
    "lost turn": lose_turn,
    "objects": lambda: dist.all_gather_object([None] * WORLD, "text"),
}  # fmt: skip


@pytest.mark.parametrize("pause", PAUSES)
def test_a_rank_draws_as_a_process_of_its_own(pause):
    found = threads.launch(lambda rank, world: draws(rank, PAUSES[pause]), WORLD, timeout=30)
    for rank in range(WORLD):
        wanted = draws(rank, no_pause)
        assert all(torch.equal(a, b) for a, b in zip(found[rank], wanted, strict=True)), rank


def test_ranks_begin_with_the_callers_state_and_seed_only_their_own():
    def program(rank: int, world: int) -> tuple[Tensor, int]:
        if rank == 1:
            torch.manual_seed(5)
        dist.barrier()
        return torch.rand(4), torch.initial_seed()

    torch.manual_seed(11)
    found = threads.launch(program, WORLD)
    assert [seed for _, seed in found] == [11, 5, 11]
    for numbers, seed in found:
        assert torch.equal(torch.rand(4, generator=torch.Generator().manual_seed(seed)), numbers)


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
