"""Results of every collective except all_reduce: values, places, and memory that must not change.

test_all_reduce.py has the numbers of reductions. Here: roots, dims, splits, `out=`, coalesced
lists, and the same methods bound to devices.
"""

from __future__ import annotations

import inspect
import pydoc

import pytest
import torch
from reference import (
    BITS_OF,
    DTYPES,
    MOVED,
    NARROW,
    OPS,
    allowed,
    assert_close,
    assert_same,
    depends_on_order,
    expected,
    left_fold,
    place,
    randoms,
    short,
)

import pycollect as pc

WORLDS = (1, 2, 3, 4, 5, 8, 9)
OUT_OF_PLACE = ("all_gather", "reduce_scatter", "all_to_all")
DIMS = (0, 1, 2, -1, -2, -3)


def clones(tensors):
    return [t.clone() for t in tensors]


def share_no_memory(tensors):
    """Whether no two tensors share a storage."""
    filled = [t for t in tensors if t.numel()]
    return len({t.untyped_storage().data_ptr() for t in filled}) == len(filled)


def named(collective):
    """None, and the collective's algorithms that can be selected by name."""
    return [None, *([] if collective == "all_to_all" else pc.algorithms(collective))]


def exact(collective, algorithm, dtype, op):
    if algorithm is None or not depends_on_order(dtype, op):
        return True
    order = pc.plan(collective, 4, algorithm=algorithm).order
    return order == "exact" or (order == "native" and dtype not in NARROW)


# --- in place -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("algorithm", named("broadcast"))
def test_broadcast(dtype, algorithm):
    for world in WORLDS:
        for src in {0, world // 2, world - 1}:
            tensors = randoms(world, (5, 7), dtype, seed=world)
            wanted = expected("broadcast", tensors, root=src)
            assert pc.broadcast(tensors, src, algorithm=algorithm) is None
            assert_same(tensors, wanted, f"world {world}, src {src}")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("algorithm", named("reduce"))
def test_reduce_writes_only_the_root(dtype, algorithm):
    for op in (o for o in OPS if allowed(dtype, o)):
        same = exact("reduce", algorithm, dtype, op)
        for world in (1, 2, 3, 5, 8):
            tensors = randoms(world, (5, 7), dtype, seed=world, tame=not same)
            dst = world // 2
            wanted = expected("reduce", tensors, op, root=dst)
            assert pc.reduce(tensors, dst, op, algorithm=algorithm) is None
            why = f"{op}, world {world}"
            (assert_same if same else assert_close)(tensors, wanted, why, *([op] if same else []))


def test_every_root():
    for world in WORLDS:
        for root in range(world):
            tensors = randoms(world, (11,), torch.float32, seed=root)
            summed, sent = clones(tensors), clones(tensors)
            pc.reduce(summed, dst=root)
            pc.broadcast(sent, src=root)
            assert_same(summed, expected("reduce", tensors, root=root), f"{root} of {world}")
            assert_same(sent, expected("broadcast", tensors, root=root), f"{root} of {world}")


# --- out of place ---------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", OUT_OF_PLACE)
@pytest.mark.parametrize("dim", DIMS)
def test_every_dim_and_algorithm(collective, dim):
    for world in WORLDS:
        for algorithm in named(collective):
            options = {} if algorithm is None else {"algorithm": algorithm}
            tensors = randoms(world, (7, 9, 11), torch.int16, seed=world)
            kept = clones(tensors)
            got = getattr(pc, collective)(tensors, dim=dim, **options)
            why = f"world {world}, {algorithm}"
            assert isinstance(got, list)
            assert_same(got, expected(collective, kept, dim=dim), why)
            assert_same(tensors, kept, f"{why}: an input changed")
            assert share_no_memory([*got, *tensors]), f"{why}: results share memory"


@pytest.mark.parametrize("collective", OUT_OF_PLACE)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_every_dtype_out_of_place(collective, dtype):
    call = getattr(pc, collective)
    for dim in (0, 1):
        tensors = randoms(3, (7, 10), dtype)
        assert_same(call(tensors, dim=dim), expected(collective, tensors, dim=dim), dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_reduce_scatter_keeps_the_contract(dtype):
    for op in (o for o in OPS if allowed(dtype, o)):
        for algorithm in named("reduce_scatter"):
            same = exact("reduce_scatter", algorithm, dtype, op)
            for world in (2, 5):
                tensors = randoms(world, (13, 3), dtype, seed=world, tame=not same)
                wanted = expected("reduce_scatter", tensors, op)
                got = pc.reduce_scatter(tensors, op, algorithm=algorithm)
                why = f"{op}, {algorithm}, world {world}"
                if same:
                    assert_same(got, wanted, why, op)
                else:
                    assert_close(got, wanted, why)


@pytest.mark.parametrize("collective", OUT_OF_PLACE)
@pytest.mark.parametrize("layout", ["contiguous", "misaligned"])
def test_out_is_written_and_returned(collective, layout):
    for dim in (0, 1):
        tensors = randoms(3, (5, 8), torch.float64)
        wanted = expected(collective, tensors, dim=dim)
        out = [place(torch.zeros_like(w), layout) for w in wanted]
        got = getattr(pc, collective)(tensors, dim=dim, out=out)
        assert all(g is o for g, o in zip(got, out, strict=True))
        assert_same(out, wanted, f"dim {dim}")


def test_all_to_all_with_split_sizes():
    # Row s gives the split of rank s's tensor: split_sizes[s][r] goes from rank s to rank r.
    splits = [[1, 0, 4], [2, 2, 2], [0, 0, 3]]
    for dim in (0, 1, -1):
        shapes = [(sum(row), 4) if dim == 0 else (4, sum(row)) for row in splits]
        tensors = [randoms(1, s, torch.int32, seed=i)[0] for i, s in enumerate(shapes)]
        parts = [t.split(row, dim) for t, row in zip(tensors, splits, strict=True)]
        wanted = [torch.cat([p[r] for p in parts], dim) for r in range(3)]
        assert_same(pc.all_to_all(tensors, dim=dim, split_sizes=splits), wanted, f"dim {dim}")


# --- scatter, gather, replicate, copy_, barrier ---------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_scatter_and_gather_are_inverse(dtype):
    for world in WORLDS:
        for dim in (0, 1, -1):
            tensor = randoms(1, (7, 11), dtype, seed=world)[0]
            chunks = pc.scatter(tensor, ["cpu"] * world, dim=dim)
            why = f"world {world}, dim {dim}"
            assert_same(chunks, list(tensor.tensor_split(world, dim)), why)
            assert share_no_memory([tensor, *chunks]), f"{why}: chunks share memory"
            assert_same([pc.gather(chunks, dim=dim)], [tensor], why)
            assert_same([pc.gather(chunks, "cpu", dim=dim)], [tensor], why)


def test_scatter_accepts_chunk_sizes_devices_and_out():
    tensor = torch.arange(24.0).view(6, 4)
    wanted = list(tensor.split([1, 0, 5]))
    assert_same(pc.scatter(tensor, "cpu*3", chunk_sizes=[1, 0, 5]), wanted)
    assert_same(pc.scatter(tensor, pc.devices("cpu*3"), chunk_sizes=(1, 0, 5)), wanted)
    out = [torch.zeros_like(w) for w in wanted]
    got = pc.scatter(tensor, "cpu*3", chunk_sizes=[1, 0, 5], out=out)
    assert all(g is o for g, o in zip(got, out, strict=True))
    assert_same(out, wanted)
    columns = tensor.split([3, 1], 1)
    assert_same(pc.scatter(tensor, "cpu*2", dim=1, chunk_sizes=[3, 1]), columns)
    one = pc.scatter(tensor, ["cpu"])[0]
    one.zero_()
    assert tensor.sum() == 276, "scatter to one rank aliases its input"


def test_gather_accepts_uneven_chunks_and_out():
    chunks = [torch.randn(n, 3) for n in (2, 0, 5)]
    out = torch.zeros(7, 3)
    assert pc.gather(chunks, out=out) is out
    assert_same([out], [torch.cat(chunks)])


def test_replicate_copies_every_tensor_for_every_rank():
    tensors = [randoms(1, s, d)[0] for s, d in (((3, 4), torch.float32), ((), torch.int64))]
    copies = pc.replicate(tensors, ["cpu"] * 3)
    assert len(copies) == 3
    for mine in copies:
        assert_same(mine, tensors)
    assert share_no_memory([t for mine in (*copies, tensors) for t in mine]), (
        "two ranks share memory"
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_copy(dtype):
    src = randoms(1, (6, 7), dtype)[0]
    for layout in ("contiguous", "transposed", "columns"):
        dst = place(torch.zeros_like(src), layout)
        pc.copy_(dst, place(src, layout))
        assert_same([dst], [src], layout)
    dst = torch.zeros_like(src)
    pc.copy_(dst, src, async_op=True).wait()
    assert_same([dst], [src])


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", MOVED, ids=short)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_calls_that_only_move_take_other_dtypes(dtype, layout):
    whole = BITS_OF[dtype.itemsize]
    integers = [place(t, layout) for t in randoms(2, (6, 4), whole)]
    tensors = [t.view(dtype) for t in integers]
    for call in (
        pc.all_gather,
        pc.all_to_all,
        lambda ranks: [pc.gather(ranks, dim=1)],
        lambda ranks: pc.scatter(ranks[0], "cpu*4", dim=1),
        lambda ranks: pc.replicate(ranks, "cpu*2")[1],
        lambda ranks: [pc.copy_(out := torch.empty_like(ranks[0]), ranks[0]) or out],
        lambda ranks: pc.broadcast(copies := clones(ranks), 1) or copies,
        lambda ranks: pc.broadcast_coalesced([[ranks[0]], [copy := ranks[1].clone()]]) or [copy],
    ):
        got = call(tensors)
        assert {t.dtype for t in got} == {dtype}
        assert_same([t.view(whole) for t in got], call(integers))


def test_every_dtype_of_torch_is_moved_unless_it_is_quantized():
    for dtype in {d for d in vars(torch).values() if isinstance(d, torch.dtype)}:
        if short(dtype).startswith(("qint", "quint")):
            continue  # test_arguments.py
        ranks = [t.view(dtype) for t in randoms(2, (3, 16), torch.uint8)]
        wanted = ranks[1].view(torch.uint8).clone()
        pc.broadcast([t.t() for t in ranks], 1)
        assert_same([t.view(torch.uint8) for t in ranks], [wanted] * 2, dtype)
        copy = pc.replicate([ranks[0][::2]], "cpu*1")[0][0]
        assert_same([copy.view(torch.uint8)], [wanted[::2]], dtype)


def test_barrier_returns():
    assert pc.barrier(["cpu"] * 4) is None
    assert pc.barrier("cpu*3") is None


# --- coalesced ------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_coalesced_lists_give_the_bits_of_single_calls(world, op):
    kinds = [((20, 1, 5, 5), torch.float32), ((), torch.float32), ((0, 3), torch.float32)]
    kinds += [((801,), torch.float32), ((9, 4), torch.bfloat16), ((17,), torch.int64)]
    columns = [randoms(world, s, d, seed=i) for i, (s, d) in enumerate(kinds)]
    for algorithm in (None, "leader", "two_shot"):
        lists = [[column[r].clone() for column in columns] for r in range(world)]
        assert pc.all_reduce_coalesced(lists, op, algorithm=algorithm) is None
        for i, column in enumerate(columns):
            got = [mine[i] for mine in lists]
            assert_same(got, [left_fold(column, op)] * world, f"tensor {i}, {algorithm}", op)


@pytest.mark.parametrize("world", WORLDS)
def test_broadcast_coalesced(world):
    src = world // 2
    lists = [
        [*randoms(1, (5, 3), torch.float16, seed=r), *randoms(1, (4,), torch.bool, seed=r)]
        for r in range(world)
    ]
    wanted = clones(lists[src])
    pc.broadcast_coalesced(lists, src)
    for mine in lists:
        assert_same(mine, wanted)


# --- bound to devices -----------------------------------------------------------------------------


def test_a_communicator_has_the_same_methods():
    communicator = pc.Communicator(["cpu"] * 3)
    tensors = randoms(3, (6, 5), torch.float32)
    for collective in ("all_reduce", "reduce", "broadcast"):
        mine = clones(tensors)
        assert getattr(communicator, collective)(mine) is None
        assert_same(mine, expected(collective, tensors), collective)
    for collective in OUT_OF_PLACE:
        got = getattr(communicator, collective)(tensors, dim=1)
        assert_same(got, expected(collective, tensors, dim=1), collective)
    lists = [[t.clone(), t[0].clone()] for t in tensors]
    communicator.all_reduce_coalesced(lists)
    assert_same([mine[0] for mine in lists], expected("all_reduce", tensors))
    communicator.barrier()


BOUND = [name for name in pc.__all__ if hasattr(pc.Communicator, name) and name != "barrier"]


@pytest.mark.parametrize("name", BOUND)
def test_signatures_of_a_communicators_methods(name):
    """The function's, without `devices`; by position only where a call by name is refused."""
    function = inspect.signature(getattr(pc, name)).parameters
    of_class = inspect.signature(getattr(pc.Communicator, name))
    bound = inspect.signature(getattr(pc.Communicator("cpu*2"), name))
    wanted = [argument for argument in function if argument != "devices"]
    assert list(of_class.parameters) == ["self", *wanted]
    assert list(bound.parameters) == wanted
    first = bound.parameters[wanted[0]]
    assert (first.kind is first.POSITIONAL_ONLY) == (name != "copy_")
    assert repr(bound.parameters["peer_access"].default) == "<the communicator's>"
    for argument in wanted[1:-1]:
        assert bound.parameters[argument] == function[argument]


def test_help_on_a_communicator_shows_its_calls():
    text = pydoc.plain(pydoc.render_doc(pc.Communicator))
    assert len(BOUND) == 12
    assert "scatter(self, tensor: 'TensorLike', /, *, chunk_sizes:" in text
    assert "replicate(self, tensors: 'TensorList', /, *, peer_access:" in text
    assert ">>> scatter(" not in text, "the example of the module function"
