"""The functions of the book: bits as in its loop, results as on one device, for any split."""

import pytest
import torch
import torch.nn.functional as F
from train_cases import CPU, same_tensors

from pycollect.train import (
    LeNet,
    ReplicaTrainer,
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
    sgd_factory,
    train_batch,
)
from pycollect.train.from_scratch import gradients

UNEVEN = (16, 16, 7, 3, 1, 16)  # not divisible by 3; a batch of 1 leaves all ranks but one idle


def trained(world, reduction):
    replicas = replicate_params(init_lenet(3), [CPU] * world)
    for X, y in batches():
        train_batch(X, y, replicas, 0.3, model=lenet, reduction=reduction)
    return replicas


def batches():
    X, y = (part[: sum(UNEVEN)].split(UNEVEN) for part in digits().train)
    return zip(X, y, strict=True)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ranks_train_as_one_device_and_as_the_books_loop(world):
    params = [param.requires_grad_() for param in init_lenet(3)]
    concise = ReplicaTrainer(LeNet(seed=3), [CPU] * world, optimizer=sgd_factory(0.3))
    for X, y in batches():
        loss = F.cross_entropy(lenet(X, params), y)
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.data -= 0.3 * grad
        concise.step(X, y)
    ours, book = trained(world, reduce_gradients_coalesced), trained(world, reduce_gradients_naive)
    for replica in (*ours, *book):
        assert all(map(same_tensors, replica, ours[0]))
        assert not any(grad.any() for grad in gradients(replica))
    for found in (ours[0], concise.parameters[-1]):
        torch.testing.assert_close(list(found), params, rtol=0, atol=1e-5)
    start = zip(ours[0], init_lenet(3), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in start) > 0.01


def test_replicas_share_no_memory_but_their_own():
    weight = torch.randn(3, 3)
    tied = [weight, weight.t()[1:]]
    replicas = [tied, *replicate_params(tied, [CPU] * 2)]
    for a, b in replicas:
        assert b.data_ptr() - a.data_ptr() == 4
        assert torch.equal(a.t()[1:], b)
    tensors = [t for replica in replicas[1:] for p in replica for t in (p, p.grad)]
    assert len({t.data_ptr() for t in (*tied, *tensors)}) == 2 + 8


def test_evaluation_counts_every_example_once():
    X, y = (part[:101] for part in digits().test)
    replicas = trained(3, reduce_gradients_coalesced)
    right = (lenet(X, replicas[0]).argmax(dim=1) == y).sum()
    assert 0 < right < 101
    assert evaluate_accuracy(X, y, replicas, model=lenet, batch_size=10) == int(right) / 101
    with pytest.raises(ValueError, match="no examples"):
        evaluate_accuracy(X[:0], y[:0], replicas, model=lenet)


def test_the_functions_of_the_book():
    params = init_lenet(1)
    shapes = [(20, 1, 3, 3), (50, 20, 5, 5), (128, 800), (10, 128)]
    assert [tuple(p.shape) for p in params[::2]] == shapes
    assert not any(bias.any() for bias in params[1::2])
    assert float(params[4].std()) == pytest.approx(0.01, rel=0.02)
    b1 = get_params(params, "cpu")[1]
    assert b1.requires_grad
    assert not b1.grad.any()
    for shape in ((1, 2), ()):
        data = [torch.full(shape, float(rank)) for rank in range(4)]
        naive_all_reduce(data)
        assert all(torch.equal(tensor, torch.full(shape, 6.0)) for tensor in data)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda X, y, r: train_batch(X[:0], y[:0], r, 1, model=lenet), "the batch has no examples"),
        (lambda X, y, r: train_batch(X, y[:4], r, 1, model=lenet), "5 images, 4 labels"),
        (lambda X, y, r: sgd(r[1], 0.1, 0), "a step needs at least 1 example, not 0"),
        (lambda X, y, r: sgd(init_lenet(), 0.1, 1), r"replicate_params\(\)"),
    ],
)
def test_what_is_refused_changes_nothing(call, message):
    replicas = replicate_params(init_lenet(), [CPU] * 2)
    with pytest.raises(ValueError, match=message):
        call(torch.rand(5, 1, 28, 28), torch.arange(5), replicas)
    assert all(map(torch.equal, replicas[1], init_lenet()))
