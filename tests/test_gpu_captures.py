"""Calls on lists of emulated GPUs' tensors in the capture of a CUDA graph, between tensors of
different layouts, and on memory that is not torch's, such as CuPy's.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from emulated_gpus import Array, Gpus, on_ranks, total, values
from torch import Tensor

import pycollect as pc

WORLD = 4


@pytest.mark.parametrize("async_op", [False, True])
def test_kernels_are_loaded_before_their_first_launch(gpus: Gpus, async_op: bool) -> None:
    """The launch itself must not load them, because a capture forbids that."""
    tensors = [on_ranks(gpus, values(2), devices) for devices in (1, 1, 2)]
    of = iter(tensors)

    def call() -> None:
        work = gpus.all_reduce(next(of), "max", async_op=async_op)
        if async_op:
            work.wait()

    with gpus.capture(gpus.stream()):
        counts = [gpus.count(call) for _ in range(2)]
    counts.append(gpus.count(call))  # also on a second device
    assert [counted["load"] for counted in counts] == [1, 0, 1]


def test_a_capture_has_streams_of_its_own(gpus: Gpus) -> None:
    """Meanwhile another thread may call, with streams that are not captured."""
    of = values(2)
    tensors, others = on_ranks(gpus, of), on_ranks(gpus, of)
    origin, other = gpus.stream(), gpus.stream()
    gpus.all_reduce(others, async_op=True).wait()  # the streams exist
    gpus.all_reduce(others, algorithm="ring", peer_access=False)
    gpus.cuda.allow_eager_work(True)
    with gpus.capture(origin):
        work = gpus.all_reduce(tensors, async_op=True)
        gpus.all_reduce(tensors, algorithm="ring", peer_access=False)
        with gpus.on(other):
            gpus.all_reduce(others, async_op=True).wait()
            gpus.all_reduce(others, algorithm="ring", peer_access=False)
        work.wait()
    with gpus.on(other):
        gpus.all_reduce(others, async_op=True).wait()


def test_two_captures_one_after_the_other(gpus: Gpus) -> None:
    tensors = on_ranks(gpus, values(2))

    def capture() -> int:
        with gpus.capture(gpus.stream()) as number:
            gpus.all_reduce(tensors, async_op=True).wait()
            gpus.all_reduce(tensors, algorithm="ring")
        return number[0]

    graphs = [capture() for _ in range(3)]
    streams = gpus.cuda.counters()["streams"]
    for number in graphs:
        gpus.cuda.destroy_graph(number)
    for _ in range(3):  # with the streams of the destroyed graphs, which are idle
        gpus.torch.run(0)
        gpus.cuda.destroy_graph(capture())
    assert gpus.cuda.counters()["streams"] == streams + 3


@contextmanager
def captured_on_both(gpus: Gpus) -> Iterator[list[int]]:
    """Capture on two devices, from a stream of the first one."""
    number: list[int] = []
    origin, forked = gpus.stream(0), gpus.stream(1)
    gpus.torch.begin_capture(origin)
    gpus.fork(origin, forked)
    with gpus.on(origin), gpus.on(forked):
        yield number
    gpus.fork(forked, origin)
    number.append(gpus.torch.end_capture(origin))


def staged(gpus: Gpus, async_op: bool) -> Any:
    """Scratch and pinned memory. No allocator knows that the graph uses pinned memory."""
    gpus.torch.connect(False)
    return gpus.all_reduce(on_ranks(gpus, values(WORLD)), algorithm="ring", peer_access=False)


def on_devices(gpus: Gpus, devices: Sequence[int], async_op: bool) -> Any:
    """On another device than the capture's, or on both."""
    tensors = [gpus.tensor(v, device=d) for v, d in zip(values(2), devices, strict=True)]
    gpus.cuda.set_device(devices[0])
    return gpus.all_gather(tensors, algorithm="ring", async_op=async_op)


# Name -> (context of the capture, call). Torch knows nothing of a capture of another library.
KEPT: dict[str, tuple[Any, Any]] = {
    "staged": (lambda gpus: gpus.capture(gpus.stream()), staged),
    "both devices": (captured_on_both, lambda gpus, a: on_devices(gpus, (0, 1), a)),
    "another device": (captured_on_both, lambda gpus, a: on_devices(gpus, (1, 1), a)),
    "another library": (
        lambda gpus: gpus.capture(gpus.stream(), by_torch=False),
        lambda gpus, a: on_devices(gpus, (0, 0), a),
    ),
}


@pytest.mark.parametrize(
    ("name", "async_op"),
    [(name, a) for name in KEPT for a in (False, True) if name != "staged" or not a],
)
def test_memory_lives_as_long_as_the_graph(gpus: Gpus, name: str, async_op: bool) -> None:
    capture, call = KEPT[name]
    before = gpus.torch.blocks_in_use()
    with capture(gpus) as number:
        results = call(gpus, async_op)
        if async_op:
            results = results.wait()
        gpus.cuda.set_device(0)
    used = gpus.torch.blocks_in_use()
    del results
    gc.collect()
    assert gpus.torch.blocks_in_use() == used > before
    assert gpus.torch.recorded() == 0  # its allocator would query an event of the capture
    # CUDA may not be called where it announces the end of a graph: a later call frees the memory.
    assert not gpus.count(lambda: gpus.cuda.destroy_graph(number[0]))
    assert gpus.torch.blocks_in_use() == used
    gpus.all_reduce(on_ranks(gpus, values(2)))
    assert gpus.torch.blocks_in_use() == before


def test_memory_of_the_graphs_pool_is_not_kept(gpus: Gpus) -> None:
    """Torch's trees of graphs account for every block of their pools."""
    tensors = on_ranks(gpus, values(WORLD))
    before = gpus.torch.blocks_in_use()
    with gpus.capture(gpus.stream()):
        gpus.all_gather(tensors, algorithm="ring")
        for algorithm in pc.algorithms("all_reduce"):
            gpus.all_reduce(tensors, algorithm=algorithm)
            gpus.all_reduce(tensors, algorithm=algorithm, async_op=True).wait()
        gc.collect()
        assert gpus.torch.blocks_in_use() == before


def test_a_work_is_waited_for_in_the_capture_of_its_call(gpus: Gpus) -> None:
    tensors, others = on_ranks(gpus, values(2), 2), on_ranks(gpus, values(2))
    origin, outside = gpus.stream(), gpus.torch.current(0)
    eager = gpus.all_reduce(others, async_op=True)
    del tensors
    gpus.cuda.allow_eager_work(True)

    def refused(work: Any, why: str) -> None:
        with pytest.raises(ValueError, match=why):
            work.wait()

    with gpus.capture(origin):
        captured = gpus.all_reduce(others, async_op=True)
        counted = gpus.count(lambda: refused(eager, "before the capture begins"))
        with gpus.on(outside):
            counted += gpus.count(lambda: refused(captured, "during the capture"))
            eager.wait()
        captured.wait()
    refused(captured, "during the capture")
    assert set(counted) <= {"current_device", "capture_id"}


def test_a_dropped_work_leaves_another_capture_as_it_was(gpus: Gpus) -> None:
    """Its memory is not torch's, so the current stream would have to wait for the call."""
    tensors = [gpus.torch.empty_foreign(8, 0) for _ in range(2)]
    works = [gpus.all_reduce(tensors, async_op=True)]

    def drop() -> None:
        works.clear()
        gc.collect()

    with gpus.capture(gpus.stream()):
        assert gpus.count(drop)["wait"] == 0  # CUDA would end the capture


def test_the_host_asks_for_other_work_during_its_capture(gpus: Gpus) -> None:
    of = values(2)
    tensors, others = on_ranks(gpus, of), on_ranks(gpus, of)
    work = gpus.all_reduce(others, async_op=True)
    with gpus.capture(gpus.stream()):
        gpus.all_reduce(tensors, algorithm="ring", peer_access=False)  # allocates pinned memory
        while not work.is_completed():
            pass


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


def test_the_host_waits_although_another_thread_captures(gpus: Gpus) -> None:
    of = values(2)
    host = of[1].clone()
    gpus.torch.adopt(host, False)
    tensors = [gpus.tensor(of[0]), host]
    other = gpus.stream()
    gpus.cuda.allow_eager_work(True)
    with gpus.capture(other), gpus.on(gpus.stream()):
        gpus.all_reduce(tensors)


# --- copies between layouts -----------------------------------------------------------------------


def test_a_copy_between_layouts_leaves_the_current_stream(gpus: Gpus) -> None:
    """A rank in host memory uses the stream of the GPU, which is then in the list twice."""
    host = torch.zeros(4, 2)
    gpus.torch.adopt(host, True)
    before = gpus.torch.current(0)
    gpus.copy_(host, gpus.tensor(torch.ones(2, 4)).t(), async_op=True).wait()
    assert gpus.torch.current(0) == before


def test_copies_of_inputs_are_freed_with_the_call(gpus: Gpus) -> None:
    of = [v.reshape(4, 16) for v in values(2, 64)]
    tensors = [gpus.tensor(of[0]), gpus.tensor(of[1].t().contiguous()).t()]
    before = gpus.torch.blocks_in_use()
    gpus.all_gather(tensors)
    assert gpus.torch.blocks_in_use() == before


@pytest.mark.parametrize("pinned", [False, True])
def test_host_memory_is_refused_in_a_capture(gpus: Gpus, pinned: bool) -> None:
    host = torch.zeros(4, 2)
    gpus.torch.adopt(host, pinned)
    device = gpus.empty(2, 4).t()
    with gpus.capture(gpus.stream()):
        with pytest.raises(ValueError, match="different layouts"):
            gpus.copy_(device, host)
        with pytest.raises(ValueError, match="different layouts"):
            gpus.all_gather([device, host], out=[gpus.empty(8, 2), torch.zeros(8, 2)])


def test_two_devices_are_refused_in_a_capture(gpus: Gpus) -> None:
    tensors = [gpus.empty(4, 2), gpus.empty(2, 4, device=1).t()]
    with captured_on_both(gpus), pytest.raises(ValueError, match="two GPUs"):
        gpus.copy_(*tensors)


def test_the_host_copies_behind_the_stream(gpus: Gpus) -> None:
    """A pinned input may still be written by a copy that does not wait."""
    host, out = torch.zeros(2, 4), torch.zeros(8, 2)
    for memory in (host, out):
        gpus.torch.adopt(memory, True)
    tensors = [gpus.empty(4, 2), host.t()]

    counted = gpus.count(lambda: gpus.all_gather(tensors, out=[gpus.empty(8, 2), out]))
    assert counted["synchronize"] >= 2  # before the copy, and for the result


@pytest.mark.parametrize("rows", [1, 2])
def test_more_ranks_than_a_kernel_takes_are_refused(gpus: Gpus, rows: int) -> None:
    """The addresses are parameters of the kernel. In several rows each of them has a pitch."""
    most = 503 if rows == 1 else 251
    for world in (most, most + 1):
        of = values(world, rows, world)
        tensors = on_ranks(gpus, of)
        if world == most:
            shards = gpus.reduce_scatter(tensors, dim=1)
            for r in range(world):
                gpus.expect(shards[r], total(of)[:, r : r + 1])
        else:
            with pytest.raises(ValueError, match=f"fewer than {world} sources .* are {world}"):
                gpus.reduce_scatter(tensors, dim=1)
        for t, v in zip(tensors, of, strict=True):
            gpus.expect(t, v)
    gpus.all_reduce(tensors, algorithm="chain")
    for t in tensors:
        gpus.expect(t, total(of))
    gpus.check()


# --- memory that is not torch's -------------------------------------------------------------------


def test_memory_that_is_not_aligned_is_refused(gpus: Gpus) -> None:
    tensors = [gpus.torch.empty_foreign(8, 0, offset) for offset in (0, 2)]
    with pytest.raises(ValueError, match=r"tensors\[1\] .*not aligned"):
        gpus.all_reduce(tensors)


@pytest.mark.usefixtures("exchange")
@pytest.mark.parametrize("tells", [False, True])
def test_a_stream_in_a_capture_is_refused_outside(gpus: Gpus, tells: bool) -> None:
    """The named streams would join the capture: the call would run in replays only."""
    named, origin = gpus.stream(), gpus.stream()
    gpus.cuda.allow_eager_work(True)
    arrays = [Array(gpus, v, named, tells) for v in values(2)]
    with gpus.capture(origin):
        for a in arrays:
            a.stream = origin
        with pytest.raises(ValueError, match="stream of an array's library is in the capture"):
            gpus.all_reduce(arrays, streams=[named] * 2)
        assert gpus.cuda.capture_id(named) == 0


@pytest.mark.usefixtures("exchange")
@pytest.mark.parametrize("async_op", [False, True])
def test_the_first_failure_is_raised_if_the_device_is_lost(async_op: bool) -> None:
    """Whatever the library still tries on the device, such as ordering streams, fails as well. If
    one call of CUDA fails, the streams of callers and of arrays are behind all enqueued work."""

    def failure(kind: str, after: int) -> str:
        gpus = Gpus(2)
        of, theirs = values(4, 64), [gpus.stream(device) for device in (0, 1)]
        tensors: list[Any] = on_ranks(gpus, of, 2)
        tensors[:2] = [Array(gpus, of[0], theirs[0]), tensors[1]]
        work = gpus.all_reduce(tensors, algorithm="two_shot", async_op=async_op)
        if async_op:
            work.wait()
        gpus.cuda.inject(kind, after=after)
        try:
            gpus.all_reduce(tensors, algorithm="two_shot", async_op=async_op)
        except RuntimeError as error:
            gpus.cuda.heal()
            if kind == "fail":
                for t, s in zip(tensors, [theirs[0], None, None, None], strict=True):
                    gpus.torch.write(t.memory if s else t, torch.zeros(64), s)
                assert gpus.cuda.race is None, f"call {after}: {gpus.cuda.race}"
            return str(error)
        else:
            return ""
        finally:
            gpus.cuda.heal()
            gpus.torch.run(0)
            gpus.close()

    number = 0
    while first := failure("fail", number):
        assert failure("lost", number) == first
        number += 1
    assert number > 20
