"""Calls on lists of GPU tensors: the order of streams, memory, and the number of CUDA calls.

Everything runs on emulated GPUs. The tests would find a missing wait, memory that is reused too
early, or a CUDA call too many: the last one leaves out every wait, event and record of a stream.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from emulated_gpus import Array, Gpus, on_ranks, total, values
from torch import Tensor

WORLD = 4


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


def test_a_device_that_torch_restores_lazily_is_set(gpus: Gpus) -> None:
    """Torch reports it as the current one, but CUDA's current device is another."""
    of = values(2)
    tensors = on_ranks(gpus, of)
    gpus.cuda.set_device(1)
    gpus.cuda.report_device(0)
    gpus.all_reduce(tensors)
    work = gpus.all_reduce(tensors, "max", async_op=True)
    gpus.cuda.set_device(1)
    gpus.cuda.report_device(0)
    work.wait()
    gpus.cuda.set_device(0)
    for t in tensors:
        gpus.expect(t, total(of))
    gpus.check()


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


def test_an_asynchronous_call_comes_after_queued_calls_of_the_host(gpus: Gpus) -> None:
    host = [torch.ones(8_000_000) for _ in range(2)]
    gpus.torch.adopt(host[0], True)
    device = gpus.tensor(torch.ones(8_000_000))
    queued = gpus.all_reduce(host, async_op=True)
    work = gpus.broadcast([host[0], device], async_op=True)
    assert queued.is_completed()
    work.wait()


# --- the host -------------------------------------------------------------------------------------


def test_another_thread_runs_while_the_host_waits(gpus: Gpus) -> None:
    """However small the call is: it waits for everything that is queued on the stream."""
    host = torch.zeros(1)
    gpus.torch.adopt(host, True)
    device = gpus.tensor(torch.ones(1))
    gpus.copy_(host, device)
    gpus.cuda.inject("slow", "synchronize", seconds=0.5)
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


# --- the number of calls --------------------------------------------------------------------------


def test_a_call_on_one_device_and_stream_is_one_launch(gpus: Gpus) -> None:
    """One for each dtype, and no other work: no event, no wait, no stream of the library's own."""
    for world in (2, 4, 8):
        of = values(world)
        tensors = on_ranks(gpus, of)
        lists = [[gpus.tensor(v), gpus.tensor(v).view(torch.int32), gpus.tensor(v)] for v in of]
        for launches, call in (
            (1, partial(gpus.all_reduce, tensors)),
            (1, partial(gpus.broadcast, tensors, streams=[gpus.torch.current(0)] * world)),
            (1, partial(gpus.all_gather, tensors)),
            (2, partial(gpus.all_reduce_coalesced, lists)),
        ):
            call()
            done = Counter({"current_device": 1, "capture_id": 1, "launch": launches})
            assert gpus.count(call) == done
    assert gpus.torch.recorded() == 0


def test_an_asynchronous_call_uses_one_event_per_stream(gpus: Gpus) -> None:
    tensors = on_ranks(gpus, values(8))
    for _ in range(2):  # creates the events
        gpus.all_reduce(tensors, async_op=True).wait()
    before = gpus.torch.recorded()
    counted = gpus.count(lambda: gpus.all_reduce(tensors, async_op=True).wait())
    assert (counted["record"], counted["wait"], counted["create_event"]) == (2, 2, 0)
    assert counted["capture_id"] == 2  # the call's, and wait()'s
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


# --- every wait, event and record of a stream is needed -------------------------------------------


def reuse_freed_memory(gpus: Gpus) -> None:
    """Write memory of all sizes that a call may use, which is free at once."""
    for device in (0, 1):
        made = [gpus.empty(128 * n, device=device) for n in range(1, 9) for _ in range(WORLD)]
        for t in made:
            gpus.torch.write(t, torch.ones_like(t, device="cpu"))


def read_and_overwrite(gpus: Gpus, tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for t, v in zip(tensors, expected, strict=True):
        gpus.expect(t, v)
        gpus.torch.write(t, torch.zeros_like(v))


def reduced(gpus: Gpus, devices: int = 2, of: Sequence[Tensor] = (), **more: Any) -> None:
    of = of or values(WORLD, 64)
    tensors = on_ranks(gpus, of, devices)
    reuse_freed_memory(gpus)
    work = gpus.all_reduce(tensors, **more)
    if work is not None:
        work.wait()
    read_and_overwrite(gpus, tensors, [total(of)] * len(of))


def on_named_streams(gpus: Gpus) -> None:
    of, streams = values(WORLD, 64), [gpus.stream() for _ in range(WORLD)]
    tensors = [gpus.tensor(v, stream=s) for v, s in zip(of, streams, strict=True)]
    gpus.all_reduce(tensors, algorithm="ring", streams=streams)
    for t, s in zip(tensors, streams, strict=True):
        with gpus.on(s):
            read_and_overwrite(gpus, [t], [total(of)])


def waited_for_on_another_stream(gpus: Gpus) -> None:
    of = values(2, 64)
    tensors = on_ranks(gpus, of)
    work = gpus.all_reduce(tensors, async_op=True)
    with gpus.on(gpus.stream()):
        work.wait()
        read_and_overwrite(gpus, tensors, [total(of)] * 2)


def behind_an_asynchronous_call(gpus: Gpus) -> Any:
    of = values(2, 64)
    tensors = on_ranks(gpus, of)
    work = gpus.all_reduce(tensors, async_op=True)
    gpus.all_reduce(tensors, "max")
    read_and_overwrite(gpus, tensors, [total(of)] * 2)
    return work


def unlike_layouts(gpus: Gpus, **more: Any) -> None:
    of = [v.reshape(4, 16) for v in values(2, 64)]
    tensors = [gpus.tensor(of[0]), gpus.tensor(of[1].t().contiguous(), device=1).t()]
    reuse_freed_memory(gpus)
    found = gpus.all_gather(tensors, **more)
    found = found.wait() if more else found
    read_and_overwrite(gpus, [*tensors, *found], [*of, torch.cat(of), torch.cat(of)])


def array_of_another_library(gpus: Gpus, **more: Any) -> None:
    of, theirs = values(2, 64), gpus.stream()
    array, tensor = Array(gpus, of[0], theirs), gpus.tensor(of[1])
    work = gpus.all_reduce([array, tensor], **more)
    if work is not None:
        work.wait()
    read_and_overwrite(gpus, [tensor], [total(of)])
    with gpus.on(theirs):
        read_and_overwrite(gpus, [array.memory], [total(of)])


def foreign_memory_of_a_dropped_work(gpus: Gpus) -> None:
    of = values(2, 64)
    tensors = [gpus.torch.empty_foreign(64, device) for device in range(2)]
    for t, v in zip(tensors, of, strict=True):
        gpus.torch.write(t, v)
    gpus.all_reduce(tensors, async_op=True)
    read_and_overwrite(gpus, tensors, [total(of)] * 2)


def host_memory(gpus: Gpus, pinned: bool) -> None:
    of = values(2, 64)
    host = of[1].clone()
    gpus.torch.adopt(host, pinned)
    tensor = gpus.tensor(of[0])
    gpus.all_reduce([tensor, host])
    assert torch.equal(host, total(of))
    read_and_overwrite(gpus, [tensor], [total(of)])


def staged(gpus: Gpus) -> None:
    """The host writes pinned memory that it gets after the call."""
    gpus.torch.connect(False)
    reduced(gpus, algorithm="ring")
    assert [gpus.torch.empty_pinned([128 * n]) for n in range(1, 9) for _ in range(WORLD)]


def captured(gpus: Gpus) -> None:
    of, stream = values(WORLD, 64), gpus.stream()
    tensors = on_ranks(gpus, of)
    gpus.fork(gpus.torch.current(0), stream)
    with gpus.capture(stream):
        gpus.all_reduce(tensors, algorithm="two_shot")
        read_and_overwrite(gpus, tensors, [total(of)] * WORLD)


def dropped(gpus: Gpus, layouts: bool) -> None:
    of = [v.reshape(4, 16) for v in values(2, 64)]
    second = gpus.tensor(of[1].t().contiguous()).t() if layouts else gpus.tensor(of[1])
    gpus.all_gather([gpus.tensor(of[0]), second], async_op=True, algorithm="ring")
    del second
    reuse_freed_memory(gpus)


# Not left out: an event of a pinned piece that no later call fills again, and waits behind which a
# caller's stream would use pinned memory of the call. test_pinned_ring.py and test_schedule.py do.
ORDER, MEMORY = ("wait", "record", "synchronize"), ("record_stream",)
EVERY = -1  # in place of the number of the call that is left out
Program = Callable[[Gpus], Any]
PROGRAMS: dict[str, tuple[Program, Sequence[str]]] = {
    "ring": (lambda gpus: reduced(gpus, algorithm="ring"), ORDER),
    "two_shot": (lambda gpus: reduced(gpus, 1, algorithm="two_shot"), ORDER),
    "async": (lambda gpus: reduced(gpus, algorithm="two_shot", async_op=True), ORDER),
    "named streams": (on_named_streams, ORDER),
    "another stream": (waited_for_on_another_stream, ORDER),
    "behind async": (behind_an_asynchronous_call, ORDER),
    "layouts": (unlike_layouts, ORDER),
    "layouts async": (lambda gpus: unlike_layouts(gpus, async_op=True), ORDER),
    "array": (array_of_another_library, ORDER),
    "array async": (lambda gpus: array_of_another_library(gpus, async_op=True), ORDER),
    "foreign memory": (foreign_memory_of_a_dropped_work, ORDER),
    "pinned memory": (lambda gpus: host_memory(gpus, True), ORDER),
    "pageable memory": (lambda gpus: host_memory(gpus, False), ("wait", "synchronize")),
    "capture": (captured, ORDER),
    "staging": (staged, ("record",)),
    "dropped": (lambda gpus: dropped(gpus, False), MEMORY),
    "dropped layouts": (lambda gpus: dropped(gpus, True), MEMORY),
}


def outcome(program: Program, left_out: str = "", number: int = 0) -> tuple[str, Counter[str]]:
    """Run the program without one call; return what was noticed, and the number of calls."""
    gpus, noticed = Gpus(2), ""
    if left_out:
        gpus.cuda.inject("skip", left_out, after=number)
    try:
        kept = program(gpus)
        gpus.check(number)
        del kept
    except AssertionError as error:  # a race or a wrong value
        noticed = str(error) or repr(error)
    except RuntimeError as error:
        noticed = str(error)
        if not noticed.startswith("CUDA error: "):  # in a capture, CUDA refuses
            raise
    made = Counter(gpus.cuda.counters()) + Counter(record_stream=gpus.torch.recorded())
    gpus.torch.run(number)
    gpus.close()
    return noticed, made


@pytest.mark.usefixtures("exchange")
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_wait_event_and_record_is_needed(name: str) -> None:
    program, calls = PROGRAMS[name]
    noticed, made = outcome(program)
    assert noticed == ""
    tried = [(call, number) for call in calls for number in range(made[call])]
    assert tried
    assert [one for one in tried if not outcome(program, *one)[0]] == []


def test_pinned_memory_of_a_call_is_recorded() -> None:
    """On the streams of both devices, either of which is behind all work on the memory."""
    assert outcome(staged)[0] == ""
    assert outcome(staged, "record_stream", EVERY)[0] != ""
