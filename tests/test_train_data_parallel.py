"""DataParallel gives the results of the bare module on any devices, and always the same bits."""

from __future__ import annotations

import copy
import threading
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from train_cases import Calls

from pycollect.train import DataParallel

Pair = namedtuple("Pair", ["first", "second"])


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(54, 8), nn.Tanh(),
        nn.Linear(8, 3),
    )  # fmt: skip


def grads(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters()]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("examples", [1, 2, 7])
def test_as_the_bare_module(world: int, examples: int) -> None:
    module = net()
    parallel = DataParallel(copy.deepcopy(module), f"cpu*{world}")
    X = torch.randn(examples, 1, 8, 8, requires_grad=True)
    mine = X.detach().clone().requires_grad_()
    expected, got = module(X), parallel(mine)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    for out in (expected, got):
        nn.functional.cross_entropy(out, torch.arange(examples) % 3).backward()
    torch.testing.assert_close(grads(parallel), grads(module), rtol=0, atol=1e-5)
    torch.testing.assert_close(mine.grad, X.grad, rtol=0, atol=1e-5)


def test_gradients_have_the_same_bits_and_are_added_in_rank_order() -> None:
    module, X = net(), torch.randn(11, 1, 8, 8)
    found = []
    for _ in range(3):
        module.zero_grad()
        DataParallel(module, "cpu*4")(X).square().sum().backward()
        found.append([g.clone() for g in grads(module)])
    assert all(all(map(torch.equal, found[0], again)) for again in found[1:])
    scaled = Calls(lambda self, x: self.weight * x)
    for x, total in (([1e8, -1e8, 1.0], 1), ([1.0, 1e8, -1e8], 0)):
        scaled.weight.grad = None
        DataParallel(scaled, "cpu*3")(torch.tensor(x)).sum().backward()
        assert scaled.weight.grad == total


def test_every_rank_gets_its_share() -> None:
    seen: list[list[float]] = []
    module = Calls(lambda self, x: seen.append(x.tolist()) or x)
    parallel = DataParallel(module, "cpu*4")
    for batch, shares in ((5, [2, 1, 1, 1]), (3, [1, 1, 1]), (1, [1]), (0, [0])):
        seen.clear()
        assert parallel(torch.arange(float(batch))).tolist() == list(range(batch))
        assert [len(s) for s in seen] == shares


@dataclass
class Registered:
    x: Tensor
    n: int


torch.export.register_dataclass(Registered)


def test_inputs_and_outputs_of_all_shapes() -> None:
    config = SimpleNamespace(size=2, names=["a"], kind=torch.float32)
    shared = {"config": config, "number": np.float32(2.5), "call": torch.relu, "nan": float("nan")}

    def forward(self: Calls, x: Tensor, more: Registered, *, scale: Tensor, **options: Any) -> Any:
        assert scale.dim() == 0
        assert all(options[name] is shared[name] for name in shared)
        labels, y = x[:, 0] > 0, (x + more.x) * scale * self.weight
        pair = Pair(y, [labels, None])
        return {"pair": pair, "loss": x.sum(), "n": 3, "more": more, "nan": options["nan"]}

    x, more, scale = torch.randn(5, 2), torch.randn(5, 2), torch.tensor(3.0, requires_grad=True)
    parallel = DataParallel(Calls(forward), "cpu*2")
    got = parallel(x, Registered(more, 7), scale=scale, **shared)
    assert isinstance(got["pair"], Pair)
    torch.testing.assert_close(got["pair"].first, (x + more) * 6)
    assert torch.equal(got["pair"].second[0], x[:, 0] > 0)
    assert (got["pair"].second[1], got["n"], got["more"].n) == (None, 3, 7)
    assert torch.equal(got["more"].x, more)
    assert got["nan"] != got["nan"]
    torch.testing.assert_close(got["loss"], torch.stack([x[:3].sum(), x[3:].sum()]))
    got["pair"].first.sum().backward()
    torch.testing.assert_close(scale.grad, ((x + more) * 2).sum())
    one = parallel(x[:1], Registered(more[:1], 7), scale=scale, **shared)
    assert one["loss"].shape == (1,)
    assert DataParallel(Calls(lambda self, x: x.sum()), "cpu")(x).shape == ()
    columns = DataParallel(Calls(lambda self, x: x * self.weight), "cpu*2", dim=1)(torch.ones(2, 5))
    assert torch.equal(columns, torch.full((2, 5), 2.0))


def test_buffers_are_those_of_rank_0() -> None:
    norm, X = nn.BatchNorm1d(3), torch.randn(7, 3)
    module = nn.Sequential(norm, nn.Linear(3, 3), norm)
    alone, other = copy.deepcopy(module), copy.deepcopy(module)
    got = DataParallel(module, "cpu*2")(X)
    torch.testing.assert_close(got, torch.cat([alone(X[:4]), other(X[4:])]))
    assert torch.equal(norm.running_var, alone[0].running_var)
    assert norm.num_batches_tracked == 2

    def counting(self: Calls, x: Tensor) -> Tensor:
        self.seen = len(x)
        self.bare.register_buffer("late", torch.tensor(float(len(x))))
        self.count += len(x)
        self.total = self.total + len(x)
        return x + self.count

    module = Calls(counting)
    module.bare = nn.Identity()
    module.register_buffer("total", torch.zeros(()))
    assert DataParallel(module, "cpu*2")(torch.zeros(3)).tolist() == [2, 2, 1]
    assert (module.count, module.total, module.bare.late) == (2, 2, 2)
    assert not hasattr(module, "seen")


def test_training_evaluation_and_gradient_modes() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    parallel = DataParallel(module, "cpu*3")
    assert list(parallel.state_dict()) == list(nn.DataParallel(module).state_dict())
    X = torch.randn(7, 3)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = parallel.eval()(X)
            assert torch.equal(parallel(X), got)
            torch.testing.assert_close(got, module(X))
            assert not got.requires_grad
    assert not module.training
    assert parallel.train()(X).requires_grad
    assert module[1].num_batches_tracked == 1
    twin = copy.deepcopy(parallel)
    twin.load_state_dict(parallel.state_dict())
    assert torch.equal(twin.eval()(X), parallel.eval()(X))


def test_tied_frozen_and_unused_parameters() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.unused = (nn.Linear(3, 3) for _ in range(3))
            self.two.weight = self.one.weight
            self.one.bias.requires_grad_(False)
            self.register_buffer("scale", torch.ones(1, requires_grad=True))

        def forward(self, x: Tensor) -> Tensor:
            assert not self.one.bias.requires_grad
            return self.two(self.one(x)) * self.scale

    module = Odd()
    parallel = DataParallel(copy.deepcopy(module), "cpu*2")
    X = torch.randn(5, 3)
    for m in (module, parallel):
        m(X).square().sum().backward()
    assert parallel.module.unused.weight.grad is None
    for mine, theirs in zip(parallel.module.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    torch.testing.assert_close(parallel.module.scale.grad, module.scale.grad)


def on_two(forward: Callable[..., Any], x: Any) -> Callable[[], Any]:
    return lambda: DataParallel(Calls(forward), "cpu*2")(torch.tensor(x))


REFUSED: dict[str, Callable[[], Any]] = {
    "3, 4 examples along dim 0": lambda: DataParallel(Calls(lambda self, x, y: x), "cpu*2")(
        torch.ones(3), torch.ones(4)
    ),
    "names 2 devices; pass one": lambda: DataParallel(net(), "cpu", "cpu*2"),
    "empty": lambda: DataParallel(net(), []),
    "TorchScript": lambda: DataParallel(torch.jit.script(net()), "cpu*2")(torch.ones(2)),
    "weight has no shape": lambda: DataParallel(nn.LazyLinear(2), "cpu*2")(torch.ones(2)),
    "returned a Tensor, None; only": on_two(lambda self, x: x if x.sum() else None, [1.0, 0.0]),
    "weight is on meta.*cpu": lambda: DataParallel(net().to("meta"), "cpu*2")(torch.ones(2)),
    r"dim is 4.*shape \[2\]": lambda: DataParallel(net(), "cpu*2", dim=4)(torch.ones(2)),
    "returned 1.0, 0.5": on_two(lambda self, x: x.tolist()[0], [1.0, 0.5]),
    "different structure": on_two(lambda self, x: [x] * len(x), [1.0, 1.0, 1.0]),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


@dataclass
class Fields:
    x: Any


def test_values_with_invariants_are_refused() -> None:
    x = torch.arange(8.0).reshape(4, 2)
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    for value, kind in (
        (packed, "PackedSequence"),
        (Fields(x), "Fields"),
        (SimpleNamespace(deep=[{"x": x}]), "SimpleNamespace"),
        (x.numpy(), "ndarray"),
        ([{"boxes": x}, {"boxes": x}], "list of dicts, numbers or strings"),
        ([3, 1, 2, 5], "list of dicts, numbers or strings"),
        (iter([x]), "list_iterator"),
        ({"x": x}.values(), "dict_values"),
        (lambda: x, "function"),
        (torch.distributions.Normal(x, 1.0), "Normal"),
        (nn.Linear(1, 1), "Linear"),
    ):
        parallel = DataParallel(Calls(lambda self, x, other=None: x), "cpu*2")
        for args, kwargs, place in (
            ((x, {"a": [value]}), {}, r"inputs\[1\]\['a'\]\[0\]"),
            ((x,), {"other": (value,)}, r"kwargs\['other'\]\[0\]"),
        ):
            with pytest.raises(ValueError, match=f"{place} is a {kind}, which cannot be split; "):
                parallel(*args, **kwargs)
        returns = DataParallel(Calls(lambda self, x: [x, value]), "cpu*2")  # noqa: B023
        for batch in (x, x[:1]):
            with pytest.raises(ValueError, match=rf"output\[1\] is a {kind}, which cannot be joi"):
                returns(batch)
    module = Calls(lambda self, p: pad_packed_sequence(p)[0].sum() * self.weight)
    assert DataParallel(module, "cpu")(packed) == 10


def test_threads_may_share_it() -> None:
    norm, errors = nn.BatchNorm1d(3), []

    def run(parallel: nn.Module) -> None:
        try:
            for _ in range(10):
                parallel(torch.randn(4, 3)).sum().backward()
        except RuntimeError as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=[DataParallel(module, "cpu*2")])
        for module in (norm, norm, nn.Sequential(norm))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert norm.num_batches_tracked == 30


def test_parameters_that_forward_changes() -> None:
    def clamping(self: Calls, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(max=0.5)
        return x * self.weight

    module = Calls(clamping)
    DataParallel(module, "cpu*2")(torch.ones(3)).sum().backward()
    assert (module.weight, module.weight.grad) == (0.5, 3)
    words = nn.Embedding(6, 4, max_norm=1.0)
    with pytest.raises(RuntimeError, match="forward changes weight in place, and differently"):
        DataParallel(words, "cpu*2")(torch.arange(4))
