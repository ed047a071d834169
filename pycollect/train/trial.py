"""Two examples of zeros through a module tell beforehand what a step would find out in its middle.

They go through in evaluation mode and leave no trace. What only training does they cannot show, and
of a module that zeros do not suit they tell nothing; there the step's own error stays.

So are shards of one example refused under batch normalisation: a single value per channel has no
variance, and torch raises where it comes to the layer, when other ranks have been through theirs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from .sync_batchnorm import SyncBatchNorm

_EXAMPLES = 2  # one alone would be refused by what takes statistics even in evaluation


def trial(
    module: nn.Module, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, record: bool
) -> Any:
    """Give the output for examples of this shape, recorded by autograd or not; None if it fails.

    >>> trial(nn.Linear(3, 4), [3], record=False).shape
    torch.Size([2, 4])
    """
    device = next((param.device for param in module.parameters()), torch.device("cpu"))
    pair = torch.zeros(_EXAMPLES, *shape, dtype=dtype, device=device)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    gpus = [device] if device.type == "cuda" else []
    try:
        with (
            torch.random.fork_rng(gpus),
            torch.set_grad_enabled(record),
            _in_evaluation(module),
        ):
            return functional_call(module, buffers, (pair,))
    except Exception:  # whatever it is: it is a matter of zeros, or comes again in the step
        return None


def unused_parameters(module: nn.Module, shape: Sequence[int]) -> list[str]:
    """Name the parameters to train that take no part in the output, as far as a trial tells.

    >>> net = nn.ModuleDict({"a": nn.Linear(3, 4)}); net.forward = lambda x: net.a.weight.sum() * x
    >>> unused_parameters(net, [3])
    ['a.bias']
    """
    output = trial(module, shape, record=True)
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


def _refusal(rank: int, examples: int) -> ValueError:
    """Say what a rank with so few examples can do."""
    return ValueError(
        f"rank {rank} has a shard of {examples}, and batch normalisation needs more than one "
        "value per channel: use larger batches or microbatches, fewer ranks, drop_last, or "
        "synchronised batch statistics"
    )


@contextmanager
def explained(rank: int, examples: int) -> Iterator[None]:
    """Say what to do where torch says that there is only one value to normalise."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise _refusal(rank, examples) from error


class SingleValues:
    """Refuses shards of one example where a layer of this module would see single values.

    So it does with one example of all ranks, where the layer takes all into its statistics, or is
    `to_meet` those of the other ranks in the run that is being prepared.

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
            raise _refusal(ranks[0], 1)
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
    found.add(x.numel() // x.shape[1] // _EXAMPLES)
