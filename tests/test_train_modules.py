"""Modules as people write them, in DataParallel and ReplicaTrainer: as on one device.

Parts under two names, references to parts in containers, functions and objects, hooks, compiled
parts, state in odd places.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from train_cases import Calls

from pycollect.train import DataParallel, ReplicaTrainer


class Twice(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Compared(nn.Module):
    """Tells its layers apart by what they are, in a dict and in a hook too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.order, self.seen = list(self.layers), {}
        self.scales = OrderedDict((layer, 2.0 + i) for i, layer in enumerate(self.layers))
        self.handles = [layer.register_forward_hook(self.note) for layer in self.layers]

    def note(self, layer: nn.Module, _: Any, output: Tensor) -> None:
        assert layer in self.order
        self.seen.update({layer: output})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.order:
            x = layer(x) * self.scales[layer]
            x = x + 1 if layer is self.layers[-1] else torch.tanh(x)
        return x + sum(self.seen[layer] for layer in self.layers)


class Ending:
    """An object that knows its module, and whose end has effects."""

    ended = 0

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __del__(self) -> None:
        Ending.ended += 1


class Trainer:
    """An object outside of the module that refers to it, as Lightning's."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.file = model, Ending(model)


class References(nn.Module):
    """Reaches its layers by containers, methods, partials, objects and parameters."""

    def __init__(self) -> None:
        super().__init__()
        a, b = self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.layers, self.held = [a, {"b": (b,)}], SimpleNamespace(layer=a)
        self.method, self.partial = self.helper, partial(References.helper, self)
        self.a.weight.scale = 0.5
        object.__setattr__(self.a, "parent", self)
        self.trainer = Trainer(self)
        self.optimizer = torch.optim.Adam(self.parameters())

    def helper(self, x: Tensor) -> Tensor:
        assert self.trainer.model is self.a.parent is self
        return self.a.parent.b(x) * getattr(self.a.weight, "scale", 1)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "handle"):
            self.handle = self.b.register_forward_hook(lambda _m, _i, output: output + 1)
        x = self.held.layer(self.layers[1]["b"][0](self.layers[0](x)))
        return self.partial(self.method(x))


class Doubling(partial):
    """A partial that calls twice as much."""

    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)


class Registry(dict):
    """A dict that refuses what a copy does not need."""

    def clear(self) -> None:
        raise TypeError("a registry is never cleared")


class Odd(nn.Module):
    """Uses layers through references of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.pick, self.made = {"a": self.a}.get, defaultdict(lambda: self.b)
        self.doubling, self.registry = Doubling(self.b), Registry(b=self.b)

    def forward(self, x: Tensor) -> Tensor:
        return self.doubling(self.registry["b"](self.made["b"](self.pick("a")(x))))


class Referring(nn.Module):
    """Computes with a layer to which `refer` gives another reference."""

    def __init__(self, refer: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.data = self.layer.weight.data
        self.found, self.myself = refer(self), lambda: self

    def forward(self, x: Tensor) -> Tensor:
        assert self.myself() is self
        found = self.found() if isinstance(self.found, weakref.ref) else self.found
        return found(x) + self.data.sum()


class Recurrent(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> None:
        super().__init__()
        self.lstm = wrap(nn.LSTM(3, 3, batch_first=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[:, None])[0][:, 0]


class Kept(nn.Module):
    """Keeps its features."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.features = nn.Linear(3, 3), []

    def forward(self, x: Tensor) -> Tensor:
        self.features = [self.linear(x)]
        return self.features[0]


class Collecting(nn.Module):
    """Layers that leave their outputs in a list of all of them, and in a dict that a hook fills."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs, self.inputs = [], {}
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        inputs = self.inputs
        for layer in self.layers:
            layer.outputs = self.outputs
            layer.register_forward_hook(lambda self, _, output: self.outputs.append(output))
            layer.register_forward_hook(lambda self, given, _: inputs.update({"last": given[0]}))
        # No copy may take long because of many references, or not end because of a circle.
        self.tree: dict[str, Any] = {"leaf": [1]}
        for _ in range(40):
            self.tree = {"left": self.tree, "right": self.tree}
        self.tree["root"] = self.tree

    def forward(self, x: Tensor) -> Tensor:
        self.outputs.clear()
        for layer in self.layers:
            x = layer(x)
        return x + sum(self.outputs) + self.inputs["last"]


def with_another_forward(module: nn.Module) -> nn.Module:
    before = module.forward

    @functools.wraps(before)
    def after(x: Tensor) -> Tensor:
        return before(x) * 2

    module.forward = after
    return module


def with_a_hook() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3))
    module.register_forward_hook(lambda _module, _inputs, output: module[0](output))
    return module


class Sharing(Twice):
    """Two parameters in one memory, and a tensor of a helper."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(3, 3)
        self.b.weight.data = self.a.weight.data.t()
        self.helper = SimpleNamespace(view=self.a.weight.detach()[1:])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.helper.view.sum()


def tied(a: nn.Module, b: nn.Module) -> nn.Module:
    b.weight = a.weight
    return nn.Sequential(a, nn.Tanh(), b)


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


AS_PEOPLE_WRITE_THEM: dict[str, Callable[[], nn.Module]] = {
    "a layer under two names": Twice,
    "a layer twice in a row": lambda: nn.Sequential(layer := nn.Linear(3, 3), nn.ReLU(), layer),
    "a weight under two names": lambda: tied(nn.Linear(3, 3), nn.Linear(3, 3)),
    "references": References,
    "odd references": Odd,
    "a function": lambda: Referring(lambda module: lambda x: module.layer(x)),
    "a default value": lambda: Referring(lambda module: lambda x, m=module: m.layer(x)),
    "a weak reference": lambda: Referring(lambda module: weakref.ref(module.layer)),
    "a weak reference to a weight": lambda: Referring(
        lambda module: (lambda weight: lambda x: x @ weight().t())(weakref.ref(module.layer.weight))
    ),
    "a function in a tuple": lambda: Referring(
        lambda module: partial(lambda found, x: found[0](x), (lambda x: module.layer(x),))
    ),
    "an object in a closure": lambda: Referring(
        lambda module: (lambda timed: lambda x: timed(x))(Timed(module.layer.forward))
    ),
    "a weight's memory in a closure": lambda: Referring(
        lambda module: (lambda kept: lambda x: module.layer(x) @ kept)(module.layer.weight.detach())
    ),
    "shared lists, dicts of hooks, circles": Collecting,
    "a cache": lambda: Referring(lambda module: functools.lru_cache(1)(module.layer.forward)),
    "a mapped function": lambda: Referring(lambda module: torch.vmap(module.layer)),
    "an object with a function": lambda: Referring(lambda module: Timed(lambda x: module.layer(x))),
    "a compiled function": lambda: Referring(
        lambda module: torch.compile(module.layer.forward, backend="eager")
    ),
    "layers that are compared": Compared,
    "a recurrent layer": Recurrent,
    "kept features": Kept,
    "another forward": lambda: with_another_forward(nn.Linear(3, 3)),
    "a hook": with_a_hook,
    "weight_norm": lambda: nn.utils.weight_norm(nn.Linear(3, 3)),
    "weight_norm of a recurrent layer": lambda: Recurrent(
        lambda layer: nn.utils.weight_norm(layer, "weight_hh_l0")
    ),
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
    "parametrization": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(3, 3), "weight", 0.3),
    "channels_last": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 1, 1)),
        nn.Conv2d(3, 3, 3, 1, 1).to(memory_format=torch.channels_last),
        nn.Flatten(),
    ),
    "a traced module": lambda: torch.fx.symbolic_trace(Twice()),
    "a compiled module": lambda: nn.Sequential(torch.compile(Twice(), backend="eager")),
    "compiled in place": lambda: compiled_in_place(Twice()),
    "memory of two parameters": Sharing,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", AS_PEOPLE_WRITE_THEM)
def test_modules_as_people_write_them(name: str) -> None:
    """Outputs and parameters are those of the bare module, and the parameters stay the same."""
    X = torch.randn(4, 7, 3)
    models: list[nn.Module] = []
    for _ in range(3):
        torch.manual_seed(0)
        models.append(AS_PEOPLE_WRITE_THEM[name]())
        models[-1](X[3])  # some keep what they compute
    alone, module, original = models
    start, kept = [p.detach().clone() for p in alone.parameters()], list(module.parameters())
    trained, sgd = [alone, DataParallel(module, "cpu*3")], partial(torch.optim.SGD, lr=0.1)
    steps = [sgd(model.parameters()) for model in trained]
    replicas = ReplicaTrainer(
        original, "cpu*3", optimizer=sgd, loss=lambda out, y: (out - y).square().sum() / 3
    )
    gc.collect()
    ended = Ending.ended
    for x in X[:3]:
        outputs = [model(x) for model in trained]
        torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-5)
        for output, step in zip(outputs, steps, strict=True):
            step.zero_grad()
            (output - 1).square().mean().backward()
            step.step()
        replicas.step(x, torch.ones(7, 3))
    assert Ending.ended == ended
    assert all(map(lambda now, then: now is then, module.parameters(), kept))
    assert all(isinstance(p, nn.Parameter) for p in kept)
    wanted = list(alone.parameters())
    assert max(float((a - b).abs().max().detach()) for a, b in zip(wanted, start)) > 1e-3  # noqa: B905
    torch.testing.assert_close(kept, wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(replicas.parameters[2], wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close([p.detach() for p in original.parameters()], start, rtol=0, atol=0)


class Timed:
    """An object in place of a forward method, which it calls."""

    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        self.inner = forward

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Average:
    """A helper that changes a buffer of its module."""

    __slots__ = ("__module",)

    def __init__(self, module: nn.Module) -> None:
        self.__module = module

    def update(self, x: Tensor) -> None:
        self.__module.count.mul_(0.5).add_(0.5 * x.mean())


def counting_down(module: Calls) -> Callable[[Tensor, int], Tensor]:
    def count(x: Tensor, n: int) -> Tensor:
        module.count.add_(1)
        return x if n == 0 else count(x + module.count, n - 1)

    return count


def with_(**attributes: Callable[[Any], Any]) -> Calls:
    module = Calls(lambda self, x: self.run(self, x * self.weight))
    module.norm, module.plain = nn.BatchNorm1d(3), torch.zeros(3)
    module.loose = [nn.BatchNorm1d(3)]
    module.run = lambda self, x: self.norm(x)
    for name, make in attributes.items():
        setattr(module, name, make(module))
    return module


def forward_is(make: Callable[[Callable[[Tensor], Tensor]], Any]) -> Calls:
    module = with_()
    module.norm.forward = make(module.norm.forward)
    return module


STATEFUL: dict[str, Callable[[], Calls]] = {
    "an object as forward": lambda: forward_is(Timed),
    "a cache": lambda: forward_is(functools.lru_cache(maxsize=0)),
    "a partial": lambda: forward_is(partial),
    "a read-only mapping": lambda: with_(
        names=lambda module: MappingProxyType({"norm": module.norm.forward}),
        run=lambda _: lambda self, x: self.names["norm"](x),
    ),
    "a recursive function": lambda: with_(
        counter=counting_down, run=lambda _: lambda self, x: self.counter(x, 2)
    ),
    "a tensor's method": lambda: with_(
        add=lambda module: module.count.add_, run=lambda _: lambda self, x: x * self.add(len(x))
    ),
    "a namespace": lambda: with_(
        names=lambda module: SimpleNamespace(norms=deque([module.norm])),
        run=lambda _: lambda self, x: self.names.norms[0](x),
    ),
    "a helper": lambda: with_(
        average=Average, run=lambda _: lambda self, x: self.average.update(x) or x - self.count
    ),
    "a view of a buffer": lambda: with_(
        view=lambda module: module.norm.running_mean[1:],
        run=lambda _: lambda self, x: self.norm(x) + self.view.add_(1).sum(),
    ),
    "a view in an object": lambda: with_(
        view=lambda module: SimpleNamespace(mean=module.norm.running_mean[1:]),
        run=lambda _: lambda self, x: self.norm(x) + self.view.mean.add_(1).sum(),
    ),
    "a weak reference": lambda: with_(
        weak=lambda module: weakref.ref(module.norm), run=lambda _: lambda self, x: self.weak()(x)
    ),
    "a weak method": lambda: with_(
        weak=lambda module: weakref.WeakMethod(module.norm.forward),
        run=lambda _: lambda self, x: self.weak()(x),
    ),
    "a weak proxy": lambda: with_(
        names=lambda module: [weakref.proxy(module.norm)],
        run=lambda _: lambda self, x: self.names[0](x),
    ),
    "a plain tensor": lambda: with_(run=lambda _: lambda self, x: x + self.plain.add_(x.mean(0))),
    "an unregistered layer": lambda: with_(run=lambda _: lambda self, x: self.loose[0](x)),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_state_is_each_ranks_own_and_rank_0s_is_kept(name: str) -> None:
    module, X = STATEFUL[name](), torch.randn(7, 3)
    ranks = []
    for shard in X.tensor_split(2):
        alone = STATEFUL[name]()
        ranks.append((alone(shard), alone))
    torch.testing.assert_close(
        DataParallel(module, "cpu*2")(X), torch.cat([output for output, _ in ranks])
    )
    alone = ranks[0][1]
    for mine, wanted in zip(
        [*module.buffers(), *module.loose[0].buffers(), module.plain],
        [*alone.buffers(), *alone.loose[0].buffers(), alone.plain],
        strict=True,
    ):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_run_the_layers_of_their_rank_again(reentrant: bool) -> None:
    """As on one device, the statistics of rank 0 count its forward pass and its repetition."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

        def block(self, x: Tensor) -> Tensor:
            used.append(self.linear.weight)
            return self.norm(self.linear(x))

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.block, x, use_reentrant=reentrant)

    used: list[Tensor] = []
    module, X = Block(), torch.randn(7, 3, requires_grad=True)
    alone = deepcopy(module)
    DataParallel(module, "cpu*3")(X).square().sum().backward()
    assert len(used) == 6
    assert len({weight.data_ptr() for weight in used}) == 3
    assert all(map(lambda again, first: again is first, used[5:2:-1], used[:3]))
    for shard in X.detach().tensor_split(3):
        alone(shard.requires_grad_()).square().sum().backward()
    torch.testing.assert_close(
        [p.grad for p in module.parameters()], [p.grad for p in alone.parameters()]
    )
    assert module.norm.num_batches_tracked == 2
