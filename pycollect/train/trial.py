"""Two examples of zeros through a module in evaluation mode, which leave no trace in it.

They tell beforehand what a step would find out in its middle. What only training does they cannot
see, and of a module that zeros do not suit they tell nothing; there the step's own error stays.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

EXAMPLES = 2  # one alone would be refused by what takes statistics even in evaluation


def trial(
    module: nn.Module, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, record: bool
) -> Any:
    """Give the output for examples of this shape, recorded by autograd or not; None if it fails.

    >>> trial(nn.Linear(3, 4), [3], record=False).shape
    torch.Size([2, 4])
    """
    device = next((param.device for param in module.parameters()), torch.device("cpu"))
    pair = torch.zeros(EXAMPLES, *shape, dtype=dtype, device=device)
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
