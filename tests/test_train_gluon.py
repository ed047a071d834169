"""Gluon's Trainer: replicas stay equal, and match one device with the whole batch."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from pycollect.train import GluonTrainer, ReplicaTrainer, sgd_factory, split_batch

total = partial(nn.functional.cross_entropy, reduction="sum")
X, Y = torch.randn(7, 4, generator=torch.Generator().manual_seed(0)), torch.arange(7) % 3
RATE = {"learning_rate": 0.1}


def net():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def of(one, **options):
    sgd = sgd_factory(0.1, momentum=0.9)
    return ReplicaTrainer(one, "cpu*2", optimizer=sgd, **options)


def backward(modules, X=X, y=Y):
    shards = split_batch(X, y, f"cpu*{len(modules)}")
    for X_shard, y_shard, module in zip(*shards, modules, strict=True):
        total(module(X_shard), y_shard).backward()


def values(module):
    return [param.detach().clone() for param in module.parameters()]


# What the trainer is given, and torch's optimizer that does the same.
MADE = [
    (
        ("sgd", RATE | {"momentum": 0.9, "wd": 0.01}),
        partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    (("SGD", {"lr": 0.1}), partial(SGD, lr=0.1)),
    ((Adam, {"lr": 0.01}), partial(Adam, lr=0.01)),
    (("adamw", {"learning_rate": 0.01, "wd": 0.1}), partial(AdamW, lr=0.01, weight_decay=0.1)),
]
OWN = ((), partial(SGD, lr=0.1, momentum=0.9))


@pytest.mark.parametrize(
    ("ranks", "given", "alone"),
    [(ranks, *made) for ranks in (1, 3, "lists", "replicas") for made in MADE]
    + [("replicas", *OWN)],
)
def test_ranks_train_as_one_device_does_in_torch(ranks, given, alone):
    """The last ranks have no examples in the batch of one."""
    one = net()
    modules = [copy.deepcopy(one) for _ in range(ranks if isinstance(ranks, int) else 2)]
    replicas = [module.parameters() for module in modules] if ranks == "lists" else modules
    if ranks == "replicas":
        replicas = of(one)
        modules = replicas.modules
    trainer, optimizer = GluonTrainer(replicas, *given), alone(one.parameters())
    for n in (7, 5, 1, 7):
        backward(modules, X[:n], Y[:n])
        trainer.step(n)
        nn.functional.cross_entropy(one(X[:n]), Y[:n]).backward()
        optimizer.step()
        optimizer.zero_grad()
    for module in modules:
        torch.testing.assert_close(values(module), values(one), rtol=0, atol=1e-5)
        assert all(map(torch.equal, values(module), values(modules[0])))


def test_gradients_are_clipped_between_the_sum_and_the_update():
    """As the refusals say: clip_gradient is of the mean, and "nag" looks ahead by the momentum."""
    nets = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for module in nets:
        nn.init.zeros_(module.weight)
    trainer = GluonTrainer(nets, "sgd", {"lr": 1.0, "momentum": 0.5, "nesterov": True})
    weight = momentum = 0.0
    for slopes in ((4.0, 8.0), (0.25, 0.5)):
        for module, slope in zip(nets, slopes, strict=True):
            (slope * module.weight).sum().backward()
        trainer.allreduce_grads()
        assert [module.weight.grad.item() for module in nets] == [sum(slopes)] * 2
        for module in nets:
            module.weight.grad.clamp_(-4 * 1.0, 4 * 1.0)
        trainer.update(4)
        clipped = min(sum(slopes) / 4, 1.0)
        momentum = 0.5 * momentum + clipped
        weight -= clipped + 0.5 * momentum
        assert [module.weight.item() for module in nets] == [weight, weight]
        assert all(module.weight.grad is None for module in nets)


def test_stale_and_frozen_parameters():
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


SHARED, ALIAS = net(), net()
ALIAS[-1].weight.data = SHARED[-1].weight.data


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (([], "sgd"), ValueError, "nothing to train"),
        (([nn.ReLU()], "sgd"), ValueError, "nothing to train"),
        (([net(), nn.Linear(4, 5)], "sgd"), ValueError, "rank 1 are not like"),
        (([SHARED, SHARED], "sgd"), ValueError, "several ranks; pass a copy"),
        (([SHARED, ALIAS], "sgd"), ValueError, "several ranks; pass a copy"),
        (([net()], "sdg"), ValueError, "'sdg' is unknown; pass the name of a class"),
        (([net()], "nag"), ValueError, "'nag' is unknown; pass 'sgd' with nesterov=True"),
        (([net()], SGD(net().parameters(), 0.1)), TypeError, "is a SGD; pass a name or a class"),
        (([net()],), TypeError, "optimizer is a NoneType; pass a name or a class"),
        ((of(net()), None, RATE), TypeError, "optimizer is a NoneType; pass a name or a class"),
        (([net()], "sgd", {"clip_gradient": 1}), TypeError, "'clip_gradient'; between allreduce"),
        (([net()], SGD, {"rescale_grad": 1}), TypeError, r"'rescale_grad'; step\(batch_size\)"),
        (([net()], "sgd", {"lr_scheduler": 1}), TypeError, "'lr_scheduler'; call set_learning_rat"),
        (([net()], "adam", {"epsilon": 1e-8}), TypeError, "unexpected .* 'epsilon'"),
        (([net()], "sgd", RATE | {"lr": 0.1}), TypeError, "twice in .*'learning_rate', 'lr'"),
    ],
)
def test_refusals(given, error, message):
    with pytest.raises(error, match=message):
        GluonTrainer(*given)


def test_the_learning_rate_and_invalid_numbers():
    trainer = GluonTrainer([net(), net()], "sgd", RATE)
    assert trainer.learning_rate == 0.1
    trainer.set_learning_rate(0.5)
    for bad in (0, True, 1.0, "8", None):
        with pytest.raises((TypeError, ValueError), match=r"batch_size is (0|a .*); pass "):
            trainer.step(bad)
    for bad in (-0.1, float("nan"), float("inf"), 10**400, True, "0.1", None):
        with pytest.raises((TypeError, ValueError), match="the learning rate is"):
            trainer.set_learning_rate(bad)
    assert [group["lr"] for o in trainer.optimizers for group in o.param_groups] == [0.5, 0.5]


def test_allreduce_grads_and_update_must_alternate():
    """In another order gradients would be summed twice, or the ranks would diverge."""
    one = net()
    nets = [copy.deepcopy(one) for _ in range(2)]
    trainer, alone = GluonTrainer(nets, "sgd", RATE), GluonTrainer([one], "sgd", RATE)
    for _ in range(2):
        backward(nets)
        before = values(nets[0])
        with pytest.raises(RuntimeError, match=r"update\(\) comes after allreduce_grads\(\)"):
            trainer.update(7)
        trainer.allreduce_grads()
        with pytest.raises(RuntimeError, match=r"summed these gradients already; call update\(\)"):
            trainer.step(7)
        assert all(map(torch.equal, values(nets[0]), before))
        trainer.update(7)
        backward([one])
        alone.update(7)  # one rank has nothing to sum
    for module in nets:
        torch.testing.assert_close(values(module), values(one), rtol=0, atol=1e-5)


def test_a_named_optimizer_replaces_those_of_the_replicas():
    """Otherwise the replicas' checkpoint would hold the momentum of an optimizer without steps."""
    replicas = of(net())
    trainer = GluonTrainer(replicas, "adam", {"learning_rate": 0.01})
    backward(replicas.modules)
    trainer.step(7)
    replicas.step(X, Y)
    state = replicas.state_dict()["optimizer"]
    assert (state["param_groups"][0]["lr"], state["state"][0]["step"]) == (0.01, 2)
    compiled = of(net(), compile="eager")
    GluonTrainer(compiled, "adam")
    with pytest.raises(ValueError, match="does not call the hooks"):
        compiled.step(X, Y)


@pytest.mark.parametrize("first", ["step", "trainer", "backward"])
def test_gradients_left_by_a_step_of_the_replicas_are_cleared(first):
    """torch's backward adds to existing gradients. Those of a backward pass before count."""
    replicas = of(net())
    if first == "step":
        replicas.step(X, Y)
    if first == "backward":
        backward(replicas.modules)
    trainer = GluonTrainer(replicas, "sgd", {"learning_rate": 0.2})
    if first == "trainer":
        replicas.step(X, Y)
    alone = copy.deepcopy(replicas.modules[0])
    if first != "backward":
        with pytest.raises(ValueError, match="has no gradient since the last step"):
            trainer.step(7)
        backward(replicas.modules)
    trainer.step(7)
    alone.zero_grad()
    backward([alone])
    GluonTrainer([alone], "sgd", {"learning_rate": 0.2}).step(7)
    torch.testing.assert_close([*map(values, replicas.modules)], [values(alone)] * 2)
