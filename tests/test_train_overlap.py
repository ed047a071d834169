"""Gradients that are reduced during the backward pass: the same bits, early, and safely."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from train_cases import CLASSES, FEATURES, batches, perceptron, replicas_of, same_bits, trained

from pycollect.train import GRADIENT_REDUCTIONS, reduce_gradients_coalesced, reduce_gradients_naive
from pycollect.train.reduce import Buckets, ListSum, bucket_indices

SIZES = [12, 12, 7, 2, 1]


class Twice(nn.Module):
    """Uses one layer twice, by a second name or in a checkpoint."""

    def __init__(self, **how):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Linear(FEATURES, FEATURES, bias=bias) for bias in (True, False))
        self.b.weight = self.a.weight
        self.out, self.how = nn.Linear(FEATURES, CLASSES), how

    def forward(self, X):
        hidden = self.a(X.requires_grad_()).tanh()
        return self.out(checkpoint(self.a, hidden, **self.how) if self.how else self.b(hidden))


@pytest.mark.parametrize("microbatch", [None, 5])
@pytest.mark.parametrize(
    ("make", "reduction", "bucket_bytes"),
    [
        *((perceptron, name, size) for name in GRADIENT_REDUCTIONS for size in (1, 700, 1 << 30)),
        (Twice, "pycollect", 1),
        (partial(Twice, use_reentrant=False), "pycollect", 1),
    ],
)
def test_overlap_and_buckets_change_no_bit(make, reduction, bucket_bytes, microbatch):
    """Parameters may be frozen and trained again between steps."""
    how = {"reduction": GRADIENT_REDUCTIONS[reduction], "microbatch": microbatch}
    for world in (2, 3):
        plain = replicas_of(make(), world, overlap=False, **how)
        early = replicas_of(make(), world, bucket_bytes=bucket_bytes, **how)
        for step, (X, y) in enumerate(batches(SIZES)):
            for replicas in (plain, early):
                for params in replicas.parameters:
                    params[0].requires_grad_(step in (1, 3, 4))
                replicas.step(X, y)
        for a, b in zip(plain.modules, early.modules, strict=True):
            assert same_bits(a, b)
    assert not same_bits(early.modules[0], make())


def test_reentrant_checkpoints_are_refused():
    trained(Twice(use_reentrant=True), 2, SIZES, overlap=False)
    with pytest.raises(RuntimeError, match="use_reentrant=False, or switch the overlap off"):
        trained(Twice(use_reentrant=True), 2, SIZES, bucket_bytes=1)


def test_buckets_begin_with_the_last_layers():
    params = list(perceptron().parameters())
    assert bucket_indices(params, 1) == [[5], [4], [3], [2], [1], [0]]
    assert bucket_indices(params, 65) == [[5, 4], [3, 2], [1, 0]]
    assert bucket_indices(params, 1 << 30) == [[5, 4, 3, 2, 1, 0]]
    params[4].requires_grad_(False)
    assert bucket_indices(params, 1) == [[5], [3], [2], [1], [0]]


RANKS = ["rank 0 at layer 0", "rank 1 at layer 0"]
EARLY = [RANKS[0], "reduce 2", "reduce 2", RANKS[1], "reduce 2"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"bucket_bytes": 65}, EARLY),
        ({"bucket_bytes": 65, "microbatch": 4}, RANKS + EARLY),
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


FAILS = {"backward": False, "reduction": False}


def fail(where):
    if FAILS[where]:
        raise ArithmeticError(f"the {where} has failed")


class Fragile(nn.Sequential):
    def forward(self, X):
        hidden = self[0](X)
        hidden.register_hook(lambda _: fail("backward"))
        return self[2](hidden.tanh())


@pytest.mark.parametrize("where", FAILS)
def test_a_step_after_a_failed_one_is_unaffected(where, monkeypatch):
    def breaks(gradients):
        fail("reduction")
        reduce_gradients_coalesced(gradients)

    torch.manual_seed(0)
    module = Fragile(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    wanted = trained(module, 2, SIZES, bucket_bytes=1)
    replicas = replicas_of(module, 2, reduction=breaks, bucket_bytes=1)
    monkeypatch.setitem(FAILS, where, True)
    with pytest.raises(ArithmeticError, match=f"the {where}"):
        replicas.step(*batches([6], seed=9)[0])
    FAILS[where] = False
    assert same_bits(replicas.modules[0], module)
    for X, y in batches(SIZES):
        replicas.step(X, y)
    assert same_bits(replicas.modules[1], wanted.modules[1])


@pytest.mark.parametrize("overlap", [False, True])
def test_sparse_gradients_are_refused(overlap):
    module = nn.Sequential(nn.EmbeddingBag(5, CLASSES, sparse=True, mode="sum"))
    replicas = replicas_of(module, 2, overlap=overlap)
    with pytest.raises(ValueError, match="sparse=False"):
        replicas.step(torch.tensor([[1, 2], [3, 4]]), torch.tensor([0, 1]))


@pytest.mark.parametrize("shares", [[4, 4, 4], [12, 0, 0], [6, 0, 6]])
def test_a_joint_backward_pass_has_the_same_bits(shares):
    in_turn, joint = (replicas_of(perceptron(), 3, bucket_bytes=1) for _ in "ab")
    joint._joint = True
    for replicas in (in_turn, joint):
        replicas.step(*batches([12])[0], shares=shares)
    for a, b in zip(in_turn.modules, joint.modules, strict=True):
        assert same_bits(a, b)


def test_removed_buckets_reduce_nothing():
    module = perceptron()
    buckets = Buckets([list(module.parameters())], ListSum(reduce_gradients_naive), 1)
    buckets.remove()
    with buckets.during([0]):
        F.cross_entropy(module(torch.zeros(1, FEATURES)), torch.tensor([0])).backward()
        assert buckets._launched == 0
