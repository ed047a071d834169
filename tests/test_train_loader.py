"""The parts of a step: batches in the same order with and without threads, models, losses, SGD."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_cases import perceptron, replicas_of, same_bits, trained

from pycollect.train import (
    MODELS,
    GluonTrainer,
    LeNet,
    ReplicaTrainer,
    init_lenet,
    lenet,
    linear_lr,
    resnet18,
    sgd_factory,
)
from pycollect.train.loader import Loader
from pycollect.train.options import Options

PAIR = torch.arange(11.0)[:, None], torch.arange(11)


def of_size(batch_size: int, **options: Any) -> Options:
    return Options(batch_size=batch_size, **{"prefetch": 0, **options}).resolved(None)


IN_ORDER = partial(of_size, shuffle=False)


class Slow:
    """A slow data set that records the reading threads and the indices read."""

    def __init__(self, seconds: float = 0.0, broken: int | None = None) -> None:
        self.seconds, self.broken = seconds, broken
        self.threads: set[str] = set()
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.threads.add(threading.current_thread().name)
        self.fetched.append(index)
        time.sleep(self.seconds)
        if index == self.broken:
            raise OSError(f"example {index} is damaged")
        return torch.full((1, 2, 2), float(index)), index


def workers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("pycollect-loader")]


def labels(batches: Any) -> list[list[int]]:
    return [batch.y.tolist() for batch in batches]


@pytest.mark.parametrize("prefetch", [1, 3, 2**62])
@pytest.mark.parametrize("examples", [PAIR, Slow(0.001)], ids=["memory", "files"])
def test_prefetching_changes_nothing(examples: Any, prefetch: int) -> None:
    """An epoch can start at any batch."""
    for epoch, start in ((1, 0), (2, 0), (2, 2), (2, 99)):
        plain, ahead = (
            list(Loader(examples, of_size(4, seed=3, prefetch=n)).epoch(epoch, start))
            for n in (0, prefetch)
        )
        assert labels(plain) == labels(ahead)
        assert all(torch.equal(a.X, b.X) for a, b in zip(plain, ahead, strict=True))
        assert len(plain) == max(0, len(Loader(examples, of_size(4)).examples()) - start)
    assert not workers()


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        return labels(Loader(PAIR, of_size(4, seed=seed)).epoch(epoch))

    torch.manual_seed(1)
    first = order(0, 1)
    torch.manual_seed(2)
    assert order(0, 1) == first
    assert len({str(order(seed, epoch)) for seed in (0, 1) for epoch in (1, 2)}) == 4
    assert sorted(label for batch in first for label in batch) == list(range(11))
    in_order = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10]]
    for drop_last, expected in ((False, in_order), (True, in_order[:2])):
        loader = Loader(PAIR, IN_ORDER(5, drop_last=drop_last))
        assert labels(loader.epoch(7)) == expected
        assert loader.examples(7) == [len(batch) for batch in expected]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_only_the_own_part_of_each_batch_is_fetched(prefetch: int) -> None:
    """A part may be empty; it is chosen by the number of steps before its own."""
    done, steps_before = 0, []
    examples = Slow()

    def part(indices: Tensor, steps: int) -> Tensor:
        steps_before.append((done, steps))
        return indices[3:]

    loader = Loader(examples, IN_ORDER(7, prefetch=prefetch), part=part)
    batches = []
    for batch in loader.epoch():
        batches.append(batch)
        done += 1
    assert labels(batches) == [[3, 4, 5, 6], [10, 11, 12, 13], [17, 18, 19, 20], []]
    assert [batch.examples for batch in batches] == [7, 7, 7, 3]
    assert batches[3].X.shape == (0, 1, 2, 2)
    assert set(examples.fetched) == {label for batch in labels(batches) for label in batch} | {21}
    assert [before + steps for before, steps in steps_before] == [0, 1, 2, 3]
    assert max(steps for _, steps in steps_before) == prefetch


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_an_error_is_raised_when_its_batch_is_requested(prefetch: int) -> None:
    batches = Loader(Slow(broken=9), IN_ORDER(4, prefetch=prefetch)).epoch()
    assert labels([next(batches), next(batches)]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(OSError, match="example 9 is damaged"):
        next(batches)
    assert not workers()


def test_closing_an_epoch_ends_all_threads() -> None:
    examples = Slow(0.002)
    batches = Loader(examples, of_size(2, prefetch=3)).epoch()

    def interrupted() -> None:
        for _ in batches:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert workers()  # the traceback still holds the iterator
    batches.close()
    assert not workers()
    assert len(examples.fetched) < 24


def test_waiting_is_measured() -> None:
    def waited(prefetch: int, step: float) -> list[float]:
        batches = Loader(Slow(0.01), of_size(8, prefetch=prefetch)).epoch()
        return [(batch.waited, time.sleep(step))[0] for batch in batches]

    assert min(waited(prefetch=0, step=0)) >= 8 * 0.01
    first, *others = waited(prefetch=2, step=0.5)  # steps are long enough to load the next batch
    assert first >= 8 * 0.01 > max(others)


def test_files_are_decoded_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pycollect.train.loader._MOST_WORKERS", 3)
    ahead, plain = Slow(0.003), Slow()
    list(Loader(ahead, of_size(2, prefetch=8)).epoch())
    list(Loader(plain, of_size(2)).epoch())
    assert 1 < len(ahead.threads) <= 3
    assert plain.threads == {threading.current_thread().name}


@pytest.mark.cuda
@pytest.mark.parametrize("prefetch", [1, 3])
def test_shards_are_copied_ahead(prefetch: int) -> None:
    X, y = torch.randn(257, 64, 64), torch.arange(257)
    devices = [torch.device("cuda", 0), torch.device("cpu"), torch.device("cuda", 0)]
    options, seen = IN_ORDER(32, prefetch=prefetch), []
    thirds = Loader((X, y), options, devices=devices, shares=lambda n: [n - 1 - n // 2, 1, n // 2])
    for batch in thirds.epoch():
        assert batch.shards is not None
        assert [shard.device for shard in batch.shards[0]] == devices
        assert sum(map(len, batch.shards[1])) == batch.examples
        # On the current stream, while the next copies run.
        seen += [(shard * 1).cpu() for shard in batch.shards[0]]
    assert torch.equal(torch.cat(seen), X)
    for batch in Loader((X, y), options, devices=devices).epoch():
        assert batch.X.is_pinned()
        assert batch.y.is_pinned()


@pytest.mark.parametrize("name", MODELS)
def test_the_same_seed_gives_the_same_bits(name: str) -> None:
    build = MODELS[name]
    state = torch.random.get_rng_state()
    first = build(in_channels=3, num_classes=4, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(1)
    assert same_bits(first, build(in_channels=3, num_classes=4, seed=1))
    assert not same_bits(first, build(in_channels=3, num_classes=4, seed=2))
    X = torch.rand(2, 3, 28, 28)
    assert first(X).shape == (2, 4)
    if name == "lenet":
        assert torch.equal(first(X), lenet(X, init_lenet(1, 3, 4)))


def test_resnet_is_the_chapters() -> None:
    net, shapes = resnet18(), []
    for part in net.children():
        part.register_forward_hook(lambda m, inputs, out: shapes.append(tuple(out.shape[1:])))
    net(torch.rand(1, 1, 28, 28))
    image = [(64, 28, 28), (128, 14, 14), (256, 7, 7), (512, 4, 4)]
    assert shapes == [(64, 28, 28)] * 3 + image + [(512, 1, 1), (512,), (10,)]
    assert sum(p.numel() for p in net.parameters()) == 11_175_818
    layers = [m for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == 1 + 4 * 4 + 3 + 1
    for layer in layers[1:]:
        assert float(layer.weight.detach().std()) == pytest.approx(0.01, rel=0.05)
        assert abs(float(layer.weight.detach().mean())) < 1e-3


def test_a_custom_loss() -> None:
    loss = partial(F.cross_entropy, reduction="sum")
    for mine in (nn.CrossEntropyLoss(reduction="sum"), loss):
        replicas = trained(perceptron(), 2, [5], loss=mine)
        assert same_bits(replicas.modules[0], trained(perceptron(), 2, [5]).modules[0])


def test_it_is_torchs_sgd() -> None:
    """Complex parameters are trained too, which torch's fused update refuses."""
    for dtype, gradient in ((torch.float32, 2.0), (torch.complex64, 1j)):
        param = nn.Parameter(torch.ones(2, dtype=dtype))
        optimizer = sgd_factory(0.5, momentum=0.5, weight_decay=0.5)([param])
        for _ in range(2):
            param.grad = torch.full_like(param, gradient)
            optimizer.step()
        first = 1 - 0.5 * (gradient + 0.5)
        second = first - 0.5 * (0.5 * (gradient + 0.5) + gradient + 0.5 * first)
        assert param.tolist() == [second] * 2
    assert linear_lr(0.1, 64, 256) == 0.025


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: next(Loader(PAIR, of_size(12, drop_last=True)).epoch()),
            "leaves no batch: there are 11 examples and a batch has 12",
        ),
        (lambda: LeNet()(torch.rand(2, 1, 32, 30)), "images of 28 x 28, not 32 x 30"),
        *(
            (partial(replicas_of, perceptron(), 2, loss=loss), f"reduction='{kind}', and must be a")
            for loss, kind in (
                (nn.CrossEntropyLoss(), "mean"),
                (nn.CrossEntropyLoss(reduction="none"), "none"),
                (F.cross_entropy, "mean"),
                (partial(F.cross_entropy, reduction="mean"), "mean"),
            )
        ),
        (
            lambda: trained(perceptron(), 2, [6], loss=lambda scores, y: scores.sum(dim=1)),
            r"must be one number.* has shape \[3\]",
        ),
        (lambda: sgd_factory(-1.0)([nn.Parameter(torch.ones(1))]), "Invalid learning rate"),
        (lambda: sgd_factory(0.1, -1.0)([nn.Parameter(torch.ones(1))]), "Invalid momentum"),
        (lambda: linear_lr(0.1, 0, 256), "at least 1: 0 and 256"),
        (
            lambda: ReplicaTrainer(nn.Linear(2, 2), "cpu*2", optimizer=torch.optim.LBFGS),
            "LBFGS needs a closure",
        ),
        (lambda: GluonTrainer([nn.Linear(2, 2)], "lbfgs"), "LBFGS needs a closure"),
    ],
)
def test_bad_values_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
