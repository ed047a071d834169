"""Shards of one example under batch normalisation: refused before a step, not in its middle.

A single value per channel has no variance, and torch raises where it comes to the layer, when other
ranks have been through theirs already. A trial, see trial.py, tells beforehand how many values an
example brings to every layer.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

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

    So it does with one example of all ranks, where the layer takes all into its statistics, or is
    `to_meet` those of the other ranks in the run that is being prepared.

    >>> import torch
    >>> SingleValues(nn.BatchNorm1d(3)).check([(2, 1)], torch.zeros(3, 3))
    Traceback (most recent call last):
    ValueError: rank 1 has a shard of 1, and batch normalisation needs more than one ...
    """

    def __init__(self, module: nn.Module, *, to_meet: bool = False) -> None:
        self._module, self._to_meet = module, to_meet
        self._found: dict[Any, bool] = {}  # by the shape of an example, and who is in training

    def check(self, parts: Iterable[Sequence[int]], examples: Tensor) -> None:
        """Raise ValueError if a pass that has parts of these sizes, by rank, cannot be done.

        `examples` has the shape of one behind its first dimension; its values do not matter.
        """
        parts = list(parts)
        ranks = [part.index(1) for part in parts if 1 in part]
        if ranks and self._sees_one(_alone, examples):
            raise refusal(ranks[0], 1)
        if any(sum(part) == 1 for part in parts) and self._sees_one(_together, examples):
            raise ValueError(
                "there is a batch or microbatch of one example, and batch normalisation over all "
                "ranks needs more than one value per channel: use another batch size or "
                "microbatch, or drop_last"
            )

    def _sees_one(self, kind: "Kind", examples: Tensor) -> bool:
        """Tell whether a layer of this kind gets a single value per channel of one example."""
        layers = [layer for layer in self._module.modules() if self._is(kind, layer)]
        if not layers:
            return False
        training = tuple(layer.training for layer in layers)
        key = (kind, examples.shape[1:], examples.dtype, training)
        if key not in self._found:
            self._found[key] = 1 in self._values(layers, examples)
        return self._found[key]

    def _is(self, kind: "Kind", layer: nn.Module) -> bool:
        if not isinstance(layer, _BatchNorm) or not (layer.training or layer.running_mean is None):
            return False
        return kind(layer) if not self._to_meet else kind is _together

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


Kind: TypeAlias = Callable[[nn.Module], bool]


def _alone(layer: nn.Module) -> bool:
    """Tell whether a layer takes statistics of a shard alone."""
    if isinstance(layer, SyncBatchNorm):
        return layer.ranks == 1
    return not isinstance(layer, nn.SyncBatchNorm)


def _together(layer: nn.Module) -> bool:
    """Tell whether a layer takes statistics over all ranks."""
    return isinstance(layer, SyncBatchNorm) and layer.ranks > 1


def _note(found: set[int], layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    (x,) = inputs
    found.add(x.numel() // x.shape[1] // EXAMPLES)
