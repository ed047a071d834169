"""The emulator fails where CUDA fails, and detects mistakes that CUDA would not report.

Otherwise tests on emulated devices would pass although the library makes such a mistake. That every
wait, record and event of a call is missed is tested with the call (test_gpu_calls.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pycollect as pc
from pycollect import _testing


class TwoDevices:
    """Two devices with a stream and 64 bytes each; device 0 is current."""

    def __init__(self) -> None:
        self.cuda = _testing.Emulator(2)
        self.streams = [self.cuda.stream(device) for device in range(2)]
        self.memory = [self.cuda.allocate("device", device, 64) for device in range(2)]
        self.pageable = self.cuda.allocate("pageable", -1, 64)

    def launch(self, device: int, *memory: int) -> None:
        self.cuda.set_device(device)
        self.cuda.launch(self.streams[device], [(list(memory), list(memory), 64)])
        self.cuda.set_device(0)

    def copy(self, to: int, source: int, count: int = 64, of: tuple[int, int] = (0, 0)) -> None:
        self.cuda.copy(self.streams[0], (to, of[0]), (source, of[1]), count)

    def recorded(self, device: int = 0) -> int:
        """An event that is recorded on the device's stream."""
        self.cuda.set_device(device)
        event: int = self.cuda.event(device)
        self.cuda.record(event, self.streams[device])
        self.cuda.set_device(0)
        return event

    def wait(self, device: int, event: int) -> None:
        self.cuda.set_device(device)
        self.cuda.wait(self.streams[device], event)
        self.cuda.set_device(0)


# --- mistakes that CUDA refuses, or that are as bad -----------------------------------------------

Mistakes = dict[str, Callable[[], object]]  # the text of the error -> what raises it


def on_another_device(pair: TwoDevices) -> Mistakes:
    cuda, stream, here = pair.cuda, pair.streams[1], (pair.memory[1], 1)
    event, other = pair.recorded(0), pair.recorded(1)
    destroyed = pair.recorded(0)
    cuda.destroy(destroyed)
    return {
        "an event for device 1 while device 0 is current": lambda: cuda.event(1),
        "launch on a stream of device 1 while device 0": lambda: cuda.launch(
            stream, [([8], [8], 1)]
        ),
        "copy on a stream of device 1": lambda: cuda.copy(stream, here, here, 1),
        "record on a stream of device 1": lambda: cuda.record(other, stream),
        "wait on a stream of device 1": lambda: cuda.wait(stream, event),
        "synchronize on a stream of device 1": lambda: cuda.synchronize(stream),
        "query of a stream of device 1": lambda: cuda.capture_id(stream),
        "an event of device 1 recorded on a stream of": lambda: cuda.record(other, pair.streams[0]),
        "wait of an event that does not exist": lambda: pair.wait(0, destroyed),
    }


def on_wrong_memory(pair: TwoDevices) -> Mistakes:
    stream, (at, there) = pair.streams[0], pair.memory

    def launch(*tasks: Any) -> Callable[[], object]:
        return lambda: pair.cuda.launch(stream, list(tasks))

    return {
        "an access beyond the end of its allocation": launch(([at], [at + 1], 64)),
        "an address outside of all allocations": launch(([8], [8], 1)),
        "partly overlaps another of its slices": launch(([at], [at + 1], 32)),
        "a launch without tasks": launch(),
        "a kernel task without elements": launch(([at], [at], 0)),
        "device 0 cannot access the memory of device 1": launch(([there], [there], 64)),
        "a kernel accesses pageable memory": launch(([pair.pageable], [pair.pageable], 64)),
        "a copy of zero bytes": lambda: pair.copy(at, at, 0),
        "a copy names a device that does not own": lambda: pair.copy(at, at, 1, (1, 0)),
        "between devices 0 and 1, which do not reach": lambda: pair.copy(there, at, 64, (1, 0)),
    }


def in_a_capture(pair: TwoDevices) -> Mistakes:
    """Device 0's stream captures; another one has joined the capture, and is not joined to it."""
    cuda, stream, before = pair.cuda, pair.streams[0], pair.recorded(0)
    joined, apart = cuda.stream(0), cuda.stream(0)
    pair.launch(1, pair.memory[1])  # loads the kernel of device 1 only
    cuda.begin_capture(stream)
    cuda.wait(joined, pair.recorded(0))
    cuda.copy(joined, (pair.memory[0], 0), (pair.memory[0] + 32, 0), 32)
    return {
        "not permitted while a stream is capturing": lambda: cuda.synchronize(stream),
        "a copy of pageable memory during": lambda: pair.copy(
            pair.memory[0], pair.pageable, 64, (0, -1)
        ),
        "two captures at once": lambda: cuda.begin_capture(apart),
        "load is not permitted while a stream is": lambda: pair.launch(0, pair.memory[0]),
        "on a stream that has not joined the capture": lambda: pair.launch(1, pair.memory[1]),
        "waits for work outside of its capture": lambda: pair.wait(0, before),
        "began no capture": lambda: cuda.end_capture(apart),
        "has work in the capture that was not joined": lambda: cuda.end_capture(stream),
    }


def after_a_capture(pair: TwoDevices) -> Mistakes:
    pair.cuda.begin_capture(pair.streams[0])
    within = pair.recorded(0)
    pair.cuda.end_capture(pair.streams[0])
    default = pair.cuda.default_stream(0)
    return {
        "wait for an event of a capture that has ended": lambda: pair.wait(0, within),
        "default stream cannot be captured": lambda: pair.cuda.begin_capture(default),
    }


SITUATIONS = (on_another_device, on_wrong_memory, in_a_capture, after_a_capture)


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda s: s.__name__)
def test_mistakes_are_errors(situation: Callable[[TwoDevices], Mistakes]) -> None:
    pair = TwoDevices()
    for why, mistake in situation(pair).items():
        with pytest.raises(RuntimeError, match=f"CUDA error: .*{why}"):
            mistake()
        pair.cuda.set_device(0)


# --- races ----------------------------------------------------------------------------------------


Order = Callable[[TwoDevices, int], object]  # given an event that is recorded before both accesses


def too_late(pair: TwoDevices, event: int) -> None:
    pair.wait(1, event)
    pair.cuda.record(event, pair.streams[0])


ORDERS: dict[str, Order] = {
    "recorded between them": lambda pair, _: pair.wait(1, pair.recorded(0)),
    "no event": lambda pair, _: None,
    "not recorded": lambda pair, _: pair.wait(1, pair.cuda.event(0)),
    "recorded after the wait": too_late,
}


@pytest.mark.parametrize("name", ORDERS)
def test_accesses_that_no_event_orders_are_a_race(name: str) -> None:
    pair = TwoDevices()
    pair.cuda.connect(1, 0)
    before = pair.recorded(0)
    pair.launch(0, pair.memory[0])
    ORDERS[name](pair, before)
    pair.launch(1, pair.memory[0])
    assert (pair.cuda.race is None) == (name == "recorded between them")


def test_conflicting_tasks_of_a_launch_are_a_race() -> None:
    pair = TwoDevices()
    at = pair.memory[0]
    pair.cuda.launch(pair.streams[0], [([at], [at + 16], 16), ([at + 32], [at + 16], 16)])
    assert pair.cuda.race is None
    pair.cuda.launch(pair.streams[0], [([at], [at + 16], 16), ([at + 32], [at], 16)])
    assert pair.cuda.race is not None


# --- devices of a process group -------------------------------------------------------------------


@pytest.mark.parametrize("order", ["late", "eager"])
def test_the_work_of_a_caller_is_late(order: str) -> None:
    fake = _testing.emulate(pc.distributed.options(), order == "eager", False)
    fake.cuda.drain_waits(False)
    x, y = fake.empty([4]), fake.empty([4])
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
    fake = _testing.emulate(pc.distributed.options(), False, False)
    fake.cuda.drain_waits(False)
    x, first, second = fake.empty([4]), fake.current(), fake.cuda.stream(0)
    fake.write(x, torch.ones(4))
    fake.use(second)
    fake.write(x, torch.zeros(4))
    (violation,) = fake.cuda.violations()
    assert violation.startswith("the caller's write (operation 0) and the caller's write")
    for stream in (first, second):
        fake.cuda.finish(stream)
    assert fake.cuda.violations()  # the last of this log
    assert fake.cuda.race is None
