"""Dry run of a module, which finds shards of one example under batch normalisation.

A single value per channel has no variance, and torch would raise only in that layer, after other
ranks have passed theirs. The dry run takes two examples of zeros in evaluation mode through a copy
of the module, and changes no state. It does not cover behaviour specific to training. A module that
fails on zeros has no result, and its step raises the error.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .module_replication import copied
from .sync_batchnorm import SyncBatchNorm

_EXAMPLES = 2  # layers with batch statistics even in evaluation refuse a single example


def _single_value_error(rank: int, examples: int) -> ValueError:
    """Return the error for a rank with too few examples, with the possible remedies."""
    return ValueError(
        f"rank {rank} has a shard of {examples}, and batch normalisation needs more than one "
        "value per channel: use larger batches or microbatches, fewer ranks, drop_last, or "
        "synchronised batch statistics"
    )


@contextmanager
def explained(rank: int, examples: int) -> Iterator[None]:
    """Replace torch's error about a single value per channel by one that names remedies."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise _single_value_error(rank, examples) from error


class SingleValueCheck:
    """Refuses shards of one example if a batch normalisation of the module would get one value.

    For layers with statistics over all ranks, a single example over all ranks is refused instead.
    With `sync_batchnorm` every layer counts as such, because the prepared run will convert it.

    >>> SingleValueCheck(nn.BatchNorm1d(3)).check([(2, 1)], torch.zeros(3, 3))
    Traceback (most recent call last):
    ValueError: rank 1 has a shard of 1, and batch normalisation needs more than one ...
    """

    def __init__(self, module: nn.Module, *, sync_batchnorm: bool = False) -> None:
        self._module, self._sync_batchnorm = module, sync_batchnorm
        self._found: dict[Any, bool] = {}  # results by kind, example shape, dtype, training modes

    def check(self, parts: Iterable[Sequence[int]], examples: Tensor) -> None:
        """Raise ValueError if batch normalisation would fail for parts of these sizes per rank.

        `examples` gives shape (after the first dimension) and dtype of an example, not its values.
        """
        parts = list(parts)
        ranks = [part.index(1) for part in parts if 1 in part]
        if ranks and self._gets_one_value(examples, over_ranks=False):
            raise _single_value_error(ranks[0], 1)
        single = any(sum(part) == 1 for part in parts)
        if single and self._gets_one_value(examples, over_ranks=True):
            raise ValueError(
                "there is a batch or microbatch of one example, and batch normalisation over all "
                "ranks needs more than one value per channel: use another batch size or "
                "microbatch, or drop_last"
            )

    def _gets_one_value(self, examples: Tensor, *, over_ranks: bool) -> bool:
        """Return whether a layer with such statistics gets one value per channel and example."""
        layers = [
            layer
            for layer in self._module.modules()
            if isinstance(layer, _BatchNorm)
            and (layer.training or layer.running_mean is None)
            and self._is_over_ranks(layer) is over_ranks
        ]
        training = tuple(layer.training for layer in layers)
        key = (over_ranks, examples.shape[1:], examples.dtype, training)
        if layers and key not in self._found:
            self._found[key] = 1 in self._values(layers, examples)
        return bool(layers) and self._found[key]

    def _is_over_ranks(self, layer: nn.Module) -> bool | None:
        """Return whether a layer takes statistics over all ranks; None for nn.SyncBatchNorm."""
        if self._sync_batchnorm:
            return True
        if isinstance(layer, SyncBatchNorm):
            return layer.ranks > 1
        return None if isinstance(layer, nn.SyncBatchNorm) else False

    def _values(self, layers: Sequence[nn.Module], examples: Tensor) -> set[int]:
        """Return the numbers of values per channel that these layers get from one example."""
        device = next((param.device for param in self._module.parameters()), torch.device("cpu"))
        pair = torch.zeros(_EXAMPLES, *examples.shape[1:], dtype=examples.dtype, device=device)
        copies: dict[int, Any] = {id(param): param for param in self._module.parameters()}
        copies |= {id(buffer): buffer.clone() for buffer in self._module.buffers()}
        found: set[int] = set()

        def note(_: nn.Module, inputs: tuple[Tensor]) -> None:
            found.add(inputs[0].numel() // inputs[0].shape[1] // _EXAMPLES)

        gpus = [device] if device.type == "cuda" else []
        try:
            with torch.random.fork_rng(gpus), torch.no_grad():
                module = copied(self._module, copies).eval()
                for layer in layers:
                    copies[id(layer)].register_forward_pre_hook(note)
                module(pair)
        except Exception:  # any error is due to the zeros, or the training step will raise it again
            return set()
        return found


def check_parameters(
    modules: Sequence[nn.Module], before: Sequence[Sequence[int]], *, alone: bool
) -> None:
    """Raise ValueError if forward passes have changed parameters, to different values.

    `before` has the versions of the parameters of each replica. Only if this process has all
    replicas, `alone`, can they be compared.
    """
    replicas = [dict(module.named_parameters()) for module in modules]
    for mine, versions in zip(replicas, before, strict=True):
        for (name, param), version in zip(mine.items(), versions, strict=True):
            if param._version == version:
                continue
            if alone and all(torch.equal(r[name].to(param.device), param) for r in replicas):
                continue
            unknown = "which a group or shards cannot compare"
            how = "and differently on each rank" if alone else unknown
            raise ValueError(
                f"forward changes parameter {name} in place, {how}: "
                "make it a buffer, of which each rank has its own"
            )
