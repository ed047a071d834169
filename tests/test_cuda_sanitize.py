"""A small test matrix for compute-sanitizer, which slows programs down 10 to 50 times.

Covers each path of every kernel once: vectors, heads, tails, strides, pieces, several tensors,
staging. `pytest -k sanitize` selects it; without the sanitizer it is quick.
"""

from __future__ import annotations

import pytest
import torch
from device_placements import CPU, GPU, PLACEMENTS, STAGED, VIRTUAL, PlacedApi
from reference import COLLECTIVES, IN_PLACE, assert_same, expected, left_fold, place, randoms

import pycollect as pc

KINDS = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.complex128]
PLACES = [pytest.param(CPU, id="cpu"), *PLACEMENTS]


@pytest.mark.parametrize("placement", PLACES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_sanitize_every_algorithm(placement, collective):
    api = PlacedApi(placement)
    named = [] if collective == "all_to_all" else pc.algorithms(collective)
    for algorithm in (None, *named):
        options = {} if algorithm is None else {"algorithm": algorithm}
        for world in (2, 5):
            values = randoms(world, (1_003,), torch.int32, seed=world)
            tensors = [v.clone() for v in values]
            got = getattr(api, collective)(tensors, **options)
            got = tensors if collective in IN_PLACE else got
            assert_same(got, expected(collective, values), f"{algorithm}, world {world}")


@pytest.mark.parametrize("placement", PLACES)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_sanitize_every_path_of_the_kernel(placement, dtype):
    api = PlacedApi(placement)
    for layout in ("contiguous", "misaligned", "columns", "transposed", "every_other"):
        for shape in ((1,), (3, 33), (5, 129)):
            values = randoms(3, shape, dtype)
            tensors = [place(v, layout) for v in values]
            api.all_reduce(tensors)
            assert_same(tensors, [left_fold(values, "sum")] * 3, f"{layout}, {shape}")


@pytest.mark.parametrize("placement", PLACES)
def test_sanitize_coalesced_lists(placement):
    shapes = [(20, 1, 3, 3), (), (0, 3), (801, 5), (10,)]
    columns = [randoms(4, s, torch.float32, seed=i) for i, s in enumerate(shapes)]
    lists = [[column[r].clone() for column in columns] for r in range(4)]
    PlacedApi(placement).all_reduce_coalesced(lists, "avg")
    for i, column in enumerate(columns):
        assert_same([mine[i] for mine in lists], [left_fold(column, "avg")] * 4, i, "avg")


@pytest.mark.parametrize(
    "placement",
    [pytest.param(CPU, id="cpu"), *(h for h in PLACEMENTS if h.values[0] in (VIRTUAL, STAGED))],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_sanitize_copies_from_the_host(placement, dim):
    device = "cpu" if placement is CPU else GPU
    host = randoms(1, (301, 17), torch.float16)[0]
    sources = [host] if device == "cpu" else [host, host.pin_memory(), host.to(device)]
    for source in sources:
        chunks = placement.bound("scatter", 3)(source, dim=dim)
        assert_same([c.cpu() for c in chunks], list(host.tensor_split(3, dim)))
        back = placement.api(3).gather(chunks, "cpu", dim=dim)
        assert_same([back], [host])
