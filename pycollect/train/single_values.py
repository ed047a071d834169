"""Shards of one example under batch normalisation: refused before a step, not in its middle.

A single value per channel has no variance, and torch raises where it comes to the layer, when other
ranks have been through theirs already. A trial, see trial.py, tells beforehand how many values an
example brings to every layer.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .sync_batchnorm import SyncBatchNorm
from .trial import EXAMPLES, trial


def refusal(rank: int, examples: int) -> ValueError:
    """Say what a rank with so few examples can do."""
    return ValueError(
        f"rank {rank} has a shard of {examples}, and batch normalisation needs more than one "
        "value per channel: use larger batches or microbatches, fewer ranks, drop_last, or "
        "synchronised batch statistics"
    )


class SingleValues:
    """Refuses shards of one example where a layer of this module would see single values.

    >>> import torch
    >>> SingleValues(nn.BatchNorm1d(3)).check([(2, 1)], torch.zeros(3, 3))
    Traceback (most recent call last):
    ValueError: rank 1 has a shard of 1, and batch normalisation needs more than one ...
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._found: dict[Any, bool] = {}  # by the shape of an example, and who is in training

    def check(self, parts: Iterable[Sequence[int]], examples: Tensor) -> None:
        """Raise ValueError if a pass that has parts of these sizes, by rank, cannot be done.

        `examples` has the shape of one behind its first dimension; its values do not matter.
        """
        ranks = [part.index(1) for part in parts if 1 in part]
        if not ranks:
            return
        layers = [layer for layer in self._module.modules() if _counts(layer)]
        if not layers:
            return
        key = (examples.shape[1:], examples.dtype, tuple(layer.training for layer in layers))
        if key not in self._found:
            self._found[key] = 1 in self._values(layers, examples)
        if self._found[key]:
            raise refusal(ranks[0], 1)

    def _values(self, layers: Sequence[nn.Module], examples: Tensor) -> set[int]:
        """Give the numbers of values per channel that these layers get of one example."""
        found: set[int] = set()
        hooks = [layer.register_forward_pre_hook(partial(_note, found)) for layer in layers]
        try:
            whole = trial(self._module, examples.shape[1:], examples.dtype, record=False)
        finally:
            for hook in hooks:
                hook.remove()
        return set() if whole is None else found


def _counts(layer: nn.Module) -> bool:
    """Tell whether a layer takes statistics of a shard alone."""
    alone = isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)
    if isinstance(layer, SyncBatchNorm):
        alone = layer.ranks == 1
    return alone and (layer.training or layer.running_mean is None)


def _note(found: set[int], layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    (x,) = inputs
    found.add(x.numel() // x.shape[1] // EXAMPLES)
