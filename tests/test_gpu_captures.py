"""Calls on lists of GPU tensors in the capture of a CUDA graph, on emulated GPUs."""

from __future__ import annotations

import gc

import pytest
import torch
from emulated_gpus import Gpus, on_ranks, values
from torch import Tensor

WORLD = 4


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
