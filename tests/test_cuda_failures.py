"""Failed calls leave the library usable: bad arguments, missing devices, out of memory.

The table of test_arguments.py runs again with tensors on the GPU and expects the same refusals.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device_placements import GPU, MARKS, STAGED, STANDS_IN, VIRTUAL, PlacedCall, several_gpus
from reference import assert_same, left_fold, randoms
from test_arguments import CASES

import pycollect as pc

pytestmark = MARKS
HERE = torch.device(GPU)


def assert_calls_work():
    values = randoms(3, (1001,), torch.int32)
    for algorithm in (None, *pc.algorithms()):
        tensors = [v.to(GPU, copy=True) for v in values]
        pc.all_reduce(tensors, algorithm=algorithm)
        assert_same([t.cpu() for t in tensors], [left_fold(values, "sum")] * 3, algorithm)


# --- bad arguments --------------------------------------------------------------------------------


def tensors_in(value):
    """All tensors and arrays in the arguments, at any depth."""
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors_in(v)]
    return [value] if isinstance(value, (torch.Tensor, np.ndarray)) else []


def on_gpu(args, placed_call):
    """The arguments with CPU tensors and devices replaced by those of the GPU."""
    if isinstance(args, str):
        return args.replace("cpu", GPU)
    if isinstance(args, torch.device):
        return HERE
    if isinstance(args, (list, tuple)) and not tensors_in(args):
        return type(args)(on_gpu(a, placed_call) for a in args)
    return placed_call.to_device(args, HERE)


def runs_on_gpu(case):
    """Whether the case can run on a GPU: not with NumPy arrays or a CPU communicator."""
    call, make, _, words, _ = case.values
    args, options = make()
    arrays = any(isinstance(t, np.ndarray) for t in tensors_in([args, list(options.values())]))
    return not arrays and "CPU" not in words and not hasattr(call, "__self__")


@pytest.mark.parametrize(
    ("call", "make", "error", "words", "async_op"), [case for case in CASES if runs_on_gpu(case)]
)
def test_invalid_calls_raise_before_data_moves(call, make, error, words, async_op):
    args, options = make()
    placed_call = PlacedCall()
    args = [on_gpu(a, placed_call) for a in args]
    options = {k: on_gpu(v, placed_call) for k, v in options.items()}
    if async_op:
        options["async_op"] = True
    watched = [t for t in tensors_in([args, list(options.values())]) if not t.is_meta]
    watched = [t for t in watched if t.layout == torch.strided]
    before = [(t.untyped_storage().cpu().tolist(), t._version) for t in watched]
    with pytest.raises(error, match=f"(?s){words}"):
        call(*args, **options)
    after = [(t.untyped_storage().cpu().tolist(), t._version) for t in watched]
    assert after == before, "a refused call changed a tensor"


def test_calls_work_after_refusals():
    assert_calls_work()


# --- invalid devices ------------------------------------------------------------------------------


def test_missing_devices_are_refused():
    x = torch.ones(4, device=GPU)
    count = torch.cuda.device_count()
    missing = f"cuda:{count}"
    for call in (
        lambda: pc.Communicator([GPU, missing]),
        lambda: pc.scatter(x, [GPU, missing]),
        lambda: pc.replicate([x], [missing]),
        lambda: pc.gather([x, x], missing),
        lambda: pc.barrier([missing]),
        lambda: pc.devices(f"{missing}*2"),
    ):
        with pytest.raises(ValueError, match=rf"{missing}|index {count}"):
            call()
    assert_calls_work()


def test_tensors_on_other_devices_than_the_communicators_are_refused():
    other = "meta" if STANDS_IN else "cpu"
    communicator = pc.Communicator([GPU] * 2)
    for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        call = getattr(communicator, name)
        with pytest.raises(ValueError, match=rf"rank 1 .*{other}"):
            call([torch.ones(3, device=GPU), torch.ones(3, device=other)])
        with pytest.raises(ValueError, match=r"3.*2"):
            call([torch.ones(3, device=GPU) for _ in range(3)])
    assert_calls_work()


@pytest.mark.cuda
def test_tensors_on_another_gpu_than_the_communicators_are_refused():
    first, second = several_gpus()[:2]
    with pytest.raises(ValueError, match=f"rank 1 .*{second}"):
        pc.Communicator([first, first]).all_reduce(
            [torch.ones(3, device=first), torch.ones(3, device=second)]
        )


@pytest.mark.cuda
def test_a_device_without_an_index_is_the_current_one():
    current = torch.device("cuda", torch.cuda.current_device())
    assert pc.Communicator(["cuda", "cuda"]).devices == [current] * 2
    assert {c.device for c in pc.scatter(torch.ones(4), ["cuda"] * 2)} == {current}


# --- out of memory --------------------------------------------------------------------------------


def extremes(tensor):
    """The smallest and largest value, computed without much extra memory."""
    return float(tensor.min()), float(tensor.max())


@pytest.fixture
def little_memory():
    """Limit torch's allocator to 256 MiB more than it has reserved."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    limit = torch.cuda.memory_reserved() + (256 << 20)
    torch.cuda.set_per_process_memory_fraction(limit / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@pytest.mark.cuda
@pytest.mark.parametrize("placement", [VIRTUAL, STAGED], ids=lambda h: h.label)
def test_out_of_memory_raises_and_keeps_no_memory(placement, little_memory):
    api = placement.api(4)
    tensors = [torch.full((8 << 20,), float(r), device="cuda:0") for r in range(4)]  # 32 MiB each
    kept = []
    for _ in range(3):
        with pytest.raises(torch.cuda.OutOfMemoryError):
            api.all_gather(tensors)  # 512 MiB of results
        kept.append(torch.cuda.memory_allocated())
    assert kept[2] == kept[0], "a failed call keeps memory"
    assert [extremes(t) for t in tensors] == [(float(r), float(r)) for r in range(4)]
    api.all_reduce(tensors)
    assert [extremes(t) for t in tensors] == [(6.0, 6.0)] * 4


@pytest.mark.cuda
@pytest.mark.parametrize("algorithm", pc.algorithms())
def test_no_memory_for_scratch_changes_no_input(algorithm, little_memory):
    tensors = [torch.full((12 << 20,), float(r), device="cuda:0") for r in range(4)]  # 48 MiB each
    try:
        pc.all_reduce(tensors, algorithm=algorithm)
    except (torch.cuda.OutOfMemoryError, pc.CollectiveError):
        assert [extremes(t) for t in tensors] == [(float(r), float(r)) for r in range(4)]
    else:
        assert [extremes(t) for t in tensors] == [(6.0, 6.0)] * 4
    del tensors
    assert_calls_work()


@pytest.mark.cuda
def test_out_of_memory_elsewhere_does_not_affect_calls():
    values = randoms(3, (100_003,), torch.int32)
    tensors = [v.cuda() for v in values]
    work = pc.all_reduce(tensors, async_op=True)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(1 << 45, device="cuda:0")
    work.wait()
    assert_same([t.cpu() for t in tensors], [left_fold(values, "sum")] * 3)
    assert_calls_work()
