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


@pytest.mark.parametrize("peer_access", [True, False])
def test_tree_order_on_devices_that_reach_each_other_or_not(peer_access: bool) -> None:
    """Through the host the default in rank order is a chain, which adds in several steps."""
    gpus = Gpus(2)
    of = [torch.full((1000,), value) for value in (1e8, 1.0, -1e8, 1.0)]
    for order, wanted in (("tree", 0.0), ("rank", 1.0)):
        tensors = [gpus.tensor(t, device=rank % 2) for rank, t in enumerate(of)]
        gpus.all_reduce(tensors, order=order, peer_access=peer_access)
        for t in tensors:
            gpus.expect(t, torch.full((1000,), wanted))
        gpus.check()
    gpus.close()


# --- asynchronous calls ---------------------------------------------------------------------------


@pytest.mark.usefixtures("exchange")
@pytest.mark.parametrize("tells", [None, False, True])
def test_an_asynchronous_call_overlaps_with_later_work(gpus: Gpus, tells: bool | None) -> None:
    """The current stream waits in wait(), also if the library of arrays uses it, too."""
    tensors: list[Any] = on_ranks(gpus, values(2))
    memory = tensors[0]
    if tells is not None:
        tensors = [Array(gpus, v, gpus.torch.current(0), tells) for v in values(2)]
        memory = tensors[0].memory
    work = gpus.all_reduce(tensors, async_op=True)
    gpus.torch.write(memory, torch.zeros(8))  # before wait(): a mistake of the caller
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


def test_events_are_created_once_and_reused(gpus: Gpus) -> None:
    tensors = on_ranks(gpus, values(8), 2)
    gpus.all_reduce(tensors, algorithm="two_shot")
    counted = gpus.count(lambda: gpus.all_reduce(tensors, algorithm="two_shot"))
    assert counted["record"] > 2
    assert counted["create_event"] == counted["create_stream"] == 0


@pytest.mark.parametrize("algorithm", ["ring", "two_shot"])
def test_a_call_that_returns_its_memory_records_no_stream(gpus: Gpus, algorithm: str) -> None:
    gpus.all_reduce(on_ranks(gpus, values(8), 2), algorithm=algorithm)
    gpus.all_gather(on_ranks(gpus, values(8), 2))
    assert gpus.torch.recorded() == 0


# --- every wait, event and record of a stream is needed -------------------------------------------


def reuse_freed_memory(gpus: Gpus) -> None:
    """Write memory of all sizes that a call may use, which is free at once."""
    for device in (0, 1):
        made = [gpus.empty(128 * n, device=device) for n in range(1, 9) for _ in range(WORLD)]
        for t in made:
            gpus.torch.write(t, torch.ones_like(t, device="cpu"))


def ended(found: Any) -> Any:
    """The results of a call, after its wait() if it is asynchronous."""
    return found.wait() if hasattr(found, "wait") else found


def read_and_overwrite(gpus: Gpus, tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for t, v in zip(tensors, expected, strict=True):
        gpus.expect(t, v)
        gpus.torch.write(t, torch.zeros_like(v))


def reduced(gpus: Gpus, devices: int = 2, of: Sequence[Tensor] = (), **more: Any) -> None:
    of = of or values(WORLD, 64)
    tensors = on_ranks(gpus, of, devices)
    reuse_freed_memory(gpus)
    ended(gpus.all_reduce(tensors, **more))
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


def rows_and_columns(gpus: Gpus, devices: int = 1, **streams: Any) -> tuple[Any, list[Tensor]]:
    """Values of two ranks, and tensors of them in unlike layouts."""
    of, each = [v.reshape(4, 16) for v in values(2, 64)], streams.get("streams", [None, None])
    rows = gpus.tensor(of[0], stream=each[0])
    columns = gpus.tensor(of[1].t().contiguous(), device=devices - 1, stream=each[1]).t()
    return of, [rows, columns]


def unlike_layouts(gpus: Gpus, **more: Any) -> None:
    of, tensors = rows_and_columns(gpus, 2)
    reuse_freed_memory(gpus)
    found = ended(gpus.all_gather(tensors, **more))
    read_and_overwrite(gpus, [*tensors, *found], [*of, torch.cat(of), torch.cat(of)])


def unlike_layouts_on_named_streams(gpus: Gpus) -> None:
    streams = [gpus.stream() for _ in range(2)]
    of, tensors = rows_and_columns(gpus, streams=streams)
    for s in streams:
        with gpus.on(s):
            reuse_freed_memory(gpus)
    for t, s in zip(gpus.all_gather(tensors, streams=streams), streams, strict=True):
        with gpus.on(s):
            read_and_overwrite(gpus, [t], [torch.cat(of)])


def unlike_layouts_behind_asynchronous_calls(gpus: Gpus, **more: Any) -> Any:
    (of, tensors), (_, others) = rows_and_columns(gpus), rows_and_columns(gpus)
    works = [
        gpus.all_reduce(list(pair), async_op=True) for pair in zip(tensors, others, strict=True)
    ]
    found = ended(gpus.all_gather(tensors, **more))
    read_and_overwrite(gpus, found, [2 * torch.cat(of)] * 2)
    return works


def a_copy_between_layouts(gpus: Gpus) -> None:
    of, tensors = rows_and_columns(gpus)
    work = gpus.copy_(*tensors, async_op=True)
    with gpus.on(gpus.stream()):
        work.wait()
        read_and_overwrite(gpus, tensors, [of[1]] * 2)


def array_of_another_library(gpus: Gpus, **more: Any) -> None:
    of, theirs = values(2, 64), gpus.stream()
    array, tensor = Array(gpus, of[0], theirs), gpus.tensor(of[1])
    ended(gpus.all_reduce([array, tensor], **more))
    read_and_overwrite(gpus, [tensor], [total(of)])
    with gpus.on(theirs):
        read_and_overwrite(gpus, [array.memory], [total(of)])


def array_of_a_dropped_work(gpus: Gpus) -> None:
    of, theirs = values(2, 64), gpus.stream()
    arrays = [Array(gpus, v, theirs) for v in of]
    gpus.all_reduce(arrays, async_op=True)
    with gpus.on(theirs):
        read_and_overwrite(gpus, [a.memory for a in arrays], [total(of)] * 2)


def array_in_another_layout(gpus: Gpus, **more: Any) -> None:
    of, tensors = rows_and_columns(gpus)
    array = Array(gpus, of[0], gpus.stream())
    found = ended(gpus.all_gather([array, tensors[1]], **more))
    with gpus.on(array.stream):
        read_and_overwrite(gpus, [array.memory], of[:1])
    read_and_overwrite(gpus, found, [torch.cat(of)] * 2)


def array_that_names_no_stream(gpus: Gpus, **more: Any) -> None:
    """Its library has ordered its work before the current stream; the call is on named streams."""
    of = values(2, 64)
    arrays = [Array(gpus, v, gpus.torch.current(0), tells=False) for v in of]
    ended(gpus.all_reduce(arrays, streams=[gpus.stream() for _ in of], **more))
    read_and_overwrite(gpus, [a.memory for a in arrays], [total(of)] * 2)


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
        gpus.all_reduce(tensors, algorithm="ring", peer_access=False)
        read_and_overwrite(gpus, tensors, [total(of)] * WORLD)


def captured_layouts(gpus: Gpus) -> None:
    of, tensors = rows_and_columns(gpus)
    stream = gpus.stream()
    gpus.fork(gpus.torch.current(0), stream)
    with gpus.capture(stream):
        found = ended(gpus.all_gather(tensors, algorithm="ring", async_op=True))
        read_and_overwrite(gpus, found, [torch.cat(of)] * 2)


def captured_arrays(gpus: Gpus) -> None:
    of, origin, named = values(2, 64), gpus.stream(), gpus.stream()
    with gpus.capture(origin):
        gpus.fork(origin, named)
        arrays = [Array(gpus, v, origin, tells=False) for v in of]
        gpus.all_reduce(arrays, streams=[named] * 2)
        read_and_overwrite(gpus, [a.memory for a in arrays], [total(of)] * 2)


def dropped(gpus: Gpus, layouts: bool) -> None:
    of = [v.reshape(4, 16) for v in values(2, 64)]
    second = gpus.tensor(of[1].t().contiguous()).t() if layouts else gpus.tensor(of[1])
    gpus.all_gather([gpus.tensor(of[0]), second], async_op=True, algorithm="ring")
    del second
    reuse_freed_memory(gpus)


# Not left out: an event of a pinned piece that no later call fills again, and waits behind which a
# caller's stream would use pinned memory of the call. test_pinned_ring.py and test_schedule.py do.
ORDER, MEMORY = ("wait", "record", "synchronize"), ("record_stream",)
ALL_WAITS = ("wait",)  # left out together: one covers another, or orders a stream that is not used
EVERY = -1  # in place of the number of the call that is left out
Program = Callable[[Gpus], Any]
PROGRAMS: dict[str, tuple[Program, Sequence[str]]] = {
    "ring": (lambda gpus: reduced(gpus, algorithm="ring"), ORDER),
    "two_shot": (lambda gpus: reduced(gpus, algorithm="two_shot"), ORDER),
    "async": (lambda gpus: reduced(gpus, algorithm="two_shot", async_op=True), ORDER),
    "named streams": (on_named_streams, ORDER),
    "another stream": (waited_for_on_another_stream, ORDER),
    "behind async": (behind_an_asynchronous_call, ORDER),
    "layouts": (unlike_layouts, ORDER),
    "layouts async": (lambda gpus: unlike_layouts(gpus, async_op=True), ORDER),
    "layouts, named streams": (unlike_layouts_on_named_streams, ORDER),
    "layouts behind async": (unlike_layouts_behind_asynchronous_calls, ALL_WAITS),
    "layouts async behind async": (
        lambda gpus: unlike_layouts_behind_asynchronous_calls(gpus, async_op=True),
        ALL_WAITS,
    ),
    "layouts copied": (a_copy_between_layouts, ORDER),
    "array": (array_of_another_library, ORDER),
    "array async": (lambda gpus: array_of_another_library(gpus, async_op=True), ORDER),
    "array dropped": (array_of_a_dropped_work, ALL_WAITS),
    "array, layouts": (array_in_another_layout, ORDER),
    "array, layouts async": (lambda gpus: array_in_another_layout(gpus, async_op=True), ORDER),
    "array, no stream": (array_that_names_no_stream, ALL_WAITS),
    "array, no stream async": (
        lambda gpus: array_that_names_no_stream(gpus, async_op=True),
        ALL_WAITS,
    ),
    "foreign memory": (foreign_memory_of_a_dropped_work, ORDER),
    "pinned memory": (lambda gpus: host_memory(gpus, True), ORDER),
    "pageable memory": (lambda gpus: host_memory(gpus, False), ("wait", "synchronize")),
    "capture": (captured, ORDER),
    "capture, layouts": (captured_layouts, ORDER),
    "capture, arrays": (captured_arrays, ORDER),
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
    except (AssertionError, ValueError) as error:  # a race, a wrong value, or a refusal
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
    if calls is ALL_WAITS:
        tried = [("wait", EVERY)]
    assert tried
    assert [one for one in tried if not outcome(program, *one)[0]] == []


def test_pinned_memory_of_a_call_is_recorded() -> None:
    """On the streams of both devices, either of which is behind all work on the memory."""
    assert outcome(staged)[0] == ""
    assert outcome(staged, "record_stream", EVERY)[0] != ""
