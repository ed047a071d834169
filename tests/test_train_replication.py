"""Copies of a module for every rank: shared parameters stay shared, and nothing else is shared."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_cases import (
    CPU,
    batches,
    replicas_of,
    same_bits,
    trained_ranks,
)

from pycollect.train import DataParallel, SyncBatchNorm, convert_sync_batchnorm, replicate_module


class Everything(nn.Module):
    """Tied and frozen parameters, buffers of many kinds, and attributes that are not tensors."""

    kept: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("kept", torch.arange(3.0).to(torch.bfloat16), persistent=False)
        self.register_buffer("nothing", None)
        self.again = self.count
        self.notes = {"names": ["a"]}
        self.frozen.weight_decay = 0.0  # type: ignore[attr-defined]


def test_the_whole_module_is_copied_for_every_rank() -> None:
    module = Everything().eval()
    module.conv.train()
    module.conv(torch.ones(1, 3, 4, 4)).sum().backward()
    copies = replicate_module(module, [CPU] * 3)
    for copy in copies:
        assert isinstance(copy, Everything)
        assert same_bits(copy, module)
        assert copy.out.weight is copy.embed.weight
        assert copy.again is copy.count
        assert [p.requires_grad for p in copy.parameters()] == [False, True, True, True]
        assert all(param.grad is None for param in copy.parameters())
        assert copy.frozen.weight_decay == 0.0  # type: ignore[attr-defined]
        assert copy.conv.weight.is_contiguous(memory_format=torch.channels_last)
        assert (copy.count.dtype, copy.kept.dtype) == (torch.int64, torch.bfloat16)
        assert torch.equal(copy.kept, module.kept)
        assert copy.notes == module.notes
        assert copy.notes is not module.notes
        assert [m.training for m in copy.modules()] == [m.training for m in module.modules()]
    tensors = [t for m in [module, *copies] for t in [*m.parameters(), *m.buffers()]]
    assert len({t.data_ptr() for t in tensors}) == len(tensors) == 4 * 7


def with_(attribute: str, value: Any) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    setattr(module[0], attribute, value)
    return module


def hooked(register: str) -> nn.Module:
    module = nn.Linear(2, 2)
    getattr(module.weight, register)(lambda gradient: None)
    return module


def by_a_global_variable() -> nn.Module:
    names: dict[str, Any] = {"torch": torch, "layer": nn.Linear(2, 2)}  # as in a notebook
    names["net"] = nn.Sequential(names["layer"])
    exec("net.run = lambda self, x: self.layer(x)", names)
    exec("net[0].twice = lambda x: [net(x) for _ in range(2)]", names)
    return names["net"]


def in_two_storages() -> nn.Module:
    module, memory = nn.ParameterList([torch.ones(4), torch.ones(4)]), bytearray(24)
    for param, begin in zip(module, (0, 8), strict=True):
        param.data = torch.frombuffer(memory, dtype=torch.float32, offset=begin, count=4)
    return module


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "weight has no shape.*send one batch through the module first": lambda: nn.LazyLinear(2),
    "TorchScript": lambda: torch.jit.script(nn.Linear(2, 2)),
    "attribute lock of 0 cannot be copied for every rank": lambda: with_("lock", threading.Lock()),
    "<lambda> uses the module by the global variable 'net'": by_a_global_variable,
    "parameter weight has a hook.*register it with the replicas": lambda: hooked("register_hook"),
    "parameter weight has a hook": lambda: hooked("register_post_accumulate_grad_hook"),
    r"shapes \[\[4\], \[4\]\] share memory of several": in_two_storages,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("message", REFUSED)
def test_modules_without_replicas_are_refused_by_name(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replicate_module(REFUSED[message](), [CPU])


@pytest.mark.parametrize("copying", [deepcopy, pickle.dumps])
def test_a_trainer_has_no_copies_but_its_state_goes_on(copying: Callable[[Any], Any]) -> None:
    first, second = batches([6, 6])
    replicas, other = (replicas_of(nn.Linear(6, 4), 2) for _ in range(2))
    with pytest.raises(TypeError, match=r"make another one, and pass its load_state_dict\(\) what"):
        copying(replicas)
    assert same_bits(replicate_module(replicas.modules[1], [CPU])[0], replicas.modules[0])
    replicas.step(*first)
    other.load_state_dict(replicas.state_dict())
    for trainer in (replicas, other):
        trainer.step(*second)
    assert all(map(same_bits, replicas.modules, other.modules))


class Tied(nn.Module):
    """Two parameters in one memory, and two buffers."""

    def __init__(self, tie: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 4)
        self.b.weight.data = tie(self.a.weight.data)
        self.register_buffer("calls", torch.zeros(4))
        self.register_buffer("last", self.calls[3:])

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.b(torch.tanh(self.a(x)))


TIES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda weight: weight.t()[:4],
    "a part": lambda weight: weight[2:],
    "other strides": lambda weight: weight.new_empty(0).set_(
        weight.untyped_storage(), 2, (4, 6), (1, 5)
    ),
}


def places(module: nn.Module) -> list[int]:
    """Where every parameter and buffer begins, counted from the first one of its memory."""
    a, b, calls, last = (
        module.get_parameter(name) if "." in name else module.get_buffer(name)
        for name in ("a.weight", "b.weight", "calls", "last")
    )
    return [b.data_ptr() - a.data_ptr(), *b.stride(), last.data_ptr() - calls.data_ptr()]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("tie", TIES)
def test_parameters_that_share_memory_do_so_in_every_copy(tie: str) -> None:
    """They train as on one device."""
    alone, steps = Tied(TIES[tie]), batches([6, 7, 5])
    assert places(alone)[-1] == 12
    replicas = replicas_of(Tied(TIES[tie]), 3)
    sgd = torch.optim.SGD(alone.parameters(), 0.3, momentum=0.9, weight_decay=1e-3)
    for X, y in steps:
        sgd.zero_grad()
        F.cross_entropy(alone(X), y).backward()
        sgd.step()
        replicas.step(X, y)
    for module in replicas.modules:
        assert places(module) == places(alone)
        assert module.get_buffer("calls").tolist() == [3, 3, 3, 3]
        torch.testing.assert_close(
            list(module.parameters()), list(alone.parameters()), rtol=0, atol=1e-6
        )
    assert 0 <= replicas.evaluate(steps) <= 1
    assert replicas.modules[1].get_buffer("calls").tolist() == [3, 3, 3, 3]


class Early(nn.Module):
    """Uses the features of the pass before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.features = nn.Linear(6, 4), []

    def forward(self, x: Tensor) -> Tensor:
        kept, self.features = self.features, [self.linear(x)]
        return (kept or self.features)[0] * 2


def test_a_tensor_computed_before_the_copy_has_no_gradient() -> None:
    module = Early()
    ((X, y),) = batches([4])
    module(X)
    replicas = replicas_of(module, 2)
    with pytest.raises(ValueError, match=r"shape \[4, 4\] was computed before .* in forward\(\)"):
        replicas.step(X, y, shares=[4, 0])


def test_parameters_that_forward_changes_must_stay_equal() -> None:
    class Clamped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    torch.manual_seed(0)
    module, steps = Clamped(6, 4), batches([6, 6])
    alone, replicas = replicas_of(module, 1), replicas_of(module, 2)
    for X, y in steps:
        alone.step(X, y)
        replicas.step(X, y)
    torch.testing.assert_close(replicas.parameters[1], alone.parameters[0], rtol=0, atol=1e-6)
    words = nn.Sequential(nn.Embedding(9, 4, max_norm=0.5), nn.Flatten(), nn.Linear(8, 4))
    with pytest.raises(ValueError, match=r"forward changes parameter 0\.weight in place"):
        replicas_of(words, 2).step(torch.arange(8).view(4, 2), torch.arange(4))


class Scaled(nn.Parameter):
    """A parameter of a class of its own."""


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor:UserWarning")
def test_parameters_and_buffers_of_any_kind() -> None:
    module = nn.Linear(6, 4)
    module.weight = Scaled(module.weight.detach())
    module.register_buffer("tokens", torch.arange(3).to(torch.uint16))
    module.register_buffer("scale", torch.ones(2).to(torch.float8_e8m0fnu))
    module.register_buffer("codes", module.get_buffer("tokens").view(torch.uint8)[1:])
    module.register_buffer("map", torch.eye(4).to_sparse())
    module.register_buffer("conjugate", torch.tensor([1j]).conj())
    module.register_buffer(
        "quantized", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    )
    X = batches([4])[0][0]
    torch.testing.assert_close(DataParallel(module, "cpu*2")(X), module(X))
    replicas = replicas_of(module, 2)
    replicas.step(*batches([4])[0])
    assert 0 <= replicas.evaluate(batches([4])) <= 1
    for mine in replicas.modules:
        assert isinstance(mine.weight, Scaled)
        for name, buffer in module.named_buffers():
            other = mine.get_buffer(name)
            assert (other.dtype, other.layout) == (buffer.dtype, buffer.layout)
        assert mine.get_buffer("tokens").tolist() == [0, 1, 2]
        begin = mine.get_buffer("tokens").data_ptr()
        assert mine.get_buffer("codes").data_ptr() == begin + 1
        assert mine.get_buffer("scale").float().tolist() == [1, 1]
        assert torch.equal(mine.get_buffer("map").to_dense(), torch.eye(4))
        assert mine.get_buffer("conjugate").tolist() == [-1j]


class Holder:
    """An object that refers to a layer by a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_statistics_over_all_ranks_reach_layers_in_lists() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(6), nn.Linear(6, 4)
            self.layers = [self.norm, nn.BatchNorm1d(6, affine=False)]
            self.holder = Holder(self.linear)
            self.holder.last = nn.BatchNorm1d(4, affine=False)

        def forward(self, x: Tensor) -> Tensor:
            for layer in (*self.layers, self.holder, self.holder.last):
                x = layer(x)
            return x

    module = Listed()
    whole, data = replicas_of(module, 1), batches([6, 6])
    for X, y in data:
        whole.step(X, y)
    converted = trained_ranks(lambda: module, 2, data)[1]
    for name, value in whole.modules[0].state_dict().items():
        torch.testing.assert_close(converted.state_dict()[name], value, rtol=0, atol=1e-5)
    layers = (*converted.layers, converted.holder.last)
    assert all(isinstance(layer, SyncBatchNorm) for layer in layers)
    assert converted.layers[0] is converted.norm
    assert converted.holder.function is converted.linear
    fresh = Listed()
    fresh.norm.forward = Holder(fresh.norm.forward)
    with pytest.raises(ValueError, match="norm is a BatchNorm1d with another forward"):
        convert_sync_batchnorm(fresh)
