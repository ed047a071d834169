"""The list collectives under torch.compile and torch.export: operators of one graph, with the
results and errors of eager mode; what no operator has breaks the graph.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_same, randoms

import pycollect as pc
from pycollect import autograd

TWO = "cpu*2"


def computed(a, b):
    return [a * 2, b + 1]


def joined(tensors):
    return sum(t.sum(0) for t in tensors) * 3 + 1


def all_reduce(a, b):
    x = computed(a, b)
    pc.all_reduce(x)
    return [x[0] * x[1] + 1, x[0] - a]


def all_reduce_of_graph_inputs(a, b):
    y = a + b
    pc.all_reduce([a, b], "max")
    return [y * a, b.clone()]


def reduce_op(a, b):
    x = computed(a, b)
    pc.all_reduce(x, torch.distributed.ReduceOp.PRODUCT)
    return x


def reduce(a, b):
    x = computed(a, b)
    pc.reduce(x, dst=1)
    return [x[0] * 2, x[1] * 2]


def broadcast(a, b):
    x = computed(a, b)
    pc.broadcast(x, 1)
    return [x[0] * 2, x[1] * 2]


def coalesced(a, b):
    x, y = computed(a, b), computed(b, a)
    pc.all_reduce_coalesced([x, y], algorithm="two_shot")
    pc.broadcast_coalesced([[x[0], y[1][:1]], [x[1], y[0][:1]]], 1)
    return [x[0] + y[1], x[1] - y[0]]


def out_of_place(a, b):
    x = computed(a, b)
    rows = [[1, 3], [4, 0]]
    results = [pc.all_gather(x), pc.reduce_scatter(x, "avg", dim=1)]
    results += [pc.all_to_all(x), pc.all_to_all(x, split_sizes=rows)]
    return [joined(result) for result in results]


def with_out(a, b):
    x, whole = computed(a, b), a.new_empty(2, 8, 6)
    gathered = pc.all_gather(x, out=list(whole))
    halves = pc.reduce_scatter(gathered, out=[torch.empty_like(a), torch.empty_like(b)])
    pc.gather(halves, out=whole[0])
    pc.scatter(whole[0], TWO, out=halves)
    return [whole, *pc.all_to_all(halves, out=x)]


def scattered(a, b):
    whole = pc.gather(pc.scatter(a * b, TWO, chunk_sizes=[1, 3]))
    copies = pc.replicate([whole + 1, b], TWO)
    pc.copy_(whole, copies[1][0] * 2)
    return [whole, copies[0][0], copies[1][1]]


def viewed(a, b):
    x = a * 2
    pc.all_reduce([x[:2], x[2:]])
    return [x + b]


def transposed(a, b):
    x = pc.all_gather([a.t(), b.t()], dim=1)
    return [x[0].reshape(-1), *pc.scatter((a + b).t()[::2], TWO, dim=1)]


def communicator(a, b):
    x = computed(a, b)
    two = pc.Communicator(TWO)
    two.all_reduce(x)
    return [x[0] + 1, *two.scatter(x[1])]


def in_a_loop(a, b):
    x = computed(a, b)
    for _ in range(3):
        pc.all_reduce(x, "avg")
        x[0] += 1
    return x


def without_gradients(a, b):
    return [*autograd.all_reduce(computed(a, b)), *autograd.replicate([a], TWO)[1]]


FULL = [all_reduce, all_reduce_of_graph_inputs, reduce_op, reduce, broadcast, coalesced]
FULL += [out_of_place, with_out, scattered, viewed, transposed, communicator, in_a_loop]
FULL += [without_gradients]


def async_op(a, b):
    x = computed(a, b)
    work = pc.all_reduce(x, async_op=True)
    z = a - b
    work.wait()
    return [x[0] * z, x[1]]


def on_streams(a, b):
    x = computed(a, b)
    pc.broadcast(x, streams=[None, None])
    return x


def staged(a, b):
    return pc.all_gather(computed(a, b), peer_access=False)


def of_arrays(a, b):
    x = computed(a, b)
    return [*pc.all_gather([np.ones(2, np.float32), np.zeros(3, np.float32)]), x[0] + x[1]]


def with_barrier(a, b):
    x = computed(a, b)
    pc.barrier(TWO)
    return x


BROKEN = [async_op, on_streams, staged, of_arrays, with_barrier]


def inputs():
    return randoms(2, (4, 6), torch.float32, tame=True)


def compiled_like_eager(function, backend, **options):
    torch._dynamo.reset()
    a, b = inputs()
    wanted = function(a, b)
    compiled = torch.compile(function, backend=backend, **options)
    for _ in range(2):  # first traced, then from the cache
        mine = inputs()
        got = compiled(*mine)
        assert_same(got, wanted, backend)
        assert [t.stride() for t in got] == [t.stride() for t in wanted]
        assert_same(mine, [a, b], "the inputs")


@pytest.mark.parametrize("function", FULL, ids=lambda f: f.__name__)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_list_collective_is_part_of_a_full_graph(function, backend):
    compiled_like_eager(function, backend, fullgraph=True)


@pytest.mark.parametrize("function", FULL, ids=lambda f: f.__name__)
def test_full_graphs_of_dynamic_shapes(function):
    compiled_like_eager(function, "aot_eager", fullgraph=True, dynamic=True)


@pytest.mark.parametrize("function", BROKEN, ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("error:.*Dynamo does not know how to trace")
def test_other_calls_break_the_graph_and_say_why(function):
    compiled_like_eager(function, "aot_eager")
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="pycollect"):
        torch.compile(function, backend="eager", fullgraph=True)(*inputs())


def test_one_graph_serves_many_sizes():
    torch._dynamo.reset()
    graphs = []

    def count(graph, _examples):
        graphs.append(graph)
        return graph

    compiled = torch.compile(out_of_place, backend=count, dynamic=True, fullgraph=True)
    for columns in (6, 10, 32):
        a, b = randoms(2, (4, columns), torch.float32, tame=True)
        assert_same(compiled(a, b), out_of_place(a, b))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: pc.all_reduce([x, x]), ValueError, "share"),
        (lambda x: pc.all_reduce([x[:3], x[1:]]), ValueError, "share"),
        (lambda x: pc.all_reduce([x, x[:2].clone()]), ValueError, "shape"),
        (lambda x: pc.all_reduce([x, x.double()]), ValueError, "dtype"),
        (lambda x: pc.all_reduce([x, x.clone()], "most"), ValueError, "most"),
        (lambda x: pc.all_reduce([x, x.clone()], 3), TypeError, "op"),
        (lambda x: pc.all_reduce([x, x.clone()], algorithm="best"), ValueError, "best"),
        (lambda x: pc.all_reduce([]), ValueError, "empty"),
        (lambda x: pc.broadcast([x, x.clone()], 2), ValueError, "src"),
        (lambda x: pc.all_gather([x, x[0]]), ValueError, "shape"),
        (lambda x: pc.all_gather([x], dim=2), ValueError, "dim"),
        (lambda x: pc.reduce_scatter([x, x[1:]]), ValueError, "shape"),
        (lambda x: pc.all_to_all([x, x], split_sizes=[1, 2]), ValueError, "split_sizes"),
        (lambda x: pc.scatter(x, TWO, chunk_sizes=[1]), ValueError, "chunk_sizes"),
        (lambda x: pc.scatter(x.sum(), TWO), ValueError, "dimension"),
        (lambda x: pc.scatter(x, "cpu:7"), ValueError, "cpu:7"),
        (lambda x: pc.gather([x, x], out=x.new_empty(3, 6)), ValueError, "shape"),
        (lambda x: pc.copy_(x, x.clone()[:2]), ValueError, "shape"),
        (lambda x: pc.all_reduce([x.requires_grad_()]), ValueError, "requires grad"),
        (lambda x: pc.copy_(x.clone(), x.requires_grad_()), ValueError, "requires grad"),
        (lambda x: pc.all_reduce_coalesced([[x, x + 1, x + 2], [x + 3]]), ValueError, "number"),
        (lambda x: pc.broadcast_coalesced([[x, x + 1, x + 2], [x + 3]]), ValueError, "number"),
        (lambda x: pc.all_reduce_coalesced([x, x + 1]), TypeError, "pass a list"),
        (lambda x: pc.all_reduce_coalesced([[x[0], x[1]], x[2:]]), TypeError, "pass a list"),
        (lambda x: autograd.all_reduce([]), ValueError, "empty"),
        (lambda x: autograd.all_reduce([x, 3]), TypeError, "int"),
        (lambda x: autograd.all_reduce(x), TypeError, "list"),
        (lambda x: autograd.reduce([x, x], 2), ValueError, "dst"),
        (lambda x: autograd.reduce([x, x], op="max"), ValueError, "no gradient"),
        (lambda x: autograd.all_gather([x], dim=2), ValueError, "dim"),
        (lambda x: autograd.reduce_scatter([x, x], "max"), ValueError, "no gradient"),
        (lambda x: autograd.all_to_all([x, x], split_sizes=[]), ValueError, "split_sizes"),
        (lambda x: autograd.scatter(x, TWO, chunk_sizes=[-1, 5]), ValueError, "chunk_sizes"),
    ],
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_invalid_calls_raise_as_in_eager_mode(call, error, words, backend):
    torch._dynamo.reset()

    @torch.compile(backend=backend)
    def compiled(x):
        y = x + 1
        return y, call(y)

    with pytest.raises(error, match=words):
        compiled(inputs()[0])
    with pytest.raises(error, match=words):
        call(inputs()[0] + 1)


@pytest.mark.filterwarnings("ignore:.*Dynamo does not know how to trace")
def test_forward_mode_is_not_lost_in_a_graph():
    def tangent(x):
        return torch.func.jvp(lambda x: autograd.all_reduce([x, x * 2])[0], (x,), (x,))[1]

    torch._dynamo.reset()
    x = torch.randn(4)
    assert_same([torch.compile(tangent, backend="aot_eager")(x)], [x * 3])


def test_exported_chunk_sizes_can_be_dynamic():
    class Cut(torch.nn.Module):
        def forward(self, x):
            return pc.scatter(x, TWO, chunk_sizes=[x.shape[0] - 1, 1])

    rows = {0: torch.export.Dim("rows", min=3, max=100)}
    exported = torch.export.export(Cut(), (torch.arange(4.0),), dynamic_shapes=(rows,))
    assert_same(exported.module()(torch.arange(6.0)), Cut()(torch.arange(6.0)))


def trained(a, b):
    """A data-parallel loss: every collective that has a gradient takes part in it."""
    shards = autograd.scatter(a, TWO)
    weights = autograd.replicate([b, autograd.copy(b * 2, "cpu")], TWO)
    h = [x @ w[0].t() + w[1].sum() for x, w in zip(shards, weights, strict=True)]
    mean = autograd.all_reduce([t.sum(0, keepdim=True) for t in h], "avg")
    whole = autograd.all_gather(mean)
    parts = autograd.reduce_scatter(whole, dim=1)
    most = autograd.all_reduce([t * 2 for t in whole], "max")
    least = autograd.all_reduce([t * 2 for t in whole], torch.distributed.ReduceOp.MIN)
    product = autograd.all_reduce([t / 9 for t in whole], "prod")
    mixed = autograd.all_to_all(most, split_sizes=[[1, 1], [0, 2]])
    sums = autograd.broadcast([t.sum() for t in parts], 1)
    total = autograd.reduce(product, 1)
    return autograd.gather(mixed).sum() + sums[0] * sums[1] + total.sum() + least[1].sum()


def gradients(function, a, b):
    a, b = (t.clone().requires_grad_() for t in (a, b))
    loss = function(a, b)
    return [loss.detach(), *torch.autograd.grad(loss, (a, b))]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_of_a_full_graph(backend, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(trained, backend=backend, fullgraph=True, dynamic=dynamic)
    assert_same(gradients(compiled, *inputs()), gradients(trained, *inputs()))


def test_full_graphs_do_not_compute_gradients_that_nobody_needs():
    torch._dynamo.reset()
    a, b = inputs()
    compiled = torch.compile(trained, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert_same([compiled(a.requires_grad_(), b)], [trained(a, b)])
    assert not compiled(a.detach(), b).requires_grad


@settings(max_examples=15)
@given(st.data())
def test_full_graphs_of_random_calls(data):
    world = data.draw(st.integers(1, 4))
    shape = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
    transpose = data.draw(st.booleans())
    calls = data.draw(st.lists(st.sampled_from(range(6)), min_size=1, max_size=4))

    def program(*tensors):
        x = [t.transpose(0, -1) if transpose else t.clone() for t in tensors]
        for call in calls:
            x = STEPS[call](x, dim)
        return x

    torch._dynamo.reset()
    tensors = randoms(world, shape, dtype)
    wanted = program(*tensors)
    got = torch.compile(program, backend="aot_eager", fullgraph=True)(*tensors)
    assert_same(got, wanted)
    assert [t.stride() for t in got] == [t.stride() for t in wanted]


def in_place(call):
    def step(x, _dim):
        call(x)
        return x

    return step


def alike(x):
    return [x[0].clone() for _ in x]


def halves(x, dim):
    return [t.narrow(dim, 0, t.shape[dim] // 2) for t in x]


STEPS = [
    in_place(lambda x: pc.all_reduce([t.contiguous() for t in x], "max")),
    lambda x, dim: autograd.all_reduce(x),
    lambda x, dim: halves(pc.all_gather(x, dim=dim), dim),
    lambda x, dim: alike(pc.all_to_all(x, dim=dim)),
    lambda x, dim: alike(pc.scatter(x[-1], f"cpu*{len(x)}", dim=dim)),
    lambda x, dim: alike([pc.gather(x, dim=dim), *x]),
]


class Program(torch.nn.Module):
    """A module for torch.export, which takes no functions."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, a, b):
        return self.function(a, b)


EXPORTED = [f for f in FULL if f is not all_reduce_of_graph_inputs]


@pytest.mark.parametrize("function", EXPORTED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs(function, strict):
    exported = torch.export.export(Program(function), tuple(inputs()), strict=strict)
    assert any("pycollect" in str(node.target) for node in exported.graph.nodes)
    assert_same(exported.module()(*inputs()), function(*inputs()))
    functional = exported.run_decompositions()
    assert_same(functional.module()(*inputs()), function(*inputs()))


def test_exported_programs_have_no_asynchronous_calls():
    for function in (async_op, on_streams, staged):
        with pytest.raises(RuntimeError, match="an exported program has no async_op"):
            torch.export.export(Program(function), tuple(inputs()))


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("function", [*FULL, trained], ids=lambda f: f.__name__)
def test_inductor(function, monkeypatch, pytestconfig):
    """Inductor's compiled code is kept in pytest's cache, which halves the time of a second run."""
    if cache := getattr(pytestconfig, "cache", None):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache.mkdir("inductor")))
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    # Inductor's own operations round differently.
    if function is trained:
        found = gradients(compiled, *inputs()), gradients(trained, *inputs())
    else:
        found = compiled(*inputs()), function(*inputs())
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted)
        assert got.stride() == wanted.stride()
