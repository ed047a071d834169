"""The functions of pycollect.autograd in a graph of torch.compile, and the operators' gradients.

In a graph, each function is the operator of its name in torch.ops.pycollect. Where autograd records
an operator, it does so as the function outside of a graph, so there is one definition of gradients.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from .._in_graph import Values, fits, name_of, runner, skip_compile
from ..collectives import ranks_of

P = ParamSpec("P")
R = TypeVar("R")
Recorded = Callable[..., Any]

LINEAR = ("sum", "avg")
ALL = (*LINEAR, "max", "min", "prod")
_unpack: Any = forward_ad.unpack_dual
_LIBRARY: Any = torch.library.Library("pycollect", "IMPL")  # type: ignore[no-untyped-call]


def operator_in_graph(
    ops: tuple[str, ...] = LINEAR, adapted: Callable[[Recorded], Recorded] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a function of pycollect.autograd: in a graph, it is its operator.

    With invalid arguments it is not, so that it raises its error. `ops` have a gradient. Autograd
    records calls of the operator with the function's name as it records the function. `adapted` is
    given if their arguments differ: it returns a function with those of the operator.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__.lstrip("_")
        parameters = inspect.signature(function).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        names = [p.name for p in parameters]
        required = [p.name for p in parameters if p.default is p.empty]
        operator = getattr(torch.ops.pycollect, name).default
        run = runner(operator, name)
        _record(operator, name, adapted(function) if adapted else function)

        @functools.wraps(function)
        def either(*args: P.args, **kwargs: P.kwargs) -> R:
            if not is_compiling():
                return function(*args, **kwargs)
            values: Values = {**dict(zip(positional, args, strict=False)), **kwargs}
            known = all(n in names for n in values) and all(n in values for n in required)
            if not known or len(values) != len(args) + len(kwargs):
                return _refused(function, args, kwargs)
            for key in ("device", "devices"):
                if key in values and not (name == "gather" and values[key] is None):
                    values[key] = ranks_of(values[key], name)
            if not _is_valid(name, positional[0], values, ops):
                return _refused(function, args, kwargs)
            result: R = run(values)
            return result

        return either

    return decorate


@skip_compile("the arguments of this call of pycollect.autograd are invalid")
def _refused(function: Callable[..., R], args: Any, kwargs: Any) -> R:
    """Call a function outside of a graph, where it raises its error."""
    return function(*args, **kwargs)


def _is_valid(name: str, first: str, values: Values, ops: tuple[str, ...]) -> bool:
    """Return whether a function accepts its arguments; `first` is the name of its tensors'."""
    tensors = values.get(first)
    if first == "tensor":
        tensors = [tensors]
    if not isinstance(tensors, (list, tuple)) or not tensors:
        return False
    if not all(isinstance(t, Tensor) for t in tensors):
        return False
    rank = values.get("dst", values.get("src", 0))
    if not isinstance(rank, int) or not 0 <= rank < len(tensors):
        return False
    if name_of(values.get("op", "sum"), name) not in ops:
        return False
    if values.get("order", "rank") not in ("rank", "tree"):
        return False
    if not isinstance(values.get("dtype"), torch.dtype | None):
        return False
    return len(values.get("device") or [None]) == 1 and fits(name, values)


def _record(operator: Any, name: str, function: Recorded) -> None:
    names = [argument.name for argument in operator._schema.arguments]

    def kernel(keys: Any, *args: Any, **options: Any) -> Any:
        if _is_recorded(args[0]):
            named = dict(zip(names[1:], args[1:], strict=False))  # without those with defaults
            return function(args[0], **named, **options)
        with torch._C._AutoDispatchBelowAutograd():
            below = keys & torch._C._after_autograd_keyset
            return operator.redispatch(below, *args, **options)

    _LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)


def _is_recorded(first: Any) -> bool:
    """Return whether a tensor requires grad, or has a tangent of forward-mode differentiation.

    `first` is the first argument of an operator, which has all its tensors.
    """
    tensors = [first] if isinstance(first, Tensor) else first
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return True
    return forward_ad._current_level >= 0 and any(_unpack(t).tangent is not None for t in tensors)
