"""The fake CUDA fails where CUDA fails, and detects mistakes that CUDA would not report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pycollect import _testing


@contextmanager
def fails(why: str) -> Iterator[None]:
    with pytest.raises(RuntimeError, match=f"CUDA error: .*{why}"):
        yield


class Stage:
    """Two devices, a stream, and 64 bytes on each device."""

    def __init__(self) -> None:
        self.cuda = _testing.Emulator(2)
        self.streams = [self.cuda.stream(device) for device in range(2)]
        self.memory = [self.cuda.allocate("device", device, 64) for device in range(2)]

    def launch(self, device: int, *memory: int) -> None:
        self.cuda.set_device(device)
        self.cuda.launch(self.streams[device], [(list(memory), list(memory), 64)])

    def order(self, first: int, second: int) -> None:
        self.cuda.set_device(first)
        event = self.cuda.event(first)
        self.cuda.record(event, self.streams[first])
        self.cuda.set_device(second)
        self.cuda.wait(self.streams[second], event)


def test_everything_needs_its_device_to_be_current() -> None:
    stage = Stage()
    cuda, stream = stage.cuda, stage.streams[1]
    with fails("an event for device 1 while device 0 is current"):
        cuda.event(1)
    cuda.set_device(1)
    event = cuda.event(1)
    cuda.record(event, stream)
    cuda.set_device(0)
    here = (stage.memory[1], 1)
    with fails("launch on a stream of device 1 while device 0 is current"):
        cuda.launch(stream, [([stage.memory[1]], [stage.memory[1]], 1)])
    with fails("copy on a stream of device 1"):
        cuda.copy(stream, here, here, 1)
    with fails("record on a stream of device 1"):
        cuda.record(event, stream)
    with fails("wait on a stream of device 1"):
        cuda.wait(stream, event)
    with fails("synchronize on a stream of device 1"):
        cuda.synchronize(stream)
    with fails("query of a stream of device 1"):
        cuda.is_capturing(stream)
    with fails("no device 2"):
        cuda.set_device(2)


def test_an_event_is_recorded_on_its_device_alone() -> None:
    stage = Stage()
    event = stage.cuda.event(0)
    stage.cuda.set_device(1)
    with fails("an event of device 0 recorded on a stream of device 1"):
        stage.cuda.record(event, stage.streams[1])


def test_a_wait_for_an_event_never_recorded_passes_through_and_the_race_shows() -> None:
    stage = Stage()
    stage.cuda.connect(1, 0)
    stage.launch(0, stage.memory[0])
    event = stage.cuda.event(0)
    stage.cuda.set_device(1)
    stage.cuda.wait(stage.streams[1], event)
    stage.launch(1, stage.memory[0])
    assert stage.cuda.race == (
        "a launch on stream 2 (operation 0) and a launch on stream 3 (operation 2) touch the same "
        "memory, one of them writes, and nothing orders them"
    )


def test_an_event_orders_two_devices() -> None:
    stage = Stage()
    stage.cuda.connect(1, 0)
    stage.launch(0, stage.memory[0])
    stage.order(0, 1)
    stage.launch(1, stage.memory[0])
    assert stage.cuda.race is None
    stage.launch(0, stage.memory[0])
    assert stage.cuda.race is not None


def test_an_event_is_recorded_once_in_a_call() -> None:
    stage = Stage()
    event = stage.cuda.event(0)
    stage.cuda.record(event, stage.streams[0])
    with fails("recorded again while others may still have to wait for it"):
        stage.cuda.record(event, stage.streams[0])
    stage.cuda.begin_call()
    stage.cuda.record(event, stage.streams[0])
    stage.cuda.destroy(event)
    with fails("wait of no event"):
        stage.cuda.wait(stage.streams[0], event)


def test_a_device_touches_only_what_it_reaches() -> None:
    stage = Stage()
    with fails("device 0 cannot touch the memory of device 1"):
        stage.launch(0, stage.memory[1])
    with fails("a copy between devices 0 and 1, which do not reach each other"):
        stage.cuda.copy(stage.streams[0], (stage.memory[1], 1), (stage.memory[0], 0), 64)
    stage.cuda.connect(0, 1)
    stage.launch(0, stage.memory[1])
    stage.cuda.copy(stage.streams[0], (stage.memory[1], 1), (stage.memory[0], 0), 64)
    stage.launch(0, stage.cuda.allocate("pinned", -1, 64))
    with fails("a kernel touches pageable memory"):
        stage.launch(0, stage.cuda.allocate("pageable", -1, 64))


def test_addresses_are_looked_at() -> None:
    stage = Stage()
    stream, at = stage.streams[0], stage.memory[0]
    with fails("an access beyond the end of its memory"):
        stage.cuda.launch(stream, [([at], [at + 1], 64)])
    with fails("an address in no memory"):
        stage.cuda.launch(stream, [([8], [8], 1)])
    with fails("overlaps another of its slices without being it"):
        stage.cuda.launch(stream, [([at], [at + 1], 32)])
    with fails("a launch of nothing"):
        stage.cuda.launch(stream, [])
    with fails("a row of nothing"):
        stage.cuda.launch(stream, [([at], [at], 0)])
    with fails("a copy of nothing"):
        stage.cuda.copy(stream, (at, 0), (at, 0), 0)
    with fails("a copy names another memory than its address is in"):
        stage.cuda.copy(stream, (at, 1), (at, 0), 1)


def test_rows_of_a_launch_know_nothing_of_each_other() -> None:
    stage = Stage()
    at = stage.memory[0]
    stage.cuda.launch(stage.streams[0], [([at], [at + 16], 16), ([at + 32], [at + 16], 16)])
    assert stage.cuda.race is None
    stage.cuda.launch(stage.streams[0], [([at], [at + 16], 16), ([at + 32], [at], 16)])
    assert stage.cuda.race is not None


def test_nothing_waits_and_nothing_is_allocated_during_a_capture() -> None:
    stage = Stage()
    pageable = stage.cuda.allocate("pageable", -1, 64)
    stage.cuda.begin_capture(stage.streams[0])
    assert stage.cuda.is_capturing(stage.streams[0])
    with fails("the host waits during a capture"):
        stage.cuda.synchronize(stage.streams[0])
    with fails("allocation during a capture"):
        stage.cuda.allocate("device", 0, 1)
    with fails("a copy of pageable memory during a capture"):
        stage.cuda.copy(stage.streams[0], (stage.memory[0], 0), (pageable, -1), 64)
    with fails("two captures at once"):
        stage.cuda.begin_capture(stage.streams[0])


def test_streams_join_a_capture_by_events_and_are_joined_to_its_origin() -> None:
    stage = Stage()
    stage.cuda.begin_capture(stage.streams[0])
    with fails("escapes the capture"):
        stage.launch(1, stage.memory[1])
    stage.order(0, 1)
    stage.launch(1, stage.memory[1])
    with fails("began no capture"):
        stage.cuda.end_capture(stage.cuda.stream(0))
    with fails("has work in the capture that was not joined"):
        stage.cuda.end_capture(stage.streams[0])
    stage.order(1, 0)
    stage.cuda.end_capture(stage.streams[0])


def test_events_do_not_cross_the_border_of_a_capture() -> None:
    stage = Stage()
    before = stage.cuda.event(0)
    stage.cuda.record(before, stage.streams[0])
    with fails("the default stream cannot be captured"):
        stage.cuda.begin_capture(stage.cuda.default_stream(0))
    stage.cuda.begin_capture(stage.streams[0])
    with fails("a stream under capture waits for work outside of it"):
        stage.cuda.wait(stage.streams[0], before)
    within = stage.cuda.event(0)
    stage.cuda.record(within, stage.streams[0])
    stage.cuda.end_capture(stage.streams[0])
    with fails("wait for an event of a capture that has ended"):
        stage.cuda.wait(stage.streams[0], within)
