"""Tensors of more than 2^31 elements: offsets, grids and pitches, checked on the GPU."""

from __future__ import annotations

import pytest
import torch

import pycollect as pc

pytestmark = [pytest.mark.cuda, pytest.mark.slow]

COUNT = 2**31 + 4_099
WORLD = 3
PIECE = 2**28


@pytest.fixture(autouse=True)
def enough_memory():
    torch.cuda.empty_cache()
    needed, (free, _) = 24 << 30, torch.cuda.mem_get_info()
    if free < needed:
        pytest.skip(f"needs {needed >> 30} GiB of GPU memory, and {free >> 30} are free")
    yield
    torch.cuda.empty_cache()


def ramp():
    """0, 1, ... 250, 0, ...: a prime period, so that a misplaced piece shows."""
    period = torch.arange(251, dtype=torch.uint8, device="cuda:0")
    return period.repeat(-(-COUNT // 251))[:COUNT]


def differ(a, b):
    """Number of differing elements, computed in pieces to avoid a temporary of full size."""
    return sum(int((x != y).sum()) for x, y in zip(a.split(PIECE), b.split(PIECE), strict=True))


@pytest.mark.parametrize("algorithm", [None, "two_shot", "chain", "one_shot"])
def test_all_reduce(algorithm):
    base = ramp()
    tensors = [base + rank for rank in range(WORLD)]
    pc.all_reduce(tensors, algorithm=algorithm)
    wanted = base.mul_(WORLD).add_(sum(range(WORLD)))  # wraps around as the uint8 sums do
    assert [differ(t, wanted) for t in tensors] == [0] * WORLD


def test_scatter_gather_and_copy():
    base = ramp()
    chunks = pc.scatter(base, "cuda:0*3", chunk_sizes=[COUNT - 2, 1, 1])
    again = pc.gather(chunks)
    assert differ(again, base) == 0
    again.zero_()
    pc.copy_(again, base)
    assert differ(again, base) == 0
