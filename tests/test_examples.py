"""The two network partitionings of examples/: outputs and gradients as on one device."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import programs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pycollect as pc
from pycollect.train import digits, lenet

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
CLOSE = {"rtol": 0, "atol": 1e-5}


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NETWORK, LAYERWISE = example("network_partitioning"), example("layerwise_partitioning")


def single(X: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Scores and gradients on one device; the gradients must be large enough to compare."""
    params = [p.clone().requires_grad_() for p in NETWORK.START]
    scores = lenet(X, params)
    F.cross_entropy(scores, y).backward()
    grads = [p.grad for p in params]
    assert min(float(g.abs().max()) for g in grads) > 1e-3
    return scores.detach(), grads


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    X, y = digits().train
    return X[:14], y[:14]


@pytest.mark.parametrize("microbatches", [1, 3])
def test_network_partitioning_is_one_device(
    batch: tuple[Tensor, Tensor], microbatches: int
) -> None:
    X, y = batch
    params = NETWORK.place(NETWORK.START, pc.devices("cpu*2"))
    scores = NETWORK.forward(X, params, microbatches)
    assert len(scores) == microbatches
    NETWORK.loss_of(scores, y).backward()
    expected, grads = single(X, y)
    torch.testing.assert_close(torch.cat(scores), expected, **CLOSE)
    torch.testing.assert_close([p.grad for p in params], grads, **CLOSE)
    assert NETWORK.difference(X, y, pc.devices("cpu*2")) < 1e-5


@pytest.mark.parametrize("world", [1, 2, 3])
def test_layerwise_partitioning_is_one_device(batch: tuple[Tensor, Tensor], world: int) -> None:
    X, y = batch
    devices = pc.devices(f"cpu*{world}")
    parts = LAYERWISE.split(LAYERWISE.START, devices)
    scores = LAYERWISE.forward(X, parts)
    torch.autograd.backward(LAYERWISE.losses_of(scores, y))
    expected, grads = single(X, y)
    torch.testing.assert_close(torch.cat(scores), expected, **CLOSE)
    for ranks, dim, grad in zip(parts, LAYERWISE.SPLIT_DIM, grads, strict=True):
        assert dim is None or max(p.numel() for p in ranks) < grad.numel() or world == 1
        found = torch.cat([p.grad for p in ranks], dim or 0)
        torch.testing.assert_close(found.view_as(grad), grad, **CLOSE)
    assert LAYERWISE.difference(X, y, devices) < 1e-5


def test_both_examples_train() -> None:
    torch.set_num_threads(1)  # small convolutions wait long for their threads on busy cores
    X, y = (part[:256] for part in digits().train)
    for losses in (
        NETWORK.train(X, y, NETWORK.place(NETWORK.START, pc.devices("cpu*2")), 20),
        LAYERWISE.train(X, y, LAYERWISE.split(LAYERWISE.START, pc.devices("cpu*2")), 20),
    ):
        assert sum(losses[-3:]) / 3 < 1.5 < 2 < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["network_partitioning", "layerwise_partitioning"])
def test_examples_run_as_programs(name: str) -> None:
    command = [sys.executable, EXAMPLES / f"{name}.py", "cpu*2"]
    ran = programs.run(command, timeout=120)
    assert ran.returncode == 0, ran.stderr
    first, second = ran.stdout.splitlines()
    assert "cpu" in first
    assert "test acc 0.9" in second


def test_network_partitioning_needs_two_ranks() -> None:
    with pytest.raises(SystemExit, match="two ranks are needed"):
        NETWORK.main(["cpu"])


@pytest.mark.cuda
@pytest.mark.parametrize("devices", ["cuda:0*2", ["cuda:0", "cpu"], ["cpu", "cuda:0"]])
def test_on_gpus(batch: tuple[Tensor, Tensor], devices: object) -> None:
    ranks = pc.devices(devices)
    # TF32 convolutions would differ by more.
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert NETWORK.difference(*batch, ranks) < 1e-5
        assert LAYERWISE.difference(*batch, ranks) < 1e-5
