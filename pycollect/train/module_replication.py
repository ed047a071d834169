"""Copies of modules, which share nothing with the original, and copies of their tensors.

Copies of tensors that share memory share it, too. For replicas that live for one forward pass and
share all but the tensors, see shallow_replica.py.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import pycollect as pc
from pycollect.devices import DeviceSpec

from .shallow_replica import CONTAINERS, ModuleReferences, global_names

_ALIGNMENT = 16  # bytes; a multiple of the size of every element


def replicate_module(module: nn.Module, devices: DeviceSpec) -> list[nn.Module]:
    """Copy a module once per rank, onto the rank's device; the original does not change.

    `devices` is an argument of `pycollect.devices`, and may name a device several times; the result
    has a module for each rank. Shapes, dtypes, training mode, frozen parameters, parameters that
    are tied or share memory, hooks of modules and the order of dimensions in memory are kept;
    gradients are not. A tensor that the module has computed, such as the weight of a layer with
    weight_norm, is copied without its history, and the forward pass must compute it again. Raises
    ValueError for a parameter without a shape or with a hook, a TorchScript module, an attribute
    that copy.deepcopy refuses, a function held by the module that uses it by a global variable, and
    a device that does not exist.

    >>> a, b = replicate_module(nn.Linear(2, 3), "cpu*2")
    >>> torch.equal(a.weight, b.weight), a.weight.data_ptr() == b.weight.data_ptr()
    (True, False)
    """
    check_replicable(module)
    for name, param in module.named_parameters():
        if any(not _is_of_trainer(hook) for hook in _hooks_of(param)):
            raise ValueError(
                f"parameter {name} has a hook, and would act on the gradient of each rank: remove "
                "it, or register it with the replicas' parameters"
            )
    return [copied(module, memo) for memo in _copied_tensors(module, devices)]


def check_replicable(module: nn.Module) -> None:
    """Raise ValueError for a module that no replica can be made of."""
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ValueError(f"module {name or type(part).__name__} is TorchScript: no replica")
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"{name} has no shape yet: send one batch through the module first")


def _hooks_of(param: Tensor) -> list[Any]:
    kinds: Any = (param._backward_hooks, param._post_accumulate_grad_hooks)
    return [hook for hooks in kinds for hook in (hooks or {}).values()]


def _is_of_trainer(hook: Any) -> bool:
    """Return whether a hook is one of `Buckets`; a trainer of the replicas makes its own."""
    return isinstance(hook, partial) and str(hook.func.__module__).startswith("pycollect.train")


# --- tensors --------------------------------------------------------------------------------------


def copies_of(tensors: Sequence[Tensor], devices: DeviceSpec) -> list[list[Tensor]]:
    """Return copies of the tensors for each rank; those that share memory share it in the copies.

    Tensors without strides, and of types with their own memory, are copied by their method `to`.
    """
    ranks, blocks = pc.devices(devices), memory_blocks(tensors)
    with torch.no_grad():
        copied = pc.replicate([block for block, _ in blocks], ranks)
        return [
            _copies(tensors, blocks, mine, device)
            for mine, device in zip(copied, ranks, strict=True)
        ]


def _copies(
    tensors: Sequence[Tensor],
    blocks: Sequence[tuple[Tensor, list[int]]],
    copied: Sequence[Tensor],
    device: torch.device,
) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for (block, members), mine in zip(blocks, copied, strict=True):
        for i in members:
            found[i] = mine if len(members) == 1 else _member(tensors[i], block, mine)
    return [
        found[i] if i in found else tensor.detach().to(device, copy=True)
        for i, tensor in enumerate(tensors)
    ]


def memory_blocks(tensors: Sequence[Tensor]) -> list[tuple[Tensor, list[int]]]:
    """Return (block, indices) for all plain tensors: none of the blocks shares memory with another.

    A block is the tensor of its only index, or the bytes [n] of all tensors that share memory. The
    blocks are in the order of their first indices.

    >>> x = torch.arange(6.0)
    >>> [(block.nbytes, indices) for block, indices in memory_blocks([x[:3], x[4:], x[2:4]])]
    [(16, [0, 2]), (8, [1])]
    """
    plain = [i for i, tensor in enumerate(tensors) if _is_plain(tensor)]
    blocks: list[tuple[Tensor, list[int]]] = []
    end = 0
    members: list[int] = []
    for i in sorted(plain, key=lambda i: _span(tensors[i])):
        first, last = _span(tensors[i])
        if members and first < end:
            members.append(i)
        else:
            members = [i]
            blocks.append((tensors[i].detach(), members))
        end = max(end, last)
    whole = [
        (_bytes_of([tensors[i] for i in members]), sorted(members))
        if len(members) > 1
        else (one, members)
        for one, members in blocks
    ]
    return sorted(whole, key=lambda block: block[1])  # the same on every rank


def in_memory_of(tensors: Iterable[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """Return those of the other tensors that have the storage of one of the tensors."""

    def place(tensor: Tensor) -> int:
        known = not nn.parameter.is_lazy(tensor) and _is_plain(tensor)
        return tensor.untyped_storage().data_ptr() if known else 0

    memory = set(map(place, tensors)) - {0} if others else set()
    return [other for other in others if place(other) in memory]


def _is_plain(tensor: Tensor) -> bool:
    own = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    strided = tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested)
    return strided and not (own or tensor.is_conj() or tensor.is_neg())


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte and after the last; (0, 0) without memory."""
    if tensor.numel() == 0 or tensor.is_meta:
        return 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * step for size, step in steps)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _bytes_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return all bytes of tensors that share memory, from an aligned address on."""
    storage = max((t.untyped_storage() for t in tensors), key=lambda s: s.nbytes())
    spans = [_span(tensor) for tensor in tensors]
    begin = (min(spans)[0] - storage.data_ptr()) // _ALIGNMENT * _ALIGNMENT
    end = max(last for _, last in spans) - storage.data_ptr()
    if begin < 0 or end > storage.nbytes():
        raise ValueError(
            f"tensors of shapes {[list(t.shape) for t in tensors]} share memory of several "
            "storages: tie them in one"
        )
    whole = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    return whole.set_(cast(Any, storage), begin, (end - begin,), (1,))


def _member(tensor: Tensor, block: Tensor, copied: Tensor) -> Tensor:
    """Return the part of a copied block that is the copy of a tensor."""
    offset = (tensor.data_ptr() - block.data_ptr()) // tensor.element_size()
    new = torch.empty(0, dtype=tensor.dtype, device=copied.device)
    storage: Any = copied.untyped_storage()
    return new.set_(storage, offset, tensor.size(), tensor.stride())


# --- whole copies ---------------------------------------------------------------------------------


def _copied_tensors(module: nn.Module, devices: DeviceSpec) -> list[dict[int, Any]]:
    """Return copies of the module's tensors for each rank, by id: a memo for `copied`.

    They are those of parameters and buffers, and of other tensors that share memory with them.
    """
    own = {id(t): t for t in [*module.parameters(), *module.buffers()]}
    others = [t for t in ModuleReferences(module).all_tensors if id(t) not in own and t.is_leaf]
    tensors = [*own.values(), *in_memory_of(own.values(), others)]
    return [
        {id(tensor): as_copy(tensor, copied) for tensor, copied in zip(tensors, mine, strict=True)}
        for mine in copies_of(tensors, devices)
    ]


def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy the module by copy.deepcopy, with the tensors of the memo in place of its own.

    deepcopy takes an object's copy from its memo, so every reference to a tensor, however deep,
    becomes a reference to the same copy. Functions, which deepcopy shares, refer to copies, too: of
    tensors, modules and containers, such as a dict in which a hook keeps outputs.
    """
    replaced = dict(memo)
    with _Detached():
        try:
            new = copy.deepcopy(module, memo)
        except Exception as error:
            where = _uncopied(module, memo)
            raise ValueError(f"{where} cannot be copied for every rank: {error}") from error
    replaced |= {
        key: made
        for key, made in memo.items()
        if isinstance(made, (nn.Module, *CONTAINERS)) and key != id(memo)
    }
    found = ModuleReferences(new, replaced)
    for function in found.functions:
        for name in global_names(function.__code__):
            if id(function.__globals__.get(name)) in replaced:
                raise ValueError(
                    f"{function.__qualname__} uses the module by the global variable {name!r}, and "
                    "would use it for every rank's copy, too: pass it the module, as hooks do"
                )
    found.replace(replaced, own={id(made) for made in memo.values()})
    return new


def as_copy(tensor: Tensor, mine: Tensor) -> Tensor:
    """Return a copied tensor as a parameter or buffer of the same type as the original."""
    kind = type(tensor)
    if issubclass(kind, nn.Parameter):
        new: Tensor = Tensor._make_subclass(kind, mine, tensor.requires_grad)
    elif isinstance(tensor, nn.Parameter):  # of a type with its own memory
        new = nn.Parameter(mine, tensor.requires_grad)
    else:
        new = mine if type(mine) is kind else mine.as_subclass(kind)
    new.__dict__.update(tensor.__dict__)  # attributes that libraries have set on the tensor
    return new


class _Detached(TorchFunctionMode):
    """A context in which copy.deepcopy copies computed tensors, without their history."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__ or args[0].is_leaf:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            mine = tensor.detach().clone().requires_grad_()
            mine.register_hook(cast(Any, torch.utils.hooks).unserializable_hook(_refuse_gradient))
            memo[id(tensor)] = mine
        return memo[id(tensor)]


def _refuse_gradient(gradient: Tensor) -> None:
    raise ValueError(
        f"a tensor of shape {list(gradient.shape)} was computed before the module was copied, and "
        "its gradient cannot reach the parameters of the replica: compute it in forward()"
    )


def _uncopied(module: nn.Module, memo: Mapping[int, Any]) -> str:
    """Return the name of the attribute that deepcopy refuses."""
    known = {**memo, **{id(part): part for part in module.modules()}}
    for name, part in module.named_modules():
        for attribute, value in vars(part).items():
            try:
                copy.deepcopy(value, dict(known))
            except Exception:  # the error itself is raised with the name
                return f"attribute {attribute} of {name or type(part).__name__}"
    return f"module {type(module).__name__}"
