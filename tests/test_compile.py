"""The list collectives under torch.compile: operators of one graph, with the results and errors of
eager mode; what no operator has breaks the graph.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from graph_functions import BROKEN, FULL, TWO, gradients, inputs, out_of_place, trained
from reference import assert_same, randoms

import pycollect as pc
from pycollect import autograd

# A static graph that runs as Dynamo has traced it, and a dynamic one without mutations.
BACKENDS = [pytest.param("eager", False, marks=pytest.mark.slow), ("aot_eager", True)]


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
@pytest.mark.parametrize(("backend", "dynamic"), BACKENDS)
def test_a_list_collective_is_part_of_a_full_graph(function, backend, dynamic):
    compiled_like_eager(function, backend, fullgraph=True, dynamic=dynamic)


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
        (lambda x: autograd.all_reduce([x], "sum", "ring"), TypeError, "positional"),
        (lambda x: autograd.all_gather([x], axis=1), TypeError, "axis"),
        (lambda x: autograd.scatter(x), TypeError, "devices"),
        (lambda x: autograd.gather([x, x], TWO), ValueError, "names 2 devices"),
        (lambda x: autograd.copy(x, TWO), ValueError, "names 2 devices"),
    ],
)
def test_invalid_calls_raise_as_in_eager_mode(call, error, words):
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
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


@pytest.mark.parametrize(("backend", "dynamic"), BACKENDS)
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
