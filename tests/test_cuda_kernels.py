"""The GPU kernels, run on the host: the bits of the contract, copies, rows, arguments, grids."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
import reference as ref
import torch
from emulation import ARGS_BYTES, Task, float8_bytes, launch, one_row, reals, shifted
from hypothesis import given, settings
from torch import Tensor

from pycollect import _testing

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
            (one,) = launch([Task(dsts, srcs)], op)
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
@pytest.mark.parametrize("count", [0, 1, 2, 511, 512, 513, 1023, 1024, 1040, 70_001, 160_003])
def test_heads_and_tails_of_ranks_at_equal_and_different_alignments(dtype: torch.dtype, count: int):
    """Also of tasks with more packets than threads, of which a thread loads several at once."""
    apart = [(5, first, second) for first, second in ((0, 1), (3, 2), (5, 9), (1, 8), (1, 1))]
    for world, first, second in (*apart, (2, 1, 1), (4, 1, 1), (8, 1, 1)):
        tensors = ref.randoms(world, [count], dtype)
        srcs = [shifted(t, second if r == 3 else first) for r, t in enumerate(tensors)]
        launches = launch([Task(srcs, srcs)])
        ref.assert_same([s.flatten() for s in srcs], [ref.left_fold(tensors, "sum")] * world)
        assert sum(one["loaded"] for one in launches) == world * count * dtype.itemsize
        assert sum(one["loaded_twice"] for one in launches) == 0
        if first == second and count > 511:
            assert launches[0]["widest_load"] == launches[0]["widest_store"] == 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=ref.short)
def test_rows_at_different_alignments(dtype: torch.dtype):
    """As in a reduce-scatter of columns: only the sources have gaps between their rows."""
    tensors = ref.randoms(3, [6, 2001], dtype)
    srcs = [torch.zeros(6, 2051, dtype=dtype)[:, 7 : 7 + 2001].copy_(t) for t in tensors]
    dst = torch.zeros(6, 2001, dtype=dtype)
    (one,) = launch([Task([dst], srcs)], multiprocessors=2)
    ref.assert_same([dst], [ref.left_fold(tensors, "sum")])
    assert one["loaded_twice"] == 0
    assert one["widest_load"] == dtype.itemsize
    packets = 2001 * dtype.itemsize // 512 * 32
    accesses = 6 * (packets + 2001 - packets * 16 // dtype.itemsize)
    assert len(one["accesses"]) == -(-accesses // 256)


@pytest.mark.parametrize(("dtype", "op"), ALLOWED, ids=lambda v: ref.short(v))
def test_tree_order(dtype: torch.dtype, op: str):
    """In one launch, as packets only where those of four or eight ranks are aligned."""
    for world, apart in ((2, 0), (3, 1), (4, 0), (4, 1), (5, 0), (7, 0), (8, 0), (9, 0), (17, 3)):
        tensors = ref.randoms(world, [4100 // world], dtype, seed=world)
        srcs = [shifted(t, 1 + apart * (r % 2)) for r, t in enumerate(tensors)]
        in_place = world % 2 == 0
        dsts = srcs if in_place else [shifted(tensors[0], 1)]
        (one,) = launch([Task(dsts, srcs)], op, order="tree", multiprocessors=world % 3 + 1)
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
        launch([Task([dst], srcs)], order="tree")
        ref.assert_same([dst], [ref.fold(tensors, "sum", "tree")])
    flat = torch.zeros(1, 63)
    launch([Task([flat], [one_row(t) for t in tensors])], order="tree")
    ref.assert_same([flat.view(3, 21)], [ref.fold(tensors, "sum", "tree")])


@pytest.mark.parametrize("dtype", ref.NARROW, ids=ref.short)
@pytest.mark.parametrize("world", [2, 3, 4, 8, 11])
def test_sums_of_narrow_floats_as_accumulators(dtype: torch.dtype, world: int):
    tensors = ref.randoms(world, [777], dtype)
    out = torch.zeros(1, 777)
    (one,) = launch([Task([out], [shifted(t, r % 3) for r, t in enumerate(tensors)])], order="tree")
    ref.assert_same([out[0]], [ref.fold([t.float() for t in tensors], "sum", "tree")])
    assert one["kind"] == "widening_fold"
    assert (one["widest_load"], one["widest_store"]) == (dtype.itemsize, 4)


@pytest.mark.parametrize("dtype", ref.NARROW[2:], ids=ref.short)
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "avg"])
def test_all_pairs_of_8_bit_floats(dtype: torch.dtype, op: str):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    a, b = codes.repeat(256), codes.view(torch.uint8).repeat_interleave(256).view(dtype)
    out = torch.empty_like(a)
    launch([Task([one_row(out)], [one_row(a), one_row(b)])], op)
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
    launch([Task([one_row(out)], [one_row(a), one_row(b)])], float8=codes)
    assert out.view(torch.uint8).tolist() == wanted


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "band", "bor", "bxor"])
def test_nonzero_bytes_of_bool_are_true(op: str):
    a, b = torch.arange(256).to(torch.uint8).repeat(256), torch.arange(2**16).div(256).byte()
    out = torch.empty(2**16, dtype=torch.bool)
    launch([Task([one_row(out)], [one_row(a.view(torch.bool)), one_row(b.view(torch.bool))])], op)
    assert torch.equal(out.view(torch.uint8), ref.left_fold([a != 0, b != 0], op).byte())


@pytest.mark.parametrize("dtype", ref.NARROW[:2], ids=ref.short)
@pytest.mark.parametrize("other", [0.0, 1.0, -3e-8, 65504.0, 1e-3])
def test_all_16_bit_floats(dtype: torch.dtype, other: float):
    a = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    b = torch.full_like(a, other)
    for op in ("sum", "prod", "avg", "min"):
        out = torch.empty_like(a)
        launch([Task([one_row(out)], [one_row(a), one_row(b)])], op)
        ref.assert_same([out], [ref.left_fold([a, b], op)], op, op=op)


def test_only_finishing_folds_divide_by_the_world():
    for dtype in (torch.float32, torch.float16, torch.int64):
        tensors = ref.randoms(3, [100], dtype)
        total, mean = one_row(torch.empty_like(tensors[0])), one_row(torch.empty_like(tensors[0]))
        srcs = [one_row(t) for t in tensors]
        (one,) = launch([Task([total], srcs, finishes=False), Task([mean], srcs)], "avg")
        assert one["tasks"] == 2
        ref.assert_same([total[0]], [ref.left_fold(tensors, "sum")])
        ref.assert_same([mean[0]], [ref.left_fold(tensors, "avg")])


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.complex128])
def test_the_width_of_copies_is_the_common_alignment(dtype: torch.dtype):
    item = dtype.itemsize
    for count, to, source in itertools.product((1, 15, 16, 10_007), (0, 1, 2), (0, 1, 3, 4)):
        values = torch.arange(count * item).to(torch.uint8).view(dtype)
        src, dst = shifted(values, source), shifted(torch.zeros_like(values), to)
        (one,) = launch([Task([dst], [src])])
        assert one["kind"] == "copy"
        assert torch.equal(dst.view(torch.uint8), src.view(torch.uint8))
        assert one["loaded"] == one["stored"] == count * item
        assert one["loaded_twice"] == 0
        if count > 100:
            apart = abs(to - source) * item
            assert one["widest_load"] == (apart & -apart if apart % 16 else 16)


def test_copies_keep_every_bit():
    for dtype in (*ref.NARROW, torch.float32, torch.bool):
        codes = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.uint8)
        src, dsts = codes.clone(), [torch.zeros_like(codes) for _ in range(3)]
        launch([Task([one_row(d.view(dtype)) for d in dsts], [one_row(src.view(dtype))])], world=4)
        assert all(torch.equal(d, codes) for d in dsts)


# --- rows -----------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.data())
def test_any_rows(data: st.DataObject):
    draw = data.draw
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.complex64]))
    world, n_dsts = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    height, width = draw(st.integers(1, 40)), draw(st.integers(1, 70))
    multiprocessors = draw(st.sampled_from([1, 100]))

    def view(values: Tensor) -> Tensor:
        gap, first = draw(st.sampled_from([0, 0, 1, 2, 7, 8, 16])), draw(st.integers(0, 5))
        base = torch.zeros(height * (width + gap) + first + 64, dtype=dtype)
        return base[first:].as_strided([height, width], [width + gap, 1]).copy_(values)

    tensors = ref.randoms(world, [height, width], dtype)
    srcs = [view(t) for t in tensors]
    in_place = draw(st.booleans())
    dsts = srcs if in_place else [view(tensors[0] * 0) for _ in range(n_dsts)]
    launches = launch([Task(dsts, srcs)], multiprocessors=multiprocessors)
    wanted = ref.left_fold(tensors, "sum") if world > 1 else tensors[0]
    ref.assert_same(dsts, [wanted] * len(dsts))
    assert sum(one["loaded"] for one in launches) == world * reals(wanted)
    assert sum(one["loaded_twice"] for one in launches) == 0


def test_rows_without_gaps_are_merged():
    srcs = [torch.arange(64.0).view(16, 4) + r for r in range(2)]
    (one,) = launch([Task(srcs, srcs)])
    assert one["widest_load"] == 16
    assert len(one["accesses"]) == 1
    assert torch.equal(srcs[1], torch.arange(64.0).view(16, 4) * 2 + 1)


# --- arguments and grids --------------------------------------------------------------------------


def test_tasks_that_exceed_the_arguments_take_several_launches():
    counts = [1 + 37 * i % 300 for i in range(700)]
    tensors = [ref.randoms(4, [count], torch.float32, seed=count) for count in counts]
    tasks = [Task(srcs, srcs) for srcs in ([one_row(t.clone()) for t in four] for four in tensors)]
    launches = launch(tasks)
    assert len(launches) == -(-700 // ((ARGS_BYTES - 32) // 64))
    assert sum(one["tasks"] for one in launches) == 700
    for four, task in zip(tensors, tasks, strict=True):
        ref.assert_same([s[0] for s in task.srcs], [ref.left_fold(four, "sum")] * 4)


def test_copies_and_folds_are_launched_separately():
    fold = Task([one_row(torch.zeros(9))], [one_row(torch.ones(9))] * 2)
    copies = [Task([one_row(torch.zeros(9))], [one_row(torch.ones(9))]) for _ in range(2)]
    launches = launch([copies[0], fold, copies[1]])
    assert [(one["kind"], one["tasks"]) for one in launches] == [("fold", 1), ("copy", 2)]
    assert bool((fold.dsts[0] == 2).all())
    assert all(bool((copy.dsts[0] == 1).all()) for copy in copies)


@pytest.mark.parametrize("world", [64, 503, 504])
def test_worlds_that_fill_the_arguments(world: int):
    tasks = []
    for _ in range(3):
        srcs = [torch.full((1, 17), float(r)) for r in range(world)]
        tasks.append(Task(srcs, srcs))
    launches = launch(tasks)
    assert sum(one["tasks"] for one in launches) == 3
    wanted = ref.left_fold([torch.full((1, 17), float(r)) for r in range(world)], "sum")
    for task in tasks:
        ref.assert_same(task.srcs, [wanted] * world)


@pytest.mark.parametrize("height", [1, 6])
@pytest.mark.parametrize("world", [1, 2, 100])
def test_destinations_that_exceed_the_arguments_are_copied_from_the_first(world: int, height: int):
    tensors = ref.randoms(world, [height, 19], torch.bfloat16)
    base = [torch.zeros(height, 32, dtype=torch.bfloat16) for _ in range(1300)]
    dsts = [r[:, :19] for r in base]
    launches = launch([Task(dsts, tensors)], "avg")
    wanted = ref.left_fold(tensors, "avg") if world > 1 else tensors[0]
    ref.assert_same(dsts, [wanted] * 1300)
    assert [one["kind"] for one in launches] == sorted((o["kind"] for o in launches), reverse=True)
    assert sum(one["stored"] for one in launches) == 1300 * reals(wanted)


def test_sources_that_exceed_a_table_are_refused():
    srcs = [torch.ones(1, 4)] * 600
    with pytest.raises(ValueError, match="folds up to 503 sources at once; there are 600"):
        launch([Task([torch.zeros(1, 4)], srcs)])


def test_misaligned_addresses_are_refused():
    odd = torch.zeros(65, dtype=torch.uint8)[1:].data_ptr()
    even = torch.zeros(64, dtype=torch.uint8).data_ptr()
    task = ([odd], [odd, even], [0], [0, 0], 4, 1, True)
    with pytest.raises(ValueError, match="float32 at multiples of 4 bytes"):
        _testing.emulate_launch([task], "float32", "sum", 2, 1, float8_bytes())


def test_undefined_reductions_are_refused():
    with pytest.raises(TypeError, match="band is not defined for float32"):
        launch([Task([torch.zeros(1, 4)], [torch.ones(1, 4)] * 2)], "band")


def test_empty_tasks_are_not_launched():
    empty, some = torch.zeros(1, 0), torch.ones(1, 4)
    assert launch([Task([empty], [empty, empty]), Task([empty], [empty])]) == []
    out = torch.zeros(1, 4)
    (one,) = launch([Task([empty], [empty] * 2), Task([out], [some, some])])
    assert one["tasks"] == 1


def in_place(count: int) -> Task:
    srcs = [one_row(torch.ones(count)) for _ in range(2)]
    return Task(srcs, srcs)


# Elements of each task -> least and largest number of blocks on one multiprocessor, of which 12
# run at once. One block more than whole waves would run alone, while the rest of the GPU waits.
BLOCKS = [
    *[(counts, 12, 12) for counts in ([90_000], [30_000] * 5, [50_000] * 12, [70_001, 20_002])],
    ([90_000, *[64] * 5], 12, 12 + 5),  # a task smaller than a block adds one
    ([*[64] * 5, 90_000], 12, 12 + 5),
]


@pytest.mark.parametrize(("counts", "least", "most"), BLOCKS)
def test_tasks_share_the_blocks_of_whole_waves(counts: list[int], least: int, most: int):
    tasks = [in_place(count) for count in counts]
    (one,) = launch(tasks, multiprocessors=1)
    assert least <= len(one["accesses"]) <= most
    assert all(bool((s == 2).all()) for task in tasks for s in task.srcs)


def test_a_large_task_among_small_ones_is_shared_by_most_blocks():
    tasks = [in_place(400_000), *(in_place(64) for _ in range(80))]
    (one,) = launch(tasks, multiprocessors=4)
    assert len(one["accesses"]) <= 4 * 12 + 80
    assert max(one["accesses"]) <= 2 * 400_000 * 4 / 4 / (4 * 12 - 3)


def test_small_tasks_have_a_thread_for_every_packet():
    srcs = [one_row(torch.ones(61_706)) for _ in range(4)]
    (one,) = launch([Task(srcs, srcs)], multiprocessors=132)
    assert len(one["accesses"]) == -(-(61_706 // 4 + 2) // 256)
    for count in (1, 2, 3, 5, 256):
        srcs = [shifted(torch.ones(count), 1) for _ in range(2)]
        (one,) = launch([Task(srcs, srcs)], multiprocessors=132)
        assert len(one["accesses"]) == 1
