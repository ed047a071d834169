"""Ranks in pageable memory: no GPU accesses it, all data passes through a ring of pinned pieces.

The fake refuses kernels that access pageable memory, and the checker sees when a piece is filled
and emptied: filling it too soon, or emptying it before its copy arrives, is a race.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from emulated_calls import all_reduce, emulate_calls, stream_layouts
from plan_cases import Case, cases, each_algorithm, random_plan

from pycollect import _C, _testing

PINNED, PAGEABLE = -1, -2
RINGS = ((64, 1), (64, 2), (96, 3), (256, 2), (512, 3), (4096, 4))  # bytes of a piece, pieces


def mixed(case: Case, seed: int) -> list[int]:
    """Some ranks on one or two devices, the others on the host, pinned or not; one is pageable."""
    pick = random.Random(seed)
    devices = [pick.choice((0, 1, PINNED, PAGEABLE, PAGEABLE)) for _ in range(case.world)]
    devices[pick.randrange(case.world)] = PAGEABLE
    if max(devices) < 0:
        devices[devices.index(PAGEABLE) - 1] = 0
    if PAGEABLE not in devices:
        devices[0 if devices[0] < 0 else -1] = PAGEABLE
    return devices


@each_algorithm
def test_no_algorithm_races_on_pageable_memory(algorithm: _C.Algorithm) -> None:
    layout, moved = stream_layouts(), 0
    for seed, case in enumerate(cases(algorithm, range(2, 9))):
        devices = mixed(case, seed)
        options: dict[str, Any] = next(layout) | {"peers": seed % 2 == 0, "bindings": 1 + seed % 2}
        emulated_run = emulate_calls(case.plan, case.in_place, devices, runs=2, **options)
        for order in (-1, seed, seed + 1):
            assert emulated_run.mismatch(order) is None, f"{case} on {devices}, {options}"
        moved += emulated_run.counts["host_copy"]
    assert moved > 0 or algorithm.collective == "barrier"


def test_random_plans_on_pageable_memory() -> None:
    refused = 0
    for seed in range(300):
        pick = random.Random(seed)
        plan, in_place = random_plan(seed)
        choices = (0, 1, PINNED, PAGEABLE, PAGEABLE)
        devices = [0, *(pick.choice(choices) for _ in range(1, plan.world))]
        layout = {
            "peers": pick.random() < 0.5,
            "pieces": pick.choice((2, 5, 8)),
            "host_waits": False,
        }
        layout |= {"copy_streams": pick.random() < 0.5, "ring": pick.choice(RINGS)}
        try:
            emulated_run = emulate_calls(plan, in_place, devices, 2, **layout)
        except ValueError as error:
            if "cut the chunks into more pieces" not in str(error):
                raise
            refused += 1
            continue
        for order in (-1, 0, 1):
            assert emulated_run.mismatch(order) is None, f"seed {seed}: {devices}, {layout}"
    assert refused < 10


def scatter(world: int) -> _C.Plan:
    return _C.find_algorithm("scatter", "direct").plan(world)


def gather(world: int) -> _C.Plan:
    return _C.find_algorithm("gather", "direct").plan(world)


def test_a_scatter_does_not_block_the_host() -> None:
    """The input has been read when the call returns, so the host does not wait for the GPUs."""
    emulated_run = emulate_calls(scatter(4), False, [PAGEABLE, 0, 0, 1], ring=(4096, 4))
    counts = emulated_run.counts
    assert counts["synchronize"] == 0
    assert counts["copy"] == 3
    assert counts["host_copy"] == 3 + 1  # the root's own part is copied from host to host


def test_a_gather_waits_for_its_copies() -> None:
    emulated_run = emulate_calls(
        gather(3), False, [PAGEABLE, 0, 1], ring=(4096, 4), copy_streams=True
    )
    assert emulated_run.counts["synchronize"] == 2  # one piece from each device
    # The last two stream waits are the host's own; stream waits before them order nothing new.
    assert not {emulated_run.waits - 1, emulated_run.waits - 2} & set(
        emulated_run.redundant_waits()
    )
    late = _testing.EmulatedRun(
        gather(3), False, [PAGEABLE, 0, 1], ring=(4096, 4), copy_streams=True
    )
    late.skip_wait(emulated_run.waits - 1)
    late.run()
    assert late.race is not None


def test_a_piece_is_refilled_only_after_its_copy() -> None:
    emulated_run = emulate_calls(scatter(2), False, [PAGEABLE, 0], ring=(32, 2), runs=4)
    host_waits = emulated_run.counts["synchronize"]
    assert host_waits > 0
    for number in range(emulated_run.waits):
        fresh = _testing.EmulatedRun(scatter(2), False, [PAGEABLE, 0], ring=(32, 2))
        fresh.skip_wait(number)
        fresh.run(4)
        assert fresh.race is not None, f"wait {number} of {emulated_run.waits} is redundant"


def test_small_tensors_share_a_piece() -> None:
    emulated_run = emulate_calls(scatter(2), False, [PAGEABLE, 0], ring=(1 << 16, 4), bindings=40)
    assert emulated_run.counts["copy"] == 40
    assert emulated_run.counts["synchronize"] == 0
    gathered = emulate_calls(gather(2), False, [PAGEABLE, 0], ring=(1 << 16, 4), bindings=40)
    assert gathered.counts["synchronize"] == 1


def test_the_host_waits_for_pinned_ranks() -> None:
    emulated_run = emulate_calls(
        all_reduce("leader", 3), True, [0, PINNED, PAGEABLE], ring=(4096, 4)
    )
    pinned = emulate_calls(all_reduce("leader", 3), True, [0, PINNED, PINNED])
    assert pinned.counts["synchronize"] == 1
    assert emulated_run.counts["synchronize"] == 2


def test_a_capture_refuses_pageable_memory_before_anything_is_issued() -> None:
    for host_waits in (False, True):
        emulated_run = _testing.EmulatedRun(
            all_reduce("leader", 2), True, [0, PAGEABLE], host_waits=host_waits
        )
        with pytest.raises(ValueError, match="not pinned cannot be read or written while a CUDA"):
            emulated_run.run(capture=True)
        assert emulated_run.counts["launch"] == emulated_run.counts["host_copy"] == 0


def test_a_failure_leaves_the_ring_usable() -> None:
    """After a failure of any CUDA call, the next run gets pieces that are not in use."""
    for plan, devices in ((scatter(3), [PAGEABLE, 0, 1]), (gather(3), [PAGEABLE, 0, 1])):
        healthy = emulate_calls(plan, False, devices, ring=(32, 2), bindings=2).counts["host_copy"]
        for after in range(40):
            emulated_run = _testing.EmulatedRun(plan, False, devices, ring=(32, 2), bindings=2)
            emulated_run.fail_call(after)
            with contextlib.suppress(RuntimeError):  # beyond the last call nothing fails
                emulated_run.run()
            before = emulated_run.counts["host_copy"]
            emulated_run.run(2)
            # The failed call writes nothing to the caller's memory any more.
            assert emulated_run.counts["host_copy"] - before == 2 * healthy, f"after {after}"
            assert emulated_run.race is None, f"after {after}: {emulated_run.race}"
            assert emulated_run.mismatch(after) is None


def test_concurrent_runs_have_their_own_rings() -> None:
    first = _testing.EmulatedRun(all_reduce("leader", 3), True, [0, PAGEABLE, 1])
    second = _testing.EmulatedRun(all_reduce("chain", 3), True, [0, PAGEABLE, 1], machine_of=first)
    for _ in range(3):
        for emulated_run in (first, second):
            emulated_run.run(2)
            assert emulated_run.race is None
            assert emulated_run.mismatch() is None


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    ("size", "rows"),  # below and above a thread's share, in few long or many short lines
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
