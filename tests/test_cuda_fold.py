"""The arithmetic of the GPU kernels, run on the host, gives the bits of the contract."""

from __future__ import annotations

import pytest
import reference as ref
import torch
from emulation import Row, launch, lines, reals, shifted

ALLOWED = [(dtype, op) for dtype in ref.DTYPES for op in ref.OPS if ref.allowed(dtype, op)]


def unit_bytes(dtype: torch.dtype, op: str) -> int:
    """Bytes of what a kernel combines: a byte, an element, or a part of a complex number."""
    if op in ("band", "bor", "bxor") or dtype == torch.bool:
        return 1
    return dtype.itemsize // (2 if dtype.is_complex and op != "prod" else 1)


@pytest.mark.parametrize(("dtype", "op"), ALLOWED, ids=lambda v: ref.short(v))
def test_ranks_at_any_alignments_are_folded_in_packets(dtype: torch.dtype, op: str):
    """A thread folds 16 bytes, unit by unit, where units have up to 4 bytes; otherwise a unit."""
    unit, item = unit_bytes(dtype, op), dtype.itemsize
    for world, in_place in ((2, True), (3, False), (4, True), (5, False), (8, True), (9, True)):
        for apart in (0, 1, 2, 4, 8):  # elements
            tensors = ref.randoms(world, [3000], dtype, seed=apart)
            srcs = [shifted(t, 1 + apart * (r % 2)) for r, t in enumerate(tensors)]
            dsts = srcs if in_place else [shifted(tensors[0], 1)]
            (one,) = launch([Row(dsts, srcs)], op)
            wanted = [ref.left_fold(tensors, op)] * len(dsts)
            ref.assert_same([d.flatten() for d in dsts], wanted, (world, apart), op)
            assert one["loaded_twice"] == 0
            assert one["loaded"] == world * reals(wanted[0])
            equal = apart * item % 16 == 0
            assert one["widest_load"] == one["widest_store"] == (16 if equal else unit)
            if not equal and unit <= 4:
                packets = 3000 * item // 512 * 32
                edges = (3000 * item - packets * 16) // unit
                assert len(one["accesses"]) == min(12, -(-(packets + edges) // 256))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=ref.short)
@pytest.mark.parametrize("count", [0, 1, 2, 511, 512, 513, 1023, 1024, 1040, 70_001])
def test_heads_and_tails_of_ranks_at_equal_and_different_alignments(dtype: torch.dtype, count: int):
    """Also of rows with more packets than threads."""
    for first, second in ((0, 1), (3, 2), (5, 9), (1, 8), (1, 1)):
        tensors = ref.randoms(5, [count], dtype)
        srcs = [shifted(t, second if r == 3 else first) for r, t in enumerate(tensors)]
        launches = launch([Row(srcs, srcs)])
        ref.assert_same([s.flatten() for s in srcs], [ref.left_fold(tensors, "sum")] * 5)
        assert sum(one["loaded"] for one in launches) == 5 * count * dtype.itemsize
        assert sum(one["loaded_twice"] for one in launches) == 0
        if first == second and count > 511:
            assert launches[0]["widest_load"] == launches[0]["widest_store"] == 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=ref.short)
def test_lines_at_different_alignments(dtype: torch.dtype):
    """As in a reduce-scatter of columns: only the sources have gaps between their lines."""
    tensors = ref.randoms(3, [6, 2001], dtype)
    srcs = [torch.zeros(6, 2051, dtype=dtype)[:, 7 : 7 + 2001].copy_(t) for t in tensors]
    dst = torch.zeros(6, 2001, dtype=dtype)
    (one,) = launch([Row([dst], srcs)], multiprocessors=2)
    ref.assert_same([dst], [ref.left_fold(tensors, "sum")])
    assert one["loaded_twice"] == 0
    assert one["widest_load"] == dtype.itemsize
    packets = 2001 * dtype.itemsize // 512 * 32
    slots = 6 * (packets + 2001 - packets * 16 // dtype.itemsize)
    assert len(one["accesses"]) == -(-slots // 256)


@pytest.mark.parametrize(("dtype", "op"), ALLOWED, ids=lambda v: ref.short(v))
def test_tree_order(dtype: torch.dtype, op: str):
    """In one launch, as packets only where those of four or eight ranks are aligned."""
    for world, apart in ((2, 0), (3, 1), (4, 0), (4, 1), (5, 0), (7, 0), (8, 0), (9, 0), (17, 3)):
        tensors = ref.randoms(world, [4100 // world], dtype, seed=world)
        srcs = [shifted(t, 1 + apart * (r % 2)) for r, t in enumerate(tensors)]
        in_place = world % 2 == 0
        dsts = srcs if in_place else [shifted(tensors[0], 1)]
        (one,) = launch([Row(dsts, srcs)], op, order="tree", multiprocessors=world % 3 + 1)
        wanted = [ref.fold(tensors, op, "tree")] * len(dsts)
        ref.assert_same([d.flatten() for d in dsts], wanted, (world, apart), op)
        assert one["loaded_twice"] == 0
        tree = world > 3 and ref.depends_on_order(dtype, op)
        assert one["kind"] == ("tree_fold" if tree else "fold")
        if tree and op != "prod" and dtype not in ref.NARROW[2:]:
            wide = world in (4, 8) and apart * dtype.itemsize % 16 == 0
            assert (
                one["widest_load"] == one["widest_store"] == (16 if wide else unit_bytes(dtype, op))
            )


@pytest.mark.parametrize("world", [1, 2, 6, 8, 15, 16, 31, 64, 500])
def test_tree_order_of_any_number_of_sources(world: int):
    tensors = ref.randoms(world, [3, 21], torch.float32)
    srcs = [torch.zeros(3, 30)[:, 2:23].copy_(t) for t in tensors]
    if world <= 250:  # a source takes a pitch beside its address
        dst = torch.zeros(3, 25)[:, 1:22]
        launch([Row([dst], srcs)], order="tree")
        ref.assert_same([dst], [ref.fold(tensors, "sum", "tree")])
    flat = torch.zeros(1, 63)
    launch([Row([flat], [lines(t) for t in tensors])], order="tree")
    ref.assert_same([flat.view(3, 21)], [ref.fold(tensors, "sum", "tree")])


@pytest.mark.parametrize("dtype", ref.NARROW, ids=ref.short)
@pytest.mark.parametrize("world", [2, 3, 4, 8, 11])
def test_sums_of_narrow_floats_as_accumulators(dtype: torch.dtype, world: int):
    tensors = ref.randoms(world, [777], dtype)
    out = torch.zeros(1, 777)
    (one,) = launch([Row([out], [shifted(t, r % 3) for r, t in enumerate(tensors)])], order="tree")
    ref.assert_same([out[0]], [ref.fold([t.float() for t in tensors], "sum", "tree")])
    assert one["kind"] == "widening_fold"
    assert (one["widest_load"], one["widest_store"]) == (dtype.itemsize, 4)


@pytest.mark.parametrize("dtype", ref.NARROW[2:], ids=ref.short)
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "avg"])
def test_all_pairs_of_8_bit_floats(dtype: torch.dtype, op: str):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    a, b = codes.repeat(256), codes.view(torch.uint8).repeat_interleave(256).view(dtype)
    out = torch.empty_like(a)
    launch([Row([lines(out)], [lines(a), lines(b)])], op)
    ref.assert_same([out], [ref.left_fold([a, b], op)], op=op)


@pytest.mark.parametrize(("dtype", "first"), list(zip(ref.NARROW[2:], (0, 3), strict=True)))
def test_8_bit_overflow_infinity_and_nan_become_the_given_bytes(dtype: torch.dtype, first: int):
    codes = [0x11, 0x22, 0x33, 0x44, 0x55, 0x66]
    overflow, infinity, nan = codes[first : first + 3]
    largest = torch.finfo(dtype).max
    a = torch.tensor([largest, -largest, 1.0, float("nan")]).to(dtype)
    b = torch.tensor([largest, -largest, 1.0, 1.0]).to(dtype)
    wanted = [overflow, overflow | 0x80, torch.tensor(2.0).to(dtype).view(torch.uint8).item(), nan]
    if dtype == torch.float8_e5m2:  # float8_e4m3fn has no infinity
        infinite = torch.tensor([float("inf"), float("-inf")]).to(dtype)
        a, b = torch.cat([a, infinite]), torch.cat([b, infinite])
        wanted += [infinity, infinity | 0x80]
    out = torch.empty_like(a)
    launch([Row([lines(out)], [lines(a), lines(b)])], float8=codes)
    assert out.view(torch.uint8).tolist() == wanted


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "band", "bor", "bxor"])
def test_nonzero_bytes_of_bool_are_true(op: str):
    a, b = torch.arange(256).to(torch.uint8).repeat(256), torch.arange(2**16).div(256).byte()
    out = torch.empty(2**16, dtype=torch.bool)
    launch([Row([lines(out)], [lines(a.view(torch.bool)), lines(b.view(torch.bool))])], op)
    assert torch.equal(out.view(torch.uint8), ref.left_fold([a != 0, b != 0], op).byte())


@pytest.mark.parametrize("dtype", ref.NARROW[:2], ids=ref.short)
@pytest.mark.parametrize("other", [0.0, 1.0, -3e-8, 65504.0, 1e-3])
def test_all_16_bit_floats(dtype: torch.dtype, other: float):
    a = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    b = torch.full_like(a, other)
    for op in ("sum", "prod", "avg", "min"):
        out = torch.empty_like(a)
        launch([Row([lines(out)], [lines(a), lines(b)])], op)
        ref.assert_same([out], [ref.left_fold([a, b], op)], op, op=op)


def test_only_finishing_folds_divide_by_the_world():
    for dtype in (torch.float32, torch.float16, torch.int64):
        tensors = ref.randoms(3, [100], dtype)
        total, mean = lines(torch.empty_like(tensors[0])), lines(torch.empty_like(tensors[0]))
        srcs = [lines(t) for t in tensors]
        (one,) = launch([Row([total], srcs, finishes=False), Row([mean], srcs)], "avg")
        assert one["works"] == 2
        ref.assert_same([total[0]], [ref.left_fold(tensors, "sum")])
        ref.assert_same([mean[0]], [ref.left_fold(tensors, "avg")])
