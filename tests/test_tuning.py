"""Tuning on the ranks' own devices, among algorithms that keep the contract: bits never change."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from reference import assert_same, expected, left_fold, randoms
from sites import GPU, ON_GPU, VIRTUAL

import pycollect as pc
from pycollect import _C, tuning
from pycollect._timing import Timing
from pycollect.tuning import SizeRange, Tuning


def spy_on(call, position, names):
    def spy(*args):
        names.append(args[position])
        return call(*args)

    return spy


@pytest.fixture
def selected(monkeypatch):
    """The algorithms passed to the calls, in order."""
    names = []
    for call in ("all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "all_gather"):
        monkeypatch.setattr(
            _C, call, spy_on(getattr(_C, call), 3 if call == "reduce" else 2, names)
        )
    return names


def fake_times(monkeypatch, seconds):
    """Give every algorithm the time in the table, by name; "" is the library's own choice."""

    def interleave(samplers, effort):
        for sampler in samplers.values():
            sampler(1)
        return {name: Timing(((seconds.get(name, 10.0),),) * 2) for name in samplers}

    monkeypatch.setattr(tuning, "interleave", interleave)


@pytest.mark.parametrize("device", ["cpu", pytest.param(GPU, marks=ON_GPU)])
def test_tuned_calls_have_the_same_bits(device):
    tuned = pc.Communicator([device] * 3)
    found = tuned.tune(sizes=[4096, 1 << 18], seconds=0.02)
    assert found is tuned.tuning
    assert sorted(found.spans) == tuning.tunable()
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        for count in (10, 5_000, 100_000):
            values = randoms(3, (count,), dtype)
            for name in ("all_reduce", "reduce", "broadcast", "all_gather"):
                tensors = [v.to(device, copy=True) for v in values]
                got = getattr(tuned, name)(tensors) or tensors
                assert_same([g.cpu() for g in got], expected(name, values), f"{name}, {dtype}")


def test_the_fastest_algorithm_that_keeps_the_contract_is_selected(monkeypatch, selected):
    fake_times(monkeypatch, {"": 4.0, "chain": 1.0, "two_shot": 2.0, "fused": 3.0, "one_shot": 5.0})
    communicator = pc.Communicator("cpu*2")
    communicator.tune(["all_reduce"], sizes=[64])
    selected.clear()
    communicator.all_reduce([torch.ones(3), torch.ones(3)])
    communicator.all_reduce([torch.ones(3).half(), torch.ones(3).half()])
    communicator.all_reduce([torch.ones(3).int(), torch.ones(3).int()])
    communicator.all_reduce_coalesced([[torch.ones(3), torch.ones(1).half()] for _ in range(2)])
    communicator.all_reduce([torch.ones(3), torch.ones(3)], algorithm="tree")
    communicator.broadcast([torch.ones(3), torch.ones(3)])
    pc.all_reduce([torch.ones(3), torch.ones(3)])
    assert selected == ["chain", "two_shot", "chain", "two_shot", "tree", None, None]


def test_small_gains_and_algorithms_that_break_the_contract_keep_the_default(monkeypatch, selected):
    breaking = dict.fromkeys(("ring", "tree", "halving_doubling"), 0.1)
    fake_times(monkeypatch, {"": 2.0, "fused": 1.94, **breaking})
    communicator = pc.Communicator("cpu*4")
    communicator.tune(["all_reduce"], sizes=[64])
    assert not {*breaking} & {*selected}
    selected.clear()
    communicator.all_reduce([torch.ones(3) for _ in range(4)])
    assert selected == [None]


def test_size_ranges_have_their_own_algorithms(selected):
    communicator = pc.Communicator("cpu*2")
    small, large = SizeRange(1000, ("fused", None)), SizeRange(math.inf, ("two_shot", None))
    communicator.tuning = Tuning({"all_reduce": (small, large)})
    for count in (250, 251):
        communicator.all_reduce([torch.ones(count), torch.ones(count)])
    communicator.all_reduce_coalesced([[torch.ones(200), torch.ones(200)] for _ in range(2)])
    assert selected == ["fused", "two_shot", "two_shot"]
    assert str(communicator.tuning) == (
        "all_reduce from 0 B: fused, default\nall_reduce from 1000 B: two_shot, default"
    )


def test_tunings_are_merged_and_pickled(monkeypatch):
    fake_times(monkeypatch, {"": 1.0})
    communicator = pc.Communicator("cpu*2")
    communicator.tune(["all_reduce"], sizes=[64])
    communicator.tune(["broadcast"], sizes=[64])
    assert sorted(communicator.tuning.spans) == ["all_reduce", "broadcast"]
    other = pc.Communicator("cpu*2")
    other.tuning = pickle.loads(pickle.dumps(communicator.tuning))
    assert other.tuning == communicator.tuning
    x = [torch.ones(2), torch.ones(2)]
    other.all_reduce(x)
    assert x[0].tolist() == [2.0, 2.0]


def test_invalid_arguments_are_refused_after_tuning():
    communicator = pc.Communicator("cpu*2")
    communicator.tuning = Tuning({"all_reduce": (SizeRange(math.inf, ("fused", None)),)})
    for bad in (None, 3, [], ["a", "b"], [torch.ones(1)]):
        with pytest.raises((TypeError, ValueError)):
            communicator.all_reduce(bad)
    arrays = [np.ones(3, np.float32), np.ones(3, np.float32)]
    communicator.all_reduce(arrays)
    assert arrays[1].tolist() == [2.0] * 3


def test_a_tuned_call_moves_dtypes_that_have_no_sums():
    """Regression: it raised TypeError, as if the dtype had to be added."""
    communicator = pc.Communicator("cpu*2")
    communicator.tuning = Tuning({"broadcast": (SizeRange(math.inf, ("chain", None)),)})
    x = [torch.tensor([1, 2], dtype=torch.uint16), torch.zeros(2, dtype=torch.uint16)]
    communicator.broadcast(x)
    assert x[1].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"collectives": ["all_to_all"]}, "'all_to_all' cannot be tuned.*'all_reduce'"),
        ({"sizes": []}, r"sizes is \[\]"),
        ({"sizes": [0]}, r"sizes is \[0\]"),
        ({"seconds": 0}, "seconds is 0"),
    ],
)
def test_invalid_arguments_of_tune_are_refused(options, words):
    communicator = pc.Communicator("cpu*2")
    with pytest.raises(ValueError, match=words):
        communicator.tune(**options)
    assert communicator.tuning is None


@pytest.mark.cuda
def test_tuning_on_several_streams_of_a_gpu():
    tuned = pc.Communicator(VIRTUAL.devices(4), peer_access=False)
    tuned.tune(["all_reduce"], sizes=[4096, 1 << 22], seconds=0.05)
    values = randoms(4, (1_000_003,), torch.float32)
    tensors = [v.to(GPU) for v in values]
    tuned.all_reduce(tensors)
    assert_same([t.cpu() for t in tensors], [left_fold(values, "sum")] * 4)
