"""torch.cuda.graph: each replay of a captured collective reads the current values of its inputs.

Replays are mixed with eager calls, which must not share scratch memory with the graph. A refused
call leaves the capture and the library usable.
"""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from reference import COLLECTIVES, IN_PLACE, assert_same, expected, left_fold, randoms
from sites import SEVERAL, STAGED, VIRTUAL, several_gpus

import pycollect as pc

pytestmark = pytest.mark.cuda

CALLS = [
    (collective, algorithm)
    for collective in COLLECTIVES
    for algorithm in (None, *([] if collective == "all_to_all" else pc.algorithms(collective)))
]
COUNTS = (4_001, 3_000_001)  # elements of one pipeline piece, and of many


def capture(work, warm=True):
    """Capture `work` in a graph, after one warm-up run on a side stream, as torch recommends."""
    if warm:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


def call_of(api, collective, algorithm, tensors):
    options = {} if algorithm is None else {"algorithm": algorithm}
    return lambda: getattr(api, collective)(tensors, **options)


def write(tensors, values):
    for t, v in zip(tensors, values, strict=True):
        t.copy_(v)


def empties(world, count, device="cuda:0"):
    return [torch.zeros(count, dtype=torch.int32, device=device) for _ in range(world)]


@pytest.mark.parametrize("placement", [VIRTUAL, STAGED], ids=lambda h: h.label)
@pytest.mark.parametrize(("collective", "algorithm"), CALLS)
@pytest.mark.parametrize("count", COUNTS)
def test_replays_read_current_values(placement, collective, algorithm, count):
    for world in (1, 4):
        tensors = empties(world, count)
        graph, got = capture(call_of(placement.api(world), collective, algorithm, tensors))
        for seed in range(4):
            values = randoms(world, (count,), torch.int32, seed=seed)
            write(tensors, values)
            graph.replay()
            results = tensors if collective in IN_PLACE else got
            why = f"world {world}, replay {seed}"
            assert_same([r.cpu() for r in results], expected(collective, values), why)


def test_coalesced_lists_in_a_graph():
    shapes = [(20, 1, 3, 3), (20,), (801, 128), (), (0, 3), (10,)]
    lists = [[torch.zeros(s, device="cuda:0") for s in shapes] for _ in range(4)]
    graph, _ = capture(lambda: pc.all_reduce_coalesced(lists, "avg"))
    for seed in range(3):
        columns = [randoms(4, s, torch.float32, seed=seed + i) for i, s in enumerate(shapes)]
        for mine, values in zip(lists, zip(*columns, strict=True), strict=True):
            write(mine, values)
        graph.replay()
        for i, column in enumerate(columns):
            wanted = [left_fold(column, "avg")] * 4
            assert_same([mine[i].cpu() for mine in lists], wanted, f"tensor {i}", "avg")


def test_a_call_can_be_captured_without_an_earlier_run():
    for algorithm in (None, *pc.algorithms()):
        tensors = empties(7, 12_345)  # no other test here uses this world size
        graph, _ = capture(lambda t=tensors, a=algorithm: pc.all_reduce(t, algorithm=a), warm=False)
        values = randoms(7, (12_345,), torch.int32)
        write(tensors, values)
        graph.replay()
        assert_same([t.cpu() for t in tensors], [left_fold(values, "sum")] * 7, algorithm)


@pytest.mark.parametrize("placement", [VIRTUAL, STAGED], ids=lambda h: h.label)
@pytest.mark.parametrize("algorithm", ["one_shot", "chain", "two_shot", "tree"])
def test_eager_calls_share_no_scratch_with_the_graph(placement, algorithm):
    count = 1_000_001
    tensors, others = empties(3, count), empties(3, count)
    api = placement.api(3)
    graph, _ = capture(lambda: api.all_reduce(tensors, algorithm=algorithm))
    side = torch.cuda.Stream()
    for seed in range(8):
        values = randoms(3, (count,), torch.int32, seed=seed)
        write(tensors, values)
        write(others, values[::-1])
        torch.cuda.synchronize()
        graph.replay()
        with torch.cuda.stream(side):  # concurrently with the replay
            api.all_reduce(others, "max", algorithm=algorithm)
        side.synchronize()
        torch.cuda.synchronize()
        assert_same([t.cpu() for t in tensors], [left_fold(values, "sum")] * 3, seed)
        assert_same([t.cpu() for t in others], [left_fold(values, "max")] * 3, seed)


def test_a_graph_keeps_its_scratch_when_the_communicator_is_deleted():
    communicator = pc.Communicator(["cuda:0"] * 4, peer_access=False)
    tensors = empties(4, 500_009)
    graph, _ = capture(partial(communicator.all_reduce, tensors, algorithm="two_shot"))
    del communicator
    gc.collect()
    torch.cuda.empty_cache()
    fillers = [torch.full((500_009,), 7, dtype=torch.int32, device="cuda:0") for _ in range(8)]
    values = randoms(4, (500_009,), torch.int32)
    write(tensors, values)
    graph.replay()
    assert_same([t.cpu() for t in tensors], [left_fold(values, "sum")] * 4)
    assert all(int((t != 7).sum()) == 0 for t in fillers), "the graph wrote into freed memory"


# --- calls that are refused in a capture ----------------------------------------------------------


def assert_refused_in_capture(work, words):
    """Capture a refused `work` between two kernels; assert that the graph replays both."""
    x = torch.zeros(4, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        with pytest.raises((ValueError, pc.CollectiveError), match=words):
            work()
        x += 1
    graph.replay()
    assert x.tolist() == [2.0] * 4, "a refused call spoils the capture"
    tensors = [torch.ones(5, device="cuda:0") for _ in range(3)]
    pc.all_reduce(tensors)
    assert tensors[2].tolist() == [3.0] * 5


def test_calls_that_cannot_be_captured_are_refused():
    host, there = torch.ones(100_000), torch.zeros(100_000, device="cuda:0")
    columns, rows = torch.ones(200, 300).t(), torch.zeros(300, 200, device="cuda:0")
    for call, words in [
        (lambda: pc.scatter(host, "cuda:0*3"), "(?i)pageable|captur"),
        (lambda: pc.copy_(there, host), "(?i)pageable|captur"),
        (lambda: pc.copy_(rows, columns), "(?i)pageable|captur"),
        (lambda: pc.all_reduce([there, host]), "(?i)captur"),
        (lambda: pc.barrier("cuda:0*2"), "(?i)captur"),
        (lambda: pc.all_reduce([there, rows]), "shape"),
    ]:
        assert_refused_in_capture(call, words)


def test_a_wait_for_an_eager_call_is_refused_in_a_capture():
    tensors = [torch.ones(5, device="cuda:0") for _ in range(3)]
    work = pc.all_reduce(tensors, async_op=True)
    assert_refused_in_capture(work.wait, "before the capture begins")
    work.wait()
    assert tensors[0].tolist() == [3.0] * 5


def test_pinned_memory_is_copied_in_a_capture():
    host = torch.arange(30_000.0).pin_memory()
    out = [torch.zeros(10_000, device="cuda:0") for _ in range(3)]
    graph, _ = capture(lambda: pc.scatter(host, "cuda:0*3", out=out))
    host.neg_()
    graph.replay()
    assert_same([o.cpu() for o in out], list(host.tensor_split(3)))


def test_reductions_over_pinned_memory_are_captured():
    host, there = torch.zeros(50_001).pin_memory(), torch.zeros(50_001, device="cuda:0")
    graph, _ = capture(lambda: pc.all_reduce([there, host]))
    for seed in range(3):
        values = randoms(2, (50_001,), torch.float32, seed=seed)
        there.copy_(values[0])
        torch.cuda.synchronize()
        host.copy_(values[1])
        graph.replay()
        torch.cuda.synchronize()
        assert_same([there.cpu(), host], [left_fold(values, "sum")] * 2, seed)


def test_a_device_that_does_not_capture_is_refused():
    several_gpus()
    tensors = [torch.ones(5, device=d) for d in SEVERAL.devices(2)]
    assert_refused_in_capture(lambda: pc.all_reduce(tensors), "(?i)captur")
