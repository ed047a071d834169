"""The emulator fails where CUDA fails, and detects mistakes that CUDA would not report."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import pycollect as pc
from pycollect import _testing


@contextmanager
def fails(why: str) -> Iterator[None]:
    with pytest.raises(RuntimeError, match=f"CUDA error: .*{why}"):
        yield


class TwoDevices:
    """Two devices with a stream and 64 bytes each."""

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


def test_a_new_emulator_begins_on_device_0() -> None:
    for _ in range(5):
        cuda = _testing.Emulator(2)
        assert cuda.current_device() == 0
        cuda.set_device(1)
        del cuda  # the next one may get its address


def test_work_runs_when_the_host_waits_for_it() -> None:
    pair = TwoDevices()
    cuda, (stream, other) = pair.cuda, (pair.streams[0], pair.cuda.stream(0))
    sources = [cuda.allocate("device", 0, 64) for _ in range(2)]
    results = [cuda.allocate("device", 0, 64) for _ in range(2)]
    for source, value in zip(sources, (1, 2), strict=True):
        ctypes.memset(source, value, 64)
    for s, result, source in zip((stream, other), results, sources, strict=True):
        cuda.launch(s, [([result], [source], 64)])
    poison = ctypes.string_at(pair.memory[0], 64)

    def seen() -> list[bytes]:
        return [ctypes.string_at(result, 64) for result in results]

    assert seen() == [poison, poison]
    cuda.synchronize(other)
    assert seen() == [poison, b"\2" * 64]
    cuda.synchronize(stream)
    assert seen() == [b"\1" * 64, b"\2" * 64]


def test_faults() -> None:
    pair = TwoDevices()
    pair.cuda.inject("fail", after=1)
    pair.cuda.event(0)
    with fails("injected failure in create_event"):
        pair.cuda.event(0)
    pair.cuda.event(0)  # it fails once
    pair.cuda.inject("skip", "launch")
    pair.launch(0, pair.memory[0])
    assert pair.cuda.race is None
    pair.cuda.connect(1, 0)
    pair.launch(1, pair.memory[0])
    assert pair.cuda.race is None  # the first launch was left out
    pair.cuda.heal()
    pair.launch(0, pair.memory[0])
    assert pair.cuda.race is not None
    with fails("only a call without a result can be left out"):
        pair.cuda.inject("skip", "query")


def emulated(order: str, own_thread: bool = False) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A runtime whose CPU tensors stand for a device's, and two tensors of it."""
    fake = _testing.emulate(pc.distributed.options(), order == "eager", own_thread)
    fake.cuda.drain_waits(False)
    return fake, fake.empty([4]), fake.empty([4])


@pytest.mark.parametrize("order", ["late", "eager"])
def test_the_work_of_a_caller_is_late(order: str) -> None:
    fake, x, y = emulated(order)
    fake.write(x, torch.ones(4))
    event = fake.cuda.event(0)
    side = fake.cuda.stream(0, of_caller=False)
    fake.cuda.record(event, side)
    fake.cuda.wait(fake.current(), event)
    assert not bool((x == 1).any())
    fake.cuda.record(event, fake.current())
    fake.cuda.wait(side, event)  # the group's stream needs it
    assert bool((x == 1).all()) == (order == "eager")
    fake.write(y, torch.ones(4))
    fake.finish()
    assert bool((y == 1).all())


def test_races_of_a_process_group_are_violations() -> None:
    fake, x, _ = emulated("late")
    first, second = fake.current(), fake.cuda.stream(0)
    fake.write(x, torch.ones(4))
    fake.use(second)
    fake.write(x, torch.zeros(4))
    (violation,) = fake.cuda.violations()
    assert violation.startswith("the caller's write (operation 0) and the caller's write")
    for stream in (first, second):
        fake.cuda.finish(stream)
    assert fake.cuda.violations()  # the last of this log
    assert fake.cuda.race is None


def test_a_runtime_may_end_before_its_work() -> None:
    for own_thread in (False, True):
        fake, x, y = emulated("late", own_thread)
        fake.cuda.set_pause(0.05)
        fake.write(x, torch.ones(4))
        fake.write(y, torch.ones(4))
        del fake, x, y


def test_operations_need_their_device_to_be_current() -> None:
    pair = TwoDevices()
    cuda, stream = pair.cuda, pair.streams[1]
    with fails("an event for device 1 while device 0 is current"):
        cuda.event(1)
    cuda.set_device(1)
    event = cuda.event(1)
    cuda.record(event, stream)
    cuda.set_device(0)
    here = (pair.memory[1], 1)
    with fails("launch on a stream of device 1 while device 0 is current"):
        cuda.launch(stream, [([pair.memory[1]], [pair.memory[1]], 1)])
    with fails("copy on a stream of device 1"):
        cuda.copy(stream, here, here, 1)
    with fails("record on a stream of device 1"):
        cuda.record(event, stream)
    with fails("wait on a stream of device 1"):
        cuda.wait(stream, event)
    with fails("synchronize on a stream of device 1"):
        cuda.synchronize(stream)
    with fails("query of a stream of device 1"):
        cuda.capture_id(stream)
    with fails("no device 2"):
        cuda.set_device(2)


def test_an_event_is_recorded_only_on_its_device() -> None:
    pair = TwoDevices()
    event = pair.cuda.event(0)
    pair.cuda.set_device(1)
    with fails("an event of device 0 recorded on a stream of device 1"):
        pair.cuda.record(event, pair.streams[1])


def test_a_wait_for_an_unrecorded_event_orders_nothing() -> None:
    pair = TwoDevices()
    pair.cuda.connect(1, 0)
    pair.launch(0, pair.memory[0])
    event = pair.cuda.event(0)
    pair.cuda.set_device(1)
    pair.cuda.wait(pair.streams[1], event)
    pair.launch(1, pair.memory[0])
    assert pair.cuda.race == (
        "a launch on stream 2 (operation 0) and a launch on stream 3 (operation 2) access the same "
        "memory, one of them writes, and nothing orders them"
    )


def test_an_event_orders_two_devices() -> None:
    pair = TwoDevices()
    pair.cuda.connect(1, 0)
    pair.launch(0, pair.memory[0])
    pair.order(0, 1)
    pair.launch(1, pair.memory[0])
    assert pair.cuda.race is None
    pair.launch(0, pair.memory[0])
    assert pair.cuda.race is not None


def test_a_wait_is_for_the_last_record() -> None:
    pair = TwoDevices()
    pair.cuda.connect(1, 0)
    event = pair.cuda.event(0)
    pair.cuda.record(event, pair.streams[0])
    pair.launch(0, pair.memory[0])
    pair.cuda.set_device(1)
    pair.cuda.wait(pair.streams[1], event)
    pair.cuda.set_device(0)
    pair.cuda.record(event, pair.streams[0])  # too late for the wait
    pair.launch(1, pair.memory[0])
    assert pair.cuda.race is not None
    pair.cuda.set_device(0)
    pair.cuda.destroy(event)
    with fails("wait of an event that does not exist"):
        pair.cuda.wait(pair.streams[0], event)


def test_devices_access_only_reachable_memory() -> None:
    pair = TwoDevices()
    with fails("device 0 cannot access the memory of device 1"):
        pair.launch(0, pair.memory[1])
    with fails("a copy between devices 0 and 1, which do not reach each other"):
        pair.cuda.copy(pair.streams[0], (pair.memory[1], 1), (pair.memory[0], 0), 64)
    pair.cuda.connect(0, 1)
    pair.launch(0, pair.memory[1])
    pair.cuda.copy(pair.streams[0], (pair.memory[1], 1), (pair.memory[0], 0), 64)
    pair.launch(0, pair.cuda.allocate("pinned", -1, 64))
    with fails("a kernel accesses pageable memory"):
        pair.launch(0, pair.cuda.allocate("pageable", -1, 64))


def test_addresses_are_checked() -> None:
    pair = TwoDevices()
    stream, at = pair.streams[0], pair.memory[0]
    with fails("an access beyond the end of its allocation"):
        pair.cuda.launch(stream, [([at], [at + 1], 64)])
    with fails("an address outside of all allocations"):
        pair.cuda.launch(stream, [([8], [8], 1)])
    with fails("partly overlaps another of its slices"):
        pair.cuda.launch(stream, [([at], [at + 1], 32)])
    with fails("a launch without work"):
        pair.cuda.launch(stream, [])
    with fails("kernel work without elements"):
        pair.cuda.launch(stream, [([at], [at], 0)])
    with fails("a copy of zero bytes"):
        pair.cuda.copy(stream, (at, 0), (at, 0), 0)
    with fails("a copy names a device that does not own the address"):
        pair.cuda.copy(stream, (at, 1), (at, 0), 1)


def test_conflicting_rows_of_a_launch_are_a_race() -> None:
    pair = TwoDevices()
    at = pair.memory[0]
    pair.cuda.launch(pair.streams[0], [([at], [at + 16], 16), ([at + 32], [at + 16], 16)])
    assert pair.cuda.race is None
    pair.cuda.launch(pair.streams[0], [([at], [at + 16], 16), ([at + 32], [at], 16)])
    assert pair.cuda.race is not None


def test_host_waits_and_allocations_in_a_capture_fail() -> None:
    pair = TwoDevices()
    pageable = pair.cuda.allocate("pageable", -1, 64)
    pair.cuda.begin_capture(pair.streams[0])
    assert pair.cuda.capture_id(pair.streams[0])
    with fails("not permitted while a stream is capturing"):
        pair.cuda.synchronize(pair.streams[0])
    with fails("a copy of pageable memory during a capture"):
        pair.cuda.copy(pair.streams[0], (pair.memory[0], 0), (pageable, -1), 64)
    with fails("two captures at once"):
        pair.cuda.begin_capture(pair.streams[0])


def test_streams_join_a_capture_by_events_and_are_joined_to_its_origin() -> None:
    pair = TwoDevices()
    pair.launch(1, pair.memory[1])  # loads the kernel
    pair.cuda.begin_capture(pair.streams[0])
    with fails("load is not permitted while a stream is capturing"):
        pair.launch(0, pair.memory[0])
    with fails("on a stream that has not joined the capture"):
        pair.launch(1, pair.memory[1])
    pair.order(0, 1)
    pair.launch(1, pair.memory[1])
    with fails("began no capture"):
        pair.cuda.end_capture(pair.cuda.stream(0))
    with fails("has work in the capture that was not joined"):
        pair.cuda.end_capture(pair.streams[0])
    pair.order(1, 0)
    pair.cuda.end_capture(pair.streams[0])


def test_events_do_not_cross_the_boundary_of_a_capture() -> None:
    pair = TwoDevices()
    before = pair.cuda.event(0)
    pair.cuda.record(before, pair.streams[0])
    with fails("the default stream cannot be captured"):
        pair.cuda.begin_capture(pair.cuda.default_stream(0))
    pair.cuda.begin_capture(pair.streams[0])
    with fails("a capturing stream waits for work outside of its capture"):
        pair.cuda.wait(pair.streams[0], before)
    within = pair.cuda.event(0)
    pair.cuda.record(within, pair.streams[0])
    pair.cuda.end_capture(pair.streams[0])
    with fails("wait for an event of a capture that has ended"):
        pair.cuda.wait(pair.streams[0], within)
