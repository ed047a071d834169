"""Test accuracy of replicated modules, with the examples shared among all ranks."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import pycollect as pc

from .shares import split_batch


@torch.no_grad()
def accuracy(
    modules: Sequence[nn.Module],
    devices: Sequence[torch.device],
    batches: Iterable[tuple[Tensor, Tensor]],
) -> float:
    """Return the fraction of examples whose highest score is the label's, 0..1.

    The modules run in evaluation mode with the buffers of rank 0, so the tested model is the one
    that a checkpoint stores. Raises ValueError if there are no examples.
    """
    correct = [torch.zeros((), dtype=torch.int64, device=device) for device in devices]
    examples = 0
    with _as_rank_0(modules):
        for X, y in batches:
            examples += len(X)
            shards = zip(*split_batch(X, y, devices), modules, correct, strict=True)
            for X_shard, y_shard, module, count in shards:
                if len(X_shard):
                    count += (module(X_shard).argmax(dim=1) == y_shard).sum()
    if examples == 0:
        raise ValueError("no examples to evaluate")
    return sum(int(count) for count in correct) / examples


@contextmanager
def _as_rank_0(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put all modules in evaluation mode with rank 0's buffers; restore both at the end."""
    parts = [part for module in modules for part in module.modules()]
    training = [part.training for part in parts]
    buffers = [list(module.buffers()) for module in modules]
    kept = [[buffer.clone() for buffer in mine] for mine in buffers[1:]]
    try:
        for module in modules:
            module.eval()
        if buffers[0]:
            pc.broadcast_coalesced(buffers)
        yield
    finally:
        for part, mode in zip(parts, training, strict=True):
            part.training = mode
        for mine, before in zip(buffers[1:], kept, strict=True):
            for buffer, value in zip(mine, before, strict=True):
                buffer.copy_(value)
