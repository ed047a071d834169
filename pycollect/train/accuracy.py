"""Test accuracy of replicated modules, with the examples shared among all ranks."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pycollect as pc

from .module_replication import memory_blocks
from .shares import split_batch


def right_labels(scores: Tensor, y: Tensor) -> Tensor:
    """Return the number of labels with the highest score, a tensor without dimensions.

    Scores have shape [n, classes, ...] and labels [n, ...]. Raises ValueError for other shapes,
    which a comparison would broadcast.

    >>> right_labels(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor(1)
    """
    if scores.dim() < 2 or y.shape != scores.shape[:1] + scores.shape[2:]:
        raise ValueError(
            f"the labels have shape {list(y.shape)} and the scores {list(scores.shape)}: scores "
            "[n, classes, ...] need labels [n, ...]"
        )
    return (scores.argmax(dim=1) == y).sum()


@torch.no_grad()
def accuracy(
    modules: Sequence[nn.Module],
    devices: Sequence[torch.device],
    batches: Iterable[tuple[Tensor, Tensor]],
    group: dist.ProcessGroup | None = None,
) -> float:
    """Return the fraction of labels that have the highest score, 0..1.

    An example has one label, or one for each pixel or position. The modules run in evaluation mode
    with the buffers of rank 0, so the tested model is the one that a checkpoint stores. With a
    group each process has one module and its part of the batches, and all return the same. Raises
    ValueError if there are no labels, or if they have another shape than the scores' argmax.
    """
    correct = [torch.zeros((), dtype=torch.int64, device=device) for device in devices]
    labels = 0
    with _as_rank_0(modules, group):
        for X, y in batches:
            labels += y.numel()
            shards = zip(*split_batch(X, y, devices), modules, correct, strict=True)
            for X_shard, y_shard, module, count in shards:
                if len(X_shard):
                    count += right_labels(module(X_shard), y_shard)
    right = sum(int(count) for count in correct)
    if group is not None:
        numbers = torch.tensor([right, labels], device=devices[0])
        dist.all_reduce(numbers, group=group)
        right, labels = numbers.tolist()
    if labels == 0:
        raise ValueError("no examples to evaluate")
    return right / labels


@contextmanager
def _as_rank_0(modules: Sequence[nn.Module], group: dist.ProcessGroup | None) -> Iterator[None]:
    """Put all modules in evaluation mode with rank 0's buffers; restore both at the end."""
    parts = [part for module in modules for part in module.modules()]
    training = [part.training for part in parts]
    others = modules[1:] if group is None else modules  # of the modules that take its buffers
    buffers = [list(module.buffers()) for module in modules]
    kept = [[buffer.clone() for buffer in module.buffers()] for module in others]
    owned = [(part, dict(part._buffers)) for module in others for part in module.modules()]
    try:
        for module in modules:
            module.eval()
        _broadcast(buffers)
        for buffer in buffers[0] if group is not None else ():
            dist.broadcast(buffer, group=group, group_src=0)
        yield
    finally:
        for part, mode in zip(parts, training, strict=True):
            part.training = mode
        for part, own in owned:
            part._buffers.update(own)
        for module, before in zip(others, kept, strict=True):
            for buffer, value in zip(module.buffers(), before, strict=True):
                buffer.copy_(value)


def _broadcast(buffers: Sequence[Sequence[Tensor]]) -> None:
    """Copy rank 0's buffers to all ranks; ``buffers`` is [rank][index]."""
    found = [memory_blocks(mine) for mine in buffers]
    indices = [[members for _, members in mine] for mine in found]
    if any(mine != indices[0] for mine in indices):
        raise ValueError("buffers share memory with other buffers than on rank 0")
    if indices[0]:
        pc.broadcast_coalesced([[block for block, _ in mine] for mine in found])
    known = {i for of_block in indices[0] for i in of_block}
    for i in sorted(set(range(len(buffers[0]))) - known):  # sparse ones, among others
        for mine in buffers[1:]:
            mine[i].copy_(buffers[0][i])
