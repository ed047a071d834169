"""all_reduce keeps the numerical contract: the left fold in rank order, bit for bit.

Covers the sizes around which kernels take another path, and literal examples that distinguish the
contract from similar ones. test_matrix.py has dtypes, ops, algorithms and worlds.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.distributed as dist
from programs import run
from reference import (
    COMPLEX,
    DTYPES,
    NARROW,
    OPS,
    WIDE,
    allowed,
    assert_same,
    fold,
    left_fold,
    randoms,
    short,
)

import pycollect as pc

REFUSED = [(d, o) for d in DTYPES for o in OPS if not allowed(d, o)]


def reduced(tensors, op="sum", **options):
    """Run all_reduce on clones of the tensors."""
    clones = [t.clone() for t in tensors]
    assert pc.all_reduce(clones, op, **options) is None
    return clones


@pytest.mark.parametrize(("dtype", "op"), REFUSED, ids=short)
def test_undefined_reductions_raise_type_error(dtype, op):
    tensors = randoms(3, (5,), dtype)
    kept = [t.clone() for t in tensors]
    with pytest.raises(TypeError, match=op):
        pc.all_reduce(tensors, op)
    assert_same(tensors, kept)


def test_ops_of_torch_distributed_are_accepted():
    names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    for op, theirs in zip(OPS, names, strict=True):
        tensors = randoms(3, (20,), torch.int32)
        assert_same(reduced(tensors, getattr(dist.ReduceOp, theirs)), [left_fold(tensors, op)] * 3)


def test_the_log_names_the_algorithm():
    program = "import torch, pycollect as pc; pc.all_reduce([torch.ones(5)] + [torch.ones(5)])"
    ran = run(
        [sys.executable, "-c", program], timeout=60, env={**os.environ, "PYCOLLECT_LOG": "info"}
    )
    assert "all_reduce of 20 bytes of float32 on 2 ranks: leader" in ran.stderr


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_counts_of_all_tails_and_split_over_threads(dtype):
    small = [*range(70), 127, 128, 129, 255, 257, 1000, 1023]
    for count in (*small, 8191, 8193, 32771, 2_400_007 // dtype.itemsize):
        tensors = randoms(4, (count,), dtype, seed=count)
        assert_same(reduced(tensors), [left_fold(tensors, "sum")] * 4, f"{count} elements")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_bits_do_not_depend_on_thread_count_or_offset(dtype):
    tensors = randoms(4, (200_003,), dtype)
    wanted = left_fold(tensors, "sum")
    for n in (1, 2, 3, 8):
        torch.set_num_threads(n)
        assert_same(reduced(tensors), [wanted] * 4, f"{n} threads")
    for begin, end in ((1, 2), (3, 77), (199_990, 200_003)):
        part = reduced([t[begin:end] for t in tensors])
        assert_same(part, [wanted[begin:end]] * 4, f"elements {begin} to {end}")


@pytest.mark.parametrize("dtype", [*WIDE, *NARROW, *COMPLEX], ids=short)
@pytest.mark.parametrize("count", [5, 70_003])
def test_the_number_of_ranks_does_not_matter_in_tree_order(dtype, count):
    """Each rank passes the sum, not rounded, of its part of the values; also if the last part of
    all is smaller than the others, of a rank that has no equal."""
    for parts in (16, 12, 13):
        values = randoms(parts, (count,), dtype, seed=parts)
        wanted = fold(values, "sum", "tree")
        wide = torch.float32 if dtype in NARROW else dtype
        for each in (1, 2, 4, 8, 16):
            mine = [values[at : at + each] for at in range(0, parts, each)]
            sums = [pc.tree_sum(part, dtype=wide) for part in mine]
            results = [r.to(dtype) for r in reduced(sums, order="tree")]
            assert_same(results, [wanted] * len(mine), (parts, each))


# --- examples that distinguish the contract from similar ones -------------------------------------

NAN = float("nan")
LITERALS = [
    # Order of additions: (1e8 + 1) - 1e8 loses the 1, and 1e8 - 1e8 + 1 does not.
    (torch.float32, "sum", [1e8, 1.0, -1e8], 0.0),
    (torch.float32, "sum", [1e8, -1e8, 1.0], 1.0),
    # One rounding: bfloat16 cannot represent 257, so rounding at every hop would stay at 256.
    (torch.bfloat16, "sum", [256.0, 1.0, 1.0], 258.0),
    (torch.float8_e5m2, "sum", [8.0, 1.0, 1.0], 10.0),
    (torch.float8_e4m3fn, "sum", [16.0, 1.0, 1.0], 18.0),
    # The accumulator is wider than the type: no intermediate infinity.
    (torch.float16, "sum", [60000.0, 60000.0, -60000.0], 60000.0),
    (torch.float16, "prod", [60000.0, 2.0, 0.25], 30000.0),
    # float32 accumulates in float32, not in a wider type.
    (torch.float32, "sum", [3e38, 3e38, -3e38], float("inf")),
    (torch.float32, "prod", [3e38, 10.0, 0.01], float("inf")),
    # A NaN of any rank propagates, and -0.0 keeps its sign.
    *[(torch.float32, op, v, NAN) for op in ("min", "max") for v in ([NAN, 1.0], [1.0, NAN, 2.0])],
    *[(t, op, [-0.0] * 3, -0.0) for t in WIDE for op in ("sum", "avg")],
    # avg scales before it rounds: the sum alone is infinite in float16.
    (torch.float16, "avg", [60000.0, 60000.0, 60000.0], 60000.0),
    (torch.float64, "avg", [1.0, 2.0, 6.0], 3.0),
    # avg of integers divides the wrapped sum toward zero.
    (torch.int32, "avg", [-3, -4], -3),
    (torch.int8, "avg", [100, 100], -28),
    (torch.uint8, "avg", [200, 100], 22),
    (torch.int64, "avg", [2**53 + 1, 2**53 + 1, 2**53 + 1], 2**53 + 1),
    (torch.int8, "sum", [100, 100], -56),
    (torch.uint8, "prod", [16, 17], 16),
    (torch.int16, "max", [-32768, 32767, 0], 32767),
    (torch.uint8, "max", [200, 100], 200),
    (torch.int8, "min", [-128, 127], -128),
    (torch.int32, "bxor", [0b1100, 0b1010, 0b0001], 0b0111),
    (torch.bool, "sum", [True, True], True),
    (torch.bool, "bxor", [True, True, True], True),
    (torch.bool, "bxor", [True, True], False),
    (torch.bool, "prod", [True, False], False),
    (torch.complex64, "prod", [1 + 2j, 3 - 1j], 5 + 5j),
    (torch.complex64, "avg", [1 + 2j, 3 - 1j], 2 + 0.5j),
]


@pytest.mark.parametrize(("dtype", "op", "values", "wanted"), LITERALS, ids=str)
def test_examples(dtype, op, values, wanted):
    for count in (1, 40):
        tensors = [torch.full((count,), v, dtype=torch.float64 if dtype in NARROW else dtype)
                   for v in values]  # fmt: skip
        got = reduced([t.to(dtype) for t in tensors], op)
        wide = torch.full((count,), wanted, dtype=torch.float64 if dtype in NARROW else dtype)
        assert_same(got, [wide.to(dtype)] * len(values))


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.itemsize == 1], ids=short)
def test_every_pair_of_bytes(dtype):
    every = torch.arange(256).to(torch.uint8)
    pairs = torch.cartesian_prod(every, every).t().contiguous()
    tensors = [row.clamp(max=1).bool() if dtype == torch.bool else row.view(dtype) for row in pairs]
    for op in (o for o in OPS if allowed(dtype, o)):
        assert_same(reduced(tensors, op), [left_fold(tensors, op)] * 2, op, op)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=short)
def test_all_16_bit_floats_with_random_partners(dtype):
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    tensors = [every, *(every[torch.randperm(2**16)] for _ in range(2))]
    tensors = [t.view(dtype) for t in tensors]
    for op in (o for o in OPS if allowed(dtype, o)):
        for n in (2, 3):
            assert_same(reduced(tensors[:n], op), [left_fold(tensors[:n], op)] * n, op, op)


@pytest.mark.parametrize("algorithm", pc.algorithms())
def test_nonzero_bytes_of_bool_are_true(algorithm):
    raw = [[0, 1, 2, 255, 2, 0], [0, 0, 0, 1, 1, 4]]
    tensors = [torch.tensor(r * 9, dtype=torch.uint8) for r in raw]
    wanted = {"bxor": [0, 1, 1, 0, 0, 1], "sum": [0, 1, 1, 1, 1, 1], "prod": [0, 0, 0, 1, 1, 0]}
    for op, truth in wanted.items():
        for t in reduced([t.view(torch.bool) for t in tensors], op, algorithm=algorithm):
            assert (t.view(torch.uint8) != 0).int().tolist() == truth * 9, op
