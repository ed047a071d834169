"""A training step as one graph of torch.compile: the same bits as the steps that it replaces."""

import shutil
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW
from torch.optim import optimizer as torch_optimizer
from train_cases import CPU, FEATURES, batches, difference, perceptron, replicas_of, same_in_graphs

from pycollect.train import LeNet, ReplicaTrainer, train
from pycollect.train.compiled_step import CompiledStep
from pycollect.train.reduce import reduce_gradients_naive

X, Y = batches([8])[0]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


class Mixed(nn.Module):
    """Has a layer that is not used, one that is frozen, buffers, two parameters with the same
    gradient in the same memory, and one with an expanded gradient.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(FEATURES)) for _ in range(3))
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.norm = nn.BatchNorm1d(FEATURES)
        self.net, self.skips = perceptron(), False

    def forward(self, x):
        x = self.norm(self.frozen(x))
        return self.net(x if self.skips else x + (self.a + self.b)) + self.c.sum()


def whole(step, X, y, replicas):
    return replicas.step(X, y)


def frozen_between(step, X, y, replicas):
    for module in replicas.modules:
        module[0].requires_grad_(step not in (2, 3, 4))
    return replicas.step(X, y)


def idle_rank(step, X, y, replicas):
    return replicas.step_on_shards([X[:0], X], [y[:0], y]) if step % 2 else replicas.step(X, y)


def other_rates(step, X, y, replicas):
    """More than torch.compile makes graphs of."""
    for optimizer in replicas.optimizers:
        optimizer.param_groups[0]["lr"] = 0.3 / (1 + step)
    losses = replicas.step(X, y, shares=[len(X) - 4, 4])
    rate = replicas.optimizers[0].param_groups[0]["lr"]
    assert isinstance(rate, float)
    assert rate == 0.3 / (1 + step)
    return losses


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("make", "world", "sizes", "step", "options"),
    [
        (perceptron, 1, [12, 12, 12, 7, 12], whole, {}),
        (Mixed, 3, [12, 12, 12, 7, 12], whole, {}),
        slow(perceptron, 2, [9, 9, 9, 9, 1], idle_rank, {}),
        slow(perceptron, 2, [8] * 7, frozen_between, {}),
        slow(perceptron, 2, [8] * 12, other_rates, {}),
        (perceptron, 2, [8] * 3, whole, {"reduction": reduce_gradients_naive}),
    ],
)
def test_a_compiled_step_has_the_bits_of_eager_steps(make, world, sizes, step, options):
    eager, compiled = (
        replicas_of(make(), world, **options, **how) for how in ({}, {"compile": "aot_eager"})
    )
    for i, (X, y) in enumerate(batches(sizes)):
        torch.testing.assert_close(*(step(i, X, y, r) for r in (eager, compiled)))
    for mine, theirs in zip(compiled.modules, eager.modules, strict=True):
        exact = step is not other_rates
        assert same_in_graphs(mine, theirs) if exact else difference(mine, theirs) < 1e-5
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    assert compiled.seconds.compute > 0 == compiled.seconds.reduction


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(AdamW, lr=0.01),
        partial(SGD, lr=0.1, momentum=0.9, fused=True),
        partial(Adagrad, lr=0.01),
    ],
)
def test_optimizers(optimizer):
    """Fused optimizers round differently, and graphs have step numbers in float32."""
    found = []
    for compiled in (False, "aot_eager"):
        replicas = ReplicaTrainer(perceptron(), "cpu*2", optimizer=optimizer, compile=compiled)
        for X, y in batches([8, 8, 8, 8]):
            replicas.step(X, y)
        found.append([*replicas.modules[1].parameters()])
    torch.testing.assert_close(*found)


def test_a_step_is_one_graph():
    graphs = []

    def count(graph, _examples):
        graphs.append(graph)
        return graph

    torch._dynamo.register_backend(count, name="count")
    replicas = replicas_of(perceptron(), 2, compile="count")
    for _ in range(4):
        replicas.step(X, Y)
    (graph,) = graphs
    called = " ".join(str(node.target) for node in graph.graph.nodes)
    for part in ("function linear", "function grad", "all_reduce_coalesced_", "momentum_buffer"):
        assert part in called


def test_a_state_is_continued():
    """It may come from fused optimizers, which are set again."""
    wanted = replicas_of(perceptron(), 2)
    first, later = (replicas_of(perceptron(seed), 2, compile="aot_eager") for seed in (0, 1))
    for i, batch in enumerate(batches([8] * 5)):
        if i == 3:
            state = first.state_dict()
            state["optimizer"]["param_groups"][0]["fused"] = True
            later.load_state_dict(state)
        wanted.step(*batch)
        first.step(*batch)
        later.step(*batch)
    assert same_in_graphs(later.modules[1], wanted.modules[1])


@pytest.mark.slow
def test_a_parameter_without_gradient_in_a_later_step():
    """Its momentum would move it, which no eager step does."""
    replicas = replicas_of(Mixed(), 2, compile="aot_eager")
    replicas.step(X, Y)
    replicas.step(X, Y)
    for mine in replicas.modules:
        mine.skips = True
    with pytest.raises(torch._dynamo.exc.Unsupported, match="other parameters have gradients"):
        replicas.step(X, Y)


def test_an_eager_run_goes_on_with_a_compiled_one(tmp_path):
    """Their ranks have random states of their own, those of a compiled step have none."""
    options = {"data": (X, Y), "model": perceptron(), "quiet": True}
    first = {"compile": "eager", "epochs": 1, "checkpoint": tmp_path / "run.pt"}
    train("cpu*2", 4, 0.1, **options, **first)
    rest = train("cpu*2", **options, epochs=2, resume=tmp_path / "run.pt")
    assert [epoch.number for epoch in rest.epochs] == [1, 2]


GPU = torch.device("cuda:1")
CPU_ONLY = "compiled for ranks on the CPU, and these are on cpu, cuda:1: GraphedStep or --graph"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replicas_of(perceptron(), 2, compile=True, microbatch=4), "leave out compile"),
        (lambda: replicas_of(perceptron(), 2, compile=True, sync_batchnorm=True), "out compile"),
        (lambda: CompiledStep([CPU, GPU], [], [], None, None, "eager"), CPU_ONLY),
    ],
)
def test_what_cannot_be_compiled_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_errors_are_those_of_eager_steps():
    replicas = replicas_of(perceptron(), 2, compile="aot_eager")
    replicas.step(X, Y)
    optimizer, param = replicas.optimizers[0], replicas.parameters[1][0]
    for hooks in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        torch_optimizer.register_optimizer_step_pre_hook,
        torch_optimizer.register_optimizer_step_post_hook,
        param.register_hook,
        param.register_post_accumulate_grad_hook,
    ):
        handle = hooks(lambda *_: None)
        with pytest.raises(ValueError, match="does not call the hooks"):
            replicas.step(X, Y)
        handle.remove()
    for bad in ((X, Y[:4]), (X[:0], Y[:0])):
        with pytest.raises(ValueError, match=r"example|label"):
            replicas.step(*bad)
    replicas.step(X, Y)


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
