"""Ranks in pageable memory: no GPU accesses it, all data passes through a ring of pinned pieces.

The emulator refuses kernels that access pageable memory, and sees when a piece is filled
and emptied: filling it too soon, or emptying it before its copy arrives, is a race.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from plan_calls import PAGEABLE, PlanCall

from pycollect import _C, _testing


def scatter(world: int) -> _C.Plan:
    return _C.find_algorithm("scatter", "direct").plan(world)


def gather(world: int) -> _C.Plan:
    return _C.find_algorithm("gather", "direct").plan(world)


def test_a_scatter_does_not_block_the_host() -> None:
    """The input has been read when the call returns, so the host does not wait for the GPUs."""
    with PlanCall(scatter(4), False, [PAGEABLE, 0, 0, 1], ring=(4096, 4)) as call:
        counts = call.count()
    assert counts["synchronize"] == 0
    assert counts["copy"] == 3
    assert counts["host_copy"] == 3 + 1  # the root's own part is copied from host to host


def race_without(call: PlanCall, number: int, times: int = 1) -> str | None:
    """Leave out a wait of the host or of a stream."""
    call.cuda.inject("skip", "wait", after=number)
    call.issue(times)
    call.cuda.heal()
    race: str | None = call.cuda.race
    call.is_right()
    return race


def test_a_gather_waits_for_its_copies() -> None:
    with PlanCall(gather(3), False, [PAGEABLE, 0, 1], ring=(4096, 4)) as call:
        assert call.count()["synchronize"] == 2  # one piece from each device
        waits, redundant = call.cuda.redundant_waits()
        assert call.is_right()
        # The last two waits are the host's own; stream waits before them order nothing new.
        assert not {waits - 1, waits - 2} & set(redundant)
        assert race_without(call, waits - 1) is not None


def test_a_piece_is_refilled_only_after_its_copy() -> None:
    with PlanCall(scatter(2), False, [PAGEABLE, 0], ring=(32, 2)) as call:
        assert call.count(4)["synchronize"] > 0
        waits, _ = call.cuda.redundant_waits()
    for number in range(waits):
        with PlanCall(scatter(2), False, [PAGEABLE, 0], ring=(32, 2)) as call:
            assert race_without(call, number, 4) is not None, f"{number} of {waits} is redundant"


def test_small_tensors_share_a_piece() -> None:
    with PlanCall(scatter(2), False, [PAGEABLE, 0], ring=(1 << 16, 4), tensors=40) as call:
        counts = call.count()
    assert counts["copy"] == 40
    assert counts["synchronize"] == 0
    with PlanCall(gather(2), False, [PAGEABLE, 0], ring=(1 << 16, 4), tensors=40) as call:
        assert call.count()["synchronize"] == 1


def test_a_failure_leaves_the_ring_usable() -> None:
    """After a failure of any CUDA call, the next run gets pieces that are not in use."""
    for plan, devices in ((scatter(3), [PAGEABLE, 0, 1]), (gather(3), [PAGEABLE, 0, 1])):
        with PlanCall(plan, False, devices, ring=(32, 2), tensors=2) as call:
            healthy = call.count()["host_copy"]
        for after in range(40):
            with PlanCall(plan, False, devices, ring=(32, 2), tensors=2) as call:
                with contextlib.suppress(RuntimeError):  # beyond the last call nothing fails
                    call.issue(fail_after=after)
                # The failed call writes nothing to the caller's memory any more.
                assert call.count(2)["host_copy"] == 2 * healthy, f"after {after}"
                assert call.cuda.race is None, f"after {after}: {call.cuda.race}"
                assert call.is_right(after)
                call.check_orders(after)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    ("size", "rows"),  # below and above a thread's share, in few long or many short rows
    [(1, 1), (1000, 1), (1_000_003, 1), (300_001, 5), (7, 100_000), (131_072, 9), (100, 3)],
)
def test_host_copies_move_every_byte_once(threads: int, size: int, rows: int) -> None:
    torch.set_num_threads(threads)
    src = torch.randint(256, (rows, size + 5), dtype=torch.uint8)
    dst = torch.zeros(rows, size + 3, dtype=torch.uint8)
    _testing.copy_rows(dst, src, size, rows, (size + 3, size + 5))
    assert torch.equal(dst[:, :size], src[:, :size])
    assert int(dst[:, size:].sum()) == 0
    back = torch.zeros(rows, size, dtype=torch.uint8)
    first = src[rows - 1 :]  # backwards, from the last row to the first
    _testing.copy_rows(back, first, size, rows, (size, -(size + 5)))
    assert torch.equal(back, src[:, :size].flip(0))
