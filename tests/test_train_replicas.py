"""Replicas of modules: a step on many ranks equals one step on the whole batch."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_cases import (
    CLASSES,
    CPU,
    FEATURES,
    Calls,
    batches,
    difference,
    perceptron,
    replicas_of,
    same_bits,
    trained,
    trained_ranks,
)

from pycollect.train import (
    MODELS,
    LeNet,
    ReplicaTrainer,
    digits,
    init_lenet,
    lenet,
    reduce_gradients_naive,
    replicate_params,
    train_batch,
)

UNEVEN = [16, 16, 7, 3, 1, 16, 8, 5, 16, 2]  # ten steps; a batch of 1 leaves all ranks but one idle


def on_one_device(module: nn.Module, sizes: list[int], lr: float = 0.3) -> nn.Module:
    """The same training in plain torch, on the mean loss of whole batches."""
    module = copy.deepcopy(module)
    sgd = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9, weight_decay=1e-3)
    for X, y in batches(sizes):
        sgd.zero_grad()
        F.cross_entropy(module(X), y).backward()
        sgd.step()
    return module


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_train_as_one_device_on_the_whole_batch(world: int) -> None:
    single = on_one_device(perceptron(), UNEVEN)
    assert difference(single, perceptron()) > 0.1
    replicas = trained(perceptron(), world, UNEVEN)
    assert difference(replicas.modules[0], single) < 1e-5
    assert all(same_bits(module, replicas.modules[0]) for module in replicas.modules)


def test_uneven_shares_are_weighted_by_examples() -> None:
    single = on_one_device(perceptron(), [10])
    replicas = replicas_of(perceptron(), 3)
    ((X, y),) = batches([10])
    losses = replicas.step(X, y, shares=[7, 0, 3])
    assert float(losses[1]) == 0
    whole = F.cross_entropy(perceptron()(X), y, reduction="sum")
    assert float(sum(losses)) == pytest.approx(whole.item(), rel=1e-5)
    assert difference(replicas.modules[1], single) < 1e-6


def test_shards_on_their_devices_train_the_same() -> None:
    ((X, y),) = batches([9])
    whole, shards = (replicas_of(perceptron(), 2) for _ in range(2))
    whole.step(X, y, shares=[4, 5])
    shards.step_on_shards(X.split([4, 5]), y.split([4, 5]))
    assert same_bits(whole.modules[1], shards.modules[1])
    with pytest.raises(ValueError, match="one shard for each rank"):
        shards.step_on_shards([X], [y])
    with pytest.raises(ValueError, match="one label per example"):
        shards.step_on_shards(X.split([4, 5]), y.split([5, 4]))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_replicas_of_lenet_train_as_the_book(world: int) -> None:
    X, y = (part[:48].split(16) for part in digits().train)
    params = replicate_params(init_lenet(3), [CPU] * world)
    replicas = ReplicaTrainer(
        LeNet(seed=3), [CPU] * world, optimizer=partial(torch.optim.SGD, lr=0.3)
    )
    for X_batch, y_batch in zip(X, y, strict=True):
        train_batch(X_batch, y_batch, params, 0.3, model=lenet)
        replicas.step(X_batch, y_batch)
    for mine, book in zip(replicas.parameters[-1], params[0], strict=True):
        torch.testing.assert_close(mine, book, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_naive_and_pycollect_leave_the_same_bits(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    size = 28 if name == "lenet" else 16
    X, y = torch.rand((5, 1, size, size), generator=generator), torch.arange(5)
    ours, book = (
        replicas_of(MODELS[name](seed=1), 3, 0.05, **how)
        for how in ({}, {"reduction": reduce_gradients_naive})
    )
    for replicas in (ours, book):
        for _ in range(2):
            replicas.step(X, y)
    assert not same_bits(ours.modules[0], MODELS[name](seed=1))
    for mine, theirs in zip(ours.modules, book.modules, strict=True):
        assert same_bits(mine, theirs)


def test_the_same_seed_gives_the_same_bits() -> None:
    first, again = (trained(perceptron(), 3, UNEVEN) for _ in range(2))
    assert same_bits(first.modules[2], again.modules[2])
    assert not same_bits(first.modules[2], trained(perceptron(1), 3, UNEVEN).modules[2])


class Sometimes(nn.Module):
    """Uses one layer only for shards with a positive sum, and another layer never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rarely = nn.Linear(2, 2), nn.Linear(2, 2)
        self.never = nn.Linear(2, 2)

    def forward(self, X: Tensor) -> Tensor:
        hidden: Tensor = self.always(X)
        return self.rarely(hidden) if X.sum() > 0 else hidden


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_unused_parameters_of_a_rank_count_as_zeros(overlap: bool, order: list[int]) -> None:
    X, y = torch.tensor([[1.0, 2.0], [-1.0, -2.0]])[order], torch.tensor([0, 1])[order]
    module = Sometimes()
    loss = sum(
        F.cross_entropy(module(X[i : i + 1]), y[i : i + 1], reduction="sum") for i in range(2)
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    replicas = replicas_of(module, 2, overlap=overlap, bucket_bytes=1)
    replicas.step(X, y)
    for mine in replicas.modules:
        assert mine.get_parameter("never.weight").grad is None
        for name in ("always.weight", "rarely.weight", "rarely.bias"):
            wanted = module.get_parameter(name).grad
            assert wanted is not None
            torch.testing.assert_close(mine.get_parameter(name).grad, wanted / 2)
    assert same_bits(*replicas.modules)
    assert torch.equal(replicas.modules[0].get_parameter("never.weight"), module.never.weight)


def test_a_frozen_parameter_stays_and_a_thawed_one_trains() -> None:
    module = perceptron()
    first, last = module[0], module[-1]  # type: ignore[index]
    for param in first.parameters():
        param.requires_grad_(False)
    replicas = replicas_of(module, 3)
    ((X, y),) = batches([9])
    replicas.step(X, y)
    for mine in replicas.modules:
        assert torch.equal(mine.get_parameter("0.weight"), first.weight)
        assert not torch.equal(mine.get_parameter("4.weight"), last.weight)
        mine.get_parameter("0.weight").requires_grad_()
    replicas.step(X, y)
    assert not torch.equal(replicas.modules[0].get_parameter("0.weight"), first.weight)
    assert all(same_bits(mine, replicas.modules[0]) for mine in replicas.modules)


def test_evaluation_restores_modes_and_statistics() -> None:
    """Every example counts once; modes and each rank's own statistics are restored."""
    module = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES), nn.Dropout())
    replicas = trained(module, 3, [12, 12])
    replicas.modules[1][0].eval()  # type: ignore[index]
    for far in replicas.modules[1:]:  # far enough to change every prediction
        far.get_buffer("0.running_mean").fill_(1e3)
    before = copy.deepcopy(replicas.modules)
    assert not same_bits(before[0], before[1]), "statistics are each rank's own"
    test = batches([7, 1, 10], seed=5)
    model = copy.deepcopy(replicas.modules[0]).eval()
    right = sum(int((model(X).argmax(dim=1) == y).sum()) for X, y in test)
    assert 0 < right < 18
    assert replicas.evaluate(iter(test)) == right / 18
    for mine, then in zip(replicas.modules, before, strict=True):
        assert same_bits(mine, then)
        assert [m.training for m in mine.modules()] == [m.training for m in then.modules()]
    with pytest.raises(ValueError, match="no examples"):
        replicas.evaluate([])
    with pytest.raises(RuntimeError):
        replicas.evaluate([(torch.zeros(4, 99), torch.zeros(4))])
    assert all(same_bits(a, b) for a, b in zip(replicas.modules, before, strict=True))
    assert replicas.modules[0].training


def test_evaluation_restores_buffers_that_forward_assigns() -> None:
    class Last(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x.mean(0)
            return super().forward(x)

    module = Last(FEATURES, CLASSES)
    module.register_buffer("last", torch.zeros(FEATURES))
    replicas = trained(module, 3, [9])
    kept = [mine.get_buffer("last").clone() for mine in replicas.modules]
    replicas.evaluate(batches([7]))
    for mine, before in zip(replicas.modules[1:], kept[1:], strict=True):
        assert torch.equal(mine.get_buffer("last"), before)


def test_evaluation_takes_rank_0s_buffers_by_every_name() -> None:
    """A rank's list of its buffers has them, too."""
    module = Calls(lambda self, x: x * self.signs[0])
    module.signs = [module.count]
    replicas = replicas_of(module, 2)
    for mine, sign in zip(replicas.modules, (1.0, -1.0), strict=True):
        mine.get_buffer("count").fill_(sign)
    assert replicas.evaluate([(torch.eye(4), torch.arange(4))]) == 1
    assert replicas.modules[1].get_buffer("count") == -1


def test_evaluation_counts_every_label_once() -> None:
    """The labels of an image are those of its pixels; other shapes would be broadcast."""
    torch.manual_seed(0)
    pixels = nn.Conv2d(1, CLASSES, 1)
    X, y = torch.randn(5, 1, 3, 2), torch.randint(CLASSES, (5, 3, 2))
    replicas = replicas_of(pixels, 3)
    right = int((pixels(X).argmax(1) == y).sum())
    assert 0 < right < 30
    assert replicas.evaluate([(X[:4], y[:4]), (X[4:], y[4:])]) == right / 30
    vectors = replicas_of(perceptron(), 2)
    ((X, y),) = batches([6])
    for labels in (y[:, None], y.view(6, 1, 1), F.one_hot(y, CLASSES), y.view(6, 1).expand(6, 5)):
        with pytest.raises(ValueError, match=r"labels have shape \[3, .* scores \[3, 4\]"):
            vectors.evaluate([(X, labels)])
    with pytest.raises(ValueError, match=r"scores \[3\]: scores \[n, classes, ...\] need"):
        replicas_of(nn.Sequential(nn.Linear(FEATURES, 1), nn.Flatten(0)), 2).evaluate([(X, y)])


def test_a_restored_state_continues_with_the_same_bits() -> None:
    def make() -> ReplicaTrainer:
        return replicas_of(nn.Sequential(nn.BatchNorm1d(FEATURES), perceptron()), 2)

    replicas, other = make(), make()
    first, *rest = batches([8, 9, 10])
    replicas.step(*first)
    state = copy.deepcopy(replicas.state_dict())
    other.load_state_dict(state)
    for each in (replicas, other):
        for X, y in rest:
            each.step(X, y)
    for mine, theirs in zip(replicas.modules, other.modules, strict=True):
        assert same_bits(mine, theirs)
    with pytest.raises(ValueError, match="the state is for 2 ranks, and there are 3"):
        replicas_of(perceptron(), 3).load_state_dict(state)


def test_parts_of_a_step_are_timed() -> None:
    replicas = trained(perceptron(), 2, [8], exact_times=True)
    seconds = replicas.seconds
    assert min(seconds.split, seconds.compute, seconds.reduction, seconds.update) > 0
    ranks = replicas.rank_seconds()
    assert min(ranks) > 0
    assert sum(ranks) <= seconds.compute


def test_bad_batches_are_refused_before_anything_moves() -> None:
    replicas = replicas_of(perceptron(), 2)
    ((X, y),) = batches([5])
    with pytest.raises(ValueError, match="at least one example"):
        replicas.step(X[:0], y[:0])
    with pytest.raises(ValueError, match="5 images, 4 labels"):
        replicas.step(X, y[:4])
    with pytest.raises(ValueError, match=r"shares \[1, 1\] must .* add up to 5"):
        replicas.step(X, y, shares=[1, 1])
    with pytest.raises(ValueError, match=r"shares \[6, -1\] must be at least 0"):
        replicas.step(X, y, shares=[6, -1])
    with pytest.raises(ValueError, match="one share per rank: 1 for 2"):
        replicas.step(X, y, shares=[5])
    for off in (torch.no_grad, torch.inference_mode):
        with off(), pytest.raises(ValueError, match=r"call it outside of torch\.no_grad"):
            replicas.step(X, y)
    frozen = perceptron().requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        replicas_of(frozen, 2)
    assert same_bits(replicas.modules[0], perceptron())


def test_one_value_to_normalise_is_refused() -> None:
    module = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES))
    with pytest.raises(ValueError, match=r"rank 1 has a shard of 1, .* use larger batches"):
        trained(module, 2, [3])


def test_a_rank_without_examples_keeps_its_statistics() -> None:
    module = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES))
    replicas = replicas_of(module, 2)
    ((X, y),) = batches([4])
    replicas.step(X, y, shares=[4, 0])
    moved, kept = (mine.get_buffer("0.num_batches_tracked") for mine in replicas.modules)
    assert (int(moved), int(kept)) == (1, 0)
    assert difference(*replicas.modules) == 0


def test_options_out_of_range() -> None:
    with pytest.raises(ValueError, match="a microbatch must have at least 1 example, not 0"):
        replicas_of(perceptron(), 2, microbatch=0)
    with pytest.raises(ValueError, match="a bucket must have at least 1 byte, not 0"):
        replicas_of(perceptron(), 2, bucket_bytes=0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("shares", [[3, 3, 3], [7, 0, 2]])
def test_batch_statistics_over_all_ranks_are_those_of_the_whole_batch(
    overlap: bool, shares: list[int]
) -> None:
    def module() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES)]
        return nn.Sequential(*layers).double()

    data = [(X.double(), y) for X, y in batches([9, 9, 9])]
    whole = replicas_of(module(), 1)
    for X, y in data:
        whole.step(X, y)
    ranks = trained_ranks(module, 3, data, shares, overlap=overlap, bucket_bytes=1)
    for mine in ranks:
        assert same_bits(mine, ranks[0])
        for name, value in whole.modules[0].state_dict().items():
            torch.testing.assert_close(mine.state_dict()[name], value, rtol=0, atol=1e-10)
