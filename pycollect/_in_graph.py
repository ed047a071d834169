"""The list collectives in a graph of torch.compile or torch.export: each is one operator.

The functions take the arguments of those of `_C`, which the public functions call otherwise. A call
that a graph cannot have runs outside of it, or raises its error there, after a break of the graph:
one that returns a Work, names streams or has peer_access=False, and one with arguments other than
tensors that autograd does not record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.compiler import is_compiling

from . import _C
from .interop import op_name

F = TypeVar("F", bound=Callable[..., Any])
Function = Callable[..., Any]
Values = dict[str, Any]  # arguments of an operator, or of a function, by name


def skip_compile(reason: str) -> Callable[[F], F]:
    """Mark a function whose calls break the graph of torch.compile; it is not wrapped.

    torch.compile gives the reason where a program wants a full graph. torch.compiler.disable does
    the same, but it loads the compiler when it is applied, which takes a second at import, and
    wraps every call, which takes 1 us. The marks are those that it sets. With a torch that ignores
    one of them, torch.compile still breaks the graph, and prints a warning.
    """

    def mark(function: F) -> F:
        if isinstance(function, FunctionType):
            function.__dict__["_torchdynamo_disable"] = True  # its callers do not trace into it
            function.__dict__["_torchdynamo_disable_msg"] = reason
            _skip(function.__code__)
        return function

    return mark


def _skip(code: CodeType) -> None:
    """Keep torch.compile from compiling the frame of a call and the frames below it."""
    try:
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
    except (AttributeError, TypeError):  # another torch, which then only prints the warning
        return


@skip_compile(
    "async_op=True, streams, peer_access=False, tensors that require grad, arguments that are not "
    "tensors, and invalid arguments break the graph: pycollect has no operator for them"
)
def _outside(function: Function, arguments: tuple[Any, ...]) -> Any:
    """Call a function of `_C` outside of a graph."""
    if is_compiling():
        raise RuntimeError(
            f"{function.__name__}: an exported program has no async_op=True, streams or "
            "peer_access=False, and only tensors that do not require grad"
        )
    return function(*arguments)


def _are_plain(value: Any) -> bool:
    """Return whether a value is a tensor that autograd does not record, or a list of such."""
    if isinstance(value, Tensor):
        return not (value.requires_grad and torch.is_grad_enabled())
    if not isinstance(value, (list, tuple)) or len(value) == 0:
        return False
    return all(_are_plain(item) for item in value)


def name_of(op: Any, call: str) -> str:
    """Return the name of an op, which is a name or one of torch.distributed."""
    return op if isinstance(op, str) else op_name(op, call)


def names_of(devices: Sequence[torch.device]) -> list[str]:
    """Return the names of devices: an operator takes names, because programs are saved with them.

    >>> names_of([torch.device("cpu"), torch.device("cuda", 1)])
    ['cpu', 'cuda:1']
    """
    return [str(device) for device in devices]


def flat(lists: Any) -> Any:
    """Return the items of all inner lists in one list; anything else is returned itself."""
    if isinstance(lists, (list, tuple)) and len(lists) > 0 and isinstance(lists[0], (list, tuple)):
        return [item for one in lists for item in one]
    return lists


def _is_grid(tensors: Sequence[Any], **_: Any) -> bool:
    """Return whether all items are lists of the same length."""
    rows = [row for row in tensors if isinstance(row, (list, tuple))]
    return len(rows) == len(tensors) and all(len(row) == len(rows[0]) for row in rows)


def _joins(tensors: Sequence[Tensor], dim: Any = 0, **_: Any) -> bool:
    """Return whether the tensors can be joined along `dim`."""
    first = tensors[0]
    if not isinstance(dim, int) or not -first.dim() <= dim < first.dim():
        return False
    if any(t.dim() != first.dim() or t.dtype != first.dtype for t in tensors):
        return False
    others = [d for d in range(first.dim()) if d != dim % first.dim()]
    return all(t.shape[d] == first.shape[d] for t in tensors for d in others)


def _reduces(tensors: Sequence[Tensor], dim: Any = 0, **_: Any) -> bool:
    return _joins(tensors, dim) and all(t.shape == tensors[0].shape for t in tensors)


def _splits(tensors: Sequence[Tensor], dim: Any = 0, split_sizes: Any = None, **_: Any) -> bool:
    if not _joins(tensors, dim):
        return False
    if split_sizes is None:
        return True
    rows = split_sizes if flat(split_sizes) is not split_sizes else [split_sizes] * len(tensors)
    return len(rows) == len(tensors) and all(
        _adds_up(row, t.shape[dim], len(tensors)) for row, t in zip(rows, tensors, strict=True)
    )


def _cuts(
    tensor: Tensor, devices: Sequence[Any], chunk_sizes: Any = None, dim: Any = 0, **_: Any
) -> bool:
    return _joins([tensor], dim) and (
        chunk_sizes is None or _adds_up(chunk_sizes, tensor.shape[dim], len(devices))
    )


def _adds_up(sizes: Any, length: int, count: int) -> bool:
    if not isinstance(sizes, (list, tuple)) or len(sizes) != count:
        return False
    return (
        all(isinstance(s, (int, torch.SymInt)) and s >= 0 for s in sizes) and sum(sizes) == length
    )


# Whether an operator has a result for arguments, whose shape tracers want to know.
_FITS: dict[str, Function] = {
    "all_reduce_coalesced": _is_grid,
    "broadcast_coalesced": _is_grid,
    "copy_": lambda src, **_: _are_plain(src),
    "all_gather": _joins,
    "reduce_scatter": _reduces,
    "all_to_all": _splits,
    "scatter": _cuts,
    "gather": _joins,
}


def fits(name: str, values: Values) -> bool:
    """Return whether the operator of a collective has a result for arguments of the function."""
    return name not in _FITS or bool(_FITS[name](**values))


def runner(operator: Any, name: str) -> Callable[[Values], Any]:
    """Return a function that calls an operator with the arguments of the collective's function."""
    positional = [a.name for a in operator._schema.arguments if not a.kwarg_only]

    def run(given: Values) -> Any:
        values = dict(given)
        if "op" in values:
            values["op"] = name_of(values["op"], name)
        if "devices" in values:
            values["devices"] = names_of(values["devices"])
        if "split_sizes" in values:
            values["split_sizes"] = flat(values["split_sizes"])
        if "device" in values:
            values["device"] = values["device"][0] if values["device"] else None
        if name.endswith("_coalesced"):
            values["world"], values["tensors"] = len(values["tensors"]), flat(values["tensors"])
        first = []
        for argument in positional:  # as graphs have them
            if argument not in values:
                break
            first.append(values.pop(argument))
        result = operator(*first, **values)
        return list(result) if isinstance(result, (list, tuple)) else result

    return run


def in_graph(name: str) -> Function:
    """Return a function that takes the arguments of the function of `_C`, and calls an operator."""
    return FUNCTIONS[name]


def _function(name: str) -> Function:
    function: Function = getattr(_C, name)
    packets = torch.ops.pycollect
    in_place = name if name.endswith("_") else f"{name}_"
    packet = getattr(packets, in_place if hasattr(packets, in_place) else name)
    run = runner(packet.default, name)
    run_out = runner(packet.out, name) if "out" in packet.overloads() else None
    names = [a.name for a in packet.default._schema.arguments if a.name != "world"]

    def call(*arguments: Any) -> Any:
        mine, rest = arguments[:-3], arguments[-3:]
        out = mine[len(names)] if len(mine) > len(names) else None
        values = dict(zip(names, mine, strict=False))
        plain = rest == _IN_GRAPH and _are_plain(mine[0]) and (out is None or _are_plain(out))
        if not (plain and fits(name, values)):
            return _outside(function, arguments)
        if out is None or run_out is None:
            return run(values)
        run_out({**values, "out": out})
        return out if isinstance(out, Tensor) else list(out)

    return call


_IN_GRAPH = (False, None, True)  # the values of async_op, streams and peer_access in a graph
_LIST_COLLECTIVES = ["all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "copy_"]
_LIST_COLLECTIVES += ["broadcast_coalesced", "all_gather", "reduce_scatter", "all_to_all"]
_LIST_COLLECTIVES += ["scatter", "gather", "replicate", "tree_sum"]
FUNCTIONS = {name: _function(name) for name in _LIST_COLLECTIVES}
