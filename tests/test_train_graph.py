"""A training step as one graph has the bits of the steps that it replaces.

CUDA graphs are tested on a GPU, and on the CPU with a plain function in place of the replay;
torch.compile with backends that leave the operations as they are, and once with inductor.
"""

import shutil
from contextlib import nullcontext
from functools import partial
from unittest.mock import MagicMock

import pytest
import torch
from sites import GPU, ON_GPU
from torch import nn
from torch.optim import optimizer as torch_optimizer
from train_cases import (
    CLASSES,
    FEATURES,
    batches,
    perceptron,
    replicas_of,
    same_in_graphs,
    same_tensors,
)

from pycollect.train import (
    GraphedStep,
    LeNet,
    init_lenet,
    lenet,
    replicate_params,
    train,
    train_batch,
)
from pycollect.train.compiled_step import CompiledStep
from pycollect.train.cuda_graph import capture

X, Y = batches([8])[0]


# --- CUDA graphs ----------------------------------------------------------------------------------


def as_graph(run):
    """Call the function as often as a capture does; the replay is one more call."""
    for _ in range(3):
        run()
    return run


def images(seed, n=10):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand((n, 1, 28, 28), generator=generator), torch.arange(n).roll(seed)


def of_modules(devices, capturing, begun):
    """Two functions that train eagerly, the second step captured, and the tensors of both."""
    module = nn.Sequential(nn.BatchNorm2d(1), LeNet(seed=1))
    eager, graphed = (replicas_of(module, 3, devices=devices) for _ in "ab")
    steps = [lambda X, y, r=r: r.step(X, y, shares=[len(X) - 2, 2, 0]) for r in (eager, graphed)]
    for step in steps if begun else ():
        step(*images(98))
    captured = GraphedStep.of(*images(99), graphed, shares=[8, 2, 0], capturing=capturing)
    tensors = [[t for m in r.modules for t in m.state_dict().values()] for r in (eager, graphed)]
    return *steps, captured, *tensors


def from_scratch(devices, capturing, begun):
    replicas = [replicate_params(init_lenet(), devices) for _ in "ab"]
    tensors = [[t for mine in r for p in mine for t in (p, p.grad)] for r in replicas]
    for t in (tensors[0][1], tensors[1][1]):
        t += float(begun)
    steps = [partial(train_batch, replicas=r, lr=0.1, model=lenet) for r in replicas]
    captured = GraphedStep(*images(99), steps[1], lambda: tensors[1], capturing=capturing)
    return *steps, captured, *tensors


@pytest.mark.parametrize(
    ("device", "capturing"), [("cpu", as_graph), pytest.param(GPU, capture, marks=ON_GPU)]
)
@pytest.mark.parametrize(
    ("make", "begun"), [(make, begun) for make in (from_scratch, of_modules) for begun in (0, 1)]
)
def test_a_captured_step_trains_the_same_bits(device, capturing, make, begun):
    # Some convolutions of cuDNN add in any order.
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        eager, between, captured, wanted, found = make([torch.device(device)] * 3, capturing, begun)
        assert all(map(same_tensors, found, wanted)), "capturing has changed the state"
        start = [t.clone() for t in found]
        for seed in range(4):
            losses = captured(*images(seed)), eager(*images(seed))
            assert [*map(float, losses[0])] == [*map(float, losses[1])]
        eager(*images(7, n=4)), between(*images(7, n=4))  # a batch of another size, not captured
        eager(*images(8)), captured(*images(8))
        assert all(map(same_tensors, found, wanted))
        assert not same_tensors(found[-2], start[-2])


def test_other_threads_may_use_the_gpu_during_the_capture(monkeypatch):
    """They load batches: `pin_memory` is forbidden to all threads in a capture of mode "global"."""
    fakes = {name: MagicMock() for name in ("Stream", "current_stream", "CUDAGraph", "graph")}
    for name, fake in {**fakes, "stream": lambda _: nullcontext()}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    capture(lambda: None)
    assert fakes["graph"].call_args.kwargs == {"capture_error_mode": "thread_local"}


# --- torch.compile: see the table of test_train_step.py, too --------------------------------------


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


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


def test_a_stored_state_of_a_fused_optimizer_is_continued():
    wanted, first = (replicas_of(perceptron(), 2, compile=how) for how in (False, "aot_eager"))
    later = replicas_of(perceptron(1), 2, compile="aot_eager")
    for i, batch in enumerate(batches([8] * 5)):
        if i == 3:
            state = first.state_dict()
            state["optimizer"]["param_groups"][0]["fused"] = True
            later.load_state_dict(state)
        for each in (wanted, first, later):
            each.step(*batch)
    assert same_in_graphs(later.modules[1], wanted.modules[1])


def test_an_eager_run_goes_on_with_a_compiled_one(tmp_path):
    """Their ranks have random states of their own, those of a compiled step have none."""
    options = {"data": (X, Y), "model": perceptron(), "quiet": True}
    first = {"compile": "eager", "epochs": 1, "checkpoint": tmp_path / "run.pt"}
    train("cpu*2", 4, 0.1, **options, **first)
    rest = train("cpu*2", **options, epochs=2, resume=tmp_path / "run.pt")
    assert [epoch.number for epoch in rest.epochs] == [1, 2]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_inductor_trains_lenet(monkeypatch, pytestconfig):
    if cache := getattr(pytestconfig, "cache", None):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache.mkdir("inductor")))
    eager, compiled = (
        train("cpu*2", 64, 0.3, data="digits", epochs=1, quiet=True, compile=how).losses[-1]
        for how in (False, True)
    )
    assert compiled == pytest.approx(eager, rel=1e-2)


class Skipping(nn.Sequential):
    skips = False

    def forward(self, X):
        return self[1](X if self.skips else self[0](X))


@pytest.mark.slow
def test_a_parameter_without_gradient_in_a_later_compiled_step_is_refused():
    """Its momentum would move it, which no eager step does."""
    module = Skipping(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES))
    replicas = replicas_of(module, 2, compile="aot_eager")
    replicas.step(X, Y)
    replicas.step(X, Y)
    for mine in replicas.modules:
        mine.skips = True
    with pytest.raises(torch._dynamo.exc.Unsupported, match="other parameters have gradients"):
        replicas.step(X, Y)


# --- refusals -------------------------------------------------------------------------------------


def graphed(**options):
    return GraphedStep.of(X, Y, replicas_of(perceptron(), 2, **options))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: graphed(exact_times=True), "exact times cannot be captured"),
        (lambda: graphed(shards=2), "a step with shards cannot be captured"),
        (graphed, "on one GPU, and these ranks are on cpu: .*compile=True.* or --compile makes"),
        (
            lambda: GraphedStep(X, Y, print, lambda: [X, X.to("meta")], capturing=as_graph),
            "these ranks are on cpu, meta",
        ),
        (
            lambda: GraphedStep(X, Y, print, lambda: [X], capturing=lambda run: run)(X[:7], Y[:7]),
            r"batches of shape \(8, 6\) and \(8,\), not \(7, 6\) and \(7,\)",
        ),
        (
            lambda: CompiledStep([torch.device("cuda:1")], [], [], None, None, "eager"),
            "compiled for ranks on the CPU, and these are on cuda:1: GraphedStep or --graph",
        ),
    ],
)
def test_what_is_not_one_graph_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_compiled_step_refuses_bad_batches_and_hooks():
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
