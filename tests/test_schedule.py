"""Plans on several streams of emulated GPUs, run as list calls.

Streams and events order every pair of conflicting accesses, checked by the addresses of the work.
No event is superfluous: dropping any wait must be noticed. Any order that streams and events allow
gives the same bits as the plan as written.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from plan_calls import PAGEABLE, PINNED, PlanCall, all_reduce, calls, layouts
from plan_cases import cases, each_algorithm, random_plan

from pycollect import _C, _testing


def waits_of(call: PlanCall, what: str) -> int:
    """Call once; return the number of waits, each of which must be needed."""
    call.issue()
    assert call.cuda.race is None, f"{what}: {call.cuda.race}"
    waits, redundant = call.cuda.redundant_waits()
    assert redundant == [], what
    return waits


@each_algorithm
def test_no_algorithm_races_and_every_wait_is_needed(algorithm: _C.Algorithm) -> None:
    waits = 0
    for case, devices, layout in calls(algorithm, (2, 3, 4, 5, 8)):
        with PlanCall(case.plan, case.in_place, devices, **layout) as call:
            waits += waits_of(call, f"{case} on {devices}, {layout}")
    assert waits > 1000


@each_algorithm
def test_any_order_of_the_streams_gives_the_same_bits(algorithm: _C.Algorithm) -> None:
    for seed, (case, devices, layout) in enumerate(calls(algorithm, (2, 3, 5, 8))):
        if algorithm.order != "exact" or seed % 2:
            types: dict[str, Any] = {"dtype": torch.float32, "op": "avg"}
        else:
            types = {"dtype": torch.bfloat16, "op": "sum"}
        with PlanCall(case.plan, case.in_place, devices, tensors=2, **types, **layout) as call:
            call.check_orders(seed)


@each_algorithm
def test_no_algorithm_races_in_host_memory(algorithm: _C.Algorithm) -> None:
    layout = layouts()
    for seed, case in enumerate(cases(algorithm, range(2, 9))):
        pick = random.Random(seed)
        devices = [pick.choice((0, 0, 1, PINNED, PAGEABLE)) for _ in range(case.world)]
        devices[seed % case.world], devices[(seed + 1) % case.world] = 0, PAGEABLE
        more = next(layout) | {"peers": seed % 2 == 0, "tensors": 1 + seed // 2 % 2}
        with PlanCall(case.plan, case.in_place, devices, **more) as call:
            call.check(2)
            call.check_orders(seed)


def test_random_plans_on_random_devices() -> None:
    layout, waits, refused = layouts(), 0, 0
    for seed in range(400):
        pick = random.Random(seed)
        plan, in_place = random_plan(seed // 2)
        devices = [pick.randrange(pick.randint(1, plan.world)) for _ in range(plan.world)]
        if pick.random() < 0.6:
            places = (*devices, PINNED, PAGEABLE, PAGEABLE)
            devices[1:] = [pick.choice(places) for _ in devices[1:]]
        more = next(layout) | {
            "peers": pick.random() < 0.5,
            "pieces": pick.choice((2, 5, 8)),
            "tensors": pick.choice((1, 2)),
            "ring": pick.choice(((64, 1), (64, 2), (96, 3), (256, 2), (512, 3), (4096, 4))),
        }
        try:
            made = PlanCall(plan, in_place, devices, **more)
        except ValueError as error:  # one step uses many buffers of an unreachable rank
            if "cut the chunks into more pieces" not in str(error):
                raise
            refused += 1
            continue
        with made as call:
            if min(devices) >= 0:  # the host's own waits make others superfluous
                waits += waits_of(call, f"seed {seed}: {devices}, {more}")
            call.check(2)
            call.check_orders(seed)
    assert waits > 8000
    assert refused < 20


@pytest.mark.parametrize("name", ["leader", "chain", "two_shot", "ring"])
def test_a_dropped_wait_changes_the_bits(name: str) -> None:
    """Besides the race checker, an order that a missing event allows gives other results."""
    with PlanCall(all_reduce(name, 4), True, [0, 1, 2, 3]) as call:
        waits = waits_of(call, name)
        assert call.is_right()
        for number in range(waits):
            for seed in range(200):
                call.cuda.set_order("random", seed)
                call.cuda.inject("skip", "wait", after=number)
                call.issue()
                call.cuda.heal()
                assert call.cuda.race is not None
                if not call.is_right(seed):
                    break
            else:
                pytest.fail(f"wait {number} of {waits} may be left out")
        call.check_orders(0)


def test_one_device_and_one_stream_is_one_launch_and_no_event() -> None:
    """One for each level, which has the kernel tasks of its steps on all tensors."""
    for name, world in itertools.product(("leader", "two_shot", "chain"), range(1, 17)):
        with PlanCall(all_reduce(name, world), True, [0] * world, tensors=8) as call:
            # The first and the last level only begin and end ranks.
            launches = call.compiled.levels - 2
            done = {"capture_id": 1, "load": 1, "launch": launches}
            if world == 1:  # a single rank in place has nothing to do
                del done["launch"]
            before = call.cuda.counters().get("tasks", 0)
            counts = call.count()
            del counts["current_device"]
            assert counts == done, (name, world)
            tasks = call.cuda.counters().get("tasks", 0) - before
            assert tasks == (8 * len(call.compiled.plan.steps) if world > 1 else 0)
            call.check(2, world)


def test_staging_has_a_stream_for_each_direction_of_a_device() -> None:
    """So that copies in both directions overlap, with each other and with folds."""
    for devices, peers, streams in (
        ([0, 0, 0], True, 0),
        ([0, 1, 1], True, 0),
        ([0, 1, 1], False, 4),
    ):
        with PlanCall(all_reduce("chain", 3), True, devices, peers=peers) as call:
            assert call.count()["create_stream"] == streams
            assert call.count()["create_stream"] == 0


@pytest.mark.parametrize(
    ("name", "level_policy", "want"),
    [  # launches, copies, records, waits
        ("leader", "any", (1, 0, 8, 14)),
        ("fused", "any", (8, 0, 16, 112)),
        ("one_shot", "any", (16, 0, 16, 112)),
        ("two_shot", "any", (8, 56, 24, 168)),
        ("two_shot", "one_task", (8, 56, 72, 168)),
        ("chain", "any", (7, 28, 15, 21)),
        ("chain", "one_task", (28, 28, 54, 60)),
        ("ring", "any", (56, 56, 120, 120)),
        ("tree", "any", (7, 7, 15, 21)),
        ("halving_doubling", "any", (24, 24, 56, 72)),
    ],
)
def test_the_numbers_of_cuda_calls(
    name: str, level_policy: str, want: tuple[int, int, int, int]
) -> None:
    devices = list(range(8))
    with PlanCall(all_reduce(name, 8), True, devices, level_policy=level_policy) as call:
        counts = call.count()
    assert tuple(counts[k] for k in ("launch", "copy", "record", "wait")) == want


def test_plans_and_placements_share_a_cache_of_schedules_and_pinned_rings() -> None:
    devices = [0, 0, 1, PAGEABLE]
    with PlanCall(all_reduce("two_shot", 4), True, devices) as one:
        two = PlanCall(all_reduce("chain", 4), True, devices, on=one)
        for apart in (False, True, False):
            for call in (one, two):
                call.apart = apart
                call.check(2)
                call.check_orders(3)


@pytest.mark.parametrize(
    ("devices", "peers", "capture"),
    [
        ([0, 1, 2, 3], True, False),
        ([0, 1, 2, 3], True, True),
        ([0, 1, 1, 2], False, False),
        ([0, 1, 1, 2], False, True),
        ([0, PINNED, 1], True, False),  # the host accesses its memory when the error is raised
    ],
)
def test_a_failed_call_leaves_streams_joined_and_events_usable(
    devices: list[int], peers: bool, capture: bool
) -> None:
    plan = all_reduce("chain", len(devices))
    layout: dict[str, Any] = {"apart": True, "peers": peers, "level_policy": "one_task"}
    for after in range(1000):
        with PlanCall(plan, True, devices, **layout) as call:
            call.check()
            made = call.cuda.counters()["events"]
            try:
                call.issue(1, capture, fail_after=after)
                break
            except RuntimeError as error:
                if "injected failure" not in str(error):
                    raise
            assert call.cuda.race is None, f"after {after}"  # callers' streams wait for all work
            call.gpus.torch.run(after)
            call.check(2)
            call.check_orders(after)
            # One more event per stream, to join it.
            assert call.cuda.counters()["events"] <= made + 3 * len(devices)
    assert after > 20


@pytest.mark.parametrize("devices", [[0, 0, 0, 0], [0, 1, 2, 3], [1, 0, 0, 1], [0, PINNED, 0, 1]])
def test_a_capture_has_its_own_events(devices: list[int]) -> None:
    for apart, peers in itertools.product((False, True), (False, True)):
        plan = all_reduce("two_shot", 4)
        with PlanCall(plan, True, devices, apart=apart, peers=peers) as call:
            call.check(2, capture=True)
            call.check(2, 1, "random", capture=True)
            assert call.cuda.counters().get("events", 0) == 0
            call.check()


def test_the_host_waits_for_ranks_in_its_memory() -> None:
    """Once for all ranks in pinned memory, which share a stream, and once for a pinned piece."""
    for name in ("leader", "two_shot", "chain"):
        for devices in ([0, PINNED], [PINNED, 0, 0, PINNED], [1, PINNED, 0]):
            for peers in (True, False):
                with PlanCall(all_reduce(name, len(devices)), True, devices, peers=peers) as call:
                    assert call.count(2)["synchronize"] == 2
                    call.check_orders(0)
    with PlanCall(all_reduce("leader", 3), True, [0, PINNED, PAGEABLE], ring=(4096, 4)) as call:
        assert call.count()["synchronize"] == 2


def test_invalid_stream_maps_are_refused() -> None:
    plan, ids = _testing.CompiledPlan(all_reduce("leader", 2), True), [(0, 0, 0), (1, 1, 1)]
    schedule = _testing.schedule(plan, ids, 2)
    assert [(stream, after, recorded) for stream, _, after, recorded in schedule] == [
        (0, [], False),
        (1, [], True),
        (0, [1], True),
        (0, [], False),
        (1, [2], False),
    ]
    for stream_ids, why in [
        (ids[:1], "a stream map of 1 ranks does not fit a plan of 2"),
        ([(0, 0, 0), (0, 2, 1)], "rank 1 uses stream 2; streams are numbered 0 to 1"),
        ([(0, 0, 0), (0, -1, 1)], "rank 1 uses stream -1; streams are numbered 0 to 1"),
    ]:
        with pytest.raises(ValueError, match=why):
            _testing.schedule(plan, stream_ids, 2)
