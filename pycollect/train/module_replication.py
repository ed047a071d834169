"""Replicas of a module: whole copies for training, and shallow ones for one forward pass.

A whole copy shares nothing with the module. A shallow replica shares all but the tensors, so it
costs little more than they do. What a forward pass leaves for the backward pass, such as a
checkpoint that runs a layer again, holds the replica, and so finds the tensors of its rank.
"""

import copy
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import pycollect as pc
from pycollect.devices import DeviceSpec

_ALIGNMENT = 16  # bytes; a multiple of the size of every element
# Types of values that refer to no module and no tensor.
PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}


def replicate_module(module: nn.Module, devices: DeviceSpec) -> list[nn.Module]:
    """Copy a module once per rank, onto the rank's device; the original does not change.

    `devices` is an argument of `pycollect.devices`, and may name a device several times; the result
    has a module for each rank. Shapes, dtypes, training mode, frozen parameters, parameters that
    are tied or share memory, hooks of modules and the order of dimensions in memory are kept;
    gradients are not. A tensor that the module has computed, such as the weight of a layer with
    weight_norm, is copied without its history, and the forward pass must compute it again. Raises
    ValueError for a parameter without a shape or with a hook, a TorchScript module, an attribute
    that copy.deepcopy refuses, and a device that does not exist.

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
    return [_with(module, memo) for memo in copied_tensors(module, devices)]


def check_replicable(module: nn.Module) -> None:
    """Raise ValueError for a module that no replica can be made of."""
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ValueError(f"module {name or type(part).__name__} is TorchScript: no replica")
    for name, param in module.named_parameters():
        if nn.parameter.is_lazy(param):
            raise ValueError(
                f"parameter {name} has no shape yet: send one batch through the module first"
            )


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


def copied_tensors(module: nn.Module, devices: DeviceSpec) -> list[dict[int, Any]]:
    """Return copies of parameters and buffers for each rank, by id: a memo for copy.deepcopy.

    deepcopy takes an object's copy from its memo, so every reference to a tensor, however deep,
    becomes a reference to the same copy.
    """
    found = [*module.parameters(), *module.buffers()]
    tensors = list({id(tensor): tensor for tensor in found}.values())
    return [
        {id(tensor): _as(tensor, copied) for tensor, copied in zip(tensors, mine, strict=True)}
        for mine in copies_of(tensors, devices)
    ]


def _with(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy the module, with the tensors of the memo in place of its own."""
    with Detached():
        try:
            return copy.deepcopy(module, memo)
        except Exception as error:
            where = _uncopied(module, memo)
            raise ValueError(f"{where} cannot be copied for every rank: {error}") from error


def _as(tensor: Tensor, mine: Tensor) -> Tensor:
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


class Detached(TorchFunctionMode):
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


# --- shallow replicas -----------------------------------------------------------------------------


def shallow_replica(
    module: nn.Module, tensors: Mapping[int, Tensor], *, shares_buffers: bool = False
) -> nn.Module:
    """Return a replica with other tensors for those of the module with these ids.

    A part that occurs several times in the module does so in the replica. Lists, dicts and other
    containers, bound methods and functions that refer to a part or to such a tensor are rebuilt to
    refer to that of the replica; any other object, and any other tensor, is shared. What a forward
    pass assigns to a replica stays there, but with `shares_buffers` its buffers are the module's.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> shallow_replica(layer, {id(layer.weight): torch.ones(1, 2)})(torch.ones(2))
    tensor([2.])
    """
    parts = list(module.modules())
    replicas: dict[int, Any] = {id(part): object.__new__(type(part)) for part in parts}
    rebound = Rebound({**tensors, **replicas})
    for part in parts:
        state = replicas[id(part)].__dict__
        state.update((name, rebound(value)) for name, value in part.__dict__.items())
        for name in ("_parameters", "_modules", *(() if shares_buffers else ("_buffers",))):
            state[name] = dict(state[name])
        state["_is_replica"] = True  # torch's mark
    return cast(nn.Module, replicas[id(module)])


class Rebound:
    """Values that refer to some objects, as values that refer to others in their place."""

    def __init__(self, replaced: Mapping[int, Any]) -> None:
        self._found = dict(replaced)

    def __call__(self, value: Any) -> Any:
        """Return the value itself unless it refers to a replaced object."""
        if type(value) in PLAIN:
            return value
        if id(value) not in self._found:
            self._found[id(value)] = value  # for a reference of the value to itself
            self._found[id(value)] = self._rebuilt(value)
        return self._found[id(value)]

    def _rebuilt(self, value: Any) -> Any:
        if isinstance(value, (list, tuple, set, frozenset)):
            return self._items(value)
        if isinstance(value, dict):
            return self._dict(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.CellType):  # of a variable that functions share
            return self._changed(value, types.CellType, *_contents(value))
        if isinstance(value, types.MethodType):
            return self._changed(value, types.MethodType, value.__func__, value.__self__)
        if type(value) is partial:
            rebuilt = lambda func, args, keywords: partial(func, *args, **keywords)  # noqa: E731
            return self._changed(value, rebuilt, value.func, value.args, value.keywords)
        if type(value) is weakref.ref:
            return self._changed(value, weakref.ref, value())
        return value

    def _changed(self, value: Any, rebuilt: Callable[..., Any], *parts: Any) -> Any:
        """Return the value rebuilt of its parts if one of them has changed, else itself."""
        new = [self(part) for part in parts]
        return value if _are_same(new, parts) else rebuilt(*new)

    def _items(self, value: Any) -> Any:
        if PLAIN.issuperset(map(type, value)):
            return value
        items = [self(item) for item in value]
        if _are_same(items, value):
            return value
        if isinstance(value, list):
            new = copy.copy(value)
            new[:] = items
            return new
        return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)

    def _dict(self, value: Any) -> Any:
        if PLAIN.issuperset(map(type, value)) and PLAIN.issuperset(map(type, value.values())):
            return value
        keys, items = [self(key) for key in value], [self(item) for item in value.values()]
        if _are_same(keys, value) and _are_same(items, value.values()):
            return value
        new = copy.copy(value)
        new.clear()
        new.update(zip(keys, items, strict=True))
        return new

    def _function(self, function: Any) -> Any:
        def rebuilt(defaults: Any, keywords: Any, closure: Any, attributes: Any) -> Any:
            names = function.__code__, function.__globals__, function.__name__
            new = types.FunctionType(*names, defaults, closure)
            new.__kwdefaults__ = keywords
            new.__dict__.update(attributes)
            return new

        parts = function.__defaults__, function.__kwdefaults__, function.__closure__
        return self._changed(function, rebuilt, *parts, function.__dict__)


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    """Return the value of a variable; nothing if it has none yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _are_same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))


@contextmanager
def originals_refused(module: nn.Module) -> Iterator[None]:
    """Raise RuntimeError when this thread calls a part of the module: a replica was meant.

    A replica can reach it by a global variable, or by an object that all replicas share.
    """
    thread = threading.get_ident()
    changed: list[tuple[dict[str, Any], Any]] = []
    for name, part in module.named_modules():
        state, before = part.__dict__, part.__dict__.get("forward")
        if not isinstance(before, _Refusal):  # of another thread that runs replicas
            changed.append((state, before))
            state["forward"] = _Refusal(part.forward, name, thread)
    try:
        yield
    finally:
        for state, before in changed:
            if before is None:
                state.pop("forward", None)
            else:
                state["forward"] = before


@dataclass
class _Refusal:
    """The forward method of a module while its replicas run in a thread."""

    forward: Callable[..., Any]
    name: str
    thread: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:
            return self.forward(*args, **kwargs)
        raise RuntimeError(
            f"a replica calls module {self.name!r} of the original, by a global variable or by an "
            "object that all replicas share: reach it through self, the replica's own modules"
        )
