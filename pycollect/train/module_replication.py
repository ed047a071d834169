"""Replication of a module: one copy per rank, with its own parameters and buffers.

All tensors are copied in one collective. Tensors shared within the module stay shared, and
everything that is not a tensor is copied by copy.deepcopy.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import pycollect as pc
from pycollect.devices import DeviceSpec


def replicate_module(module: nn.Module, devices: DeviceSpec) -> list[nn.Module]:
    """Copy a module once per rank, onto the rank's device; the original does not change.

    `devices` is an argument of `pycollect.devices`, and may name a device several times; the result
    has a module for each rank. Shapes, dtypes, training mode, frozen parameters, tied parameters,
    hooks and the order of dimensions in memory are kept; gradients are not. Raises ValueError for a
    module whose parameters have no shape yet, and for a device that does not exist.

    >>> a, b = replicate_module(nn.Linear(2, 3), "cpu*2")
    >>> torch.equal(a.weight, b.weight), a.weight.data_ptr() == b.weight.data_ptr()
    (True, False)
    """
    tensors = list(_tensors(module))
    if any(nn.parameter.is_lazy(tensor) for tensor in tensors):
        raise ValueError("a parameter has no shape yet: send one batch through the module first")
    with torch.no_grad():
        copies = pc.replicate([tensor.detach() for tensor in tensors], devices)
    return [_with(module, tensors, mine) for mine in copies]


def _tensors(module: nn.Module) -> list[Tensor]:
    """Return all parameters and buffers of the module, each once."""
    found = [*module.parameters(), *module.buffers()]
    return list({id(tensor): tensor for tensor in found}.values())


def _with(module: nn.Module, tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> nn.Module:
    """Copy the module, with `copies` in place of its `tensors`."""
    # deepcopy takes an object's copy from its memo, so every reference to a tensor, however deep,
    # becomes a reference to the same copy.
    memo: dict[int, object] = {}
    for tensor, mine in zip(tensors, copies, strict=True):
        is_parameter = isinstance(tensor, nn.Parameter)
        new = nn.Parameter(mine, requires_grad=tensor.requires_grad) if is_parameter else mine
        new.__dict__.update(tensor.__dict__)  # attributes that libraries have set on the tensor
        memo[id(tensor)] = new
    return copy.deepcopy(module, memo)
