"""The training step from scratch: replicate, split, backward on every rank, reduce, update.

The ranks of one process run one after the other: on a CPU each uses all cores (one Python thread
per rank took 1.8 times as long), and on GPUs the calls return before the work is done.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from .losses import right_labels
from .module_replication import copies_of
from .reduce import Reduction, reduce_gradients_coalesced
from .shares import split_batch

Model: TypeAlias = Callable[[Tensor, Sequence[Tensor]], Tensor]
ParameterLists: TypeAlias = Sequence[Sequence[Tensor]]  # [rank][parameter]


def get_params(params: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Return a copy of the parameters on one device, with gradients of zeros attached.

    Shapes and dtypes are kept, and `params` do not change. The copies are leaves that require grad.
    Raises RuntimeError for an integer dtype, ValueError for a device that does not exist.

    >>> get_params([torch.ones(2)], "cpu")[0].grad
    tensor([0., 0.])
    """
    return replicate_params(params, [torch.device(device)])[0]


def replicate_params(
    params: Sequence[Tensor], devices: Sequence[torch.device]
) -> list[list[Tensor]]:
    """Return `replicas[rank][i]`: a copy of every parameter for each rank, with zeros as gradients.

    `devices` has one device per rank. A device may occur several times; each rank still has its own
    memory. Shapes, dtypes and memory that parameters share are kept, and `params` do not change.
    The copies are leaves that require grad. Raises RuntimeError for an integer dtype, ValueError
    for no device and for a device that does not exist.

    >>> len(replicate_params([torch.ones(2)], [torch.device("cpu")] * 3))
    3
    """
    replicas = copies_of(list(params), devices)
    for replica in replicas:
        for param in replica:
            param.requires_grad_()
            param.grad = torch.zeros_like(param)
    return replicas


def backward(model: Model, X: Tensor, y: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Add the gradients of the summed cross-entropy of one shard to `.grad`; return the loss.

    An empty shard adds no gradients, and its loss is 0.
    """
    if len(X) == 0:
        return torch.zeros((), device=X.device)
    loss = F.cross_entropy(model(X, params), y, reduction="sum")
    loss.backward()  # type: ignore[no-untyped-call]  # unannotated in torch
    return loss.detach()


def gradients(params: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of one replica; ValueError if a parameter has none attached."""
    grads = [param.grad for param in params if param.grad is not None]
    if len(grads) != len(params):
        raise ValueError("a parameter has no gradient: make the replicas with replicate_params()")
    return grads


@torch.no_grad()
def sgd(params: Sequence[Tensor], lr: float, batch_size: int) -> None:
    """Take one SGD step on one replica in place, and set its gradients to zero.

    The step is `param -= lr / batch_size * grad`. The gradients are those of a loss that is summed
    over `batch_size` examples, the whole batch of all ranks, so that this is a step of plain SGD on
    the mean loss. Raises ValueError for a parameter without a gradient, and for a batch size below
    1.

    >>> [param] = get_params([torch.ones(2)], "cpu")
    >>> param.grad += 4.0; sgd([param], lr=0.5, batch_size=4); param.tolist()
    [0.5, 0.5]
    """
    if batch_size < 1:
        raise ValueError(f"a step needs at least 1 example, not {batch_size}")
    for param, grad in zip(params, gradients(params), strict=True):
        param.sub_(grad, alpha=lr / batch_size)
        grad.zero_()


def train_batch(
    X: Tensor,
    y: Tensor,
    replicas: ParameterLists,
    lr: float,
    *,
    model: Model,
    reduction: Reduction = reduce_gradients_coalesced,
) -> list[Tensor]:
    """Train every replica on its shard of one batch; return each rank's summed loss.

    X has shape [n, ...] and y [n], on any device; y holds class numbers, int64 or uint8. `replicas`
    are those of `replicate_params`, and a rank's device is that of its replica.
    `model(X_shard, params)` returns scores [k, classes]. The batch is split by `split_batch`, every
    rank's gradients of the cross-entropy are summed over its shard, `reduction` sums them over the
    ranks (default: in one collective), and `sgd` updates every replica with the learning rate `lr`
    on the mean loss of the batch. Replicas that are equal before are equal afterwards, and their
    gradients are zeros.

    The losses are tensors without dimensions on the ranks' devices, summed over a rank's shard; a
    rank without examples has 0. Raises ValueError if X and y differ in length or are empty, or if a
    parameter has no gradient; torch's errors for labels that cross-entropy does not take.

    >>> from pycollect.train import init_lenet, lenet
    >>> replicas = replicate_params(init_lenet(), [torch.device("cpu")] * 2)
    >>> X, y = torch.rand(3, 1, 28, 28), torch.tensor([1, 2, 3])
    >>> len(train_batch(X, y, replicas, 0.1, model=lenet))
    2
    """
    if len(X) == 0:
        raise ValueError("the batch has no examples")
    devices = [replica[0].device for replica in replicas]
    X_shards, y_shards = split_batch(X, y, devices)
    shards = zip(X_shards, y_shards, replicas, strict=True)
    losses = [backward(model, X_shard, y_shard, params) for X_shard, y_shard, params in shards]
    with torch.no_grad():
        reduction([gradients(params) for params in replicas])
    for params in replicas:
        sgd(params, lr, len(X))
    return losses


@torch.no_grad()
def evaluate_accuracy(
    X: Tensor, y: Tensor, replicas: ParameterLists, *, model: Model, batch_size: int = 1024
) -> float:
    """Return the fraction of labels that have the highest score, 0..1.

    X has shape [n, ...] and y [n], or [n, ...] for scores [n, classes, ...], on any device;
    `replicas` and `model` are those of `train_batch`. All ranks take part, every label counts once,
    and at most `batch_size` examples of all ranks together (default 1024) are copied to the devices
    at a time. Raises ValueError if there are no labels, if X and y differ in length, or if labels
    have another shape than the scores' argmax; RuntimeError for a batch size below 1.

    >>> from pycollect.train import init_lenet, lenet
    >>> replicas = replicate_params(init_lenet(), [torch.device("cpu")] * 2)
    >>> X, y = torch.rand(3, 1, 28, 28), torch.tensor([1, 2, 3])
    >>> 0 <= evaluate_accuracy(X, y, replicas, model=lenet) <= 1
    True
    """
    if y.numel() == 0:
        raise ValueError("no examples to evaluate")
    devices = [replica[0].device for replica in replicas]
    correct = [torch.zeros((), dtype=torch.int64, device=device) for device in devices]
    batches = zip(torch.split(X, batch_size), torch.split(y, batch_size), strict=True)
    for X_batch, y_batch in batches:
        shards = zip(*split_batch(X_batch, y_batch, devices), replicas, correct, strict=True)
        for X_shard, y_shard, params, count in shards:
            if len(X_shard):
                count += right_labels(model(X_shard, params), y_shard)
    return sum(int(count) for count in correct) / y.numel()
