"""Gluon's Trainer: replicas stay equal, and match one device with the whole batch."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam, AdamW
from train_cases import CLASSES, FEATURES, batches, difference, perceptron, replicas_of, same_bits

from pycollect.train import GluonTrainer, split_batch

RATE = {"learning_rate": 0.1}
((X, Y),) = batches([7])


def backward(modules, X=X, y=Y):
    shards = split_batch(X, y, f"cpu*{len(modules)}")
    for X_shard, y_shard, module in zip(*shards, modules, strict=True):
        F.cross_entropy(module(X_shard), y_shard, reduction="sum").backward()


@pytest.mark.parametrize(
    ("given", "alone"),  # the arguments, and torch's optimizer that does the same
    [
        (
            ("sgd", RATE | {"momentum": 0.9, "wd": 0.01}),
            partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
        ),
        (("SGD", {"lr": 0.1}), partial(SGD, lr=0.1)),
        ((Adam, {"lr": 0.01}), partial(Adam, lr=0.01)),
        (("adamw", {"learning_rate": 0.01, "wd": 0.1}), partial(AdamW, lr=0.01, weight_decay=0.1)),
    ],
)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("lists", [False, True])
def test_ranks_train_as_one_device_does_in_torch(ranks, given, alone, lists):
    """The last ranks have no examples in the batch of one."""
    one, *modules = (perceptron() for _ in range(1 + ranks))
    trainer = GluonTrainer([m.parameters() for m in modules] if lists else modules, *given)
    optimizer = alone(one.parameters())
    for n in (7, 5, 1, 7):
        backward(modules, X[:n], Y[:n])
        trainer.step(n)
        F.cross_entropy(one(X[:n]), Y[:n]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert difference(modules[0], one) < 1e-5 < 1e-2 < difference(one, perceptron())
    assert all(same_bits(module, modules[0]) for module in modules)


def test_gradients_are_clipped_between_the_sum_and_the_update():
    """In another order gradients would be summed twice, or the ranks would diverge."""
    one, *nets = (perceptron() for _ in range(3))
    options = RATE | {"momentum": 0.5, "nesterov": True}
    trainer, alone = (GluonTrainer(modules, "sgd", options) for modules in (nets, [one]))
    for _ in range(3):
        before = copy.deepcopy(nets[0])
        backward([*nets])
        backward([one])
        with pytest.raises(RuntimeError, match=r"update\(\) comes after allreduce_grads\(\)"):
            trainer.update(7)
        trainer.allreduce_grads()
        with pytest.raises(RuntimeError, match=r"summed these gradients already; call update\(\)"):
            trainer.step(7)
        assert same_bits(nets[0], before)
        for param, *sums in zip(*(module.parameters() for module in (one, *nets)), strict=True):
            for mine in sums:
                torch.testing.assert_close(mine.grad, param.grad)
        for module in (one, *nets):
            nn.utils.clip_grad_value_(module.parameters(), 0.3)
        trainer.update(7)
        alone.update(7)  # one rank has nothing to sum
    assert same_bits(*nets)
    assert difference(nets[1], one) < 1e-5 < 1e-2 < difference(one, perceptron())


def test_stale_and_frozen_parameters():
    """A layer has no gradient on any rank, one on rank 1 alone, and one is frozen."""
    nets = [nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2)]
    for n in nets:
        n[0].bias.requires_grad_(False)
    nets[1][0](torch.ones(1, 2)).sum().backward()
    trainer, before = GluonTrainer(nets, "sgd", {"lr": 1.0}), copy.deepcopy(nets[0])
    with pytest.raises(ValueError, match=r"\[2, 2\] has no gradient.*backward.*ignore_stale_grad"):
        trainer.step(1)
    assert same_bits(nets[0], before)
    assert nets[1][0].weight.grad.tolist() == [[1, 1], [1, 1]]
    trainer.step(1, ignore_stale_grad=True)
    assert same_bits(nets[0][1], before[1])
    assert torch.equal(nets[0][0].weight, before[0].weight - 1)


def test_the_learning_rate_and_invalid_numbers():
    trainer = GluonTrainer([perceptron(), perceptron()], "sgd", RATE)
    assert trainer.learning_rate == 0.1
    trainer.set_learning_rate(0.5)
    for call, bad in ((trainer.set_learning_rate, (-0.1, float("nan"), 10**400, True, "0.1")),
                      (trainer.step, (0, True, 1.0))):  # fmt: skip
        for value in bad:
            with pytest.raises((TypeError, ValueError), match=r"(the learning rate|batch_size) is"):
                call(value)
    assert [group["lr"] for o in trainer.optimizers for group in o.param_groups] == [0.5, 0.5]


SHARED, ALIAS, NET = perceptron(), perceptron(), perceptron()
ALIAS[-1].weight.data = SHARED[-1].weight.data


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (([], "sgd"), ValueError, "nothing to train"),
        (([nn.ReLU()], "sgd"), ValueError, "nothing to train"),
        (([NET, nn.Linear(FEATURES, CLASSES)], "sgd"), ValueError, "rank 1 are not like"),
        (([SHARED, SHARED], "sgd"), ValueError, "several ranks; pass a copy"),
        (([SHARED, ALIAS], "sgd"), ValueError, "several ranks; pass a copy"),
        (([NET], "sdg"), ValueError, "'sdg' is unknown; pass the name of a class"),
        ((NET, "sgd"), TypeError, "replicas is a Sequential; pass a list with a module"),
        ((replicas_of(NET, 2), "sgd"), TypeError, "is a ReplicaTrainer; pass .* such as the mod"),
        (([NET], SGD(NET.parameters(), 0.1)), TypeError, "is a SGD; pass a name or a class"),
        (([NET], "sgd", {"clip_gradient": 1}), TypeError, "unexpected .* 'clip_gradient'"),
        (([NET], "sgd", RATE | {"lr": 0.1}), TypeError, "twice in .*'learning_rate', 'lr'"),
    ],
)
def test_refusals(given, error, message):
    with pytest.raises(error, match=message):
        GluonTrainer(*given)
