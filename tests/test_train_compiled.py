"""A training step as one graph of torch.compile: the same bits as the steps that it replaces."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn
from train_cases import (
    CPU,
    FEATURES,
    batches,
    perceptron,
    replicas_of,
    same_in_graphs,
    trained,
)

from pycollect.train import LeNet, ReplicaTrainer, StepOptions, naive_all_reduce, train
from pycollect.train.reduce import reduce_gradients_naive

SIZES = [12, 12, 12, 7, 12]  # takes two graphs: the other size is a variable of the second


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def close(one: nn.Module, other: nn.Module) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


class Partial(nn.Module):
    """A model with a layer that is not used, one that is frozen, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.norm = nn.BatchNorm1d(FEATURES)
        self.net = perceptron()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.norm(self.frozen(x)))


@pytest.mark.parametrize(("world", "make"), [(1, perceptron), (3, Partial)])
def test_a_compiled_step_has_the_bits_of_eager_steps(world, make):
    eager = trained(make(), world, SIZES)
    compiled = trained(make(), world, SIZES, compile="aot_eager")
    for mine, theirs in zip(compiled.modules, eager.modules, strict=True):
        assert same_in_graphs(mine, theirs)
    for mine, theirs in zip(compiled.parameters, eager.parameters, strict=True):
        for p, q in zip(mine, theirs, strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad)


def test_every_loss_is_that_of_an_eager_step():
    replicas = [replicas_of(perceptron(), 2, **o) for o in ({}, {"compile": "aot_eager"})]
    for X, y in batches([12, 12, 12]):
        losses = [r.step(X, y, shares=[len(X) - 4, 4]) for r in replicas]
        torch.testing.assert_close(losses[0], losses[1])
    assert replicas[1].seconds.compute > 0
    assert replicas[1].seconds.reduction == 0


@pytest.mark.slow
def test_a_rank_without_examples_and_shards_on_their_devices():
    replicas = [replicas_of(perceptron(), 2, **o) for o in ({}, {"compile": "aot_eager"})]
    for r in replicas:
        for X, y in batches([9, 9, 1]):
            r.step(X, y)
        for X, y in batches([9, 9]):
            r.step_on_shards([X[:0], X], [y[:0], y])
    assert same_in_graphs(replicas[0].modules[1], replicas[1].modules[1])


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        lambda p: torch.optim.Adagrad(p, lr=0.01),
    ],
)
def test_optimizers(optimizer):
    found = []
    for options in (StepOptions(), StepOptions(compile="aot_eager")):
        replicas = ReplicaTrainer(perceptron(), "cpu*2", optimizer=optimizer, options=options)
        for X, y in batches([8, 8, 8, 8]):
            replicas.step(X, y)
        found.append(replicas.modules[1])
    close(*found)  # fused optimizers round differently, and graphs have their numbers in float32


def test_a_step_is_one_graph():
    graphs = []

    def count(graph, _examples):
        graphs.append(graph)
        return graph

    torch._dynamo.register_backend(count, name="count")
    trained(perceptron(), 2, [8] * 4, compile="count")
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes]
    assert sum("pycollect" in target for target in called) >= 3  # two scatters, an all-reduce
    assert any("all_reduce_coalesced_" in target for target in called)


def test_other_reductions():
    def one_by_one(gradients):
        for same in zip(*gradients, strict=True):
            naive_all_reduce(same)

    for reduction in (reduce_gradients_naive, one_by_one):
        eager = trained(perceptron(), 2, [8] * 3, reduction=reduction)
        compiled = trained(perceptron(), 2, [8] * 3, reduction=reduction, compile="aot_eager")
        assert same_in_graphs(eager.modules[1], compiled.modules[1])


def test_state_goes_from_eager_to_compiled_and_back():
    wanted = trained(perceptron(), 2, [8] * 5)
    first = trained(perceptron(), 2, [8] * 3, compile="aot_eager")
    later = replicas_of(perceptron(1), 2, compile="aot_eager")
    X, y = batches([8])[0]
    later.step(X, y)
    later.step(X, y)
    later.load_state_dict(first.state_dict())
    for X, y in batches([8] * 5)[3:]:
        later.step(X, y)
    assert same_in_graphs(later.modules[1], wanted.modules[1])


@pytest.mark.slow
def test_a_learning_rate_of_every_step():
    """There are more than torch.compile makes graphs of."""
    replicas = [replicas_of(perceptron(), 2, **o) for o in ({}, {"compile": "aot_eager"})]
    for step in range(12):
        for r in replicas:
            for optimizer in r.optimizers:
                optimizer.param_groups[0]["lr"] = 0.3 / (1 + step)
            r.step(*batches([8])[0])
            assert r.optimizers[0].param_groups[0]["lr"] == 0.3 / (1 + step)
    close(replicas[1].modules[1], replicas[0].modules[1])


class Shared(nn.Module):
    """Two parameters have the same gradient in the same memory, and one has an expanded one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(FEATURES)) for _ in range(3))
        self.net = perceptron()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x * 1 + (self.a + self.b)) + self.c.sum()


@pytest.mark.slow
def test_gradients_that_share_memory():
    eager, compiled = (trained(Shared(), 2, [8] * 3, **o) for o in ({}, {"compile": "aot_eager"}))
    assert same_in_graphs(eager.modules[1], compiled.modules[1])


@pytest.mark.slow
def test_parameters_are_frozen_and_trained_again():
    replicas = [replicas_of(perceptron(), 2, **o) for o in ({}, {"compile": "aot_eager"})]
    for step, (X, y) in enumerate(batches([8] * 7)):
        for r in replicas:
            for module in r.modules:
                module[0].requires_grad_(step not in (2, 3, 4))
            r.step(X, y)
    assert same_in_graphs(replicas[0].modules[1], replicas[1].modules[1])


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.net, self.skips = nn.Linear(FEATURES, FEATURES), perceptron(), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x if self.skips else self.first(x))


@pytest.mark.slow
def test_a_parameter_without_gradient_in_a_later_step():
    """Its momentum would move it, which no eager step does."""
    replicas = replicas_of(Skipping(), 2, compile="aot_eager")
    X, y = batches([8])[0]
    replicas.step(X, y)
    replicas.step(X, y)
    for mine in replicas.modules:
        mine.skips = True
    with pytest.raises(torch._dynamo.exc.Unsupported, match="other parameters have gradients"):
        replicas.step(X, y)


def test_a_state_of_fused_optimizers():
    replicas = replicas_of(perceptron(), 2, compile="aot_eager")
    X, y = batches([8])[0]
    replicas.step(X, y)
    state = replicas.state_dict()
    state["optimizer"]["param_groups"][0]["fused"] = True
    replicas.load_state_dict(state)
    replicas.step(X, y)


@pytest.mark.parametrize("other", [{"microbatch": 4}, {"sync_batchnorm": True}])
def test_graphs_exclude_other_options(other):
    with pytest.raises(ValueError, match="leave out compile"):
        StepOptions(compile=True, **other)


def test_hooks_of_optimizers_are_refused():
    def hooked(params):
        optimizer = torch.optim.SGD(params, lr=0.1)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    with pytest.raises(ValueError, match="hooks"):
        ReplicaTrainer(perceptron(), [CPU] * 2, optimizer=hooked, options=StepOptions(compile=True))


def test_hooks_of_later_are_refused():
    X, y = batches([8])[0]
    replicas = replicas_of(perceptron(), 2, compile="aot_eager")
    replicas.step(X, y)
    handle = replicas.optimizers[0].register_step_pre_hook(lambda *_: None)
    with pytest.raises(ValueError, match="optimizer's hooks"):
        replicas.step(X, y)
    handle.remove()
    replicas.parameters[1][0].register_hook(torch.clone)
    with pytest.raises(ValueError, match="hooks of parameters"):
        replicas.step(X, y)


def test_errors_are_those_of_eager_steps():
    replicas = replicas_of(perceptron(), 2, compile="aot_eager")
    X, y = batches([8])[0]
    replicas.step(X, y)
    for bad in ((X, y[:4]), (X[:0], y[:0])):
        with pytest.raises(ValueError, match=r"example|label"):
            replicas.step(*bad)
    replicas.step(X, y)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_inductor_trains_lenet(monkeypatch, pytestconfig):
    if cache := getattr(pytestconfig, "cache", None):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache.mkdir("inductor")))
    results = [
        train("cpu*2", 64, 0.3, data="digits", epochs=1, quiet=True, **options)
        for options in ({}, {"compile": True})
    ]
    eager, compiled = (result.losses[-1] for result in results)
    assert compiled == pytest.approx(eager, rel=1e-2)
    assert isinstance(results[1].module, LeNet)
