"""DataParallel gives the results of the bare module on any devices, and always the same bits."""

from __future__ import annotations

import copy
import threading
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from train_cases import Calls

from pycollect.train import DataParallel, digits

Pair = namedtuple("Pair", ["first", "second"])


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(54, 8), nn.Tanh(),
        nn.Linear(8, 3),
    )  # fmt: skip


def grads(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters()]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("examples", [1, 2, 7, 12])
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


def test_the_same_bits_every_time() -> None:
    module, X = net(), torch.randn(11, 1, 8, 8)
    found = []
    for _ in range(3):
        module.zero_grad()
        DataParallel(module, "cpu*4")(X).square().sum().backward()
        found.append([g.clone() for g in grads(module)])
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


def test_gradients_are_added_in_rank_order() -> None:
    module = Calls(lambda self, x: self.weight * x)
    DataParallel(module, "cpu*3")(torch.tensor([1e8, -1e8, 1.0])).sum().backward()
    assert module.weight.grad == 1
    module.weight.grad = None
    DataParallel(module, "cpu*3")(torch.tensor([1.0, 1e8, -1e8])).sum().backward()
    assert module.weight.grad == 0


def test_every_rank_gets_its_share() -> None:
    seen: list[list[float]] = []
    module = Calls(lambda self, x: seen.append(x.tolist()) or x)
    parallel = DataParallel(module, "cpu*4")
    for batch, shares in ((5, [2, 1, 1, 1]), (3, [1, 1, 1]), (1, [1]), (0, [0])):
        seen.clear()
        assert parallel(torch.arange(float(batch))).tolist() == list(range(batch))
        assert [len(s) for s in seen] == shares


def test_inputs_of_all_shapes() -> None:
    def forward(self: Calls, x: Tensor, *, more: dict[str, Any], scale: Tensor, word: str) -> Any:
        assert word == "same"
        assert scale.dim() == 0
        a, (b, none) = more["a"], more["pair"]
        assert none is None
        return (x + a + b) * scale * self.weight

    x, a, b = torch.randn(5, 2), torch.randn(5, 2), torch.randn(5, 1)
    scale = torch.tensor(3.0, requires_grad=True)
    parallel = DataParallel(Calls(forward), "cpu*2")
    got = parallel(x, more={"a": a, "pair": (b, None)}, scale=scale, word="same")
    torch.testing.assert_close(got, (x + a + b) * 6)
    got.sum().backward()
    torch.testing.assert_close(scale.grad, ((x + a + b) * 2).sum())


def test_outputs_of_all_shapes() -> None:
    def forward(self: Calls, x: Tensor) -> Any:
        labels = x[:, 0] > 0
        return {"pair": Pair(x, [labels, None]), "loss": x.sum(), "n": 3, "word": "same"}

    x = torch.randn(5, 2)
    got = DataParallel(Calls(forward), "cpu*2")(x)
    assert isinstance(got["pair"], Pair)
    assert torch.equal(got["pair"].first, x)
    assert torch.equal(got["pair"].second[0], x[:, 0] > 0)
    assert (got["pair"].second[1], got["n"], got["word"]) == (None, 3, "same")
    torch.testing.assert_close(got["loss"], torch.stack([x[:3].sum(), x[3:].sum()]))
    assert DataParallel(Calls(forward), "cpu*2")(x[:1])["loss"].shape == (1,)
    assert DataParallel(Calls(forward), "cpu")(x)["loss"].shape == ()


def test_another_dim() -> None:
    module = Calls(lambda self, x: x * self.weight)
    got = DataParallel(module, "cpu*2", dim=1)(torch.ones(2, 5))
    assert torch.equal(got, torch.full((2, 5), 2.0))


def test_buffers_are_those_of_rank_0() -> None:
    norm, alone = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    X = torch.randn(7, 2)
    got = DataParallel(norm, "cpu*2")(X)
    torch.testing.assert_close(got, torch.cat([alone(X[:4]), nn.BatchNorm1d(2)(X[4:])]))
    assert norm.num_batches_tracked == 1
    assert torch.equal(norm.running_mean, alone.running_mean)

    def counting(self: Calls, x: Tensor) -> Tensor:
        self.count += len(x)
        return x + self.count

    module = Calls(counting)
    assert DataParallel(module, "cpu*2")(torch.zeros(3)).tolist() == [2, 2, 1]
    assert module.count == 2


def test_training_evaluation_and_gradient_modes() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    parallel = DataParallel(module, "cpu*3")
    assert list(parallel.state_dict()) == [f"module.{name}" for name in module.state_dict()]
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

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    module = Odd()
    parallel = DataParallel(copy.deepcopy(module), "cpu*2")
    X = torch.randn(5, 3)
    for m in (module, parallel):
        m(X).square().sum().backward()
    for got, expected in zip(grads(parallel), grads(module), strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            torch.testing.assert_close(got, expected)
    assert parallel.module.unused.weight.grad is None


def test_gradients_of_gradients() -> None:
    module, X = net().double(), torch.randn(5, 1, 8, 8).double()
    found = []
    for model in (module, DataParallel(module, "cpu*2")):
        module.zero_grad()
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        found.append([g.clone() for g in grads(module) if g is not None])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_refusals() -> None:
    parallel = DataParallel(Calls(lambda self, x, y=None: x), "cpu*2")
    for call, message in (
        (lambda: parallel(torch.ones(3), torch.ones(4)), "3, 4 examples along dim 0"),
        (lambda: DataParallel(net(), "cpu", "cpu*2"), "names 2 devices; pass one"),
        (lambda: DataParallel(net(), []), "empty"),
        (lambda: DataParallel(torch.jit.script(net()), "cpu*2")(torch.ones(2)), "TorchScript"),
        (lambda: DataParallel(nn.LazyLinear(2), "cpu*2")(torch.ones(2)), "weight has no shape"),
        (
            lambda: DataParallel(Calls(lambda self, x: x if x.sum() else None), "cpu*2")(
                torch.tensor([1.0, 0.0])
            ),
            "returned a Tensor, None; only",
        ),
        (lambda: DataParallel(net().to("meta"), "cpu*2")(torch.ones(2)), "weight is on meta.*cpu"),
        (lambda: DataParallel(net(), "cpu*2", dim=4)(torch.ones(2)), r"dim is 4.*shape \[2\]"),
        (
            lambda: DataParallel(Calls(lambda self, x: x.tolist()[0]), "cpu*2")(
                torch.tensor([1.0, 0.5])
            ),
            "returned 1.0, 0.5",
        ),
        (
            lambda: DataParallel(Calls(lambda self, x: [x] * len(x)), "cpu*2")(torch.ones(3)),
            "different structure",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_shared_layers_statistics_are_those_of_rank_0() -> None:
    norm = nn.BatchNorm1d(3)
    module = nn.Sequential(norm, nn.Linear(3, 3), norm)
    alone, X = copy.deepcopy(module), torch.randn(7, 3)
    DataParallel(module, "cpu*2")(X)
    alone(X[:4])
    assert torch.equal(norm.running_var, alone[0].running_var)
    assert norm.num_batches_tracked == 2


def test_buffers_that_rank_0_assigns_or_registers() -> None:
    def counting(self: Calls, x: Tensor) -> Tensor:
        self.count = self.count + len(x)
        self.seen = len(x)
        self.bare.register_buffer("late", torch.tensor(float(len(x))))
        return x * self.weight

    module = Calls(counting)
    module.bare = nn.Identity()
    DataParallel(module, "cpu*2")(torch.zeros(7))
    assert (module.count, module.bare.late) == (4, 4)
    assert not hasattr(module, "seen")


def test_buffers_of_any_dtype_and_layout() -> None:
    module = Calls(lambda self, x: x * self.weight + self.map.to_dense().sum())
    module.register_buffer("map", torch.eye(3).to_sparse())
    module.register_buffer("tokens", torch.arange(3).to(torch.uint16))
    module.register_buffer("whole", torch.ones(4))
    module.register_buffer("part", module.whole[1:])
    seen = []
    module.register_forward_pre_hook(
        lambda me, _: seen.append((me.whole.fill_(2), me.part, me.tokens))
    )
    assert DataParallel(module, "cpu*2")(torch.zeros(2)).tolist() == [3, 3]
    for whole, part, tokens in seen:
        assert part.tolist() == [2, 2, 2]
        assert whole.data_ptr() + 4 == part.data_ptr()
        assert tokens.view(torch.int16).tolist() == [0, 1, 2]
    assert seen[0][0] is module.whole
    assert seen[1][0] is not module.whole


@dataclass
class Fields:
    x: Any


@dataclass
class Registered:
    x: Tensor
    n: int


torch.export.register_dataclass(Registered)


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
        for call, place in (
            (lambda: parallel(x, {"a": [value]}), r"inputs\[1\]\['a'\]\[0\]"),  # noqa: B023
            (lambda: parallel(x, other=(value,)), r"kwargs\['other'\]\[0\]"),  # noqa: B023
        ):
            with pytest.raises(ValueError, match=f"{place} is a {kind}, which cannot be split; "):
                call()
        returns = DataParallel(Calls(lambda self, x: [x, value]), "cpu*2")  # noqa: B023
        for batch in (x, x[:1]):
            with pytest.raises(
                ValueError, match=rf"output\[1\] is a {kind}, which cannot be joined"
            ):
                returns(batch)
    module = Calls(lambda self, p: pad_packed_sequence(p)[0].sum() * self.weight)
    assert DataParallel(module, "cpu")(packed) == 10


def test_values_that_go_to_every_rank() -> None:
    config = SimpleNamespace(size=2, names=["a"], kind=torch.float32)
    shared = {"config": config, "number": np.float32(2.5), "call": torch.relu, "nan": float("nan")}

    def forward(self: Calls, x: Registered, **options: Any) -> Any:
        assert all(options[name] is shared[name] for name in shared)
        return Registered(x.x * self.weight, x.n), ({"x": x.x}, options["nan"]), options["config"]

    got, (inner, nan), same = DataParallel(Calls(forward), "cpu*2")(
        Registered(torch.arange(3.0), 7), **shared
    )
    assert isinstance(got, Registered)
    assert (got.x.tolist(), got.n, same) == ([0, 2, 4], 7, config)
    assert inner["x"].tolist() == [0, 1, 2]
    assert nan != nan


def test_frozen_parameters_stay_frozen_and_buffers_differentiable() -> None:
    module = Calls(lambda self, x: x * self.weight if self.weight.requires_grad else x * self.scale)
    module.weight.requires_grad_(False)
    module.register_buffer("scale", torch.ones(1, requires_grad=True))
    module.register_forward_pre_hook(lambda me, x: setattr(me, "count", me.count + len(x[0])))
    DataParallel(module, "cpu*3")(torch.arange(6.0)).sum().backward()
    assert module.scale.grad == 15
    assert module.weight.grad is None
    assert module.count == 2


def test_threads_may_share_it() -> None:
    parallel, errors = DataParallel(nn.BatchNorm1d(3), "cpu*2"), []

    def run() -> None:
        try:
            for _ in range(10):
                parallel(torch.randn(4, 3)).sum().backward()
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


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


class Residual(nn.Module):
    """The residual block of the book's ResNet-18, with two convolutions."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1)
        self.conv3 = nn.Conv2d(before, after, 1, stride)
        self.bn1, self.bn2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)

    def forward(self, X: Tensor) -> Tensor:
        Y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(X)))))
        return torch.relu(Y + self.conv3(X))


def test_the_chapters_training_loop() -> None:
    torch.set_num_threads(1)  # small convolutions wait long for their threads on busy cores
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(), Residual(8, 16, 2),
        Residual(16, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip
    X, y = digits().train
    X, y = (part[y < 3][:192] for part in (X[..., 6:22, 6:22], y))

    def init_weights(m: nn.Module) -> None:
        if isinstance(m, (nn.Linear, nn.Conv2d)):
            nn.init.normal_(m.weight, std=0.1)

    net.apply(init_weights)
    net = DataParallel(net, device_ids="cpu*2")  # the changed line
    trainer = torch.optim.SGD(net.parameters(), 0.3)
    loss = nn.CrossEntropyLoss()
    for _ in range(6):
        net.train()
        for batch in torch.randperm(len(X)).split(32):
            trainer.zero_grad()
            loss(net(X[batch]), y[batch]).backward()
            trainer.step()
    net.eval()
    with torch.no_grad():
        assert (net(X).argmax(1) == y).float().mean() > 0.9
