"""Replicas of modules: one step on many ranks is the step of one on the whole batch."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from pycollect.train import (
    MODELS,
    LeNet,
    Replicas,
    StepOptions,
    collective,
    digits,
    init_lenet,
    lenet,
    naive,
    replicate,
    train_batch,
)
from pycollect.train.reduce import Reduction

CPU = torch.device("cpu")
SGD = partial(torch.optim.SGD, lr=0.3)


def batches(sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    X, y = (part[: sum(sizes)].split(list(sizes)) for part in digits().train)
    return list(zip(X, y, strict=True))


def bits(module: nn.Module) -> list[Tensor]:
    return [t.detach().view(torch.uint8) for t in module.state_dict().values() if t.dim()]


def assert_same_bits(a: nn.Module, b: nn.Module) -> None:
    for mine, theirs in zip(bits(a), bits(b), strict=True):
        assert torch.equal(mine, theirs)


def lenets(
    world: int, sizes: Sequence[int], reduction: Reduction = collective, **options: object
) -> Replicas:
    """Replicas of LeNet that have seen consecutive batches of the given sizes."""
    replicas = Replicas(
        LeNet(seed=3),
        [CPU] * world,
        optimizer=SGD,
        reduction=reduction,
        options=StepOptions(**options),  # type: ignore[arg-type]
    )
    for X, y in batches(sizes):
        replicas.step(X, y)
    return replicas


def test_lenet_is_the_function_with_its_parameters() -> None:
    X = torch.rand(2, 1, 28, 28)
    assert torch.equal(LeNet(seed=5)(X), lenet(X, init_lenet(5)))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_replicas_of_lenet_train_as_the_book(world: int) -> None:
    params = replicate(init_lenet(3), [CPU] * world)
    for X, y in batches([16, 16, 7]):
        train_batch(X, y, params, 0.3, model=lenet)
    replicas = lenets(world, [16, 16, 7])
    for mine, book in zip(replicas.parameters[-1], params[0], strict=True):
        torch.testing.assert_close(mine, book, rtol=0, atol=1e-6)
    for module in replicas.modules[1:]:
        assert_same_bits(module, replicas.modules[0])


def test_naive_and_pycollect_leave_the_same_bits() -> None:
    ours, book = lenets(3, [16, 7, 1]), lenets(3, [16, 7, 1], naive)
    for mine, theirs in zip(ours.modules, book.modules, strict=True):
        assert_same_bits(mine, theirs)


def test_models_are_the_same_for_the_same_seed() -> None:
    for build in MODELS.values():
        state = torch.random.get_rng_state()
        assert_same_bits(build(in_channels=3, num_classes=4, seed=1), build(3, 4, 1))
        assert torch.equal(torch.random.get_rng_state(), state)
