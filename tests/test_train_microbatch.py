"""Microbatches: the result of the whole batch, with less memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from train_cases import batches, difference, perceptron, replicas_of, trained

from pycollect.train import LeNet, ReplicaTrainer
from pycollect.train.shares import microbatches

SIZES = [16, 16, 7, 3, 1, 16]


@pytest.mark.parametrize("microbatch", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_microbatches_train_as_the_whole_batch(world: int, microbatch: int) -> None:
    whole = trained(perceptron(), world, SIZES)
    parts = trained(perceptron(), world, SIZES, microbatch=microbatch)
    assert difference(whole.modules[0], perceptron()) > 0.1
    assert difference(whole.modules[0], parts.modules[0]) < 1e-6
    assert difference(parts.modules[0], parts.modules[-1]) == 0


def test_losses_are_those_of_the_whole_batch() -> None:
    ((X, y),) = batches([11])
    whole, parts = replicas_of(perceptron(), 3), replicas_of(perceptron(), 3, microbatch=4)
    torch.testing.assert_close(parts.step(X, y), whole.step(X, y))


def saved_bytes(replicas: ReplicaTrainer, X: Tensor, y: Tensor) -> int:
    """Peak bytes that a step saves for its backward passes, without parameters."""
    held: dict[int, int] = {}
    most = 0
    known = {p.untyped_storage().data_ptr() for params in replicas.parameters for p in params}

    class Saved:
        def __init__(self, t: Tensor) -> None:
            nonlocal most
            self.t, self.key = t, t.untyped_storage().data_ptr()
            if self.key not in known:
                held[id(self)] = t.nbytes
                most = max(most, sum(held.values()))

        def __del__(self) -> None:
            held.pop(id(self), None)

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.t):
        replicas.step(X, y)
    assert not held
    return most


@pytest.mark.parametrize("world", [1, 2])
def test_memory_falls_with_the_microbatch(world: int) -> None:
    X, y = torch.rand(32, 1, 28, 28), torch.randint(10, (32,))
    whole, half, small = (
        saved_bytes(replicas_of(LeNet(), world, microbatch=k), X, y) for k in (None, 16, 4)
    )
    assert half == pytest.approx(whole / 2, rel=0.05)
    assert small == pytest.approx(whole / 8, rel=0.05)


@pytest.mark.cuda
def test_memory_falls_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    X, y = torch.rand(512, 1, 28, 28), torch.randint(10, (512,))
    peaks = []
    for microbatch in (None, 64):
        module = nn.Sequential(nn.Conv2d(1, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(43264, 10))
        replicas = replicas_of(module, 2, devices=[device] * 2, microbatch=microbatch)
        replicas.step(X, y)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        replicas.step(X, y)
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
        del replicas
    assert peaks[1] < 0.7 * peaks[0]  # cuDNN's workspace is in both


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 30))
def test_microbatches_are_the_shards_cut_evenly(shares: list[int], size: int) -> None:
    if not sum(shares):
        return
    parts = microbatches(tuple(shares), size)
    assert [sum(of_rank) for of_rank in zip(*parts, strict=True)] == shares
    assert [sum(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert 1 <= sum(parts[-1]) <= size
    for rank, share in enumerate(shares):
        wanted = share * size / sum(shares)
        assert all(abs(part[rank] - wanted) < len(shares) + 1 for part in parts[:-1])


def test_divisible_shares_are_split_evenly() -> None:
    assert microbatches((8, 8), 4) == ((2, 2),) * 4
    assert microbatches((6, 6, 6), 9) == ((3, 3, 3),) * 2


@pytest.mark.parametrize(
    ("n", "microbatch", "message"),
    [
        (7, None, "batch size must be divisible by the number of devices: 7 examples on 2"),
        (8, 3, "microbatch size must be divisible by the number of devices: 3 examples on 2"),
        (8, 6, "batch size must be divisible by the microbatch size: 8 examples in .* of 6"),
    ],
)
def test_strict_divisibility(n: int, microbatch: int | None, message: str) -> None:
    ((X, y),) = batches([n])
    replicas = replicas_of(perceptron(), 2, strict=True, microbatch=microbatch)
    with pytest.raises(ValueError, match=message):
        replicas.step(X, y)
    assert difference(replicas.modules[0], perceptron()) == 0
    relaxed = replicas_of(perceptron(), 2, microbatch=microbatch)
    relaxed.step(X, y)
    assert difference(relaxed.modules[0], perceptron()) > 0


def test_strict_accepts_divisible_batches() -> None:
    trained(perceptron(), 2, [8, 12], strict=True, microbatch=4)
