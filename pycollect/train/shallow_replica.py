"""What a module refers to, and shallow replicas that refer to other tensors and modules.

A shallow replica shares all but the tensors with its module, so it costs little more than they do.
What a forward pass leaves for the backward pass, such as a checkpoint that runs a layer again,
holds the replica, and so finds the tensors of its rank.
"""

import copy
import dis
import functools
import gc
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

CONTAINERS = (list, dict, set, deque)
_MUTABLE = (*CONTAINERS, types.FunctionType, types.CellType)
_SEARCHED = (*_MUTABLE, partial)
_PLAIN_CONTAINERS = {list, dict, set, deque, OrderedDict, defaultdict}
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
_BUILTIN_METHODS = (types.BuiltinMethodType, types.MethodWrapperType)
_IMMUTABLE = {tuple, frozenset, types.MethodType, types.MappingProxyType, *_BUILTIN_METHODS}
_IMMUTABLE |= {weakref.ref, weakref.WeakMethod, *_PROXIES, functools._lru_cache_wrapper}


class ModuleReferences:
    """Everything that a module refers to, to make copies of it that refer to other objects.

    `modules` and `tensors` are those that the module holds: as parts, parameters, buffers and other
    attributes, in lists, dicts and other containers, and in the variables of its methods and
    functions. Instances of other classes are searched for references, but what they hold is theirs
    (`all_modules` and `all_tensors` have those, too). Not searched are tensors, classes, instances
    of classes of torch and this package, of those written in C or with `__del__`, what a weak
    reference refers to unless it is a module or tensor, global variables, replicas of earlier
    forward passes, and objects with the ids `closed`.
    """

    def __init__(self, module: nn.Module, closed: Iterable[int] = ()) -> None:
        self.module = module
        self.all_modules: list[nn.Module] = [module]
        self.all_tensors: list[Tensor] = []
        self._objects: list[Any] = [module]  # keeps the ids valid
        self._holders: dict[int, list[int]] = {id(module): []}
        self._closed = frozenset(closed)
        self._of_replica = vars(module).get(_MARK) == id(module)
        others = self._search([module])
        self.modules, self.tensors = list(self.all_modules), list(self.all_tensors)
        while others:
            others = self._search(others)

    @property
    def functions(self) -> list[types.FunctionType]:
        """The functions, with closures or without, to which the module refers."""
        return [item for item in self._objects if type(item) is types.FunctionType]

    def _search(self, stack: list[Any]) -> list[Any]:
        """Search these values and what they hold; return the instances of other classes found."""
        others: list[Any] = []
        while stack:
            value = stack.pop()
            # What the collector does not track refers to nothing that it tracks: numbers, strings,
            # and tuples and dicts of such.
            for child in filter(gc.is_tracked, parts_of(value)):
                if id(child) in self._holders:
                    self._holders[id(child)].append(id(value))
                    continue
                self._holders[id(child)] = [id(value)]
                self._objects.append(child)
                kind: Any = type(child)
                if issubclass(kind, Tensor):
                    self.all_tensors.append(child)
                elif id(child) in self._closed:
                    pass
                elif issubclass(kind, nn.Module):
                    if self._of_replica or child.__dict__.get(_MARK) != id(child):
                        self.all_modules.append(child)
                        stack.append(child)
                elif kind in _IMMUTABLE or issubclass(kind, _SEARCHED) or _is_named_tuple(kind):
                    stack.append(child)
                elif _is_instance(kind):
                    others.append(child)
        return others

    def copy(self, replaced: Mapping[int, Any], *, shares_buffers: bool = False) -> nn.Module:
        """Return a shallow replica of the module, with replaced objects by the id of the old ones.

        All of `modules` are new, and so is everything that refers to them or to a replaced object;
        the rest is shared. With `shares_buffers` the modules have the dicts of buffers of the
        originals, so that what a forward pass assigns to a buffer stays there.

        >>> import torch
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> ModuleReferences(layer).copy({id(layer.weight): torch.ones(1, 2)})(torch.ones(2))
        tensor([2.])
        """
        changed = self._holders_of([*map(id, self.modules), *replaced])
        rebuilt = _Rebuilder(changed, replaced, shares_buffers=shares_buffers)
        new = cast(nn.Module, rebuilt(self.module))
        for made in map(rebuilt, self.modules):
            made.__dict__["_is_replica"] = True  # torch's mark
            made.__dict__[_MARK] = id(made)
        return new

    def replace(self, replaced: Mapping[int, Any], own: Collection[int] | None = None) -> None:
        """Replace objects by their ids, in place: in all that the module refers to.

        With `own`, objects with other ids do not change: new ones take their places.
        """
        kinds = (*_MUTABLE, nn.Module)
        in_place = {
            id(item)
            for item in self._objects
            if (own is None or id(item) in own)
            and (issubclass(type(item), kinds) or _is_instance(cast(Any, type(item))))
        }
        changed = self._holders_of(replaced)
        rebuilt = _Rebuilder(changed, replaced, in_place)
        for item in self._objects:
            if id(item) in in_place and id(item) in changed:
                rebuilt(item)

    def _holders_of(self, ids: Iterable[int]) -> set[int]:
        """Return these ids and those of all objects that refer to them, directly or not."""
        stack = list(ids)
        found = set(stack)
        while stack:
            new = [holder for holder in self._holders.get(stack.pop(), ()) if holder not in found]
            found.update(new)
            stack += new
        return found


def parts_of(value: Any) -> Iterable[Any]:
    """Return the objects to which a value refers."""
    kind = type(value)
    if issubclass(kind, dict):
        found = [*value.values(), *filter(_is_part, value), *_attributes(value)]
        return [*found, value.default_factory] if issubclass(kind, defaultdict) else found
    if issubclass(kind, (list, deque)):
        return [*value, *_attributes(value)]
    if issubclass(kind, (set, frozenset)):
        return [*filter(_is_part, value), *_attributes(value)]
    if issubclass(kind, tuple):
        return [*value]
    if kind is types.FunctionType:
        defaults = value.__defaults__, value.__kwdefaults__
        return [*(value.__closure__ or ()), *filter(None, defaults), value.__dict__]
    if kind is types.CellType:
        return _contents(value)
    if kind is types.MethodType:
        return value.__self__, value.__func__
    if kind in _BUILTIN_METHODS:
        return (value.__self__,)
    if issubclass(kind, partial):
        return value.func, value.args, value.keywords, value.__dict__
    if issubclass(kind, weakref.ref) or kind in _PROXIES:
        return filter(_is_part, [_referent(value)])
    if kind is functools._lru_cache_wrapper:
        return (value.__wrapped__,)
    if kind is types.MappingProxyType:
        return [*value.values()]
    return _attributes(value)


def global_names(code: types.CodeType) -> set[str]:
    """Return the names of the global variables that a function's code reads, or functions in it."""
    found = {read.argval for read in dis.get_instructions(code) if read.opname == "LOAD_GLOBAL"}
    inner = (item for item in code.co_consts if isinstance(item, types.CodeType))
    return found.union(*map(global_names, inner))


def _is_part(value: Any) -> bool:
    return issubclass(type(value), (nn.Module, Tensor))


def _attributes(value: Any) -> list[Any]:
    """Return the values of the attributes of an instance, but for empty dicts of hooks."""
    if type(value) in _PLAIN_CONTAINERS:
        return []
    state = getattr(value, "__dict__", None)
    own = list(state.values()) if isinstance(state, dict) else []
    names = _slots(cast(Any, type(value)))
    own += [getattr(value, name) for name in names if hasattr(value, name)]
    return [item for item in own if type(item) is not OrderedDict or item]


@functools.lru_cache(maxsize=256)
def _slots(kind: type) -> list[str]:
    found: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_make") and kind.__dictoffset__ == 0


@functools.lru_cache(maxsize=256)
def _is_instance(kind: type) -> bool:
    """Return whether instances of a class are searched, and copied attribute by attribute."""
    inside = str(kind.__module__).partition(".")[0] in ("torch", "pycollect")
    if (inside and kind.__name__ != "_WrappedHook") or hasattr(kind, "__del__"):
        return False
    try:
        object.__new__(kind)
    except TypeError:  # a class written in C
        return kind is types.SimpleNamespace
    return True


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    """Return the value of a variable; nothing if it has none yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _referent(reference: Any) -> Any:
    """Return the object of a weak reference, the instance of a weak method, a proxy's module."""
    if type(reference) is weakref.WeakMethod:
        return getattr(reference(), "__self__", None)
    if type(reference) not in _PROXIES:
        return reference()
    try:
        return next(reference.modules()) if isinstance(reference, nn.Module) else None
    except ReferenceError:
        return None


def _container(value: Any) -> Any:
    """Return a container with the same items; methods of a subclass may count or refuse them."""
    kind: Any = type(value)
    if kind in _PLAIN_CONTAINERS:
        return copy.copy(value)
    new = kind.__new__(kind)
    if issubclass(kind, OrderedDict):
        for key, item in value.items():
            OrderedDict.__setitem__(new, key, item)
    elif issubclass(kind, dict):
        dict.update(new, value)
    else:
        base: Any = next(base for base in (list, set, deque) if issubclass(kind, base))
        (base.update if base is set else base.extend)(new, value)
    return new


class _Rebuilder:
    """Returns values that refer to replaced objects as values that refer to the new ones.

    The values with the ids `changed` refer to them. Those `in_place` change, others are rebuilt.
    """

    def __init__(
        self,
        changed: Collection[int],
        replaced: Mapping[int, Any],
        in_place: Collection[int] = (),
        *,
        shares_buffers: bool = False,
    ) -> None:
        self._changed, self._in_place, self._shares_buffers = changed, in_place, shares_buffers
        self._new = dict(replaced)
        self._unfilled: list[tuple[Any, Any]] = []

    def __call__(self, value: Any) -> Any:
        """Return the value, or the one in its place."""
        found = self._get(value)
        while self._unfilled:
            self._fill(*self._unfilled.pop())
        return found

    def _get(self, value: Any) -> Any:
        key = id(value)
        if key in self._new:
            return self._new[key]
        if key not in self._changed:
            return value
        new = self._new[key] = self._make(value)
        return new

    def _make(self, value: Any) -> Any:
        """Return a new object: a complete one of an immutable type, and others to be filled."""
        get, kind = self._get, type(value)
        if issubclass(kind, (tuple, frozenset)):
            items = map(get, value)
            return kind._make(items) if hasattr(kind, "_make") else kind(items)
        if kind is types.MethodType:
            return types.MethodType(get(value.__func__), get(value.__self__))
        if kind in _BUILTIN_METHODS:
            return getattr(get(value.__self__), value.__name__)
        if kind is weakref.WeakMethod:
            return weakref.WeakMethod(types.MethodType(value().__func__, get(value().__self__)))
        if kind is weakref.ref or kind in _PROXIES:
            make: Any = weakref.ref if kind is weakref.ref else weakref.proxy
            return make(get(_referent(value)))
        if kind is types.MappingProxyType:
            return types.MappingProxyType({key: get(item) for key, item in value.items()})
        if kind is functools._lru_cache_wrapper:
            return functools.lru_cache(**value.cache_parameters())(get(value.__wrapped__))
        self._unfilled.append((value, new := self._empty(value)))
        return new

    def _empty(self, value: Any) -> Any:
        """Return an object whose items or attributes are to be filled in."""
        get, kind = self._get, type(value)
        if id(value) in self._in_place:
            return value
        if issubclass(kind, partial):
            keywords = {name: get(item) for name, item in value.keywords.items()}
            return partial.__new__(kind, get(value.func), *map(get, value.args), **keywords)
        if kind is types.FunctionType:
            closure = None if value.__closure__ is None else tuple(map(get, value.__closure__))
            names = value.__code__, value.__globals__, value.__name__
            return types.FunctionType(*names, None, closure)
        if kind is types.CellType:
            return types.CellType()
        if issubclass(kind, CONTAINERS):
            return _container(value)
        return types.SimpleNamespace() if kind is types.SimpleNamespace else object.__new__(kind)

    def _fill(self, value: Any, new: Any) -> None:
        get, kind = self._get, type(value)
        if issubclass(kind, dict):
            for key, item in list(value.items()):
                if not _is_part(key) or get(key) is key:
                    dict.__setitem__(new, key, get(item))
                else:
                    del new[key]
                    new[get(key)] = get(item)
            if issubclass(kind, defaultdict):
                new.default_factory = get(value.default_factory)
        elif issubclass(kind, set):
            old = [item for item in value if _is_part(item)]
            new.difference_update(old)
            new.update(map(get, old))
        elif issubclass(kind, list):
            list.__setitem__(new, slice(None), [get(item) for item in value])
        elif issubclass(kind, deque):
            items = [get(item) for item in value]
            new.clear()
            new.extend(items)
        elif kind is types.CellType:
            new.cell_contents = get(value.cell_contents)
        if kind not in _PLAIN_CONTAINERS:
            self._fill_attributes(value, new)

    def _fill_attributes(self, value: Any, new: Any) -> None:
        get = self._get
        if type(value) is types.FunctionType:
            new.__defaults__ = get(value.__defaults__)
            new.__kwdefaults__ = get(value.__kwdefaults__)
        for name in _slots(cast(Any, type(value))):
            if hasattr(value, name):
                object.__setattr__(new, name, get(getattr(value, name)))
        if hasattr(value, "__dict__"):
            state = dict(value.__dict__)
            changed = [name for name, item in state.items() if id(item) in self._changed]
            new.__dict__.update(state)
            new.__dict__.update([(name, get(state[name])) for name in changed])
        if issubclass(type(value), nn.Module) and new is not value:
            self._separate(value, new)

    def _separate(self, module: nn.Module, new: nn.Module) -> None:
        """Give a replica dicts of its own for what a forward pass may register."""
        state = new.__dict__
        for name, item in module.__dict__.items():
            if name == "_buffers" and self._shares_buffers:
                state[name] = item
            elif state[name] is item and (type(item) is OrderedDict or name in _REGISTRIES):
                state[name] = item.copy()


_MARK = "_replica_id"  # an attribute of replicas; their copies are no replicas of a pass
_REGISTRIES = ("_parameters", "_buffers", "_modules")
