"""Gluon's Trainer: replicas stay equal, and match one device with the whole batch."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pycollect.train import (
    GluonTrainer,
    ReplicaTrainer,
    digits,
    init_lenet,
    lenet,
    replicate_params,
    sgd_factory,
    split_batch,
    train_batch,
)

CPU = torch.device("cpu")
total = partial(nn.functional.cross_entropy, reduction="sum")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def backward(replicas: list[nn.Module], X: Tensor, y: Tensor) -> None:
    shards = zip(*split_batch(X, y, [CPU] * len(replicas)), replicas, strict=True)
    for X_shard, y_shard, replica in shards:
        total(replica(X_shard), y_shard).backward()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}),
        ("SGD", {"lr": 0.1}),
        (torch.optim.Adam, {"lr": 0.01}),
        ("adamw", {"learning_rate": 0.01, "wd": 0.1}),
    ],
)
def test_as_one_device(world: int, optimizer: object, options: dict[str, float]) -> None:
    one = net()
    replicas = [copy.deepcopy(one) for _ in range(world)]
    trainer, single = (
        GluonTrainer(replicas, optimizer, options),
        GluonTrainer([one], optimizer, options),
    )
    for _ in range(4):
        X, y = torch.randn(7, 4), torch.randint(3, (7,))
        backward(replicas, X, y)
        backward([one], X, y)
        trainer.step(7)
        single.step(7)
    for parameters in zip(*(r.parameters() for r in replicas), one.parameters(), strict=True):
        *ranks, expected = parameters
        torch.testing.assert_close(ranks[0], expected, rtol=0, atol=1e-5)
        assert all(torch.equal(p, ranks[0]) for p in ranks)


def test_one_rank_trains_as_plain_torch() -> None:
    one, other = net(), net()
    other.load_state_dict(one.state_dict())
    X, y = torch.randn(8, 4), torch.randint(3, (8,))
    optimizer = torch.optim.SGD(other.parameters(), 0.5)
    nn.functional.cross_entropy(other(X), y).backward()
    optimizer.step()
    trainer = GluonTrainer([one], "sgd", {"learning_rate": 0.5})
    backward([one], X, y)
    trainer.step(8)
    torch.testing.assert_close(list(one.parameters()), list(other.parameters()))


def test_lists_of_parameters_train_as_the_step_from_scratch() -> None:
    X, y = (part[:30] for part in digits().train)
    replicas, scratch = (replicate_params(init_lenet(), [CPU] * 2) for _ in range(2))
    trainer = GluonTrainer(replicas, "sgd", {"learning_rate": 0.5})
    for _ in range(2):
        shards = zip(*split_batch(X, y, [CPU] * 2), replicas, strict=True)
        for X_shard, y_shard, params in shards:
            total(lenet(X_shard, params), y_shard).backward()
        trainer.step(len(X))
        train_batch(X, y, scratch, 0.5, model=lenet)
    for mine, theirs, start in zip(replicas[1], scratch[1], init_lenet(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
        assert not torch.equal(mine, start)


def test_reduce_clip_update() -> None:
    nets = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    for n in nets:
        nn.init.zeros_(n.weight)
        (100 * n(torch.ones(1, 2))).sum().backward()
    trainer = GluonTrainer(nets, "sgd", {"learning_rate": 1.0})
    trainer.allreduce_grads()
    assert all(n.weight.grad.tolist() == [[200, 200]] for n in nets)
    for n in nets:
        n.weight.grad.clamp_(max=4)
    trainer.update(2)
    assert all(n.weight.tolist() == [[-2, -2]] for n in nets)
    assert all(n.weight.grad is None for n in nets)


def test_the_learning_rate() -> None:
    trainer = GluonTrainer([net(), net()], "sgd", {"learning_rate": 0.1})
    assert trainer.learning_rate == 0.1
    trainer.set_learning_rate(0.5)
    assert trainer.learning_rate == 0.5
    assert [group["lr"] for o in trainer.optimizers for group in o.param_groups] == [0.5, 0.5]


def test_a_rank_without_examples_counts_as_zeros() -> None:
    nets = [net() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    backward(nets[:1], torch.randn(3, 4), torch.tensor([0, 1, 2]))
    before = nets[1][0].weight.detach().clone()
    GluonTrainer(nets, "sgd", {"lr": 1.0}).step(3)
    assert torch.equal(nets[0][0].weight, nets[1][0].weight)
    assert not torch.equal(nets[1][0].weight, before)


def test_stale_and_frozen_parameters() -> None:
    nets = [nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2)]
    for n in nets:
        n[0].bias.requires_grad_(False)
        n[0](torch.ones(1, 2)).sum().backward()
    trainer = GluonTrainer(nets, "sgd", {"lr": 1.0, "wd": 1.0})
    kept, weight = nets[1][1].weight.clone(), nets[1][0].weight.clone()
    with pytest.raises(ValueError, match=r"\[2, 2\] has no gradient.*backward.*ignore_stale_grad"):
        trainer.step(1)
    assert torch.equal(nets[1][0].weight, weight)
    assert nets[1][0].weight.grad.tolist() == [[1, 1], [1, 1]]
    trainer.step(1, ignore_stale_grad=True)
    assert torch.equal(nets[1][1].weight, kept)
    assert not torch.equal(nets[1][0].weight, weight)


def test_refusals() -> None:
    shared, alias = net(), net()
    alias[-1].weight.data = shared[-1].weight.data
    for make, error, message in (
        (lambda: GluonTrainer([], "sgd"), ValueError, "nothing to train"),
        (lambda: GluonTrainer([nn.ReLU()], "sgd"), ValueError, "nothing to train"),
        (lambda: GluonTrainer([net(), nn.Linear(4, 5)], "sgd"), ValueError, "rank 1 are not like"),
        (lambda: GluonTrainer([shared, shared], "sgd"), ValueError, "several ranks; pass a copy"),
        (lambda: GluonTrainer([shared, alias], "sgd"), ValueError, "several ranks; pass a copy"),
        (lambda: GluonTrainer([net()], "sdg"), ValueError, "'sdg' is unknown.*adam, .*sgd"),
        (
            lambda: GluonTrainer([net()], torch.optim.SGD(net().parameters(), 0.1)),
            TypeError,
            "optimizer is a SGD; pass a name or a class",
        ),
        (lambda: GluonTrainer([net()], "sgd").step(0), ValueError, "batch_size is 0"),
    ):
        with pytest.raises(error, match=message):
            make()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nag", {}, "'nag' is unknown; pass 'sgd' with nesterov=True"),
        ("sgd", {"clip_gradient": 1.0}, "SGD has no argument 'clip_gradient'; between allreduce"),
        ("adam", {"epsilon": 1e-8}, "Adam has no argument 'epsilon'; it has lr, betas, eps, wei"),
        ("sgd", {"learning_rate": 0.1, "lr": 0.1}, "'lr' is given twice"),
        ("sgd", {"params": []}, "SGD has no argument 'params'; it has lr, momentum"),
    ],
)
def test_other_names_of_gluon_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        GluonTrainer([net()], name, options)


def test_what_the_refusals_name_is_what_gluon_does() -> None:
    """clip_gradient clips the gradient of the mean; "nag" looks ahead by the momentum."""
    nets = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for module in nets:
        nn.init.zeros_(module.weight)
    trainer = GluonTrainer(nets, "sgd", {"lr": 1.0, "momentum": 0.5, "nesterov": True})
    weight = momentum = 0.0
    for slopes in ((4.0, 8.0), (0.25, 0.5)):
        for module, slope in zip(nets, slopes, strict=True):
            (slope * module.weight).sum().backward()
        trainer.allreduce_grads()
        for module in nets:
            module.weight.grad.clamp_(-4 * 1.0, 4 * 1.0)
        trainer.update(4)
        clipped = min(sum(slopes) / 4, 1.0)
        momentum = 0.5 * momentum + clipped
        weight -= clipped + 0.5 * momentum
        assert [module.weight.item() for module in nets] == [weight, weight]


def test_allreduce_grads_and_update_must_alternate() -> None:
    """In another order gradients would be summed twice, or the ranks would diverge."""
    nets = [net() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    trainer = GluonTrainer(nets, "sgd", {"lr": 1.0})
    X, y = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    backward(nets, X, y)
    kept = [p.detach().clone() for p in nets[0].parameters()]
    with pytest.raises(RuntimeError, match=r"update\(\) comes after allreduce_grads\(\)"):
        trainer.update(4)
    trainer.allreduce_grads()
    with pytest.raises(RuntimeError, match=r"summed these gradients already; call update\(\)"):
        trainer.step(4)
    assert all(map(torch.equal, kept, nets[0].parameters()))
    trainer.update(4)
    backward(nets, X, y)
    trainer.step(4)
    assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))
    one = net()
    backward([one], X, y)
    GluonTrainer([one], "sgd", {"lr": 1.0}).update(4)  # one rank has nothing to sum


def of(one: nn.Module, world: int = 2, lr: float = 0.1) -> ReplicaTrainer:
    return ReplicaTrainer(one, f"cpu*{world}", optimizer=sgd_factory(lr, momentum=0.9))


def weights(modules: list[nn.Module]) -> list[list[Tensor]]:
    return [[p.detach().clone() for p in module.parameters()] for module in modules]


def test_replicas_are_trained_as_their_modules_are() -> None:
    one, batch = net(), (torch.randn(7, 4), torch.randint(3, (7,)))
    replicas, modules = of(one), [copy.deepcopy(one) for _ in range(2)]
    options = {"learning_rate": 0.2, "momentum": 0.5}
    trainers = GluonTrainer(replicas, "sgd", options), GluonTrainer(modules, "sgd", options)
    for _ in range(3):
        for trained, trainer in zip((replicas.modules, modules), trainers, strict=True):
            backward(trained, *batch)
            trainer.step(7)
    for mine, theirs in zip(weights(replicas.modules), weights(modules), strict=True):
        assert all(map(torch.equal, mine, theirs))


def test_replicas_keep_their_own_optimizer_by_default() -> None:
    one, (X, y) = net(), (torch.randn(8, 4), torch.randint(3, (8,)))
    by_trainer, by_step = of(one), of(one)
    trainer = GluonTrainer(by_trainer)
    assert trainer.optimizers is by_trainer.optimizers
    for _ in range(3):
        backward(by_trainer.modules, X, y)
        trainer.step(8)
        by_step.step(X, y)
    torch.testing.assert_close(
        weights(by_trainer.modules), weights(by_step.modules), rtol=0, atol=1e-6
    )


def test_a_named_optimizer_replaces_those_of_the_replicas() -> None:
    """Otherwise the replicas' checkpoint would hold the momentum of an optimizer without steps."""
    replicas, (X, y) = of(net()), (torch.randn(8, 4), torch.randint(3, (8,)))
    trainer = GluonTrainer(replicas, "adam", {"learning_rate": 0.01})
    backward(replicas.modules, X, y)
    trainer.step(8)
    state = replicas.state_dict()["optimizer"]
    assert state["param_groups"][0]["lr"] == 0.01
    assert state["state"][0]["step"] == 1
    replicas.step(X, y)
    assert replicas.state_dict()["optimizer"]["state"][0]["step"] == 2


@pytest.mark.parametrize("first", [True, False])
def test_gradients_left_by_a_step_of_the_replicas_are_cleared(first: bool) -> None:
    """torch's backward adds to existing gradients."""
    one, (X, y) = net(), (torch.randn(8, 4), torch.randint(3, (8,)))
    replicas = of(one)
    if first:
        replicas.step(X, y)
    trainer = GluonTrainer(replicas, "sgd", {"learning_rate": 0.2})
    if not first:
        replicas.step(X, y)
    with pytest.raises(ValueError, match="has no gradient since the last step"):
        trainer.step(8)
    alone = copy.deepcopy(replicas.modules[0])
    backward(replicas.modules, X, y)
    trainer.step(8)
    backward([alone], X, y)
    GluonTrainer([alone], "sgd", {"learning_rate": 0.2}).step(8)
    torch.testing.assert_close(weights(replicas.modules), weights([alone]) * 2, rtol=0, atol=1e-6)


def test_gradients_of_a_backward_pass_before_the_trainer_count() -> None:
    replicas = of(net())
    backward(replicas.modules, torch.randn(4, 4), torch.tensor([0, 1, 2, 0]))
    before = weights(replicas.modules)
    GluonTrainer(replicas, "sgd", {"learning_rate": 0.2}).step(4)
    assert not torch.equal(before[0][0], replicas.modules[0][0].weight)


def test_invalid_optimizers_are_refused() -> None:
    for make in (
        lambda: GluonTrainer(of(net()), optimizer_params={"learning_rate": 0.1}),
        lambda: GluonTrainer([net()]),
        lambda: GluonTrainer(of(net()), 3),
    ):
        with pytest.raises(TypeError, match=r"optimizer is a .*; pass a name or a class"):
            make()


def test_invalid_numbers_are_refused() -> None:
    trainer = GluonTrainer([net()], "sgd", {"lr": 0.1})
    for bad in (True, 1.0, "8", None):
        with pytest.raises(TypeError, match=r"batch_size is a .*; pass an int"):
            trainer.step(bad)
    for bad in (-0.1, float("nan"), float("inf"), 10**400):
        with pytest.raises(ValueError, match="learning rate is"):
            trainer.set_learning_rate(bad)
    for bad in (True, "0.1", None):
        with pytest.raises(TypeError, match="learning rate is a"):
            trainer.set_learning_rate(bad)
    assert trainer.learning_rate == 0.1
