"""Modules as people write them, in DataParallel: as on one device.

Parts under two names, references to parts in containers, functions and objects, other forward
methods, hooks, compiled parts, state in odd places.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from copy import deepcopy
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from train_cases import Calls, same_bits

from pycollect.train import DataParallel, data_parallel
from pycollect.train.module_check import SingleValueCheck


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
        self.scales = {layer: 2.0 + i for i, layer in enumerate(self.layers)}
        for layer in self.layers:
            layer.register_forward_hook(lambda me, _, out: self.seen.update({me: out}))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.order:
            x = layer(x) * self.scales[layer]
            x = x + 1 if layer is self.layers[-1] else torch.tanh(x)
        return x + sum(self.seen[layer] for layer in self.layers)


class References(nn.Module):
    """Reaches its layers by a list, dict, tuple, weak reference, method, partial and closure."""

    def __init__(self) -> None:
        super().__init__()
        a, b = self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.layers = [a, {"b": (b,)}]
        self.weak, self.method = weakref.ref(a), self.helper
        self.partial = functools.partial(References.helper, self)
        self.closure = lambda x, last=b: last(a(x))

    def helper(self, x: Tensor) -> Tensor:
        return self.b(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.weak()(self.layers[1]["b"][0](self.layers[0](x)))
        return self.closure(self.partial(self.method(x)))


class Recurrent(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> None:
        super().__init__()
        self.lstm = wrap(nn.LSTM(3, 3, batch_first=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[:, None])[0][:, 0]


class Doubling(functools.partial):
    """A partial that calls twice as much."""

    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)


class Factor(float):
    """A number that knows its module."""

    owner: nn.Module


class Pair(tuple):
    """A pair with an attribute."""

    scale: float


class Registry(dict):
    """A dict that refuses what a copy does not need."""

    def clear(self) -> None:
        raise TypeError("a registry is never cleared")

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("a registry is never changed")


class Resource:
    """An object that refers to its module, and whose end has effects."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.closed = module, module.closed

    def __del__(self) -> None:
        self.closed.append(self)


class Private:
    __slots__ = ("__layer",)

    def __init__(self, layer: nn.Module) -> None:
        self.__layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        return self.__layer(x)


class Odd(nn.Module):
    """Uses layers through references of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.a.parent = weakref.proxy(self)
        self.trainer = TRAINER
        TRAINER.model = self
        self.back = weakref.ref(TRAINER)
        self.pick, self.made = {"a": self.a}.get, defaultdict(lambda: self.b)
        self.weak, self.private = weakref.WeakMethod(self.last), Private(self.a)
        self.doubling, self.factor, self.pair = Doubling(self.b), Factor(0.3), Pair((1, 2))
        self.factor.owner, self.pair.scale, self.a.weight.scale = self, 0.5, 0.5
        self.closed: list[Any] = []
        self.registry, self.resource = Registry(b=self.b), Resource(self)

    def last(self, x: Tensor) -> Tensor:
        return x * self.factor * self.pair.scale * getattr(self.a.weight, "scale", 1)

    def forward(self, x: Tensor) -> Tensor:
        assert self.back() is not None
        if not hasattr(self, "handle"):
            self.handle = self.b.register_forward_hook(lambda _m, _i, output: output + 1)
        x = self.a.parent.b(self.registry["b"](self.pick("a")(x)))
        return self.weak()(self.doubling(self.private(self.made["b"](x))))


class Trainer:
    """An object outside of the module that refers to it, as Lightning's."""

    model: nn.Module


TRAINER = Trainer()


def with_another_forward() -> nn.Module:
    module = nn.Linear(3, 3)
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


def compiled_in_place() -> nn.Module:
    module = Twice()
    module.compile(backend="eager")
    return module


AS_PEOPLE_WRITE_THEM: dict[str, Callable[[], nn.Module]] = {
    "a layer under two names": Twice,
    "a layer twice in a row": lambda: nn.Sequential(layer := nn.Linear(3, 3), nn.ReLU(), layer),
    "references": References,
    "a recurrent layer": Recurrent,
    "odd references": Odd,
    "another forward": with_another_forward,
    "a hook": with_a_hook,
    "layers that are compared": Compared,
    "weight_norm": lambda: nn.utils.weight_norm(nn.Linear(3, 3)),
    "weight_norm of a recurrent layer": lambda: Recurrent(
        lambda layer: nn.utils.weight_norm(layer, "weight_hh_l0")
    ),
    "parametrization": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    "a traced module": lambda: torch.fx.symbolic_trace(Twice()),
    "a compiled module": lambda: torch.compile(Twice(), backend="eager"),
    "compiled in place": compiled_in_place,
    "memory of two parameters": lambda: sharing_memory(Twice()),
}


def sharing_memory(module: nn.Module) -> nn.Module:
    module.b = nn.Linear(3, 3)
    module.b.weight.data = module.a.weight.data.t()
    return module


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", AS_PEOPLE_WRITE_THEM)
def test_modules_as_people_write_them(name: str) -> None:
    """Outputs and parameters are those of the bare module, and the parameters stay the same."""
    models: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(AS_PEOPLE_WRITE_THEM[name]())
    start = [p.detach().clone() for p in models[0].parameters()]
    kept = list(models[1].parameters())
    trained = [models[0], DataParallel(models[1], "cpu*3")]
    steps = [torch.optim.SGD(model.parameters(), 0.1) for model in trained]
    for _ in range(3):
        X = torch.randn(7, 3)
        outputs = [model(X) for model in trained]
        torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-5)
        for output, step in zip(outputs, steps, strict=True):
            step.zero_grad()
            (output - 1).square().mean().backward()
            step.step()
    assert all(map(lambda now, then: now is then, models[1].parameters(), kept))
    assert all(isinstance(p, nn.Parameter) for p in kept)
    assert not getattr(models[1], "closed", [])
    assert any(
        float((p.detach() - before).abs().max()) > 1e-3
        for p, before in zip(kept, start, strict=True)
    )
    torch.testing.assert_close(kept, list(models[0].parameters()), rtol=0, atol=1e-5)


class Timed:
    """An object in place of a forward method, which it calls."""

    def __init__(self, module: nn.Module) -> None:
        self.inner = module.forward

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Average:
    """A helper that changes a buffer of its module."""

    __slots__ = ("__module",)

    def __init__(self, module: nn.Module) -> None:
        self.__module = module

    def update(self, x: Tensor) -> None:
        self.__module.count.mul_(0.5).add_(0.5 * x.mean())


def counting_down(module: nn.Module) -> Callable[[Tensor, int], Tensor]:
    def count(x: Tensor, n: int) -> Tensor:
        module.count.add_(1)
        return x if n == 0 else count(x + module.count, n - 1)

    return count


def with_(**attributes: Callable[[nn.Module], Any]) -> Calls:
    module = Calls(lambda self, x: self.run(self, x * self.weight))
    module.norm, module.plain = nn.BatchNorm1d(3), torch.zeros(3)
    module.loose = [nn.BatchNorm1d(3)]
    for name, make in attributes.items():
        setattr(module, name, make(module))
    return module


def forward_is(make: Callable[[Callable[[Tensor], Tensor]], Any]) -> Calls:
    module = with_(run=lambda module: lambda self, x: self.norm(x))
    module.norm.forward = make(module.norm.forward)
    return module


STATEFUL: dict[str, Callable[[], Calls]] = {
    "an object as forward": lambda: forward_is(
        lambda forward: Timed(SimpleNamespace(forward=forward))
    ),
    "a cache": lambda: forward_is(functools.lru_cache(maxsize=0)),
    "a partial": lambda: forward_is(functools.partial),
    "a namespace": lambda: with_(
        names=lambda module: SimpleNamespace(norms=deque([module.norm])),
        run=lambda _: lambda self, x: self.names.norms[0](x),
    ),
    "a read-only mapping": lambda: with_(
        names=lambda module: MappingProxyType({"norm": module.norm.forward}),
        run=lambda _: lambda self, x: self.names["norm"](x),
    ),
    "a helper": lambda: with_(
        average=Average, run=lambda _: lambda self, x: self.average.update(x) or x - self.count
    ),
    "a recursive function": lambda: with_(
        counter=counting_down, run=lambda _: lambda self, x: self.counter(x, 2)
    ),
    "a tensor's method": lambda: with_(
        add=lambda module: module.count.add_, run=lambda _: lambda self, x: x * self.add(len(x))
    ),
    "a view of a buffer": lambda: with_(
        view=lambda module: module.norm.running_mean[1:],
        run=lambda _: lambda self, x: self.norm(x) + self.view.add_(1).sum(),
    ),
    "a plain tensor": lambda: with_(run=lambda _: lambda self, x: x + self.plain.add_(x.mean(0))),
    "an unregistered layer": lambda: with_(run=lambda _: lambda self, x: self.loose[0](x)),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_state_is_each_ranks_own_and_rank_0s_is_kept(name: str) -> None:
    module, X = STATEFUL[name](), torch.randn(7, 3)
    ranks = []
    for shard in X.tensor_split(2):
        torch.manual_seed(0)
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


def test_a_backward_pass_that_reads_its_module() -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
            ctx.module = module
            return x * module.weight

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            used.append(ctx.module.weight)
            return grad * ctx.module.weight, None

    used: list[Tensor] = []
    module, X = Calls(lambda self, x: Scale.apply(x, self)), torch.ones(4, requires_grad=True)
    DataParallel(module, "cpu*2")(X).sum().backward()
    assert len({weight.data_ptr() for weight in [*used, module.weight]}) == 3
    assert X.grad.tolist() == [2, 2, 2, 2]


EVERYWHERE: list[nn.Module] = []


def test_a_change_of_the_modules_own_buffers_is_noticed() -> None:
    module = Calls(lambda self, x: EVERYWHERE[-1].count.add_(1) * x)
    EVERYWHERE.append(module)
    with pytest.raises(RuntimeError, match=r"while rank 1 ran, count of the module itself has"):
        DataParallel(module, "cpu*2")(torch.ones(2))
    reads = Calls(lambda self, x: EVERYWHERE[-1].weight * x)
    EVERYWHERE.append(reads)
    assert DataParallel(reads, "cpu*2")(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.slow
def test_replicas_that_refer_to_themselves_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_parallel, "_MOST_BYTES", 3 * 2 * 48)  # of three passes
    module = nn.Linear(3, 3)
    module.act = module.forward
    found: list[weakref.ref[nn.Module]] = []
    module.register_forward_hook(lambda me, *_: found.append(weakref.ref(me)))
    parallel = DataParallel(module, "cpu*2")
    for _ in range(20):
        parallel(torch.ones(2, 3))
    assert sum(ref() is not None for ref in found) <= 8
    kept = [parallel(torch.ones(2, 3)) for _ in range(20)]  # and their graphs
    kept[0].sum().backward()
    assert len(kept) == 20


def test_a_dry_run_leaves_shared_layers_as_they_are() -> None:
    norm = nn.BatchNorm1d(6)
    module = nn.Sequential(norm, nn.Linear(6, 6), norm)
    before, kept = deepcopy(module), [*module.parameters(), *module.buffers()]
    with pytest.raises(ValueError, match="rank 1 has a shard of 1"):
        SingleValueCheck(module).check([(2, 1)], torch.zeros(3, 6))
    now = [*module.parameters(), *module.buffers()]
    assert all(map(lambda a, b: a is b, now, kept))
    assert same_bits(module, before)
