"""The training step as a CUDA graph; without a GPU a plain function stands in for the replay."""

from contextlib import nullcontext
from functools import partial
from unittest.mock import MagicMock

import pytest
import torch
from sites import GPU, ON_GPU
from torch import nn
from train_cases import perceptron, replicas_of

from pycollect.train import GraphedStep, LeNet, init_lenet, lenet, replicate_params, train_batch
from pycollect.train.graph import capture
from pycollect.train.records import same_bits


def as_graph(run):
    """Call the function as often as a capture does; the replay is one more call."""
    for _ in range(3):
        run()
    return run


def batch(seed, n=10):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand((n, 1, 28, 28), generator=generator), torch.arange(n).roll(seed)


def of_modules(devices, capturing, begun):
    """Two functions that train eagerly, the second step captured, and the tensors of both."""
    module = nn.Sequential(nn.BatchNorm2d(1), LeNet(seed=1))
    eager, graphed = (replicas_of(module, 3, devices=devices) for _ in "ab")
    steps = [lambda X, y, r=r: r.step(X, y, shares=[len(X) - 2, 2, 0]) for r in (eager, graphed)]
    for step in steps if begun else ():
        step(*batch(98))
    captured = GraphedStep.of(*batch(99), graphed, shares=[8, 2, 0], capturing=capturing)
    tensors = [[t for m in r.modules for t in m.state_dict().values()] for r in (eager, graphed)]
    return *steps, captured, *tensors


def from_scratch(devices, capturing, begun):
    eager, graphed = (replicate_params(init_lenet(), devices) for _ in "ab")
    for replica in (*eager, *graphed):
        replica[0].grad += float(begun)
    steps = [partial(train_batch, replicas=r, lr=0.1, model=lenet) for r in (eager, graphed)]
    make = partial(GraphedStep.from_scratch, model=lenet, capturing=capturing)
    tensors = [[t for replica in r for t in replica] for r in (eager, graphed)]
    return *steps, make(*batch(99), graphed, 0.1), *tensors


@pytest.mark.parametrize(
    ("device", "capturing"), [("cpu", as_graph), pytest.param(GPU, capture, marks=ON_GPU)]
)
@pytest.mark.parametrize(
    ("make", "begun"), [(make, begun) for make in (from_scratch, of_modules) for begun in (0, 1)]
)
def test_a_captured_step_trains_the_same_bits(device, capturing, make, begun):
    # Some convolutions of cuDNN add in any order.
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        eager, between, captured, wanted, found = make([torch.device(device)] * 3, capturing, begun)
        assert all(map(same_bits, found, wanted)), "capturing has changed the state"
        start = [t.clone() for t in found]
        for seed in range(4):
            losses = captured(*batch(seed)), eager(*batch(seed))
            assert [*map(float, losses[0])] == [*map(float, losses[1])]
        eager(*batch(7, n=4)), between(*batch(7, n=4))  # a batch of another size, not captured
        eager(*batch(8)), captured(*batch(8))
        assert all(map(same_bits, found, wanted))
        assert not same_bits(found[-1], start[-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exact_times": True}, "exact times cannot be captured"),
        ({}, "on one GPU, and these ranks are on cpu: .*compile=True.* or --compile makes"),
    ],
)
def test_what_cannot_be_captured_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GraphedStep.of(*batch(0), replicas_of(LeNet(), 2, **options))


def test_other_shapes_and_several_devices_are_refused():
    X, y = torch.zeros(10, 6), torch.zeros(10).long()
    step = GraphedStep.of(X, y, replicas_of(perceptron(), 2), capturing=as_graph)
    with pytest.raises(ValueError, match=r"batches of shape \(10, 6\) and \(10,\), not \(9, 6\)"):
        step(X[:9], y[:9])
    with pytest.raises(ValueError, match="these ranks are on cpu, meta"):
        GraphedStep(X, y, step, lambda: [X, X.to("meta")], capturing=as_graph)


def test_other_threads_may_use_the_gpu_during_the_capture(monkeypatch):
    """They load batches: `pin_memory` is forbidden to all threads in a capture of mode "global"."""
    fakes = {name: MagicMock() for name in ("Stream", "current_stream", "CUDAGraph", "graph")}
    for name, fake in {**fakes, "stream": lambda _: nullcontext()}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    capture(lambda: None)
    assert fakes["graph"].call_args.kwargs == {"capture_error_mode": "thread_local"}
