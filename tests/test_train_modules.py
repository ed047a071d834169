"""Modules as people write them, in DataParallel: as on one device.

Parts under two names, references to parts in containers, functions and objects, other forward
methods, hooks, compiled parts, state in odd places.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from train_cases import Calls

from pycollect.train import DataParallel

OUTSIDE = SimpleNamespace()  # refers to modules, as Lightning's trainer does


class Twice(nn.Module):
    """One layer under two names, and a number in a slot."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.5
        self.a = self.b = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) * self.factor


class Private:
    __slots__ = ("__layer",)

    def __init__(self, layer: nn.Module) -> None:
        self.__layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        return self.__layer(x)


class References(nn.Module):
    """Reaches its layers by containers, weak references, methods, partials, closures, objects."""

    def __init__(self) -> None:
        super().__init__()
        a, b = self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.layers = [a, {"b": (b,)}]
        self.weak, self.method, self.pick = weakref.ref(a), self.helper, {"a": a}.get
        self.partial = functools.partial(References.helper, self)
        self.closure = lambda x, last=b: last(a(x))
        a.parent, self.private, OUTSIDE.model = weakref.proxy(self), Private(a), self
        a.weight.scale = 0.5

    def helper(self, x: Tensor) -> Tensor:
        return self.b(x) * self.a.weight.scale

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "handle"):
            self.handle = self.b.register_forward_hook(lambda _m, _i, output: output + 1)
        x = self.weak()(self.layers[1]["b"][0](self.layers[0](x)))
        x = self.a.parent.b(self.pick("a")(self.private(x)))
        return OUTSIDE.model.closure(self.partial(self.method(x)))


class Recurrent(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> None:
        super().__init__()
        self.lstm = wrap(nn.LSTM(3, 3, batch_first=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[:, None])[0][:, 0]


def with_another_forward() -> nn.Module:
    module = nn.Linear(3, 3)
    before = module.forward
    module.forward = functools.wraps(before)(lambda x: before(x) * 2)
    return module


def with_a_hook() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3))
    module.register_forward_hook(lambda _module, _inputs, output: module[0](output))
    return module


def compiled_in_place() -> nn.Module:
    module = Twice()
    module.compile(backend="eager")
    return module


def sharing_memory() -> nn.Module:
    module = Twice()
    module.b = nn.Linear(3, 3)
    module.b.weight.data = module.a.weight.data.t()
    return module


AS_PEOPLE_WRITE_THEM: dict[str, Callable[[], nn.Module]] = {
    "a layer under two names": Twice,
    "a layer twice in a row": lambda: nn.Sequential(layer := nn.Linear(3, 3), nn.ReLU(), layer),
    "references": References,
    "a recurrent layer": Recurrent,
    "another forward": with_another_forward,
    "a hook": with_a_hook,
    "weight_norm": lambda: nn.utils.weight_norm(nn.Linear(3, 3)),
    "weight_norm of a recurrent layer": lambda: Recurrent(
        lambda layer: nn.utils.weight_norm(layer, "weight_hh_l0")
    ),
    "parametrization": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    "a traced module": lambda: torch.fx.symbolic_trace(Twice()),
    "a compiled module": lambda: torch.compile(Twice(), backend="eager"),
    "compiled in place": compiled_in_place,
    "memory of two parameters": sharing_memory,
    "DataParallel": lambda: nn.Sequential(DataParallel(Twice(), "cpu*2"), nn.Linear(3, 3)),
}


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
        outputs = []
        for model, bare in zip(trained, models, strict=True):
            OUTSIDE.model = bare
            outputs.append(model(X))
        torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-5)
        for output, step in zip(outputs, steps, strict=True):
            step.zero_grad()
            (output - 1).square().mean().backward()
            step.step()
    assert all(map(lambda now, then: now is then, models[1].parameters(), kept))
    assert not hasattr(models[1], "handle"), "what forward assigns is lost"
    assert any(
        float((p.detach() - before).abs().max()) > 1e-3
        for p, before in zip(kept, start, strict=True)
    )
    torch.testing.assert_close(kept, list(models[0].parameters()), rtol=0, atol=1e-5)


class Timed:
    """An object in place of a forward method, which it calls."""

    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        self.inner = forward

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(x)


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
    OUTSIDE.model = module
    return module


def forward_is(make: Callable[[Callable[[Tensor], Tensor]], Any]) -> Calls:
    module = with_(run=lambda module: lambda self, x: self.norm(x))
    module.norm.forward = make(module.norm.forward)
    return module


STATEFUL: dict[str, Callable[[], Calls]] = {
    "an object as forward": lambda: forward_is(Timed),
    "a cache": lambda: forward_is(functools.lru_cache(maxsize=0)),
    "a recursive function": lambda: with_(
        counter=counting_down, run=lambda _: lambda self, x: self.counter(x, 2)
    ),
    "a global variable": lambda: with_(
        run=lambda _: lambda self, x: OUTSIDE.model.count.add_(1) * OUTSIDE.model.norm(x)
    ),
    "a view of a buffer": lambda: with_(
        view=lambda module: module.norm.running_mean[1:],
        run=lambda _: lambda self, x: self.norm(x) + self.view.add_(1).sum(),
    ),
    "a plain tensor": lambda: with_(run=lambda _: lambda self, x: x + self.plain.add_(x.mean(0))),
    "tensors in containers": lambda: with_(
        held=lambda module: {"all": [(module.plain,)]},
        run=lambda _: lambda self, x: self.held["all"][0][0].add_(x.mean(0)) + self.plain * x,
    ),
    "an unregistered layer": lambda: with_(run=lambda _: lambda self, x: self.loose[0](x)),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_state_is_each_ranks_own_and_rank_0s_is_kept(name: str) -> None:
    X, ranks = torch.randn(7, 3), []
    for shard in X.tensor_split(2):
        alone = STATEFUL[name]()
        ranks.append((alone(shard), alone))
    module = STATEFUL[name]()
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
    assert len({weight.data_ptr() for weight in used}) == 3
    assert all(map(lambda again, first: again is first, used[5:2:-1], used[:3]))
    for shard in X.detach().tensor_split(3):
        alone(shard.requires_grad_()).square().sum().backward()
    torch.testing.assert_close(
        [p.grad for p in module.parameters()], [p.grad for p in alone.parameters()]
    )
    assert module.norm.num_batches_tracked == 2


def test_what_the_ranks_would_share_is_refused() -> None:
    module = with_(
        add=lambda module: module.count.add_, run=lambda _: lambda self, x: x * self.add(1)
    )
    with pytest.raises(RuntimeError, match=r"while rank 1 ran, count of the module itself has"):
        DataParallel(module, "cpu*2")(torch.ones(2, 3))
    module = with_(
        linear=lambda _: nn.Linear(3, 3),
        seen=lambda _: {},
        run=lambda _: lambda self, x: self.seen.setdefault(0, self.linear)(x),
    )
    parallel = DataParallel(module, "cpu*2")
    parallel(torch.randn(4, 3))
    with pytest.raises(RuntimeError, match=r"earlier forward pass has put .* a Linear into"):
        parallel(torch.randn(4, 3))


def test_after_a_pass_nothing_of_it_is_left() -> None:
    """Replicas are freed at once, and the module has its own tensors, also after an error."""
    found: list[weakref.ref[nn.Module]] = []
    module = nn.Sequential(nn.Linear(3, 3))
    module.act, module.parts, weight = module.forward, [module], module[0].weight
    module.register_forward_hook(lambda me, *_: found.append(weakref.ref(me)))
    parallel = DataParallel(module, "cpu*2")
    gc.disable()
    try:
        parallel(torch.ones(2, 3)).sum().backward()
        assert len({id(ref) for ref in found}) == 2
        assert all(ref() is None for ref in found)
    finally:
        gc.enable()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        parallel(torch.ones(2, 4))
    assert module[0].weight is weight
    assert not hasattr(module, "_is_replica")
