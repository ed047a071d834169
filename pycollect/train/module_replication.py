"""Copies of modules, which share nothing with the original, and copies of their tensors.

Copies of tensors that share memory share it, too. For replicas that live for one forward pass and
share all but the tensors, see data_parallel.py.
"""

import functools
import gc
import importlib.util
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import pycollect as pc
from pycollect.devices import DeviceSpec

_ALIGNMENT = 16  # bytes; a multiple of the size of every element
_LRU_CACHE: Any = functools._lru_cache_wrapper
# What copy.deepcopy shares, although it may refer to a module.
_FUNCTIONS = (types.FunctionType, types.CellType, types.BuiltinMethodType, weakref.ref, _LRU_CACHE)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, types.MappingProxyType)
_SEARCHED = (nn.Module, *_CONTAINERS, partial, types.MethodType, types.MethodWrapperType)


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
    replicable(module)
    for name, param in module.named_parameters():
        hooks: Any = (param._backward_hooks, param._post_accumulate_grad_hooks)
        if not all(_is_of_trainer(hook) for kind in hooks for hook in (kind or {}).values()):
            raise ValueError(
                f"parameter {name} has a hook, and would act on the gradient of each rank: remove "
                "it, or register it with the replicas' parameters"
            )
    return [copied(module, memo) for memo in copied_tensors(module, devices)]


def replicable(module: nn.Module) -> nn.Module:
    """Return the module; raise ValueError if no replica can be made of it."""
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ValueError(f"module {name or type(part).__name__} is TorchScript: no replica")
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"{name} has no shape yet: send one batch through the module first")
    return module


def _is_of_trainer(hook: Any) -> bool:
    """Return whether a hook is one of `Buckets`; a trainer of the replicas makes its own."""
    return isinstance(hook, partial) and str(hook.func.__module__).startswith("pycollect.train")


# --- tensors --------------------------------------------------------------------------------------


def copies_of(tensors: Sequence[Tensor], devices: DeviceSpec) -> list[list[Tensor]]:
    """Return copies of the tensors for each rank; those that share memory share it in the copies.

    Tensors without strides, and of types with their own memory, are copied by their method `to`.
    """
    ranks, blocks = pc.devices(devices), memory_blocks(tensors)
    copies: list[list[Tensor]] = []
    with torch.no_grad():
        for device, mine in zip(ranks, pc.replicate([b for b, _ in blocks], ranks), strict=True):
            found = {
                i: made if len(members) == 1 else _member(tensors[i], block, made)
                for (block, members), made in zip(blocks, mine, strict=True)
                for i in members
            }
            others = {i: tensor for i, tensor in enumerate(tensors) if i not in found}
            found |= {i: t.detach().to(device, copy=True) for i, t in others.items()}
            copies.append([found[i] for i in range(len(tensors))])
    return copies


def memory_blocks(tensors: Sequence[Tensor]) -> list[tuple[Tensor, list[int]]]:
    """Return (block, indices) for all plain tensors: none of the blocks shares memory with another.

    A block is the tensor of its only index, or the bytes [n] of all tensors that share memory. The
    blocks are in the order of their first indices.

    >>> x = torch.arange(6.0)
    >>> [(block.nbytes, indices) for block, indices in memory_blocks([x[:3], x[4:], x[2:4]])]
    [(16, [0, 2]), (8, [1])]
    """
    spans = {i: _span(tensor) for i, tensor in enumerate(tensors) if _is_plain(tensor)}
    members: list[list[int]] = []
    end = 0
    for i, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        if not members or first >= end:
            members.append([])
        members[-1].append(i)
        end = max(end, last)
    ordered = sorted(map(sorted, members))  # the same on every rank
    return [(_block([tensors[i] for i in block]), block) for block in ordered]


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


def _block(tensors: Sequence[Tensor]) -> Tensor:
    """Return the only tensor, or all bytes of those that share memory, from an aligned address."""
    if len(tensors) == 1:
        return tensors[0].detach()
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


# --- references -----------------------------------------------------------------------------------


def of_type(kind: Any, values: Iterable[Any]) -> list[Any]:
    """Return the values of a type, without proxies of such values."""
    return [value for value in values if issubclass(type(value), kind)]


def reachable(value: Any, *, instances: bool = True, functions: bool = True) -> Iterator[Any]:
    """Yield a value and all that it refers to, directly or not.

    Not searched are tensors, classes, global variables, instances of classes of torch and this
    package, of those written in C or with `__del__`, what a weak reference refers to unless it is a
    module or tensor; without `instances` those of any class but modules and containers, and
    without `functions` functions and what copy.deepcopy shares as it does functions.

    >>> layer = nn.Linear(2, 1)
    >>> any(item is layer.weight for item in reachable(lambda own=layer: own))
    True
    """
    searched = (*_SEARCHED, *(_FUNCTIONS if functions else ()))
    found: dict[int, Any] = {}
    stack: list[Iterable[Any]] = [[value]]
    while stack:
        # What the collector does not track refers to nothing that it tracks: numbers, strings, and
        # tuples and dicts of such.
        for part in filter(gc.is_tracked, stack.pop()):
            if id(part) not in found:
                found[id(part)] = part  # keeps the id valid
                yield part
                kind: Any = type(part)
                if issubclass(kind, searched) or (instances and _is_instance(kind)):
                    stack.append(parts_of(part))


def parts_of(value: Any) -> Iterable[Any]:
    """Return the objects to which a value refers."""
    kind = type(value)
    if kind is types.FunctionType:  # not its global variables
        return value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__
    if kind is _LRU_CACHE:
        return (value.__wrapped__,)
    if issubclass(kind, weakref.ref):
        return of_type((nn.Module, Tensor), [value()])
    return gc.get_referents(value)


@functools.lru_cache(maxsize=256)
def _is_instance(kind: type) -> bool:
    """Return whether instances of a class are searched."""
    inside = str(kind.__module__).partition(".")[0] in ("torch", "pycollect")
    if (inside and kind.__name__ != "_WrappedHook") or hasattr(kind, "__del__"):
        return False
    try:
        object.__new__(kind)
    except TypeError:  # a class written in C
        return kind is types.SimpleNamespace
    return True


# --- whole copies ---------------------------------------------------------------------------------


def copied_tensors(module: nn.Module, devices: DeviceSpec) -> list[dict[int, Any]]:
    """Return copies of the module's tensors for each rank, by id: a memo for `copied`.

    They are those of parameters and buffers, and of other tensors that share memory with them.
    """
    own = {id(t): t for t in [*module.parameters(), *module.buffers()]}
    others = of_type(Tensor, reachable(module, instances=False))
    held = [*own.values(), *(t for t in others if id(t) not in own and t.is_leaf and _is_plain(t))]
    with_own = [m for _, m in memory_blocks(held) if len(m) > 1 and min(m) < len(own)]
    aliases = sorted(i for members in with_own for i in members if i >= len(own))
    tensors = [*own.values(), *(held[i] for i in aliases)]
    return [
        {id(tensor): as_copy(tensor, copied) for tensor, copied in zip(tensors, mine, strict=True)}
        for mine in copies_of(tensors, devices)
    ]


def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy the module by copy.deepcopy, with the tensors of the memo in place of its own.

    deepcopy takes an object's copy from its memo, so every reference to a tensor, however deep,
    becomes a reference to the same copy. So do references in functions, which deepcopy would share:
    functions that refer to the module are copied, too. The memo gets all copies. Raises ValueError
    for an attribute that cannot be copied, or whose copy refers to the module itself.
    """
    parts = of_type(nn.Module, reachable(module, functions=False))
    own = _Memo(memo, {*memo, *map(id, parts)})
    with Detached():
        try:
            new: nn.Module = _deepcopy(module, own)
        except Exception as error:
            where = _uncopied(module, own)
            raise ValueError(f"{where} cannot be copied for every rank: {error}") from error
    for left in reachable(new):
        if id(left) in own.known and own.get(id(left)) is not left:
            raise ValueError(
                f"a {type(left).__name__} of the module is also held by an object that "
                "copy.deepcopy shares, and replicas would use it in place of their own"
            )
    memo.update(own)
    return new


class _Memo(dict[int, Any]):
    """The memo of a deepcopy, and the ids of the modules and tensors that it copies."""

    def __init__(self, copies: Mapping[int, Any], known: set[int]) -> None:
        super().__init__(copies)
        self.known = known

    def refers(self, value: Any) -> bool:
        """Return whether a value refers to one of them."""
        return any(id(item) in self.known for item in reachable(value))


def _deepcopy_function(function: types.FunctionType, memo: _Memo) -> types.FunctionType:
    """Copy a function that refers to the module: the variables, defaults and attributes that do."""
    if not memo.refers(function):
        return function
    own = [cell for cell in function.__closure__ or () if memo.refers(cell)]
    fresh = [cell for cell in own if id(cell) not in memo]  # functions may have common variables
    memo |= {id(cell): types.CellType() for cell in fresh}
    closure = function.__closure__ and tuple(memo.get(id(c), c) for c in function.__closure__)
    names = function.__code__, function.__globals__, function.__name__
    new = memo[id(function)] = types.FunctionType(*names, None, closure)
    for cell in fresh:  # after the memo has the function, to which its variables may refer
        memo[id(cell)].cell_contents = _deepcopy(cell.cell_contents, memo)

    def mine(value: Any) -> Any:
        return _deepcopy(value, memo) if memo.refers(value) else value

    new.__defaults__ = function.__defaults__ and tuple(map(mine, function.__defaults__))
    defaults = function.__kwdefaults__
    new.__kwdefaults__ = defaults and {name: mine(value) for name, value in defaults.items()}
    new.__dict__.update((name, mine(value)) for name, value in function.__dict__.items())
    return new


def _deepcopy_reference(reference: Any, memo: _Memo) -> Any:
    """Copy a weak reference, a cache or a builtin method that refers to the module."""
    if not memo.refers(reference):
        return reference
    if type(reference) is weakref.ref:
        return weakref.ref(_deepcopy(reference(), memo))
    if type(reference) is _LRU_CACHE:
        cache = functools.lru_cache(**reference.cache_parameters())
        return cache(_deepcopy(reference.__wrapped__, memo))
    return getattr(_deepcopy(reference.__self__, memo), reference.__name__)


def _make_deepcopy() -> Any:
    """Return a copy.deepcopy for a `_Memo` that does not share what refers to the module.

    It is that of another instance of the module copy, so copy.deepcopy itself does not change.
    """
    spec: Any = importlib.util.find_spec("copy")
    own: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    kinds: dict[Any, Any] = {types.FunctionType: _deepcopy_function}
    for kind in (weakref.ref, _LRU_CACHE, types.BuiltinMethodType):
        kinds[kind] = _deepcopy_reference
    own._deepcopy_dispatch.update(kinds)
    if hasattr(own, "_atomic_types"):  # of Python 3.14
        own._atomic_types = set(own._atomic_types) - set(kinds)
    return own.deepcopy


_deepcopy = _make_deepcopy()


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


def _uncopied(module: nn.Module, memo: _Memo) -> str:
    """Return the name of the attribute that deepcopy refuses."""
    known = {**memo, **{id(part): part for part in module.modules()}}
    for name, part in module.named_modules():
        for attribute, value in vars(part).items():
            try:
                _deepcopy(value, _Memo(known, memo.known))
            except Exception:  # the error itself is raised with the name
                return f"attribute {attribute} of {name or type(part).__name__}"
    return f"module {type(module).__name__}"
