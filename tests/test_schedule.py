"""The unchanged device executor, on emulated devices that only record the order of work.

Streams and events order every pair of conflicting accesses, checked by the executor's addresses. No
event is superfluous: dropping any wait must be noticed. Any order that streams and events allow
gives the same bits as the plan as written.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest
from emulated_calls import all_reduce, calls, emulate_calls, stream_layouts
from plan_cases import each_algorithm, random_plan

from pycollect import _C, _testing


@each_algorithm
def test_no_algorithm_races_and_every_wait_is_needed(algorithm: _C.Algorithm) -> None:
    waits = 0
    for case, devices, layout in calls(algorithm, (2, 3, 4, 5, 8)):
        emulated_run = emulate_calls(case.plan, case.in_place, devices, **layout)
        assert emulated_run.redundant_waits() == [], f"{case} on {devices}, {layout}"
        waits += emulated_run.waits
    assert waits > 1000


@each_algorithm
def test_any_order_of_the_streams_gives_the_same_bits(algorithm: _C.Algorithm) -> None:
    for seed, (case, devices, layout) in enumerate(calls(algorithm, (2, 3, 5, 8))):
        if algorithm.order != "exact" or seed % 2:
            types: dict[str, Any] = {"dtype": "float32", "op": "avg"}
        else:
            types = {"dtype": "bfloat16", "op": "sum"}
        emulated_run = emulate_calls(
            case.plan, case.in_place, devices, runs=2, bindings=2, **types, **layout
        )
        # -1 is the order of issue, the only one with CUDA_LAUNCH_BLOCKING=1.
        for order in (-1, seed, seed + 1):
            assert emulated_run.mismatch(order) is None, f"{case} on {devices}, {layout}"


def random_call(seed: int) -> tuple[_testing.EmulatedRun, str]:
    pick = random.Random(seed)
    plan, in_place = random_plan(seed // 4)
    devices = [pick.randrange(pick.randint(1, plan.world)) for _ in range(plan.world)]
    if pick.random() < 0.4:
        devices[1:] = [d if pick.random() < 0.5 else -1 for d in devices[1:]]
    layout = next(layouts_from(seed)) | {
        "peers": pick.random() < 0.5,
        "pieces": pick.choice((2, 5, 8)),
    }
    layout |= {"bindings": pick.choice((1, 2)), "host_waits": False}
    emulated_run = emulate_calls(plan, in_place, devices, pick.choice((1, 2)), **layout)
    return emulated_run, f"seed {seed}: {devices}, {layout}"


def layouts_from(seed: int) -> Any:
    layout = stream_layouts()
    for _ in range(seed % 8):
        next(layout)
    return layout


@pytest.mark.parametrize(
    ("first", "last"),
    [(0, 144), pytest.param(144, 400, marks=pytest.mark.slow)],
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
        assert emulated_run.redundant_waits() == [], what
        for order in (-1, 0, 1):
            assert emulated_run.mismatch(order) is None, what
        waits += emulated_run.waits
    assert waits > 37 * (last - first)
    assert refused < 10


@pytest.mark.parametrize("name", ["leader", "chain", "two_shot", "ring"])
def test_a_dropped_wait_changes_the_bits(name: str) -> None:
    """Besides the race checker, an order that a missing event allows gives other results."""
    emulated_run = emulate_calls(all_reduce(name, 4), True, [0, 1, 2, 3])
    assert all(emulated_run.mismatch(seed) is None for seed in range(20))
    for number in range(emulated_run.waits):
        emulated_run.skip_wait(number)
        assert any(emulated_run.mismatch(seed) is not None for seed in range(200)), number
        assert emulated_run.race is not None


def test_one_device_and_one_stream_is_one_launch_and_no_event() -> None:
    """One for each level, which has the works of its steps on all tensors."""
    for name, world in itertools.product(("leader", "two_shot", "chain"), range(1, 17)):
        plan = all_reduce(name, world)
        emulated_run = emulate_calls(plan, True, [0] * world, bindings=8)
        launches = emulated_run.levels - 2  # the first and the last level only begin and end ranks
        works = 8 * len(emulated_run.plan.steps)
        done = Counter({"capture_id": 1, "load": 1, "launch": launches, "works": works})
        if world == 1:  # a single rank in place has nothing to do
            del done["launch"], done["works"]
        apart = Counter({"create_stream": 1, "streams": 1, "current_device": 99})
        assert emulated_run.counts - apart == done, (name, world)
        assert emulated_run.mismatch(world) is None


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
    emulated_run = emulate_calls(
        all_reduce(name, 8), True, list(range(8)), level_policy=level_policy
    )
    counts = emulated_run.counts
    assert tuple(counts[k] for k in ("launch", "copy", "record", "wait")) == want


def test_schedules_are_cached_by_plan_and_placement() -> None:
    one = emulate_calls(all_reduce("two_shot", 4), True, [0, 1, 2, 3])
    two = _testing.EmulatedRun(all_reduce("chain", 4), True, [0, 1, 2, 3], machine_of=one)
    for callers_apart in (False, True, False):
        for emulated_run in (one, two):
            emulated_run.replace_streams(callers_apart)
            emulated_run.run(2)
            assert emulated_run.race is None
            assert emulated_run.mismatch(3) is None


def test_events_are_created_once_and_reused() -> None:
    emulated_run = _testing.EmulatedRun(all_reduce("two_shot", 4), True, [0, 1, 2, 3])
    emulated_run.run()
    made = emulated_run.counts["create_event"]
    for _ in range(10):
        emulated_run.run(5)
        assert emulated_run.race is None
    assert emulated_run.counts["create_event"] == emulated_run.counts["events"] == made
    assert emulated_run.counts["record"] == 51 * made


@pytest.mark.parametrize("capture", [False, True])
def test_a_failed_call_leaves_streams_joined_and_events_usable(capture: bool) -> None:
    for after in range(1000):
        emulated_run = _testing.EmulatedRun(
            all_reduce("chain", 4), True, [0, 1, 2, 3], callers_apart=True, level_policy="one_task"
        )
        emulated_run.run()
        made = emulated_run.counts["events"]
        emulated_run.fail_call(after)
        try:
            emulated_run.run(1, capture)
            break
        except RuntimeError as error:
            if "injected failure" not in str(error):
                raise
        assert emulated_run.race is None  # callers' streams wait for all issued work
        emulated_run.run(2)
        assert emulated_run.race is None
        assert emulated_run.mismatch(after) is None
        assert emulated_run.counts["events"] <= made + 8  # one more event per stream, to join it
    assert after > 60


@pytest.mark.parametrize("devices", [[0, 0, 0, 0], [0, 1, 2, 3], [1, 0, 0, 1]])
def test_a_capture_has_its_own_events(devices: list[int]) -> None:
    for layout in (next(layouts_from(n)) for n in range(8)):
        for peers in (True, False):
            emulated_run = _testing.EmulatedRun(
                all_reduce("two_shot", 4), True, devices, peers=peers, **layout
            )
            emulated_run.run(2, capture=True)
            assert emulated_run.race is None, layout
            assert emulated_run.mismatch(1) is None, layout
            assert emulated_run.counts["events"] == 0
            emulated_run.run()
            assert emulated_run.race is None, layout


def test_a_capture_of_some_callers_streams_is_refused() -> None:
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


def test_a_capture_with_a_host_wait_is_refused() -> None:
    emulated_run = _testing.EmulatedRun(all_reduce("leader", 2), True, [0, -1])
    with pytest.raises(ValueError, match="the host cannot wait"):
        emulated_run.run(1, capture=True)
    emulated_run = _testing.EmulatedRun(all_reduce("leader", 2), True, [0, -1], host_waits=False)
    emulated_run.run(1, capture=True)
    assert emulated_run.race is None
    assert emulated_run.mismatch(5) is None


def test_invalid_stream_maps_are_refused() -> None:
    plan, ids = all_reduce("leader", 2), [(0, 0, 0), (1, 1, 1)]
    schedule = _testing.schedule(plan, True, "any", ids, 2)
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
            _testing.schedule(plan, True, "any", stream_ids, 2)
