"""DataParallel gives the results of the bare module on any devices, and always the same bits."""

from __future__ import annotations

import copy
import threading
import weakref
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

from pycollect.train import DataParallel, data_parallel, digits, replicate_module

Pair = namedtuple("Pair", ["first", "second"])


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(54, 8), nn.Tanh(),
        nn.Linear(8, 3),
    )  # fmt: skip


def calling(forward: Callable[..., Any], devices: str = "cpu*2", **options: Any) -> DataParallel:
    return DataParallel(Calls(forward), devices, **options)


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("examples", [1, 7])
def test_as_the_bare_module_with_the_same_bits_every_time(world: int, examples: int) -> None:
    """Outputs, gradients of parameters and inputs, and gradients of gradients."""
    module = net().double()
    module.unused, module[4].bias.requires_grad = nn.Parameter(torch.ones(1)), False
    parallel = DataParallel(copy.deepcopy(module), f"cpu*{world}")
    X = torch.randn(examples, 1, 8, 8).double()
    found: list[list[Tensor]] = []
    for model in (module, parallel, parallel):
        model.zero_grad()
        x = X.clone().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        (nn.functional.cross_entropy(output, torch.arange(examples) % 3) + slope.sum()).backward()
        used = [p for p in model.parameters() if p.grad is not None]
        assert len(used) == 5
        found.append([output, slope, x.grad, *(p.grad.clone() for p in used)])
    torch.testing.assert_close(found[1], found[0])
    assert all(map(torch.equal, found[1], found[2]))


def test_gradients_are_added_in_rank_order() -> None:
    for values, total in (([1e8, -1e8, 1.0], 1), ([1.0, 1e8, -1e8], 0)):
        parallel = calling(lambda self, x: self.weight * x, "cpu*3")
        parallel(torch.tensor(values)).sum().backward()
        assert parallel.module.weight.grad == total


def test_every_rank_gets_its_share() -> None:
    seen: list[list[float]] = []
    parallel = calling(lambda self, x: seen.append(x.tolist()) or x, "cpu*4")
    for batch, shares in ((5, [2, 1, 1, 1]), (3, [1, 1, 1]), (1, [1]), (0, [0])):
        seen.clear()
        assert parallel(torch.arange(float(batch))).tolist() == list(range(batch))
        assert [len(s) for s in seen] == shares
    got = calling(lambda self, x: x * self.weight, dim=1)(torch.ones(2, 5))
    assert torch.equal(got, torch.full((2, 5), 2.0))


@dataclass
class Fields:
    x: Any


@dataclass
class Registered:
    x: Tensor
    n: int


torch.export.register_dataclass(Registered)


def test_inputs_and_outputs_of_all_shapes() -> None:
    config = SimpleNamespace(size=2, names=["a"], kind=torch.float32)
    shared = {"config": config, "number": np.float32(2.5), "call": torch.relu, "nan": float("nan")}

    def forward(self: Calls, x: Tensor, more: Any, *, scale: Tensor, **others: Any) -> Any:
        assert scale.dim() == 0
        assert all(others[name] is shared[name] for name in shared)
        (b, none), c = more["pair"], more["data"].x
        labels = x[:, 0] > 0
        total = (x + b + c) * scale * self.weight
        return {
            "pair": Pair(total, [labels, none]),
            "data": Registered(c, more["data"].n),
            "loss": x.sum(),
            "same": (3, "word", others["config"], others["nan"]),
        }

    x, b, c = torch.randn(5, 2), torch.randn(5, 2), torch.randn(5, 1)
    scale = torch.tensor(3.0, requires_grad=True)
    more = {"pair": (b, None), "data": Registered(c, 7)}
    got = calling(forward)(x, more, scale=scale, **shared)
    assert isinstance(got["pair"], Pair)
    torch.testing.assert_close(got["pair"].first, (x + b + c) * 6)
    assert torch.equal(got["pair"].second[0], x[:, 0] > 0)
    assert isinstance(got["data"], Registered)
    assert torch.equal(got["data"].x, c)
    assert (got["pair"].second[1], got["data"].n) == (None, 7)
    torch.testing.assert_close(got["loss"], torch.stack([x[:3].sum(), x[3:].sum()]))
    assert got["same"][:3] == (3, "word", config)
    assert got["same"][3] != got["same"][3]
    got["pair"].first.sum().backward()
    torch.testing.assert_close(scale.grad, ((x + b + c) * 2).sum())
    sums = lambda self, x: {"loss": x.sum()}  # noqa: E731
    assert calling(sums)(x[:1])["loss"].shape == (1,)
    assert calling(sums, "cpu")(x)["loss"].shape == ()


X = torch.arange(8.0).reshape(4, 2)
REFUSED: list[tuple[str, Callable[[], Any]]] = [
    ("3, 4 examples along dim 0", lambda: DataParallel(nn.Bilinear(1, 1, 1), "cpu*2")(X[:3], X)),
    ("names 2 devices; pass one", lambda: DataParallel(net(), "cpu", "cpu*2")),
    ("empty", lambda: DataParallel(net(), [])),
    ("returned None, a Tensor; only", lambda: calling(lambda _, x: x if x[0, 0] else None)(X)),
    ("returned 1.0, 5.0", lambda: calling(lambda _, x: x.tolist()[0][0])(X + 1)),
    ("different structure", lambda: calling(lambda _, x: [x] * len(x))(X[:3])),
    ("weight is on meta.*cpu", lambda: DataParallel(net().to("meta"), "cpu*2")(X)),
    (r"dim is 4.*shape \[4, 2\]", lambda: calling(lambda _, x: x, dim=4)(X)),
]


@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_refusals(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=message):
        call()


PACKED = pack_sequence([torch.ones(3), torch.ones(2)])
WITH_INVARIANTS: list[tuple[str, Any]] = [
    ("PackedSequence", PACKED),
    ("Fields", Fields(X)),
    ("SimpleNamespace", SimpleNamespace(deep=[{"x": X}])),
    ("ndarray", X.numpy()),
    ("list of dicts, numbers or strings", [{"boxes": X}, {"boxes": X}]),
    ("list of dicts, numbers or strings", [3, 1, 2, 5]),
    ("list_iterator", iter([X])),
    ("dict_values", {"x": X}.values()),
    ("function", (lambda x: lambda: x)(X)),
    ("Normal", torch.distributions.Normal(X, 1.0)),
    ("Linear", nn.Linear(1, 1)),
]


@pytest.mark.parametrize(("kind", "value"), WITH_INVARIANTS)
def test_values_with_invariants_are_refused(kind: str, value: Any) -> None:
    parallel = calling(lambda self, x, other=None: x)
    for call, place in (
        (lambda: parallel(X, {"a": [value]}), r"inputs\[1\]\['a'\]\[0\]"),
        (lambda: parallel(X, other=(value,)), r"kwargs\['other'\]\[0\]"),
    ):
        with pytest.raises(ValueError, match=f"{place} is a {kind}, which cannot be split; "):
            call()
    for batch in (X, X[:1]):
        with pytest.raises(ValueError, match=rf"output\[1\] is a {kind}, which cannot be joined"):
            calling(lambda self, x: [x, value])(batch)
    if value is PACKED:  # one device splits nothing
        padded = calling(lambda self, p: pad_packed_sequence(p)[0].sum() * self.weight, "cpu")
        assert padded(value) == 10


def test_training_evaluation_and_gradient_modes() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    parallel = DataParallel(module, "cpu*3")
    assert list(parallel.state_dict()) == list(nn.DataParallel(module).state_dict())
    x = torch.randn(7, 3)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = parallel.eval()(x)
            assert torch.equal(parallel(x), got)
            torch.testing.assert_close(got, module(x))
            assert not got.requires_grad
    assert not module.training
    assert parallel.train()(x).requires_grad
    assert module[1].num_batches_tracked == 1
    twin = copy.deepcopy(parallel)
    twin.load_state_dict(parallel.state_dict())
    assert torch.equal(twin.eval()(x), parallel.eval()(x))


def test_buffers_are_those_of_rank_0() -> None:
    """Also those of a layer that runs twice, and those that it assigns or registers."""
    norm, alone, x = nn.BatchNorm1d(3), nn.BatchNorm1d(3), torch.randn(7, 3)
    got = DataParallel(nn.Sequential(norm, nn.Tanh(), norm), "cpu*2")(x)
    wanted = alone(torch.tanh(alone(x[:4])))
    torch.testing.assert_close(got[:4], wanted)
    torch.testing.assert_close(norm.running_var, alone.running_var)
    assert norm.num_batches_tracked == 2

    def counting(self: Calls, x: Tensor) -> Tensor:
        self.count += len(x)
        self.count = self.count + 1
        self.seen = len(x)
        self.bare.register_buffer("late", torch.tensor(float(len(x))))
        self.bare.register_forward_hook(lambda *_: None)
        return x + self.count

    module = Calls(counting)
    module.bare = nn.Identity()
    assert DataParallel(module, "cpu*2")(torch.zeros(3)).tolist() == [3, 3, 2]
    assert (module.count, module.bare.late) == (3, 2)
    assert not hasattr(module, "seen")
    assert not module.bare._forward_hooks


def test_frozen_parameters_stay_frozen_and_buffers_differentiable() -> None:
    module = Calls(lambda self, x: x * self.weight if self.weight.requires_grad else x * self.scale)
    module.weight.requires_grad_(False)
    module.register_buffer("scale", torch.ones(1, requires_grad=True))
    module.register_forward_pre_hook(lambda me, x: setattr(me, "count", me.count + len(x[0])))
    DataParallel(module, "cpu*3")(torch.arange(6.0)).sum().backward()
    assert module.scale.grad == 15
    assert module.weight.grad is None
    assert module.count == 2


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


def test_the_chapters_training_loop() -> None:
    torch.set_num_threads(1)  # small convolutions wait long for their threads on busy cores
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1),
        nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 3),
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


EVERYWHERE: list[nn.Module] = []


def test_a_change_of_buffers_that_replicas_share_is_noticed() -> None:
    module = Calls(lambda self, x: EVERYWHERE[-1].count.add_(1) * x)
    EVERYWHERE.append(module)
    with pytest.raises(RuntimeError, match=r"while rank 1 ran, count has changed, which all"):
        DataParallel(module, "cpu*2")(torch.ones(2))
    reads = Calls(lambda self, x: EVERYWHERE[-1].weight * x)
    EVERYWHERE.append(reads)
    assert DataParallel(reads, "cpu*2")(torch.ones(2)).tolist() == [2, 2]
    hidden = Calls(lambda self, x: self.teacher.norm(x))
    hidden.teacher = SimpleNamespace(norm=nn.BatchNorm1d(3))
    with pytest.raises(RuntimeError, match=r"while rank 1 ran, a tensor of shape \[\] has changed"):
        DataParallel(hidden, "cpu*2")(torch.randn(4, 3))
    hidden.teacher.norm.eval()
    DataParallel(hidden, "cpu*2")(torch.randn(4, 3))
    halves = Calls(lambda self, x: self.helper.data.mul_(0.5) * x)
    halves.helper = SimpleNamespace(data=halves.weight.data)
    with pytest.raises(
        RuntimeError, match=r"while rank 1 ran, a tensor of shape \[1\] has changed"
    ):
        DataParallel(halves, "cpu*2")(torch.ones(2))


def test_a_copy_of_a_replica_is_a_module_as_others() -> None:
    kept: list[nn.Module] = []
    module = nn.Sequential(nn.BatchNorm1d(3))
    handle = module[0].register_forward_hook(lambda me, *_: kept.append(me))
    with torch.no_grad():
        DataParallel(module, "cpu*2")(torch.randn(4, 3))
    handle.remove()
    again = nn.Sequential(copy.deepcopy(kept[0]), nn.Linear(3, 3))
    DataParallel(again, "cpu*2")(torch.randn(4, 3))
    assert again[0].num_batches_tracked == 2


def test_tensors_of_helpers_that_are_not_the_modules() -> None:
    shared = np.zeros(8, dtype=np.float32)
    freed = [torch.ones(2), torch.ones(2)]
    for tensor in freed:
        tensor.untyped_storage().resize_(0)
    module = nn.Linear(3, 2)
    arrays = [torch.from_numpy(part) for part in (shared[:6], shared[4:])]
    module.helper = SimpleNamespace(arrays=arrays, freed=freed, lazy=nn.LazyBatchNorm1d())
    X = torch.randn(4, 3)
    torch.testing.assert_close(DataParallel(module, "cpu*2")(X), module(X))
    module.helper.lazy = nn.LazyLinear(2)
    torch.testing.assert_close(replicate_module(module, "cpu")[0](X), module(X))


def test_what_does_not_refer_to_the_module_is_shared() -> None:
    """Optimizers, which refer to parameters, are shared, too."""
    seen: list[int] = []
    module = Calls(lambda self, x: x * all(vars(self.kept)[k] is kept[k] for k in kept))
    kept = {
        "lock": threading.Lock(),
        "words": [str(i) for i in range(100)],
        "optimizer": torch.optim.SGD(module.parameters(), 0.1),
    }
    module.kept = SimpleNamespace(module=module, **kept)
    module.note = seen.append
    module.register_forward_hook(lambda me, *_: seen.append(me.kept.module is me))
    assert DataParallel(module, "cpu*2")(torch.ones(2, 3)).sum() == 6
    assert seen == [True, True]


def test_a_hook_may_fill_a_dict_with_replicas_in_every_pass() -> None:
    outputs: dict[nn.Module, Tensor] = {}
    module = nn.Sequential(nn.BatchNorm1d(3))
    module[0].register_forward_hook(lambda me, _, output: outputs.update({me: output}))
    for times in range(1, 4):
        DataParallel(module, "cpu*2")(torch.randn(4, 3))
        assert len(outputs) == 2 * times
        assert module[0] not in outputs


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
