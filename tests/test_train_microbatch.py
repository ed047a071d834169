"""Microbatches: the result of the whole batch, with less memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from train_cases import batches, difference, perceptron, replicas_of

from pycollect.train import LeNet
from pycollect.train.shares import microbatches


@pytest.mark.parametrize("microbatch", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_microbatches_train_as_the_whole_batch(world, microbatch):
    whole, parts = (replicas_of(perceptron(), world, microbatch=m) for m in (None, microbatch))
    for X, y in batches([16, 16, 7, 3, 1, 16]):
        torch.testing.assert_close(parts.step(X, y), whole.step(X, y))
    assert difference(whole.modules[0], perceptron()) > 0.1
    assert difference(whole.modules[0], parts.modules[0]) < 1e-6
    assert difference(parts.modules[0], parts.modules[-1]) == 0


def saved_bytes(replicas, X, y):
    """Peak bytes that a step saves for its backward passes, without parameters."""
    held, most = {}, 0
    known = {p.untyped_storage().data_ptr() for params in replicas.parameters for p in params}

    class Saved:
        def __init__(self, t):
            nonlocal most
            self.t = t
            if t.untyped_storage().data_ptr() not in known:
                held[id(self)] = t.nbytes
                most = max(most, sum(held.values()))

        def __del__(self):
            held.pop(id(self), None)

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.t):
        replicas.step(X, y)
    assert not held
    return most


@pytest.mark.parametrize("world", [1, 2])
def test_memory_falls_with_the_microbatch(world):
    X, y = torch.rand(32, 1, 28, 28), torch.randint(10, (32,))
    whole, half, small = (
        saved_bytes(replicas_of(LeNet(), world, microbatch=k), X, y) for k in (None, 16, 4)
    )
    assert half == pytest.approx(whole / 2, rel=0.05)
    assert small == pytest.approx(whole / 8, rel=0.05)


@pytest.mark.cuda
def test_memory_falls_on_a_gpu():
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


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(sum), st.integers(1, 30))
def test_microbatches_are_the_shards_cut_evenly(shares, size):
    parts = microbatches(tuple(shares), size)
    assert [sum(of_rank) for of_rank in zip(*parts, strict=True)] == shares
    assert [sum(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert 1 <= sum(parts[-1]) <= size
    for rank, share in enumerate(shares):
        wanted = share * size / sum(shares)
        assert all(abs(part[rank] - wanted) < len(shares) + 1 for part in parts[:-1])
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
def test_the_strict_rule(n, microbatch, message):
    ((X, y),) = batches([n])
    replicas = replicas_of(perceptron(), 2, strict=True, microbatch=microbatch)
    with pytest.raises(ValueError, match=message):
        replicas.step(X, y)
    assert difference(replicas.modules[0], perceptron()) == 0
    for allowed in ({"microbatch": microbatch}, {"strict": True, "microbatch": 4}):
        n -= n % 4 if "strict" in allowed else 0
        replicas_of(perceptron(), 2, **allowed).step(X[:n], y[:n])
