"""Failed calls leave the library usable: missing devices, tensors elsewhere, out of memory."""

from __future__ import annotations

import pytest
import torch
from reference import assert_same, left_fold, randoms
from sites import GPU, STAGED, VIRTUAL, several_gpus

import pycollect as pc

pytestmark = pytest.mark.cuda


def assert_calls_work():
    values = randoms(3, (1001,), torch.int32)
    for algorithm in (None, *pc.algorithms()):
        tensors = [v.to(GPU, copy=True) for v in values]
        pc.all_reduce(tensors, algorithm=algorithm)
        assert_same([t.cpu() for t in tensors], [left_fold(values, "sum")] * 3, algorithm)


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


@pytest.mark.parametrize("other", ["cpu", "another GPU"])
def test_tensors_on_other_devices_than_the_communicators_are_refused(other):
    other = other if other == "cpu" else several_gpus()[1]
    communicator = pc.Communicator([GPU] * 2)
    for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        with pytest.raises(ValueError, match=rf"rank 1 .*{other}"):
            getattr(communicator, name)([torch.ones(3, device=d) for d in (GPU, other)])
    assert_calls_work()


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
