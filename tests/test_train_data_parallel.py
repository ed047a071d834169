"""DataParallel gives the results of the bare module on any devices, and always the same bits."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pycollect.train import DataParallel, digits

Pair = namedtuple("Pair", ["first", "second"])


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(54, 8), nn.Tanh(),
        nn.Linear(8, 3),
    )  # fmt: skip


class Calls(nn.Module):
    """A module with the given forward, and a parameter and a buffer for it to use."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))
        self.register_buffer("count", torch.zeros(()))
        self.call = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self, *args, **kwargs)


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


def test_refusals() -> None:
    parallel = DataParallel(Calls(lambda self, x, y=None: x), "cpu*2")
    for call, message in (
        (lambda: parallel(torch.ones(3), torch.ones(4)), "3, 4 examples along dim 0"),
        (lambda: DataParallel(net(), "cpu", "cpu*2"), "names 2 devices; pass one"),
        (lambda: DataParallel(net(), []), "empty"),
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
