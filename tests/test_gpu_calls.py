"""Calls on lists of GPU tensors: the order of streams, memory, captures, and the number of calls.

Everything runs on emulated GPUs. Each test would find a missing wait, memory that is reused too
early, or a CUDA call too many.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from emulated_gpus import Gpus, total, values
from torch import Tensor

WORLD = 4


@pytest.fixture
def gpus(request: pytest.FixtureRequest) -> Iterator[Gpus]:
    made = Gpus(getattr(request, "param", 2))
    yield made
    gc.collect()
    made.close()


def on_ranks(gpus: Gpus, of: list[Tensor], devices: int = 1, **more: Any) -> list[Tensor]:
    return [gpus.tensor(v, device=r % devices, **more) for r, v in enumerate(of)]


# --- order with the callers' streams --------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("algorithm", [None, "two_shot", "ring"])
@pytest.mark.parametrize("connected", [True, False])
def test_calls_are_ordered_with_the_current_streams(
    gpus: Gpus, devices: int, algorithm: str | None, connected: bool
) -> None:
    gpus.torch.connect(connected)
    for seed in range(3):
        of = values(WORLD, 64, seed=seed)
        tensors = on_ranks(gpus, of, devices)
        gpus.all_reduce(tensors, algorithm=algorithm)
        for t in tensors:
            gpus.expect(t, total(of))
            gpus.torch.write(t, torch.zeros(64))
        gpus.check(seed)


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [
        ("all_gather", None),
        ("all_gather", "ring"),
        ("all_reduce", None),
        ("all_reduce", "ring"),
        ("reduce_scatter", None),
    ],
)
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_memory_of_the_call_is_ordered_with_the_named_streams(
    gpus: Gpus, collective: str, algorithm: str | None, async_op: bool, shared: bool
) -> None:
    """Torch hands out freed memory whose last use is pending on the stream it was allocated on."""
    of = values(WORLD, 64)
    streams = [gpus.stream()] * WORLD if shared else [gpus.stream() for _ in range(WORLD)]
    tensors = [gpus.tensor(v, stream=s) for v, s in zip(of, streams, strict=True)]
    for size in (64, 256, 16, 128, 512):
        for _ in range(2 * WORLD):  # pending work of the current stream on memory that is free then
            gpus.torch.write(gpus.empty(size), torch.zeros(size))
    call = getattr(gpus, collective)
    found = call(tensors, algorithm=algorithm, streams=streams, async_op=async_op)
    if async_op:
        for s in streams:
            with gpus.on(s):
                results = found.wait()
        found = results
    for size in (64, 256, 16, 128, 512):  # memory that the call has freed already
        for _ in range(2 * WORLD):
            gpus.torch.write(gpus.empty(size), torch.ones(size))
    for r, s in enumerate(streams):
        if collective == "all_reduce":
            gpus.expect(tensors[r], total(of), s)
        elif collective == "all_gather":
            gpus.expect(found[r], torch.cat(of), s)
        else:
            gpus.expect(found[r], total(of)[r * 16 : r * 16 + 16], s)
    del found
    for s in streams:
        with gpus.on(s):
            gpus.torch.write(gpus.empty(256), torch.ones(256))
    gpus.check()


def test_inputs_of_unlike_layouts_are_copied_on_their_streams(gpus: Gpus) -> None:
    of = [v.reshape(4, 16) for v in values(2, 64)]
    streams = [gpus.stream() for _ in of]
    first = gpus.tensor(of[0], stream=streams[0])
    second = gpus.tensor(of[1].t().contiguous(), stream=streams[1]).t()
    found = gpus.all_gather([first, second], streams=streams)
    for out, s in zip(found, streams, strict=True):
        gpus.expect(out, torch.cat(of), s)
    gpus.check()


def test_a_copy_between_layouts_leaves_the_current_stream(gpus: Gpus) -> None:
    """A rank in host memory uses the stream of the GPU, which is then in the list twice."""
    host = torch.zeros(4, 2)
    gpus.torch.adopt(host, True)
    before = gpus.torch.current(0)
    gpus.copy_(host, gpus.tensor(torch.ones(2, 4)).t(), async_op=True).wait()
    assert gpus.torch.current(0) == before


# --- asynchronous calls ---------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2])
def test_a_call_comes_after_an_asynchronous_one_that_nobody_has_waited_for(
    gpus: Gpus, devices: int
) -> None:
    of = values(2)
    tensors = on_ranks(gpus, of, devices)
    work = gpus.all_reduce(tensors, async_op=True)
    gpus.all_reduce(tensors, "max")
    for t in tensors:
        gpus.expect(t, total(of))
    gpus.check()
    work.wait()


@pytest.mark.parametrize("devices", [1, 2])
def test_asynchronous_calls_are_ordered_by_wait(gpus: Gpus, devices: int) -> None:
    of = values(WORLD)
    tensors = on_ranks(gpus, of, devices)
    works = [gpus.all_reduce(tensors, async_op=True, algorithm="two_shot") for _ in range(2)]
    for work in works:
        work.wait()
    for t in tensors:
        gpus.expect(t, total(of) * WORLD)
    gpus.check()


def test_an_asynchronous_call_overlaps_with_later_work(gpus: Gpus) -> None:
    tensors = on_ranks(gpus, values(2))
    work = gpus.all_reduce(tensors, async_op=True)
    gpus.torch.write(tensors[0], torch.zeros(8))  # before wait(): a mistake of the caller
    assert gpus.cuda.race is not None
    work.wait()


def test_wait_releases_the_tensors(gpus: Gpus) -> None:
    before = gpus.torch.blocks_in_use()
    tensors = on_ranks(gpus, values(WORLD), 2)
    work = gpus.all_reduce(tensors, async_op=True, algorithm="ring")
    used = {t.data_ptr() for t in tensors}
    del tensors
    gc.collect()
    assert gpus.torch.blocks_in_use() >= before + WORLD
    work.wait()
    assert gpus.torch.blocks_in_use() == before
    # The allocator may hand the memory out only when the side stream is done with it.
    assert all(gpus.empty(8).data_ptr() not in used for _ in range(2 * WORLD))
    del work


def test_a_timeout_waits_for_the_device(gpus: Gpus) -> None:
    of = values(2)
    tensors = on_ranks(gpus, of)
    work = gpus.all_reduce(tensors, async_op=True)
    assert work.wait(10) is None
    for t in tensors:
        gpus.expect(t, total(of))
    gpus.check()


# --- the number of calls --------------------------------------------------------------------------


def test_a_call_on_one_device_and_stream_is_one_launch(gpus: Gpus) -> None:
    for world in (2, 4, 8):
        tensors = on_ranks(gpus, values(world))
        gpus.all_reduce(tensors)
        counted = gpus.count(lambda t=tensors: gpus.all_reduce(t))
        assert counted == Counter({"current_device": 1, "capture_id": 1, "launch": 1})
    assert gpus.torch.recorded() == 0


def test_an_asynchronous_call_uses_one_event_per_stream(gpus: Gpus) -> None:
    tensors = on_ranks(gpus, values(8))
    for _ in range(2):  # creates the events
        gpus.all_reduce(tensors, async_op=True).wait()
    before = gpus.torch.recorded()
    counted = gpus.count(lambda: gpus.all_reduce(tensors, async_op=True).wait())
    assert (counted["record"], counted["wait"], counted["create_event"]) == (2, 2, 0)
    assert counted["capture_id"] == 1
    assert gpus.torch.recorded() - before == len(tensors)


@pytest.mark.parametrize("algorithm", ["ring", "two_shot"])
def test_a_call_that_returns_its_memory_records_no_stream(gpus: Gpus, algorithm: str) -> None:
    gpus.all_reduce(on_ranks(gpus, values(8), 2), algorithm=algorithm)
    gpus.all_gather(on_ranks(gpus, values(8), 2))
    assert gpus.torch.recorded() == 0


def test_pinned_memory_of_the_call_is_not_reused_while_a_device_uses_it(gpus: Gpus) -> None:
    """The host may write pinned memory that is handed out again at once."""
    gpus.torch.connect(False)
    tensors = on_ranks(gpus, values(2), 2)
    gpus.all_reduce(tensors)
    pinned = gpus.torch.recorded()
    assert pinned > 0
    before = gpus.cuda.counters()
    gpus.all_reduce(tensors)
    assert gpus.torch.recorded() == 2 * pinned
    assert gpus.cuda.counters()["streams"] == before["streams"]


# --- captures -------------------------------------------------------------------------------------


def test_a_capture_has_streams_of_its_own(gpus: Gpus) -> None:
    """Meanwhile another thread may call, with streams that are not captured."""
    of = values(2)
    tensors, others = on_ranks(gpus, of), on_ranks(gpus, of)
    origin, other = gpus.stream(), gpus.stream()
    gpus.all_reduce(others, async_op=True).wait()  # the streams exist
    gpus.cuda.allow_eager_work(True)
    with gpus.capture(origin):
        work = gpus.all_reduce(tensors, async_op=True)
        gpus.all_reduce(tensors, algorithm="ring")
        with gpus.on(other):
            gpus.all_reduce(others, async_op=True).wait()
            gpus.all_reduce(others, algorithm="ring")
        work.wait()
    with gpus.on(other):
        gpus.all_reduce(others, async_op=True).wait()


def test_two_captures_one_after_the_other(gpus: Gpus) -> None:
    tensors = on_ranks(gpus, values(2))
    graphs = []
    for _ in range(3):
        with gpus.capture(gpus.stream()) as number:
            gpus.all_reduce(tensors, async_op=True).wait()
            gpus.all_reduce(tensors, algorithm="ring")
        graphs += number
    streams = gpus.cuda.counters()["streams"]
    for number in graphs:
        gpus.cuda.destroy_graph(number)
    for _ in range(3):  # with the streams of the destroyed graphs
        with gpus.capture(gpus.stream()) as number:
            gpus.all_reduce(tensors, async_op=True).wait()
            gpus.all_reduce(tensors, algorithm="ring")
        gpus.cuda.destroy_graph(number[0])
    assert gpus.cuda.counters()["streams"] == streams + 3


def test_scratch_and_pinned_memory_live_as_long_as_the_graph(gpus: Gpus) -> None:
    """No allocator knows that the graph uses them: on host memory it never does."""
    tensors = on_ranks(gpus, values(WORLD))
    gpus.torch.connect(False)
    before = gpus.torch.blocks_in_use()
    with gpus.capture(gpus.stream()) as number:
        gpus.all_reduce(tensors, algorithm="ring", peer_access=False)
    assert gpus.torch.blocks_in_use() > before
    assert gpus.torch.recorded() == 0
    gpus.cuda.destroy_graph(number[0])
    gpus.all_reduce(tensors)
    assert gpus.torch.blocks_in_use() == before


def test_memory_on_another_device_than_the_capture_lives_as_long_as_the_graph(gpus: Gpus) -> None:
    of = values(2)
    tensors = on_ranks(gpus, of, 2)
    origin, forked = gpus.stream(0), gpus.stream(1)
    gpus.torch.begin_capture(origin)
    gpus.fork(origin, forked)
    with gpus.on(origin), gpus.on(forked):
        results = gpus.all_gather(tensors)
    gpus.fork(forked, origin)
    number = gpus.torch.end_capture(origin)
    used = gpus.torch.blocks_in_use()
    del results
    gc.collect()
    assert gpus.torch.blocks_in_use() == used
    gpus.cuda.destroy_graph(number)
    gpus.all_reduce(tensors)
    assert gpus.torch.blocks_in_use() == used - len(tensors)


def test_a_refused_call_leaves_the_capture_as_it_was(gpus: Gpus) -> None:
    host = torch.zeros(8)
    gpus.torch.adopt(host, False)
    tensors = [*on_ranks(gpus, values(1)), host]
    eager = on_ranks(gpus, values(2), 2)
    gpus.cuda.allow_eager_work(True)

    def refused(of: list[Tensor], why: str) -> None:
        with pytest.raises(ValueError, match=why):
            gpus.all_reduce(of, async_op=True)

    with gpus.capture(gpus.stream()):
        counted = gpus.count(lambda: refused(tensors, "not pinned"))
        counted += gpus.count(lambda: refused(eager, "on 1 of the 2 current streams"))
    # No stream has joined the capture.
    assert set(counted) <= {"current_device", "capture_id", "create_stream", "streams"}


@pytest.mark.parametrize("pinned", [False, True])
def test_unlike_layouts_in_host_memory_are_refused_in_a_capture(gpus: Gpus, pinned: bool) -> None:
    host = torch.zeros(4, 2)
    gpus.torch.adopt(host, pinned)
    device = gpus.empty(2, 4).t()
    with gpus.capture(gpus.stream()), pytest.raises(ValueError, match="different layouts"):
        gpus.copy_(device, host)


def test_the_host_waits_although_another_thread_captures(gpus: Gpus) -> None:
    of = values(2)
    host = of[1].clone()
    gpus.torch.adopt(host, False)
    tensors = [gpus.tensor(of[0]), host]
    other = gpus.stream()
    gpus.cuda.allow_eager_work(True)
    with gpus.capture(other), gpus.on(gpus.stream()):
        gpus.all_reduce(tensors)


def test_another_thread_runs_while_the_host_waits(gpus: Gpus) -> None:
    """However small the call is: it waits for everything that is queued on the stream."""
    host = torch.zeros(1)
    gpus.torch.adopt(host, True)
    device = gpus.tensor(torch.ones(1))
    gpus.copy_(host, device)
    gpus.cuda.delay("synchronize", 0.5)
    ended, steps = threading.Event(), []

    def tick() -> None:
        while not ended.wait(0.01):
            steps.append(1)

    thread = threading.Thread(target=tick)
    thread.start()
    time.sleep(0.05)
    before = len(steps)
    gpus.copy_(host, device)
    during = len(steps) - before
    ended.set()
    thread.join()
    assert during > 5


# --- memory of other libraries --------------------------------------------------------------------


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch import DLPack tensors of the emulated kind of device."""
    module = ModuleType("torch.privateuseone")
    module._lazy_init = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.privateuseone", module)


class Array:
    """An array of a library that uses its memory on a stream of its own, as CuPy does."""

    def __init__(self, gpus: Gpus, of: Tensor, stream: object) -> None:
        self.memory = gpus.tensor(of, stream=stream)
        self.stream = stream

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"version": 3, "stream": self.stream.stream_id}

    def __dlpack_device__(self) -> tuple[int, int]:
        return (12, 0)  # DLPack's kDLExtDev is torch's PrivateUse1

    def __dlpack__(self, **_: object) -> object:
        return torch.utils.dlpack.to_dlpack(self.memory)


@pytest.mark.usefixtures("exchange")
@pytest.mark.parametrize("async_op", [False, True])
def test_arrays_of_other_libraries_are_ordered_with_their_streams(
    gpus: Gpus, async_op: bool
) -> None:
    of = values(2)
    theirs = gpus.stream()
    arrays = [Array(gpus, v, theirs) for v in of]
    work = gpus.all_reduce(arrays, async_op=async_op)
    if async_op:
        work.wait()
    for a in arrays:
        gpus.expect(a.memory, total(of), theirs)
    gpus.check()


@pytest.mark.usefixtures("exchange")
def test_memory_of_other_libraries_is_ordered_when_a_work_is_dropped(gpus: Gpus) -> None:
    of = values(2)
    theirs = gpus.stream()
    arrays = [Array(gpus, v, theirs) for v in of]
    work = gpus.all_reduce(arrays, async_op=True)
    del work
    gc.collect()
    for a in arrays:
        gpus.expect(a.memory, total(of), theirs)
    gpus.check()


def test_memory_that_torch_does_not_own_is_ordered_when_a_work_is_dropped(gpus: Gpus) -> None:
    """Its owner, such as another process, reuses it in the order of the current stream."""
    of = values(2)
    tensors = [gpus.torch.foreign(8, 0) for _ in of]
    for t, v in zip(tensors, of, strict=True):
        gpus.torch.write(t, v)
    work = gpus.all_reduce(tensors, async_op=True)
    del work
    gc.collect()
    for t in tensors:
        gpus.expect(t, total(of))
    gpus.check()
