"""The trainer's arithmetic: bits as in the book's loop, results as on one device, for any split."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pycollect.train import (
    digits,
    evaluate_accuracy,
    get_params,
    init_lenet,
    lenet,
    naive_all_reduce,
    reduce_gradients_coalesced,
    reduce_gradients_naive,
    replicate_params,
    sgd,
    split_batch,
    train_batch,
)
from pycollect.train.from_scratch import gradients
from pycollect.train.records import same_bits
from pycollect.train.reduce import Reduction

CPU = torch.device("cpu")
UNEVEN = (16, 16, 7, 3, 1, 16)  # not divisible by 3; a batch of 1 leaves all ranks but one idle


def trained(
    world: int, sizes: Sequence[int], reduction: Reduction = reduce_gradients_coalesced
) -> list[list[Tensor]]:
    """Replicas that were trained on consecutive batches of the given sizes."""
    X, y = (part[: sum(sizes)].split(list(sizes)) for part in digits().train)
    replicas = replicate_params(init_lenet(3), [CPU] * world)
    for X_batch, y_batch in zip(X, y, strict=True):
        train_batch(X_batch, y_batch, replicas, 0.3, model=lenet, reduction=reduction)
    return replicas


def assert_same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    assert len(a) == len(b) == 8
    assert all(map(same_bits, a, b))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_naive_and_pycollect_leave_the_same_bits(world: int) -> None:
    ours, book = trained(world, UNEVEN), trained(world, UNEVEN, reduce_gradients_naive)
    for mine, theirs in zip(ours, book, strict=True):
        assert_same_bits(mine, theirs)
        assert_same_bits(mine, ours[0])


@pytest.mark.parametrize("world", [2, 3, 8])
def test_ranks_train_as_one_device_on_the_whole_batch(world: int) -> None:
    params = [param.requires_grad_() for param in init_lenet(3)]
    X, y = (part[: sum(UNEVEN)].split(list(UNEVEN)) for part in digits().train)
    for X_batch, y_batch in zip(X, y, strict=True):
        loss = torch.nn.functional.cross_entropy(lenet(X_batch, params), y_batch)
        grads = torch.autograd.grad(loss, params)
        with torch.no_grad():
            for param, grad in zip(params, grads, strict=True):
                param -= 0.3 * grad
    start = init_lenet(3)
    moved = max(float((a.detach() - b).abs().max()) for a, b in zip(params, start, strict=True))
    assert moved > 1e-2
    for mine, single in zip(trained(world, UNEVEN)[0], params, strict=True):
        torch.testing.assert_close(mine, single, rtol=0, atol=1e-5)


def test_ranks_without_examples_change_nothing() -> None:
    assert_same_bits(trained(4, [1, 1])[3], trained(1, [1, 1])[0])


def test_gradients_are_zero_after_the_update() -> None:
    replicas = trained(2, [4])
    assert all(not grad.any() for params in replicas for grad in gradients(params))


def test_parameters_that_share_memory_stay_tied() -> None:
    weight = torch.randn(3, 3)
    for a, b in replicate_params([weight, weight.t()[1:]], [CPU] * 2):
        assert b.data_ptr() - a.data_ptr() == 4
        assert torch.equal(a.t()[1:], b)
        assert a.grad.data_ptr() != b.grad.data_ptr()
        assert a.data_ptr() != weight.data_ptr()


def test_evaluation_counts_every_example_once() -> None:
    X, y = (part[:101] for part in digits().test)
    replicas = trained(3, [64] * 3)
    with torch.no_grad():
        right = (lenet(X, replicas[0]).argmax(dim=1) == y).sum()
    assert 0 < right < 101
    assert evaluate_accuracy(X, y, replicas, model=lenet, batch_size=10) == int(right) / 101
    with pytest.raises(ValueError, match="no examples"):
        evaluate_accuracy(X[:0], y[:0], replicas, model=lenet)
    with pytest.raises(ValueError, match=r"labels have shape \[34, 1\] and the scores \[34, 10\]"):
        evaluate_accuracy(X, y[:, None], replicas, model=lenet)
    pixels = [[torch.eye(2)[:, :, None]]] * 3

    def scores(X: torch.Tensor, params: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.conv1d(X, params[0])

    X, y = torch.tensor([[[0.0, 2.0], [1.0, 1.0]]] * 4), torch.tensor([[1, 1]] * 4)
    assert evaluate_accuracy(X, y, pixels, model=scores) == 0.5


def test_split_batch_gives_every_rank_its_share() -> None:
    X, y = torch.arange(20.0).reshape(5, 4), torch.arange(5)
    X_shards, y_shards = split_batch(X, y, [CPU] * 3)
    assert [shard.tolist() for shard in y_shards] == [[0, 1], [2, 3], [4]]
    assert torch.equal(torch.cat(X_shards), X)
    assert [len(shard) for shard in split_batch(X[:1], y[:1], [CPU] * 3)[0]] == [1, 0, 0]
    with pytest.raises(ValueError, match="5 images, 4 labels"):
        split_batch(X, y[:4], [CPU] * 3)


def test_the_functions_of_the_book() -> None:
    b1 = get_params(init_lenet(), "cpu")[1]
    assert b1.requires_grad
    assert b1.grad is not None
    assert not b1.grad.any()
    data = [torch.ones(1, 2), torch.ones(1, 2) * 2]
    naive_all_reduce(data)
    assert [tensor.tolist() for tensor in data] == [[[3, 3]], [[3, 3]]]


def test_the_naive_loop_sums_tensors_without_dimensions() -> None:
    data = [torch.tensor(float(rank)) for rank in range(4)]
    naive_all_reduce(data)
    assert [tensor.item() for tensor in data] == [6.0] * 4


def test_a_step_without_examples_is_refused_and_changes_nothing() -> None:
    replicas = replicate_params(init_lenet(), [CPU] * 2)
    before = [param.clone() for param in replicas[1]]
    with pytest.raises(ValueError, match="the batch has no examples"):
        train_batch(torch.rand(0, 1, 28, 28), torch.zeros(0).long(), replicas, 0.1, model=lenet)
    with pytest.raises(ValueError, match="a step needs at least 1 example, not 0"):
        sgd(replicas[1], 0.1, 0)
    assert all(torch.equal(a, b) for a, b in zip(replicas[1], before, strict=True))


def test_replicas_share_no_memory() -> None:
    params = init_lenet()
    replicas = [params, *replicate_params(params, [CPU] * 2)]
    assert len({tensor.data_ptr() for replica in replicas for tensor in replica}) == 3 * 8


def test_lenet_has_the_initial_values_of_the_book() -> None:
    params = init_lenet(1)
    assert [tuple(p.shape) for p in params[::2]] == [
        (20, 1, 3, 3),
        (50, 20, 5, 5),
        (128, 800),
        (10, 128),
    ]
    assert all(not bias.any() for bias in params[1::2])
    assert float(params[4].std()) == pytest.approx(0.01, rel=0.02)
    assert_same_bits(params, init_lenet(1))


def test_gradients_must_be_attached() -> None:
    with pytest.raises(ValueError, match=r"replicate_params\(\)"):
        gradients(init_lenet())
