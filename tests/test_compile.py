"""Under torch.compile a list collective is a graph break and never gives a wrong result, and the
schemas of torch.ops.pycollect declare correctly which arguments an operator changes.
"""

from __future__ import annotations

import contextlib
import shutil

import pytest
import torch
from reference import assert_same, expected, randoms

import pycollect as pc

ops = torch.ops.pycollect


@pytest.mark.parametrize("name", ["all_reduce_", "reduce_", "broadcast_", "all_gather"])
@pytest.mark.parametrize("key", ["CPU", "CUDA"])
def test_the_operators_have_kernels(name, key):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"pycollect::{name}", key)


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
    pc.all_reduce_coalesced([x, y])
    return [x[0] + y[1], x[1] - y[0]]


def async_op(a, b):
    x = computed(a, b)
    work = pc.all_reduce(x, async_op=True)
    z = a - b
    work.wait()
    return [x[0] * z, x[1]]


def out_of_place(a, b):
    x = computed(a, b)
    return [joined(pc.all_gather(x)), joined(pc.reduce_scatter(x)), joined(pc.all_to_all(x))]


def scattered(a, b):
    whole = pc.gather(pc.scatter(a * b, "cpu*2"))
    copies = pc.replicate([whole + 1], "cpu*2")
    pc.copy_(whole, copies[1][0] * 2)
    return [whole, copies[0][0]]


def viewed(a, b):
    x = a * 2
    pc.all_reduce([x[:2], x[2:]])
    return [x + b]


def communicator(a, b):
    x = computed(a, b)
    pc.Communicator("cpu*2").all_reduce(x)
    return [x[0] + 1]


def in_a_loop(a, b):
    x = computed(a, b)
    for _ in range(3):
        pc.all_reduce(x, "avg")
        x[0] += 1
    return x


FUNCTIONS = [all_reduce, all_reduce_of_graph_inputs, reduce, broadcast, coalesced, async_op]
FUNCTIONS += [out_of_place, scattered, viewed, communicator, in_a_loop]


def inputs():
    return randoms(2, (4, 6), torch.float32, tame=True)


def compiled_like_eager(function, backend, **options):
    torch._dynamo.reset()
    a, b = inputs()
    wanted = function(a, b)
    compiled = torch.compile(function, backend=backend, **options)
    for _ in range(2):  # first traced, then from the cache
        mine = inputs()
        assert_same(compiled(*mine), wanted, backend)
        assert_same(mine, [a, b], "the inputs")


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("error:.*Dynamo does not know how to trace")
def test_a_list_collective_is_a_graph_break(function, backend):
    compiled_like_eager(function, backend)


def test_full_graphs_are_correct_or_refused():
    for function in (all_reduce, out_of_place):
        with contextlib.suppress(torch._dynamo.exc.Unsupported):
            compiled_like_eager(function, "aot_eager", fullgraph=True)


def test_invalid_calls_raise_as_in_eager_mode():
    torch._dynamo.reset()
    a, _ = inputs()

    @torch.compile(backend="eager")
    def twice(x):
        y = x + 1
        pc.all_reduce([y, y])
        return y

    with pytest.raises(ValueError, match="share"):
        twice(a)


def with_ops(a, b):
    x = computed(a, b)
    ops.all_reduce_(x)
    ops.broadcast_([x[0][:2], x[0][2:]], 1)
    ops.reduce_(x, 1, "max", algorithm=None)
    gathered = ops.all_gather(x, 1)
    return [*x, *ops.reduce_scatter(gathered, "sum", 0), *ops.all_to_all(x, -1)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_operators_stay_in_the_graph(backend, dynamic):
    compiled_like_eager(with_ops, backend, fullgraph=True, dynamic=dynamic)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_inductor(monkeypatch, pytestconfig):
    """Inductor's compiled code is kept in pytest's cache, which halves the time of a second run."""
    if cache := getattr(pytestconfig, "cache", None):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache.mkdir("inductor")))

    def both(a, b):
        return with_ops(*all_reduce(a, b))

    compiled_like_eager(both, "inductor")


SCHEMAS = [
    'pycollect::all_reduce_(Tensor(a!)[] tensors, str op="sum", *, str? algorithm=None) -> ()',
    'pycollect::reduce_(Tensor(a!)[] tensors, int dst=0, str op="sum", *, str? algorithm=None) '
    "-> ()",
    "pycollect::broadcast_(Tensor(a!)[] tensors, int src=0, *, str? algorithm=None) -> ()",
    "pycollect::all_gather(Tensor[] tensors, int dim=0, *, str? algorithm=None) -> Tensor[]",
    'pycollect::reduce_scatter(Tensor[] tensors, str op="sum", int dim=0, *, '
    "str? algorithm=None) -> Tensor[]",
    "pycollect::all_to_all(Tensor[] tensors, int dim=0) -> Tensor[]",
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_schemas(schema):
    name = schema.split("::")[1].split("(")[0]
    wanted = torch._C.parse_schema(schema)
    assert str(getattr(ops, name).default._schema) == str(wanted)


CHECKS = [
    ("all_reduce_", (), {}),
    ("all_reduce_", ("avg",), {"algorithm": "two_shot"}),
    ("reduce_", (1,), {}),
    ("reduce_", (0, "max"), {}),
    ("broadcast_", (2,), {}),
    ("all_gather", (), {}),
    ("all_gather", (-1,), {}),
    ("reduce_scatter", (), {}),
    ("reduce_scatter", ("prod", 1), {}),
    ("all_to_all", (), {}),
    ("all_to_all", (-1,), {}),
]


@pytest.mark.parametrize(("name", "args", "options"), CHECKS, ids=str)
@pytest.mark.parametrize(
    "layout",
    [torch.contiguous_format, pytest.param(torch.channels_last, marks=pytest.mark.slow)],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_opcheck(name, args, options, layout):
    for shape in ((6, 5, 2, 2), (7, 4, 1, 3)):
        tensors = [t.to(memory_format=layout) for t in randoms(3, shape, torch.float32, tame=True)]
        torch.library.opcheck(getattr(ops, name).default, (tensors, *args), options)


FUNCTION_OF = {"all_reduce_": "all_reduce", "reduce_": "reduce", "broadcast_": "broadcast"}


@pytest.mark.parametrize("name", [s.split("::")[1].split("(")[0] for s in SCHEMAS])
def test_operators_equal_the_functions(name):
    tensors = randoms(3, (7, 4), torch.bfloat16)
    wanted = expected(FUNCTION_OF.get(name, name), tensors)
    got = getattr(ops, name)(tensors)
    assert_same(tensors if got is None else got, wanted)
    for bad, words in ((tensors[:1] * 2, "share"), ([], "empty")):
        if name in FUNCTION_OF or not bad:
            with pytest.raises((ValueError, RuntimeError), match=words):
                getattr(ops, name)(bad)
