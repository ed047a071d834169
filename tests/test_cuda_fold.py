"""The arithmetic of the GPU kernels, run on the host, gives the bits of the contract."""

from __future__ import annotations

import pytest
import reference as ref
import torch
from emulation import Row, launch, lines, reals, shifted

ALLOWED = [(dtype, op) for dtype in ref.DTYPES for op in ref.OPS if ref.allowed(dtype, op)]


@pytest.mark.parametrize(("dtype", "op"), ALLOWED, ids=lambda v: ref.short(v))
def test_bits_are_those_of_the_contract(dtype: torch.dtype, op: str):
    for world, count in ((2, 1), (2, 5000), (3, 517), (4, 1000), (5, 33), (8, 2100), (9, 260)):
        tensors = ref.randoms(world, [count], dtype, seed=count)
        wanted = ref.left_fold(tensors, op)
        for shift, in_place in ((0, True), (0, False), (1, True), (3, False)):
            srcs = [shifted(t, shift) for t in tensors]
            dsts = srcs if in_place else [shifted(t, shift) for t in tensors[:2]]
            (one,) = launch([Row(dsts, srcs)], op)
            ref.assert_same(
                [d.flatten() for d in dsts], [wanted] * len(dsts), (world, count, shift), op
            )
            assert one["loaded_twice"] == 0
            assert one["loaded"] == world * reals(wanted)
            assert one["stored"] == len(dsts) * reals(wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=ref.short)
@pytest.mark.parametrize("world", [2, 3, 4, 7, 8, 12])
def test_rows_with_more_packets_than_threads(dtype: torch.dtype, world: int):
    count = 160_003 // world
    tensors = ref.randoms(world, [count], dtype)
    srcs = [shifted(t, 1) for t in tensors]
    (one,) = launch([Row(srcs, srcs)])
    ref.assert_same([s.flatten() for s in srcs], [ref.left_fold(tensors, "sum")] * world)
    assert one["loaded_twice"] == 0
    assert one["widest_load"] == one["widest_store"] == 16


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
