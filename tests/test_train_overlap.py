"""Gradients that are reduced during the backward pass: the same bits, early, and safely."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from train_cases import CLASSES, FEATURES, batches, perceptron, replicas_of, same_bits, trained

from pycollect.train import GRADIENT_REDUCTIONS, reduce_gradients_coalesced, reduce_gradients_naive
from pycollect.train.buckets import Buckets, bucket_indices
from pycollect.train.reduce import Gradients

SIZES = [12, 12, 7, 2, 1]


@pytest.mark.parametrize("reduction", GRADIENT_REDUCTIONS)
@pytest.mark.parametrize("bucket_bytes", [1, 700, 1 << 30])
@pytest.mark.parametrize("microbatch", [None, 5])
def test_overlap_and_buckets_change_no_bit(
    reduction: str, bucket_bytes: int, microbatch: int | None
) -> None:
    for world in (2, 3):
        how = {"reduction": GRADIENT_REDUCTIONS[reduction], "microbatch": microbatch}
        plain = trained(perceptron(), world, SIZES, overlap=False, **how)
        early = trained(perceptron(), world, SIZES, overlap=True, bucket_bytes=bucket_bytes, **how)
        for a, b in zip(plain.modules, early.modules, strict=True):
            assert same_bits(a, b)


def test_parameters_may_be_frozen_between_steps() -> None:
    module = perceptron()
    for param in list(module.parameters())[:2]:
        param.requires_grad_(False)
    plain, early = (replicas_of(module, 2, overlap=overlap) for overlap in (False, True))
    for step, (X, y) in enumerate(batches([8] * 4)):
        for replica in (*plain.modules, *early.modules):
            for param in list(replica.parameters())[:2]:
                param.requires_grad_(step in (1, 3))
        plain.step(X, y)
        early.step(X, y)
        assert all(same_bits(plain.modules[0], other) for other in early.modules), step


def test_buckets_begin_with_the_last_layers() -> None:
    params = list(perceptron().parameters())
    assert bucket_indices(params, 1) == [[5], [4], [3], [2], [1], [0]]
    assert bucket_indices(params, 65) == [[5, 4], [3, 2], [1, 0]]
    assert bucket_indices(params, 1 << 30) == [[5, 4, 3, 2, 1, 0]]
    params[4].requires_grad_(False)
    assert bucket_indices(params, 1) == [[5], [3], [2], [1], [0]]


def note_gradient(events: list[str], what: str, module: nn.Module, X: Any, out: Tensor) -> None:
    """A forward hook: record when the gradient of the module's output has been computed."""
    out.register_hook(lambda grad: events.append(what))


@pytest.mark.parametrize("microbatch", [None, 4])
def test_reductions_begin_while_the_backward_pass_goes_on(microbatch: int | None) -> None:
    """Checks which reductions precede the gradient of the first layer's output on each rank."""
    events: list[str] = []

    def noted(gradients: Gradients) -> None:
        events.append(f"reduce {len(gradients[0])}")
        reduce_gradients_naive(gradients)

    replicas = replicas_of(perceptron(), 2, reduction=noted, bucket_bytes=65, microbatch=microbatch)
    for rank, module in enumerate(replicas.modules):
        module.get_submodule("0").register_forward_hook(
            partial(note_gradient, events, f"rank {rank} at layer 0")
        )
    replicas.step(*batches([8])[0])
    ranks = ["rank 0 at layer 0", "rank 1 at layer 0"]
    last = ["rank 0 at layer 0", "reduce 2", "reduce 2", "rank 1 at layer 0", "reduce 2"]
    assert events == ([*ranks, *last] if microbatch else last)


def test_without_overlap_all_gradients_are_reduced_at_once() -> None:
    sizes: list[int] = []

    def noted(gradients: Gradients) -> None:
        sizes.append(len(gradients[0]))
        reduce_gradients_naive(gradients)

    trained(perceptron(), 2, [8], reduction=noted, overlap=False)
    assert sizes == [6]


class Tied(nn.Module):
    """A module whose two layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.b.weight = self.a.weight
        self.out = nn.Linear(FEATURES, CLASSES)

    def forward(self, X: Tensor) -> Tensor:
        scores: Tensor = self.out(self.b(self.a(X).tanh()))
        return scores


def test_a_weight_that_is_used_twice_is_reduced_once() -> None:
    plain = trained(Tied(), 3, SIZES, overlap=False)
    early = trained(Tied(), 3, SIZES, overlap=True, bucket_bytes=1)
    assert same_bits(plain.modules[0], early.modules[0])
    assert same_bits(early.modules[1], early.modules[2])


class Checkpointed(nn.Module):
    """Uses one layer inside and outside of a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.out = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)
        self.reentrant = reentrant

    def forward(self, X: Tensor) -> Tensor:
        hidden: Any = self.layer(X.requires_grad_())
        hidden = checkpoint(self.layer, hidden.tanh(), use_reentrant=self.reentrant)
        scores: Tensor = self.out(hidden)
        return scores


def test_reentrant_checkpoints_are_refused() -> None:
    plain = trained(Checkpointed(True), 2, SIZES, overlap=False)
    early = trained(Checkpointed(False), 2, SIZES, bucket_bytes=1)
    for a, b in zip(plain.parameters[0], early.parameters[0], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    with pytest.raises(RuntimeError, match="use_reentrant=False, or switch the overlap off"):
        trained(Checkpointed(True), 2, SIZES, bucket_bytes=1)


class Failing(torch.autograd.Function):
    """A function whose backward pass fails on demand."""

    fails = False

    @staticmethod
    def forward(ctx: Any, X: Tensor) -> Tensor:
        return X.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if Failing.fails:
            raise ArithmeticError("the backward pass has failed")
        return grads[0]


class Fragile(nn.Sequential):
    def forward(self, X: Tensor) -> Tensor:
        hidden = Failing.apply(self[0](X))  # type: ignore[no-untyped-call]
        scores: Tensor = self[2](hidden.tanh())
        return scores


@pytest.mark.parametrize("where", ["backward", "reduction"])
def test_a_step_after_a_failed_one_is_unaffected(where: str, monkeypatch: Any) -> None:
    def breaks(gradients: Gradients) -> None:
        if failing:
            raise ArithmeticError("the reduction has failed")
        reduce_gradients_coalesced(gradients)

    torch.manual_seed(0)
    module = Fragile(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    how = {"reduction": breaks, "bucket_bytes": 1}
    wanted, failing = trained(module, 2, SIZES, bucket_bytes=1), False
    replicas = replicas_of(module, 2, **how)
    failing = where == "reduction"
    monkeypatch.setattr(Failing, "fails", where == "backward")
    with pytest.raises(ArithmeticError, match=f"the {where}"):
        replicas.step(*batches([6], seed=9)[0])
    failing = False
    monkeypatch.setattr(Failing, "fails", False)
    assert same_bits(replicas.modules[0], module)
    for X, y in batches(SIZES):
        replicas.step(X, y)
    assert same_bits(replicas.modules[1], wanted.modules[1])


@pytest.mark.parametrize("overlap", [False, True])
def test_sparse_gradients_are_refused(overlap: bool) -> None:
    module = nn.Sequential(nn.EmbeddingBag(5, CLASSES, sparse=True, mode="sum"))
    replicas = replicas_of(module, 2, overlap=overlap)
    with pytest.raises(ValueError, match="sparse=False"):
        replicas.step(torch.tensor([[1, 2], [3, 4]]), torch.tensor([0, 1]))


@pytest.mark.parametrize("shares", [[4, 4, 4], [12, 0, 0], [6, 0, 6]])
def test_a_joint_backward_pass_has_the_same_bits(shares: list[int]) -> None:
    ((X, y),) = batches([12])
    in_turn, joint = (replicas_of(perceptron(), 3, bucket_bytes=1) for _ in range(2))
    in_turn.step(X, y, shares=shares)
    joint._joint = True
    joint.step(X, y, shares=shares)
    for a, b in zip(in_turn.modules, joint.modules, strict=True):
        assert same_bits(a, b)


def test_removed_buckets_reduce_nothing() -> None:
    module = perceptron()
    buckets = Buckets([list(module.parameters())], reduce_gradients_naive, 1)
    buckets.remove()
    with buckets.during([0]):
        F.cross_entropy(module(torch.zeros(1, FEATURES)), torch.tensor([0])).backward()
        assert not any(bucket.launched for bucket in buckets._buckets)
