"""The unchanged device executor, on emulated devices that only record the order of work.

Streams and events order every pair of conflicting accesses, checked by the executor's addresses. No
event is superfluous: dropping any wait must be noticed. Any order that streams and events allow
gives the same bits as the plan as written.
"""

from __future__ import annotations

import random
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
    for _ in range(seed % 48):
        next(layout)
    return layout


@pytest.mark.parametrize(
    ("first", "last"),
    # The first range has each of the 48 stream layouts three times.
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
    emulated_run = emulate_calls(all_reduce(name, 4), True, [0, 1, 2, 3], workers="devices")
    assert all(emulated_run.mismatch(seed) is None for seed in range(20))
    for number in range(emulated_run.waits):
        emulated_run.skip_wait(number)
        assert any(emulated_run.mismatch(seed) is not None for seed in range(200)), number
        assert emulated_run.race is not None


@pytest.mark.parametrize(
    ("name", "level_policy", "join_stream", "want"),
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
def test_the_numbers_of_cuda_calls(
    name: str, level_policy: str, join_stream: bool, want: tuple[int, int, int, int]
) -> None:
    emulated_run = emulate_calls(
        all_reduce(name, 8),
        True,
        list(range(8)),
        level_policy=level_policy,
        join_stream=join_stream,
    )
    counts = emulated_run.counts
    assert tuple(counts[k] for k in ("launch", "copy", "record", "wait")) == want


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
    for layout in (next(layouts_from(n)) for n in range(48)):
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


def test_a_capture_with_a_host_wait_is_refused() -> None:
    emulated_run = _testing.EmulatedRun(all_reduce("leader", 2), True, [0, -1])
    with pytest.raises(ValueError, match="the host cannot wait"):
        emulated_run.run(1, capture=True)
    emulated_run = _testing.EmulatedRun(all_reduce("leader", 2), True, [0, -1], host_waits=False)
    emulated_run.run(1, capture=True)
    assert emulated_run.race is None
    assert emulated_run.mismatch(5) is None


def test_invalid_stream_maps_are_refused() -> None:
    plan, ids = all_reduce("leader", 2), (0, 1, 1, 1)
    for stream_ids, join_stream, why in [
        ([ids], -1, "a stream map of 1 ranks does not fit a plan of 2"),
        ([ids, (0, 2, 1, 1)], -1, "rank 1 uses stream 2; streams are numbered 0 to 1"),
        ([ids, (0, -1, 1, 1)], -1, "rank 1 uses stream -1; streams are numbered 0 to 1"),
        ([ids, ids], 1, "rank 0 uses stream 1, which is the join stream"),
        ([ids, ids], 5, "the join stream is stream 5; streams are numbered 0 to 1"),
    ]:
        with pytest.raises(ValueError, match=why):
            _testing.schedule(plan, True, "any", stream_ids, 2, join_stream)
