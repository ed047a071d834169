"""What a module refers to, and shallow replicas that refer to other tensors and modules.

A shallow replica shares all but the tensors with its module, so it costs little more than they do.
What a forward pass leaves for the backward pass, such as a checkpoint that runs a layer again,
holds the replica, and so finds the tensors of its rank.
"""

import copy
import functools
import gc
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any, cast

from torch import Tensor, nn


class References:
    """Everything that a module refers to, to make copies of it that refer to other objects.

    `modules` and `tensors` are those that the module holds: as parts, parameters, buffers and other
    attributes, in lists, dicts and other containers, and in the variables of its methods and
    functions. Objects of other classes are searched for references, but what they hold is theirs
    (`all_modules` has their modules, too). Tensors, classes, objects of torch's classes, and those
    with the ids `closed` are not searched, nor are global variables.
    """

    def __init__(self, module: nn.Module, closed: Iterable[int] = ()) -> None:
        self.module = module
        self.all_modules: list[nn.Module] = [module]
        self.tensors: list[Tensor] = []
        self._objects: list[Any] = [module]  # keeps the ids valid
        self._holders: dict[int, list[int]] = {id(module): []}
        self._closed = frozenset(closed)
        others = self._search([module])
        self.modules, tensors = list(self.all_modules), len(self.tensors)
        while others:
            others = self._search(others)
        del self.tensors[tensors:]

    def _search(self, values: list[Any]) -> list[Any]:
        """Search these values and what they hold; return the objects of other classes found."""
        others: list[Any] = []
        stack = values
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
                if isinstance(child, Tensor):
                    self.tensors.append(child)
                elif id(child) in self._closed or isinstance(child, _CLOSED):
                    pass
                elif isinstance(child, nn.Module):
                    self.all_modules.append(child)
                    stack.append(child)
                elif isinstance(child, _CONTAINERS):
                    stack.append(child)
                elif str(type(child).__module__).partition(".")[0] != "torch":
                    others.append(child)
        return others

    def copy(self, replaced: Mapping[int, Any], *, shares_buffers: bool = False) -> nn.Module:
        """Return a shallow replica of the module, with replaced objects by the id of the old ones.

        All of `modules` are new, and so is everything that refers to them or to a replaced object;
        the rest is shared. With `shares_buffers` the buffers that are not replaced are in the
        module's own dicts, so that what a forward pass assigns to a buffer stays in the module.

        >>> import torch
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> References(layer).copy({id(layer.weight): torch.ones(1, 2)})(torch.ones(2))
        tensor([2.])
        """
        changed = self.holders([*map(id, self.modules), *replaced])
        rebuilt = Rebuilder(changed, replaced, shares_buffers)
        new = cast(nn.Module, rebuilt(self.module))
        for part in self.modules:
            rebuilt(part).__dict__["_is_replica"] = True  # torch's mark
        return new

    def holders(self, ids: Iterable[int]) -> set[int]:
        """Return these ids and those of all objects that refer to them, directly or not."""
        stack = list(ids)
        found = set(stack)
        while stack:
            new = [holder for holder in self._holders.get(stack.pop(), ()) if holder not in found]
            found.update(new)
            stack += new
        return found


_CLOSED = (type, types.ModuleType)
_PLAIN_CONTAINERS = {list, set, dict, deque, OrderedDict, defaultdict}
_CONTAINERS: tuple[type, ...] = (
    *(list, tuple, set, frozenset, dict, deque, types.MappingProxyType, weakref.ref),
    *(types.FunctionType, types.MethodType, types.BuiltinMethodType, types.CellType),
    *(partial, functools._lru_cache_wrapper),
)


def parts_of(value: Any) -> Iterable[Any]:
    """Return the objects to which a value refers."""
    if isinstance(value, dict):
        return [*value.values(), *filter(gc.is_tracked, value), *_attributes(value)]
    if isinstance(value, (list, set, deque)):
        return [*value, *_attributes(value)]
    if isinstance(value, (tuple, frozenset)):
        return value
    if isinstance(value, types.FunctionType):
        defaults = value.__defaults__, value.__kwdefaults__
        return [*(value.__closure__ or ()), *filter(None, defaults), value.__dict__]
    if isinstance(value, types.CellType):
        return _contents(value)
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, types.BuiltinMethodType):
        return (value.__self__,) if isinstance(value.__self__, Tensor) else ()
    if isinstance(value, partial):
        return value.func, value.args, value.keywords, value.__dict__
    if isinstance(value, weakref.ref):
        return (value(),)
    if isinstance(value, functools._lru_cache_wrapper):
        return (value.__wrapped__,)
    if isinstance(value, types.MappingProxyType):
        return value.values()
    return _attributes(value)


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
        found += [slots] if isinstance(slots, str) else slots
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    """Return the value of a variable; nothing if it has none yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


class Rebuilder:
    """Returns values that refer to replaced objects as values that refer to the new ones."""

    def __init__(
        self, changed: Collection[int], replaced: Mapping[int, Any], shares_buffers: bool = False
    ) -> None:
        self._changed, self._shares_buffers = changed, shares_buffers
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
        get = self._get
        if isinstance(value, (tuple, frozenset)):
            items = map(get, value)
            return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
        if isinstance(value, types.MethodType):
            return types.MethodType(get(value.__func__), get(value.__self__))
        if isinstance(value, types.BuiltinMethodType):
            return getattr(get(value.__self__), value.__name__)
        if isinstance(value, weakref.ref):
            return weakref.ref(get(value()))
        if isinstance(value, types.MappingProxyType):
            return types.MappingProxyType({key: get(item) for key, item in value.items()})
        if isinstance(value, functools._lru_cache_wrapper):
            return functools.lru_cache(**value.cache_parameters())(get(value.__wrapped__))
        if isinstance(value, partial):
            keywords = {name: get(item) for name, item in value.keywords.items()}
            new: Any = partial(get(value.func), *map(get, value.args), **keywords)
        elif isinstance(value, types.FunctionType):
            closure = None if value.__closure__ is None else tuple(map(get, value.__closure__))
            new = types.FunctionType(
                value.__code__, value.__globals__, value.__name__, None, closure
            )
        elif isinstance(value, types.CellType):
            new = types.CellType()
        elif isinstance(value, (list, set, dict, deque)):
            new = copy.copy(value)
        else:
            new = _instance(value)
        self._unfilled.append((value, new))
        return new

    def _fill(self, value: Any, new: Any) -> None:
        get = self._get
        if isinstance(value, (list, set, dict, deque)):
            new.clear()
        if isinstance(value, dict):
            for key, item in value.items():
                new[get(key)] = get(item)
        elif isinstance(value, set):
            new.update(map(get, value))
        elif isinstance(value, (list, deque)):
            new.extend(map(get, value))
        elif isinstance(value, types.CellType):
            new.cell_contents = get(value.cell_contents)
        if type(value) not in _PLAIN_CONTAINERS:
            self._fill_attributes(value, new)

    def _fill_attributes(self, value: Any, new: Any) -> None:
        get = self._get
        if isinstance(value, types.FunctionType):
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
        if isinstance(value, nn.Module):
            own = ("_parameters", "_modules", *(() if self._shares_buffers else ("_buffers",)))
            shared = [name for name in own if new.__dict__[name] is value.__dict__[name]]
            new.__dict__.update([(name, dict(new.__dict__[name])) for name in shared])


def _instance(value: Any) -> Any:
    """Return an empty instance of the value's class."""
    kind: Any = type(value)
    for make in (object.__new__, kind.__new__):
        try:
            return make(kind)
        except TypeError as error:
            reason = error
    raise ValueError(f"a {kind.__name__} refers to the module, and cannot be copied: {reason}")
