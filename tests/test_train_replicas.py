"""Replicas beside the arithmetic of their step: memory, order, time, failures and evaluation."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from train_cases import CLASSES, FEATURES, batches, perceptron, replicas_of, same_bits, trained

from pycollect.train import LeNet, reduce_gradients_coalesced, reduce_gradients_naive
from pycollect.train.shares import microbatches

SIZES = (16, 7, 3, 1, 16)


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


# --- the parts of a step --------------------------------------------------------------------------

RANKS = ["rank 0 at layer 0", "rank 1 at layer 0"]
EARLY = [RANKS[0], "reduce 2", "reduce 2", RANKS[1], "reduce 2"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"bucket_bytes": 200}, EARLY),
        ({"bucket_bytes": 200, "microbatch": 4}, RANKS + EARLY),
        ({}, [*RANKS, "reduce 6"]),
        ({"overlap": False}, [*RANKS, "reduce 6"]),
    ],
)
def test_reductions_begin_while_the_backward_pass_goes_on(options, expected):
    """Checks which reductions precede the gradient of the first layer's output on each rank."""
    events = []

    def noted(gradients):
        events.append(f"reduce {len(gradients[0])}")
        reduce_gradients_naive(gradients)

    def watch(rank):
        return lambda module, X, out: (
            out.register_hook(lambda _: events.append(RANKS[rank])) and None
        )

    replicas = replicas_of(perceptron(), 2, reduction=noted, **options)
    for rank, module in enumerate(replicas.modules):
        module[0].register_forward_hook(watch(rank))
    replicas.step(*batches([8])[0])
    assert events == expected


@pytest.mark.parametrize("where", ["backward", "reduction"])
def test_a_step_after_a_failed_one_is_unaffected(where):
    failing = [where]

    def fail(here):
        if here in failing:
            failing.remove(here)
            raise ArithmeticError(f"the {here} has failed")

    def reduction(gradients):
        fail("reduction")
        reduce_gradients_coalesced(gradients)

    options = {"reduction": reduction} if where == "reduction" else {}
    replicas = replicas_of(perceptron(), 2, bucket_bytes=1, **options)
    layer = replicas.modules[1][2]
    layer.register_full_backward_hook(lambda *_: fail("backward"))
    with pytest.raises(ArithmeticError, match=f"the {where}"):
        replicas.step(*batches([6], seed=9)[0])
    assert same_bits(replicas.modules[0], perceptron())
    for X, y in batches(SIZES):
        replicas.step(X, y)
    wanted = trained(perceptron(), 2, SIZES)
    assert same_bits(replicas.modules[1], wanted.modules[1])


def test_parts_of_a_step_are_timed():
    replicas = trained(perceptron(), 2, [8], exact_times=True)
    seconds = replicas.seconds
    assert min(seconds.split, seconds.compute, seconds.reduction, seconds.update) > 0
    ranks = replicas.rank_seconds()
    assert min(ranks) > 0
    assert sum(ranks) <= seconds.compute


# --- evaluation -----------------------------------------------------------------------------------


class Signed(nn.Module):
    """Has batch statistics, a buffer that forward assigns, and one that it reads from a list."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.out = nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)
        self.dropout = nn.Dropout()
        self.register_buffer("last", torch.zeros(FEATURES))
        self.register_buffer("sign", torch.ones(()))
        self.signs = [self.sign]

    def forward(self, X):
        self.last = X.detach().mean(0)
        return self.dropout(self.out(self.norm(X))) * self.signs[0]


def test_evaluation_is_of_rank_0s_model_and_changes_nothing():
    """Every example counts once; each rank has statistics of its own before and after."""
    replicas = replicas_of(Signed(), 3)
    for X, y in batches([12, 12]):
        replicas.step(X, y, shares=[6, 6, 0])
    assert [int(mine.norm.num_batches_tracked) for mine in replicas.modules] == [2, 2, 0]
    replicas.modules[1].norm.eval()
    for far in replicas.modules[1:]:  # far enough to change every prediction
        far.norm.running_mean.fill_(1e3)
        far.sign.fill_(-1)
    before = copy.deepcopy(replicas.modules)
    assert not same_bits(before[0], before[1])
    model = copy.deepcopy(replicas.modules[0]).eval()
    test = [(X, model(X).argmax(dim=1)) for X, _ in batches([7, 1, 10], seed=5)]
    for _, y in test:
        y[0] = (y[0] + 1) % CLASSES
    assert replicas.evaluate(iter(test)) == 15 / 18
    with pytest.raises(ValueError, match="no examples"):
        replicas.evaluate([])
    with pytest.raises(RuntimeError, match="99"):
        replicas.evaluate([(torch.zeros(4, 99), torch.zeros(4))])
    before[0].last = replicas.modules[0].last  # of rank 0 it is the model's own
    for mine, then in zip(replicas.modules, before, strict=True):
        assert same_bits(mine, then)
        assert [m.training for m in mine.modules()] == [m.training for m in then.modules()]


def test_evaluation_counts_every_label_once():
    """The labels of an image are those of its pixels; other shapes would be broadcast."""
    torch.manual_seed(0)
    pixels = nn.Conv2d(1, CLASSES, 1)
    X, y = torch.randn(5, 1, 3, 2), torch.randint(CLASSES, (5, 3, 2))
    replicas = replicas_of(pixels, 3)
    right = int((pixels(X).argmax(1) == y).sum())
    assert 0 < right < 30
    assert replicas.evaluate([(X[:4], y[:4]), (X[4:], y[4:])]) == right / 30
    vectors = replicas_of(perceptron(), 2)
    ((X, y),) = batches([6])
    for labels in (y[:, None], y.view(6, 1, 1), F.one_hot(y, CLASSES), y.view(6, 1).expand(6, 5)):
        with pytest.raises(ValueError, match=r"labels have shape \[3, .* scores \[3, 4\]"):
            vectors.evaluate([(X, labels)])
    with pytest.raises(ValueError, match=r"scores \[3\]: scores \[n, classes, ...\] need"):
        replicas_of(nn.Sequential(nn.Linear(FEATURES, 1), nn.Flatten(0)), 2).evaluate([(X, y)])
