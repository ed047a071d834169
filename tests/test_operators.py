"""torch.ops.pycollect: schemas, fake kernels and gradients of the operators, and their results."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import assert_same, expected, randoms
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import pycollect as pc
from pycollect import autograd

ops = torch.ops.pycollect

TUNABLE = "str? algorithm=None"
REDUCES = f"{TUNABLE}, str order='rank'"
SCHEMAS = [
    f"all_reduce(Tensor[] tensors, str op='sum', *, {REDUCES}) -> Tensor[]",
    f"all_reduce_(Tensor(a!)[] tensors, str op='sum', *, {REDUCES}) -> ()",
    f"all_reduce_coalesced_(Tensor(a!)[] tensors, int world, str op='sum', *, {REDUCES}) -> ()",
    f"reduce(Tensor[] tensors, int dst=0, str op='sum', *, {REDUCES}) -> Tensor",
    f"reduce_(Tensor(a!)[] tensors, int dst=0, str op='sum', *, {REDUCES}) -> ()",
    f"broadcast(Tensor[] tensors, int src=0, *, {TUNABLE}) -> Tensor[]",
    f"broadcast_(Tensor(a!)[] tensors, int src=0, *, {TUNABLE}) -> ()",
    "broadcast_coalesced_(Tensor(a!)[] tensors, int world, int src=0) -> ()",
    f"all_gather(Tensor[] tensors, int dim=0, *, {TUNABLE}) -> Tensor[]",
    f"all_gather.out(Tensor[] tensors, int dim=0, *, {TUNABLE}, Tensor(a!)[] out) -> ()",
    f"reduce_scatter(Tensor[] tensors, str op='sum', int dim=0, *, {REDUCES}) -> Tensor[]",
    "reduce_scatter.out(Tensor[] tensors, str op='sum', int dim=0, *, "
    f"{REDUCES}, Tensor(a!)[] out) -> ()",
    "tree_sum(Tensor[] tensors, *, ScalarType? dtype=None) -> Tensor",
    "all_to_all(Tensor[] tensors, int dim=0, SymInt[]? split_sizes=None) -> Tensor[]",
    "all_to_all.out(Tensor[] tensors, int dim=0, SymInt[]? split_sizes=None, *, "
    "Tensor(a!)[] out) -> ()",
    "scatter(Tensor tensor, str[] devices, SymInt[]? chunk_sizes=None, int dim=0) -> Tensor[]",
    "scatter.out(Tensor tensor, str[] devices, SymInt[]? chunk_sizes=None, int dim=0, *, "
    "Tensor(a!)[] out) -> ()",
    "gather(Tensor[] tensors, Device? device=None, int dim=0) -> Tensor",
    "gather.out(Tensor[] tensors, Device? device=None, int dim=0, *, Tensor(a!) out) -> ()",
    "replicate(Tensor[] tensors, str[] devices) -> Tensor[]",
    "copy(Tensor tensor, Device device) -> Tensor",
    "copy_(Tensor(a!) dst, Tensor src) -> ()",
]
NAMES = [schema.split("(")[0] for schema in SCHEMAS]
FUNCTIONAL = [name for name in NAMES if not name.endswith(("_", ".out"))]


def operator(name):
    packet, _, overload = name.partition(".")
    return getattr(getattr(ops, packet), overload or "default")


@pytest.mark.parametrize("schema", SCHEMAS, ids=NAMES)
def test_operators_have_their_schema_kernels_and_gradients(schema):
    name, wanted = schema.split("(")[0], torch._C.parse_schema(f"pycollect::{schema}")
    assert str(operator(name)._schema) == str(wanted)
    for key in ("CPU", "CUDA", *["Autograd"] * (name in FUNCTIONAL)):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"pycollect::{name}", key), key
    assert name not in FUNCTIONAL or name in autograd.__all__


def arguments_of(function, *without):
    """Names of a function's or an operator's arguments, and their defaults in a list, if any."""
    if isinstance(function, torch._ops.OpOverload):
        arguments = function._schema.arguments
        found = {a.name: [a.default_value] if a.has_default_value() else [] for a in arguments}
    else:
        parameters = inspect.signature(function).parameters.values()
        found = {p.name: [] if p.default is p.empty else [p.default] for p in parameters}
    names = {"tensor_lists": "tensors"}
    return [(names.get(n, n), default) for n, default in found.items() if n not in without]


@pytest.mark.parametrize("schema", SCHEMAS, ids=NAMES)
def test_a_function_and_its_operators_have_the_same_arguments(schema):
    """Names, order and defaults: the declarations in Python and in C++ are one table."""
    name = schema.split("(")[0]
    plain = name.partition(".")[0].rstrip("_")
    mine = arguments_of(operator(name), "world", "out")
    if name in FUNCTIONAL:
        assert mine == arguments_of(getattr(autograd, name))
    if name == "copy":
        return
    usual = [("async_op", [False]), ("streams", [None]), ("peer_access", [True])]
    lacks = {
        "tree_sum": ["async_op", "streams", "peer_access"],
        "gather": ["async_op"],
        "copy": ["streams"],
        "replicate": ["async_op", "streams"],
    }
    usual = [item for item in usual if item[0] not in lacks.get(plain, [])]
    out = [("out", [None])] if f"{plain}.out" in NAMES else []
    public = getattr(pc, plain, None) or getattr(pc, f"{plain}_")
    assert arguments_of(public) == [*mine, *out, *usual]


CPU = torch.device("cpu")
TWO = ["cpu", "cpu"]
CASES = [
    ("all_reduce", lambda x: (x, "avg"), {"algorithm": "two_shot"}),
    ("all_reduce", lambda x: (x, "max"), {}),
    ("all_reduce", lambda x: (x, "prod"), {}),
    ("all_reduce_", lambda x: (x,), {}),
    ("all_reduce_", lambda x: (x, "avg"), {"algorithm": "two_shot"}),
    ("all_reduce_coalesced_", lambda x: ([*x, *twins(x)], 2), {}),
    ("all_reduce", lambda x: ([*x, *twins(x)],), {"order": "tree"}),
    ("reduce", lambda x: (x, 1, "avg"), {}),
    ("reduce_", lambda x: (x, 1), {}),
    ("reduce_", lambda x: (x, 0, "max"), {}),
    ("broadcast", lambda x: (x, 2), {}),
    ("broadcast_", lambda x: (x, 2), {}),
    ("broadcast_coalesced_", lambda x: ([*x, *twins(x)], 2, 1), {}),
    ("all_gather", lambda x: (x,), {}),
    ("all_gather", lambda x: (x, -1), {}),
    ("all_gather.out", lambda x: (x,), lambda x: {"out": ops.all_gather(x)}),
    ("reduce_scatter", lambda x: (x,), {}),
    ("reduce_scatter", lambda x: (x, "avg", 1), {}),
    ("reduce_scatter.out", lambda x: (x,), lambda x: {"out": ops.reduce_scatter(x)}),
    ("tree_sum", lambda x: (x,), {}),
    ("tree_sum", lambda x: ([t.bfloat16() for t in x],), {"dtype": torch.float32}),
    ("all_to_all", lambda x: (x,), {}),
    ("all_to_all", lambda x: (x, -1, [0, 0, x[0].shape[-1]] * 3), {}),
    ("all_to_all.out", lambda x: (x,), lambda x: {"out": ops.all_to_all(x)}),
    ("scatter", lambda x: (x[0], TWO), {}),
    ("scatter", lambda x: (x[0], TWO, [0, x[0].shape[1]], 1), {}),
    ("scatter.out", lambda x: (x[0], TWO), lambda x: {"out": ops.scatter(x[0], TWO)}),
    ("gather", lambda x: (x,), {}),
    ("gather", lambda x: (x, CPU, 1), {}),
    ("gather.out", lambda x: (x,), lambda x: {"out": ops.gather(x)}),
    ("replicate", lambda x: (x, TWO), {}),
    ("copy", lambda x: (x[0], CPU), {}),
    ("copy_", lambda x: x[:2], {}),
]


def twins(tensors):
    return [t + 1 for t in tensors]


def test_every_operator_has_a_case():
    assert {name for name, *_ in CASES} == set(NAMES)


@pytest.mark.parametrize(("name", "arguments", "options"), CASES, ids=lambda v: str(v)[:20])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_opcheck(name, arguments, options, layout):
    for shape in ((6, 5, 2, 2), (7, 4, 1, 3)):
        for grad in (False, True) if name in FUNCTIONAL else (False,):
            tensors = [
                t.to(memory_format=layout) for t in randoms(3, shape, torch.float64, tame=True)
            ]
            given = options(tensors) if callable(options) else options
            tensors = [t.requires_grad_(grad) for t in tensors]
            torch.library.opcheck(operator(name), tuple(arguments(tensors)), given)


def steps(tensor):
    """The strides that matter: torch's own fake kernels differ from its kernels in others."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in sizes if size > 1] if tensor.numel() else []


MOVES = [case for case in CASES if case[0] in FUNCTIONAL]


@given(st.data())
def test_fake_kernels_know_the_layout_of_results(data):
    """Shapes and strides of results, for inputs of any strides."""
    name, arguments, options = data.draw(st.sampled_from(MOVES))
    shape = data.draw(st.tuples(*[st.integers(0, 4)] * 3))
    order = data.draw(st.permutations(range(3)))
    other = data.draw(st.permutations(range(3)))
    cut = data.draw(st.booleans())

    def tensors():
        found = [torch.empty([shape[d] for d in order]) for _ in range(3)]
        found = [t.permute([order.index(d) for d in range(3)]) for t in found]
        if other[0] == 0:  # ranks of different layouts
            found[1] = (
                found[1].permute(other).contiguous().permute([other.index(d) for d in range(3)])
            )
        return [t[..., ::2] for t in found] if cut else found

    real = operator(name)(*arguments(tensors()), **options)
    with FakeTensorMode():
        fake = operator(name)(*arguments(tensors()), **options)
    for r, f in zip(
        *([x] if isinstance(x, torch.Tensor) else x for x in (real, fake)), strict=True
    ):
        assert (r.shape, r.dtype, r.device) == (f.shape, f.dtype, f.device)
        assert steps(r) == steps(f)


FUNCTION_OF = {"all_reduce_": "all_reduce", "reduce_": "reduce", "broadcast_": "broadcast"}
EQUAL = ["all_gather", "reduce_scatter", "all_to_all", *FUNCTION_OF]


@pytest.mark.parametrize("name", EQUAL)
def test_operators_equal_the_functions(name):
    tensors = randoms(3, (7, 4), torch.bfloat16)
    wanted = expected(FUNCTION_OF.get(name, name), tensors)
    got = getattr(ops, name)(tensors)
    assert_same(tensors if got is None else got, wanted)
    for bad, words in ((tensors[:1] * 2, "share"), ([], "empty")):
        if name in FUNCTION_OF or not bad:
            with pytest.raises((ValueError, RuntimeError), match=words):
                getattr(ops, name)(bad)


@pytest.mark.parametrize("name", ["all_reduce", "reduce", "broadcast"])
@pytest.mark.parametrize("strided", [False, True])
def test_functional_twins_leave_their_inputs(name, strided):
    tensors = randoms(3, (7, 4), torch.bfloat16)
    if strided:
        tensors[1] = tensors[1].t().contiguous().t()
    before = [t.clone() for t in tensors]
    got = getattr(ops, name)(tensors)
    assert_same(tensors, before)
    wanted = [t.contiguous() for t in before]
    getattr(pc, name)(wanted)
    assert_same([got], wanted[:1]) if name == "reduce" else assert_same(got, wanted)


def test_operators_come_after_asynchronous_calls():
    """An operator that copies its inputs first does so when earlier calls have written them."""
    for _ in range(20):
        tensors = [torch.ones(300_000) for _ in range(2)]
        work = pc.all_reduce(tensors, async_op=True)
        results = [ops.all_reduce(tensors), ops.broadcast(tensors), [ops.reduce(tensors)]]
        work.wait()
        for found, value in zip(results, (4, 2, 4), strict=True):
            assert all(bool((t == value).all()) for t in found)


def test_coalesced_operators_want_equal_lists():
    with pytest.raises((ValueError, RuntimeError), match="3 tensors for 2 ranks"):
        ops.all_reduce_coalesced_(randoms(3, (2,), torch.float32), 2)


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_layouts_with_dimensions_of_one_element(name):
    """Their strides mean nothing, and new fake tensors have others."""
    x = [t.permute(2, 1, 0)[:, :2, :1] for t in torch.zeros(3, 3, 3, 4)]
    for mine in (x, [x[0].contiguous(), *x[1:]], [*x[:2], x[2].clone()]):
        call = next(arguments for case, arguments, _ in CASES if case == name)
        results = [operator(name)(*call(mine))]
        with FakeTensorMode() as mode:
            results.append(operator(name)(*call([mode.from_tensor(t) for t in mine])))
        real, fake = ([r] if isinstance(r, torch.Tensor) else r for r in results)
        assert [steps(t) for t in fake] == [steps(t) for t in real]


FORWARD = [
    lambda x: ops.all_reduce([x, x * 3])[0],
    lambda x: ops.reduce([x, x * 3]),
    lambda x: ops.broadcast([x * 4])[0],
    lambda x: ops.gather([x * 4]),
    lambda x: ops.copy(x * 4, "cpu"),
]


@pytest.mark.parametrize("function", FORWARD)
def test_forward_mode(function):
    x = torch.randn(3)
    with forward_ad.dual_level():
        result = function(forward_ad.make_dual(x, torch.ones(3)))
        assert_same([forward_ad.unpack_dual(result).tangent], [torch.full((3,), 4.0)])


def in_place(x):
    y = [x * 2, x.detach() + 1]
    ops.all_reduce_(y, "avg")
    return y[0].sum()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "transformed", [torch.func.grad(in_place), lambda x: torch.func.jvp(in_place, (x,), (x,))]
)
def test_transforms_of_calls_in_place_are_refused(transformed, compiled):
    torch._dynamo.reset()
    call = torch.compile(transformed, backend="eager") if compiled else transformed
    with pytest.raises((ValueError, RuntimeError), match="does not record"):
        call(torch.ones(3))


def test_no_tensors_but_outputs():
    """The outputs alone let torch find the operator."""
    with pytest.raises((ValueError, RuntimeError), match="empty"):
        ops.all_to_all.out([], 0, [1], out=[torch.ones(1)])
    with pytest.raises((ValueError, RuntimeError), match="empty"):
        ops.all_gather.out([], out=[torch.ones(1)])
