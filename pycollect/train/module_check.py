"""Dry run of a module on two examples of zeros, to find errors before a training step.

The examples run in evaluation mode, through a copy of the module, and change no state. The dry run
does not cover behaviour specific to training. A module that fails on zeros has no result, and its
step raises the error.

The dry run finds shards of one example under batch normalisation: a single value per channel has no
variance, and torch would raise only in that layer, after other ranks have passed theirs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .module_replication import copied
from .sync_batchnorm import SyncBatchNorm

_EXAMPLES = 2  # layers with batch statistics even in evaluation refuse a single example


def dry_run(
    module: nn.Module, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, record: bool
) -> Any:
    """Return the module's output for zeros of this shape; None if the module raises.

    With `record` autograd records the pass.

    >>> dry_run(nn.Linear(3, 4), [3], record=False).shape
    torch.Size([2, 4])
    """
    device = next((param.device for param in module.parameters()), torch.device("cpu"))
    pair = torch.zeros(_EXAMPLES, *shape, dtype=dtype, device=device)
    tensors: dict[int, Any] = {id(param): param for param in module.parameters()}
    tensors |= {id(buffer): buffer.clone() for buffer in module.buffers()}
    gpus = [device] if device.type == "cuda" else []
    try:
        with (
            torch.random.fork_rng(gpus),
            torch.set_grad_enabled(record),
            _in_evaluation(module),
        ):
            return copied(module, tensors)(pair)
    except Exception:  # any error is due to the zeros, or the training step will raise it again
        return None


def unused_parameters(module: nn.Module, shape: Sequence[int]) -> list[str]:
    """Return the names of trained parameters that the output does not depend on, if `dry_run` runs.

    >>> net = nn.ModuleDict({"a": nn.Linear(3, 4)}); net.forward = lambda x: net.a.weight.sum() * x
    >>> unused_parameters(net, [3])
    ['a.bias']
    """
    output = dry_run(module, shape, record=True)
    if not isinstance(output, Tensor) or not output.requires_grad:
        return []
    named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    grads = torch.autograd.grad(output.sum(), [param for _, param in named], allow_unused=True)
    return [name for (name, _), grad in zip(named, grads, strict=True) if grad is None]


@contextmanager
def _in_evaluation(module: nn.Module) -> Iterator[None]:
    training = [(part, part.training) for part in module.modules()]
    try:
        module.eval()
        yield
    finally:
        for part, mode in training:
            part.training = mode


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
        if ranks and self._gets_one_value(_is_local, examples):
            raise _single_value_error(ranks[0], 1)
        single = any(sum(part) == 1 for part in parts)
        if single and self._gets_one_value(_is_synchronized, examples):
            raise ValueError(
                "there is a batch or microbatch of one example, and batch normalisation over all "
                "ranks needs more than one value per channel: use another batch size or "
                "microbatch, or drop_last"
            )

    def _gets_one_value(self, kind: "Kind", examples: Tensor) -> bool:
        """Return whether a layer of this kind gets only one value per channel from one example."""
        layers = [layer for layer in self._module.modules() if self._matches(kind, layer)]
        if not layers:
            return False
        training = tuple(layer.training for layer in layers)
        key = (kind, examples.shape[1:], examples.dtype, training)
        if key not in self._found:
            self._found[key] = 1 in self._values(layers, examples)
        return self._found[key]

    def _matches(self, kind: "Kind", layer: nn.Module) -> bool:
        if not isinstance(layer, _BatchNorm) or not (layer.training or layer.running_mean is None):
            return False
        return kind(layer) if not self._sync_batchnorm else kind is _is_synchronized

    def _values(self, layers: Sequence[nn.Module], examples: Tensor) -> set[int]:
        """Return the numbers of values per channel that these layers get from one example."""
        found = _Numbers()
        hooks = [layer.register_forward_pre_hook(partial(_note, found)) for layer in layers]
        try:
            whole = dry_run(self._module, examples.shape[1:], examples.dtype, record=False)
        finally:
            for hook in hooks:
                hook.remove()
        return set() if whole is None else found


Kind: TypeAlias = Callable[[nn.Module], bool]


def _is_local(layer: nn.Module) -> bool:
    """Return whether a layer takes statistics over its own shard alone."""
    if isinstance(layer, SyncBatchNorm):
        return layer.ranks == 1
    return not isinstance(layer, nn.SyncBatchNorm)


def _is_synchronized(layer: nn.Module) -> bool:
    """Return whether a layer takes statistics over all ranks."""
    return isinstance(layer, SyncBatchNorm) and layer.ranks > 1


class _Numbers(set[int]):
    """Numbers that the hooks of a copied module note, too."""

    def __deepcopy__(self, memo: object) -> "_Numbers":
        return self


def _note(found: set[int], layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    (x,) = inputs
    found.add(x.numel() // x.shape[1] // _EXAMPLES)
