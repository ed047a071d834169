"""Bad arguments are refused before any data is moved.

Each row of a table gives the call, the error, and words of the message (what was asked, what is
allowed, what to do). A refused call leaves the bytes and versions of its tensors unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycollect as pc
from pycollect.errors import shown

EITHER = (TypeError, ValueError)
IN_PLACE = {"all_reduce": pc.all_reduce, "reduce": pc.reduce, "broadcast": pc.broadcast}
ALONG_DIM = {
    "all_gather": pc.all_gather,
    "reduce_scatter": pc.reduce_scatter,
    "all_to_all": pc.all_to_all,
    "gather": pc.gather,
}
CALLS = IN_PLACE | ALONG_DIM
REDUCING = {n: CALLS[n] for n in ("all_reduce", "reduce", "reduce_scatter")}
WITH_ALGORITHM = {n: CALLS[n] for n in CALLS if n not in ("all_to_all", "gather")}
NESTED = {
    "all_reduce_coalesced": pc.all_reduce_coalesced,
    "broadcast_coalesced": pc.broadcast_coalesced,
}


def three(dtype=torch.float32, shape=(6, 4)):
    """Three ranks' tensors, with different values."""
    return [(torch.arange(torch.Size(shape).numel()).view(shape) + r).to(dtype) for r in range(3)]


def last(tensor):
    """Two valid tensors, then the given one."""
    return [*three()[:2], tensor]


def read_only():
    array = np.ones((6, 4), np.float32)
    array.flags.writeable = False
    return array


def repeated():
    a, b, _ = three()
    return [a, b, a]


def overlapping():
    storage = torch.arange(20.0)
    return [storage[:8], storage[7:15], torch.zeros(8)]


def needs_grad():
    tensors = three()
    tensors[1].requires_grad_()
    return tensors


def quantized():
    return [torch.quantize_per_tensor(t, 0.1, 0, torch.qint8) for t in three()]


def expanded():
    return [torch.arange(4.0).expand(6, 4) for _ in range(3)]


class Failing(Sequence):
    def __len__(self):
        return 3

    def __getitem__(self, rank):
        raise KeyError("the storage of this list was lost")


# Invalid tensor lists: a function that makes the list, the error, words of the message.
ANY_LIST = {
    "empty": (list, ValueError, "empty"),
    "one tensor": (lambda: torch.zeros(3, 4), EITHER, "list|sequence"),
    "None": (lambda: None, EITHER, "list|sequence"),
    "a number": (lambda: 3, EITHER, "list|sequence"),
    "None in it": (lambda: last(None), TypeError, r"\[2\].*None"),
    "a number in it": (lambda: last(1.5), TypeError, r"\[2\].*float"),
    "a failing sequence": (Failing, KeyError, "storage of this list"),
    "lists in it": (lambda: [three(), three()], TypeError, r"\[0\].*list"),
    "another number of dims": (lambda: last(torch.zeros(24)), ValueError, r"\[2\].*shape.*24"),
    "another dtype": (lambda: last(three(torch.float64)[2]), ValueError, r"\[2\].*same dtype"),
    "unknown dtype": (quantized, TypeError, "allowed.*float32.*bool"),
    "sparse in it": (lambda: last(three()[2].to_sparse()), EITHER, r"\[2\].*sparse.*dense"),
    "sparse": (lambda: [t.to_sparse() for t in three()], EITHER, r"\[0\].*sparse.*dense"),
    "meta in it": (lambda: last(three()[2].to("meta")), EITHER, r"\[2\].*meta"),
    "meta": (lambda: [t.to("meta") for t in three()], EITHER, r"\[0\].*meta"),
    "requires grad": (needs_grad, ValueError, r"\[1\].*no_grad.*detach"),
}
IN_PLACE_LIST = {
    "another shape": (lambda: last(torch.zeros(6, 5)), ValueError, r"\[2\].*shape.*6, 5"),
    "fewer rows": (lambda: last(torch.zeros(5, 4)), ValueError, r"\[2\].*shape.*5, 4"),
    "transposed": (lambda: last(torch.zeros(4, 6).t()), ValueError, r"\[2\].*contiguous"),
    "not dense": (lambda: last(torch.zeros(6, 5)[:, :4]), ValueError, r"\[2\].*contiguous"),
    "one tensor twice": (repeated, ValueError, r"\[[02]\].*\[[02]\].*share.*clone"),
    "overlapping views": (overlapping, ValueError, r"\[[01]\].*\[[01]\].*share.*clone"),
    "expanded": (expanded, ValueError, r"\[[01]\].*expanded.*clone"),
    "windows": (
        lambda: [torch.ones(9).unfold(0, 4, 2)] * 3,
        ValueError,
        r"\[[01]\].*share memory.*clone",
    ),
    "read-only": (lambda: [read_only()] * 3, ValueError, r"\[[01]\].*read-only.*copy"),
}


def given(*args, **options):
    """Arguments of one call, made when the test runs: callables are replaced by their results."""
    made = lambda value: value() if callable(value) else value  # noqa: E731
    return lambda: ([made(a) for a in args], {k: made(v) for k, v in options.items()})


# Each generator yields: name of the call and its defect, call, arguments, error, words.


def list_cases():
    for name, call in CALLS.items():
        for what, (make, *how) in (ANY_LIST | IN_PLACE_LIST).items():
            if name in IN_PLACE or what in ANY_LIST:
                yield f"{name}, {what}", call, given(make), *how
    for name, call in NESTED.items():
        for what, (make, *how) in IN_PLACE_LIST.items():
            yield f"{name}, {what}", call, given(lambda make=make: [[t] for t in make()]), *how
        for what, make, words in (
            ("empty", list, "empty"),
            ("a flat list", three, "list|sequence"),
            ("unlike lengths", lambda: [three(), three()[:2]], "3.*2|2.*3"),
            ("an overlap of two ranks", lambda: [(x := three()), x[::-1]], "share"),
            ("an overlap in a rank", lambda: [[t, t] for t in three()], "share"),
            ("None", lambda: None, "list|sequence"),
        ):
            yield f"{name}, {what}", call, given(make), EITHER, words


def option_case(name, call, error, words, **options):
    what = " ".join(f"{k}={v!r}".partition(" object at ")[0] for k, v in options.items())
    return f"{name}, {what}", call, given(three, **options), error, words


def option_cases():
    case = option_case
    for name, call in WITH_ALGORITHM.items():
        known = ".*".join(pc.algorithms(name))
        yield case(name, call, ValueError, f"butterfly.*{known}", algorithm="butterfly")
        yield case(name, call, EITHER, "algorithm", algorithm=3)
    for name, call in REDUCING.items():
        for op in ("median", "SUM", ""):
            yield case(name, call, ValueError, f"{op}.*sum.*avg.*bxor", op=op)
        for op in (7, None, dist._make_nccl_premul_sum(2.0)):
            yield case(name, call, EITHER, "op.*sum", op=op)
        yield case(name, call, TypeError, "bxor.*float32.*sum", op="bxor")
        unsigned = given(lambda: three(torch.uint16))
        yield f"{name}, uint16", call, unsigned, TypeError, "uint16; allowed.*float32.*bool"
    for name, root in (("reduce", "dst"), ("broadcast", "src")):
        for bad in (3, -1, 2**40):
            yield case(name, CALLS[name], ValueError, f"{root}.*{bad}.*0 to 2", **{root: bad})
        for bad in (2**70, True, 1.0, "1", None):
            yield case(name, CALLS[name], EITHER, root, **{root: bad})
    for name, call in ALONG_DIM.items():
        for bad in (2, -3):
            yield case(name, call, ValueError, f"dim.*{bad}.*-2.*1", dim=bad)
        for bad in (0.0, None, 2**70):
            yield case(name, call, EITHER, "dim", dim=bad)
    for name in [n for n in CALLS if n != "gather"]:
        yield case(name, CALLS[name], ValueError, "streams.*CPU", streams=[0, 0, 0])
        for bad in ([None] * 2, [], 0):
            yield case(name, CALLS[name], EITHER, "streams", streams=bad)


def order_cases():
    case = option_case
    for name, call in REDUCING.items():
        for bad in (3, None):
            yield case(name, call, TypeError, "order.*'rank' or 'tree'", order=bad)
        yield case(name, call, ValueError, "order is 'ring'; allowed are rank, tree", order="ring")
    for algorithm in ("chain", "halving_doubling", "ring", "tree"):
        words = f"'{algorithm}' adds in several steps, which order='tree'.*'fused', 'leader', 'one"
        more = {"algorithm": algorithm, "order": "tree"}
        yield case("all_reduce", pc.all_reduce, ValueError, words, **more)
    for what, (make, *how) in ANY_LIST.items():
        yield f"tree_sum, {what}", pc.tree_sum, given(make), *how
    for made, dtype, words in (
        (
            torch.float32,
            torch.float64,
            "dtype is float64; the sum of float32 tensors may be float32$",
        ),
        (torch.bfloat16, torch.float16, "dtype is float16; .* may be bfloat16 or float32$"),
        (torch.int32, torch.float32, "dtype is float32; the sum of int32 tensors may be int32$"),
        (torch.float32, "float32", "dtype is a str; pass a torch.dtype, or None"),
    ):
        args = given(partial(three, made), dtype=dtype)
        yield f"tree_sum, {made} as {dtype!r}", pc.tree_sum, args, EITHER, words
    plan = pc.plan("all_reduce", 4)
    yield "verify, order 3", plan.verify, given(3), TypeError, "order is a int; pass 'rank' or"
    yield "verify, order", plan.verify, given("ring"), ValueError, "order is 'ring'; allowed are"


def dim_cases():
    scalars = given(lambda: [torch.tensor(1.0) for _ in range(3)])
    for name, call in ALONG_DIM.items():
        yield f"{name}, scalars", call, scalars, ValueError, "dim.*reshape"
        columns = given(lambda: last(torch.zeros(6, 5)), dim=0)
        yield f"{name}, shapes", call, columns, ValueError, r"\[2\].*shape.*6, 5"
    rows = given(lambda: last(torch.zeros(5, 4)), dim=0)
    yield "reduce_scatter, rows", pc.reduce_scatter, rows, ValueError, r"\[2\].*shape.*5, 4"


def output_cases():
    shapes = {"all_gather": (18, 4), "reduce_scatter": (2, 4), "all_to_all": (6, 4)}
    outs = {
        "number": (lambda s: [torch.zeros(s)] * 2, r"out.*2.*3"),
        "shape": (lambda s: [torch.zeros(5, 5) for _ in range(3)], r"out\[0\].*5, 5"),
        "dtype": (lambda s: [torch.zeros(s).int() for _ in range(3)], r"out\[0\].*int.*float"),
        "repeated": (lambda s: [torch.zeros(s)] * 3, r"out.*share.*clone"),
        "expanded": (lambda s: [torch.zeros(4).expand(s) for _ in range(3)], r"out\[0\].*expanded"),
        "meta": (lambda s: [torch.zeros(s, device="meta")] * 3, r"out\[0\].*meta"),
        "no list": (torch.zeros, r"out.*(list|sequence)"),
        "read-only": (lambda s: [np.broadcast_to(np.float32(0), s)] * 3, r"out\[0\].*read-only"),
        "grad": (lambda s: [torch.zeros(s, requires_grad=True)] * 3, r"out\[0\].*no_grad"),
    }
    for name, shape in shapes.items():
        for what, (make, words) in outs.items():
            args = given(three, out=partial(make, shape))
            yield f"{name}, out: {what}", CALLS[name], args, EITHER, words
        base = torch.zeros(99, 4)
        shared = given(
            [base[:6], base[6:12], base[12:18]],
            out=[base[7 : 7 + shape[0]], torch.zeros(shape), torch.zeros(shape)],
        )
        yield f"{name}, out: an input's memory", CALLS[name], shared, ValueError, "share"
    args = given(three, out=torch.zeros(17, 4))
    yield "gather, out: shape", pc.gather, args, ValueError, "out.*17, 4.*18, 4"


def split_cases():
    good = torch.arange(24.0).view(6, 4)
    for sizes in ([1, 5], [1, 2, 2], [1, 2, 4], [-1, 3, 4], [2, 2, 1, 1], []):
        args = given(good, "cpu*3", chunk_sizes=sizes)
        yield f"scatter, {sizes}", pc.scatter, args, ValueError, "chunk_sizes.*(3|negative)"
        args = given(three, split_sizes=[[2, 2, 2], sizes, [2, 2, 2]])
        yield f"all_to_all, {sizes}", pc.all_to_all, args, ValueError, "split_sizes.*(3|negative)"
    for bad in ([[2, 2, 2]] * 2, "222", 2):
        args = given(three, split_sizes=bad)
        yield f"all_to_all, splits {bad}", pc.all_to_all, args, EITHER, "split_sizes"
    for what, args, error, words in (
        ("no device", given(good, []), ValueError, "devices"),
        ("unknown device", given(good, "toaster"), EITHER, "toaster"),
        ("None", given(None, "cpu*2"), TypeError, "tensor.*None"),
        ("a scalar", given(torch.tensor(1.0), "cpu*2"), ValueError, "dim.*reshape"),
        ("a list", given(three, "cpu*2"), TypeError, "tensor.*list"),
        ("dim", given(good, "cpu*2", dim=2), ValueError, "dim.*2"),
        ("sizes 3", given(good, "cpu*3", chunk_sizes=3), EITHER, "chunk_sizes"),
    ):
        yield f"scatter, {what}", pc.scatter, args, error, words


def other_cases():
    base = torch.arange(9.0)
    for what, dst, src, error, words in (
        ("shape", torch.ones(3), torch.zeros(4), ValueError, "dst is.*shape .3.*src is.*shape .4"),
        ("dims", torch.ones(3, 2), torch.zeros(2, 3), ValueError, "shape .3, 2.*shape .2, 3"),
        ("dtype", torch.ones(3), torch.zeros(3).int(), ValueError, "dst is float32.*src is int32"),
        ("read-only", read_only(), torch.zeros(6, 4), ValueError, "read-only.*copy"),
        ("expanded", torch.ones(1).expand(3), torch.zeros(3), ValueError, "expanded"),
        ("overlap", base[:5], base[3:8], ValueError, "share"),
        ("None", None, torch.zeros(3), TypeError, "None"),
        ("meta", torch.ones(3), torch.zeros(3, device="meta"), EITHER, "meta"),
    ):
        yield f"copy_, {what}", pc.copy_, given(dst, src), error, words
    for what, tensors, devices, words in (
        ("one tensor", torch.zeros(3), "cpu*2", "list|sequence"),
        ("no device", three, [], "devices"),
        ("grad", needs_grad, "cpu*2", r"\[1\].*no_grad"),
    ):
        yield f"replicate, {what}", pc.replicate, given(tensors, devices), EITHER, words
    for name in CALLS:
        bound = getattr(pc.Communicator(["cpu"] * 2), name)
        yield f"{name}, of a communicator", bound, given(three), ValueError, "3.*2|2.*3"
    known = "all_scatter.*all_reduce.*barrier"
    yield "algorithms, collective", pc.algorithms, given("all_scatter"), ValueError, known
    yield "plan, collective", pc.plan, given("all_scatter", 4), ValueError, known
    args = given("all_reduce", 4, algorithm="butterfly")
    yield "plan, algorithm", pc.plan, args, ValueError, "butterfly.*leader.*tree"
    for world in (0, -1):
        yield f"plan, world {world}", pc.plan, given("all_reduce", world), ValueError, "world"


TABLES = (list_cases, option_cases, order_cases, dim_cases, output_cases, split_cases, other_cases)
SYNCHRONOUS = {
    "gather",
    "replicate",
    "tree_sum",
    "broadcast_coalesced",
    "verify",
    "plan",
    "algorithms",
}
CASES = [
    pytest.param(*case, async_op, id=name + (", async" if async_op else ""))
    for table in TABLES
    for name, *case in table()
    for async_op in (False, True)
    if not (async_op and name.split(",")[0] in SYNCHRONOUS)
]


def memory(value, found=None):
    """Collect every tensor and array in the arguments, with its bytes and its version."""
    found = [] if found is None else found
    if isinstance(value, (list, tuple)):
        for v in value:
            memory(v, found)
    elif isinstance(value, np.ndarray):
        found.append((value, value.tobytes(), 0))
    elif isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta:
        found.append((value, bytes(value.untyped_storage()), value._version))
    return found


@pytest.mark.parametrize(("call", "make", "error", "words", "async_op"), CASES)
def test_invalid_calls_raise_before_data_moves(call, make, error, words, async_op):
    args, options = make()
    if async_op:
        options["async_op"] = True
    before = memory([args, list(options.values())])
    with pytest.raises(error, match=f"(?s){words}") as raised:
        call(*args, **options)
    assert len(str(raised.value)) > 25, "the message is too short"
    for value, held, version in before:
        now = value.tobytes() if isinstance(value, np.ndarray) else bytes(value.untyped_storage())
        assert now == held, "a refused call changed a tensor"
        assert version == getattr(value, "_version", 0), "a refused call changed a version"


def test_leaf_tensors_are_reduced_under_no_grad():
    tensors = needs_grad()
    with torch.no_grad():
        pc.all_reduce(tensors)
    assert torch.equal(tensors[0], tensors[1])
    assert tensors[1].requires_grad


class NoShape:
    @property
    def shape(self) -> tuple[int, ...]:
        raise RuntimeError("unknown")


class Named(NamedTuple):
    values: torch.Tensor


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([torch.ones(2, 3), 1], "[tensor[2, 3], 1]"),
        (np.ones(4), "ndarray[4]"),
        (torch.tensor(0.5), "tensor(0.5000)"),
        (nn.LazyLinear(3).weight, "<UninitializedParameter>"),
        (NoShape(), "<NoShape>"),
        (10**5000, "<int>"),
        (Named(torch.ones(3)), "<Named>"),
        (torch.Size([3]), "torch.Size([3])"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_is_shown_in_one_short_line(value: object, text: str) -> None:
    assert shown(value) == text
    long = shown(nn.Sequential(*[nn.Linear(1, 1)] * 99))
    assert len(long) < 300
    assert "\n" not in long
