"""The unchanged device executor, on emulated devices that only record the order of work.

Streams and events order every pair of conflicting accesses, checked by the executor's addresses. No
event is superfluous: dropping any wait must be noticed. Any order that streams and events allow
gives the same bits as the plan as written.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import plan_cases
import pytest
from emulated_calls import all_reduce, calls, emulate_calls, placements, ways
from plan_cases import random_plan

from pycollect import _C, _testing

REGISTRY = plan_cases.registry()
IDS = [f"{a.collective}-{a.name}" for a in REGISTRY]

each_algorithm = pytest.mark.parametrize("algorithm", REGISTRY, ids=IDS)


@each_algorithm
def test_no_algorithm_races_and_no_wait_is_dropped_unnoticed(algorithm: _C.Algorithm) -> None:
    waits = 0
    for case, devices, way in calls(algorithm, range(2, 9)):
        emulated_run = emulate_calls(case.plan, case.in_place, devices, **way)
        assert emulated_run.missed() == [], f"{case} on {devices}, {way}"
        waits += emulated_run.waits
    assert waits > 1000


@each_algorithm
def test_any_order_of_the_streams_gives_the_same_bits(algorithm: _C.Algorithm) -> None:
    for seed, (case, devices, way) in enumerate(calls(algorithm, (2, 3, 5, 8))):
        if algorithm.order != "exact" or seed % 2:
            types: dict[str, Any] = {"dtype": "float32", "op": "avg"}
        else:
            types = {"dtype": "bfloat16", "op": "sum"}
        emulated_run = emulate_calls(
            case.plan, case.in_place, devices, runs=2, bindings=2, **types, **way
        )
        # -1 is the order of issue, the only one with CUDA_LAUNCH_BLOCKING=1.
        for order in (-1, seed, seed + 1):
            assert emulated_run.mismatch(order) is None, f"{case} on {devices}, {way}"


def random_call(seed: int) -> tuple[_testing.EmulatedRun, str]:
    pick = random.Random(seed)
    plan, in_place = random_plan(seed // 4)
    devices = [pick.randrange(pick.randint(1, plan.world)) for _ in range(plan.world)]
    if pick.random() < 0.4:
        devices[1:] = [d if pick.random() < 0.5 else -1 for d in devices[1:]]
    way = next(ways_from(seed)) | {"peers": pick.random() < 0.5, "pieces": pick.choice((2, 5, 8))}
    way |= {"bindings": pick.choice((1, 2)), "host_waits": False}
    emulated_run = emulate_calls(plan, in_place, devices, pick.choice((1, 2)), **way)
    return emulated_run, f"seed {seed}: {devices}, {way}"


def ways_from(seed: int) -> Any:
    way = ways()
    for _ in range(seed % 48):
        next(way)
    return way


@pytest.mark.parametrize(
    ("first", "last"),
    [(0, 144), pytest.param(144, 400, marks=pytest.mark.slow)],  # each of 48 ways three times
)
def test_random_plans_on_random_devices(first: int, last: int) -> None:
    waits = refused = 0
    for seed in range(first, last):
        try:
            emulated_run, what = random_call(seed)
        except ValueError as error:  # one step uses many buffers of an unreachable rank
            if "cut the chunks into more pieces" not in str(error):
                raise
            refused += 1
            continue
        assert emulated_run.missed() == [], what
        for order in (-1, 0, 1):
            assert emulated_run.mismatch(order) is None, what
        waits += emulated_run.waits
    assert waits > 37 * (last - first)
    assert refused < 10


def test_a_dropped_wait_shows_in_the_bits() -> None:
    """Besides the race checker, an order that a missing event allows gives other results."""
    emulated_run = emulate_calls(all_reduce("chain", 4), True, [0, 1, 2, 3], workers="devices")
    assert all(emulated_run.mismatch(seed) is None for seed in range(20))
    emulated_run.drop_wait(emulated_run.waits // 2)
    assert emulated_run.race is not None
    assert any(emulated_run.mismatch(seed) is not None for seed in range(200))


def test_one_device_and_one_stream_is_one_launch_and_no_event() -> None:
    for world in range(1, 17):
        plan = all_reduce("leader", world)
        emulated_run = emulate_calls(plan, True, [0] * world, workers="callers", bindings=8)
        alone = world == 1  # a single rank in place has nothing to do
        done = {"launch": 1, "rows": 8} if not alone else {}
        assert emulated_run.counts - Counter({"create_stream": 1, "streams": 1}) == done


@pytest.mark.parametrize(
    ("name", "pace", "hub", "want"),
    [  # launches, copies, records, waits
        ("leader", "any", False, (1, 0, 9, 16)),
        ("fused", "any", False, (8, 0, 16, 128)),
        ("fused", "any", True, (8, 0, 18, 32)),
        ("one_shot", "any", False, (16, 0, 24, 128)),
        ("one_shot", "any", True, (16, 0, 26, 40)),
        ("two_shot", "any", False, (8, 56, 24, 184)),
        ("two_shot", "any", True, (8, 56, 27, 48)),
        ("two_shot", "one_task", True, (8, 56, 26, 88)),
        ("chain", "any", True, (7, 28, 22, 29)),
        ("chain", "one_task", True, (28, 28, 61, 68)),
        ("ring", "any", False, (56, 56, 120, 136)),
        ("tree", "any", False, (7, 7, 19, 29)),
        ("halving_doubling", "any", False, (24, 24, 56, 88)),
        ("halving_doubling", "any", True, (24, 24, 57, 72)),
    ],
)
def test_calls_do_not_grow_in_silence(
    name: str, pace: str, hub: bool, want: tuple[int, int, int, int]
) -> None:
    emulated_run = emulate_calls(all_reduce(name, 8), True, list(range(8)), pace=pace, hub=hub)
    counts = emulated_run.counts
    assert tuple(counts[k] for k in ("launch", "copy", "record", "wait")) == want


def test_one_hub_is_never_more_waits_than_all_pairs() -> None:
    for algorithm in REGISTRY:
        for devices in placements(8):
            with_hub, without = (
                emulate_calls(algorithm.plan(8), algorithm.in_place, devices, hub=hub).waits
                for hub in (True, False)
            )
            assert with_hub <= without, (algorithm.name, devices)


def test_schedules_are_kept_by_plan_and_placement() -> None:
    one = emulate_calls(all_reduce("two_shot", 4), True, [0, 1, 2, 3])
    two = _testing.EmulatedRun(all_reduce("chain", 4), True, [0, 1, 2, 3], beside=one)
    for workers in ("devices", "callers", "ranks", "devices"):
        for emulated_run in (one, two):
            emulated_run.reseat(workers, workers == "ranks")
            emulated_run.run(2)
            assert emulated_run.race is None
            assert emulated_run.mismatch(3) is None


def test_events_are_made_once_and_used_again() -> None:
    emulated_run = _testing.EmulatedRun(all_reduce("two_shot", 4), True, [0, 1, 2, 3])
    emulated_run.run()
    made = emulated_run.counts["create_event"]
    for _ in range(10):
        emulated_run.run(5)
        assert emulated_run.race is None
    assert emulated_run.counts["create_event"] == emulated_run.counts["events"] == made
    assert emulated_run.counts["record"] == 51 * made


@pytest.mark.parametrize("capture", [False, True])
def test_a_call_that_fails_half_way_leaves_streams_joined_and_events_whole(capture: bool) -> None:
    for after in range(1000):
        emulated_run = _testing.EmulatedRun(
            all_reduce("chain", 4), True, [0, 1, 2, 3], callers_apart=True, pace="one_task"
        )
        emulated_run.run()
        made = emulated_run.counts["events"]
        emulated_run.fail_call(after)
        try:
            emulated_run.run(1, capture)
            break
        except RuntimeError as error:
            if "made up" not in str(error):
                raise
        assert emulated_run.race is None  # callers' streams wait for all issued work
        emulated_run.run(2)
        assert emulated_run.race is None
        assert emulated_run.mismatch(after) is None
        assert emulated_run.counts["events"] <= made + 8  # one more event per stream, to join it
    assert after > 60


@pytest.mark.parametrize("devices", [[0, 0, 0, 0], [0, 1, 2, 3], [1, 0, 0, 1]])
def test_a_capture_has_events_of_its_own(devices: list[int]) -> None:
    for way in (next(ways_from(n)) for n in range(48)):
        for peers in (True, False):
            emulated_run = _testing.EmulatedRun(
                all_reduce("two_shot", 4), True, devices, peers=peers, **way
            )
            emulated_run.run(2, capture=True)
            assert emulated_run.race is None, way
            assert emulated_run.mismatch(1) is None, way
            assert emulated_run.counts["events"] == 0
            emulated_run.run()
            assert emulated_run.race is None, way


def test_a_capture_on_some_of_the_callers_is_refused_before_anything_is_issued() -> None:
    emulated_run = _testing.EmulatedRun(all_reduce("fused", 3), True, [0, 1, 2])
    with pytest.raises(ValueError, match="on 1 of the 3 current streams of this call"):
        emulated_run.run_half_captured()
    assert emulated_run.counts["launch"] == emulated_run.counts["record"] == 0


def test_the_host_waits_for_ranks_in_its_memory() -> None:
    for name in ("leader", "two_shot", "chain"):
        for devices in ([0, -1], [-1, 0, 0, -1], [1, -1, 0]):
            for peers in (True, False):
                emulated_run = emulate_calls(
                    all_reduce(name, len(devices)), True, devices, runs=2, peers=peers
                )
                assert emulated_run.counts["synchronize"] == 2  # 1 per run: hosts share a stream
                assert all(emulated_run.mismatch(seed) is None for seed in range(4))


def test_a_capture_that_the_host_would_have_to_wait_for_is_refused() -> None:
    emulated_run = _testing.EmulatedRun(all_reduce("leader", 2), True, [0, -1])
    with pytest.raises(ValueError, match="the host cannot wait"):
        emulated_run.run(1, capture=True)
    emulated_run = _testing.EmulatedRun(all_reduce("leader", 2), True, [0, -1], host_waits=False)
    emulated_run.run(1, capture=True)
    assert emulated_run.race is None
    assert emulated_run.mismatch(5) is None


def test_placements_that_are_not_the_plans_are_refused() -> None:
    plan, seat = all_reduce("leader", 2), (0, 1, 1, 1)
    schedule = _testing.schedule(plan, True, "any", [seat, seat], 2)
    assert [(stream, after, recorded) for stream, _, after, recorded in schedule] == [
        (0, [], True),
        (1, [0], True),
        (0, [1], False),
    ]
    for seats, hub, why in [
        ([seat], -1, "a placement of 1 ranks is not one of a plan of 2"),
        ([seat, (0, 2, 1, 1)], -1, "rank 1 is on stream 2 of 2"),
        ([seat, (0, -1, 1, 1)], -1, "rank 1 is on stream -1 of 2"),
        ([seat, seat], 1, "rank 0 is on stream 1, which is the hub"),
        ([seat, seat], 5, "the hub is stream 5 of 2"),
    ]:
        with pytest.raises(ValueError, match=why):
            _testing.schedule(plan, True, "any", seats, 2, hub)
