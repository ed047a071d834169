"""Device specifications: strings, patterns, indices and lists that name one device per rank."""

from __future__ import annotations

import re
from collections.abc import Iterable
from numbers import Integral
from typing import TypeAlias, TypeGuard

import torch

from . import _C

DeviceSpec: TypeAlias = "str | torch.device | int | Iterable[str | torch.device | int] | None"

_MOST_RANKS = 65536  # of one process; a larger number is taken for a typing error
_EXACT = re.compile(
    r"(?P<kind>cpu|cuda|gpu)(?::(?P<index>\d+|\*))?(?:\s*\*\s*(?P<times>\d+))?", re.IGNORECASE
)
_MOST_CHARACTERS = 256  # of a string; int() refuses numbers of more than 4300 digits
_FORMS = '"cpu", "cpu*4", "cuda:0", "cuda:0*4", "cuda:*", "GPU:1", "GPU:*", or a regular expression'


def devices(spec: DeviceSpec = None) -> list[torch.device]:
    """Return one device per rank.

    ``spec`` is None (all CUDA devices, or two ranks on the CPU if there are none), a string such as
    ``"cpu*4"``, ``"cuda:0"``, ``"cuda:0*4"`` (four ranks on one GPU), ``"cuda:*"``, ``"GPU:*"`` or
    ``"GPU:1"``, a regular expression that is matched against the names of all visible devices, such
    as ``"cuda:[0-3]"``, a torch.device, an index of a GPU, or a list of any of these. Raises
    ValueError for a device that does not exist, a pattern that matches none, an empty list and more
    than 65536 ranks; TypeError for other types.

    >>> devices("cpu*2")
    [device(type='cpu'), device(type='cpu')]
    >>> devices(["cpu", "cpu*2"])
    [device(type='cpu'), device(type='cpu'), device(type='cpu')]
    """
    if spec is None:
        return _gpus() or [torch.device("cpu")] * 2
    if _is_index(spec):
        index = _C.int_from(spec, "devices", "index")
        return [_gpu(index, f"index {index}")]
    if isinstance(spec, torch.device):
        return _parse("cpu" if spec.type == "cpu" else str(spec))
    if isinstance(spec, str):
        return _parse(spec.strip())
    if not isinstance(spec, Iterable):
        kind = type(spec).__name__
        raise TypeError(f"devices: spec is a {kind}; pass a device, a string or a list of these")
    found: list[torch.device] = []
    for item in spec:
        if not (isinstance(item, (str, torch.device)) or _is_index(item)):
            kind = type(item).__name__
            raise TypeError(f"devices: the list contains a {kind}; pass devices or strings")
        found += devices(item)
        if len(found) > _MOST_RANKS:
            raise ValueError(f"devices: the list names more than the allowed {_MOST_RANKS} ranks")
    if not found:
        raise ValueError("devices: the list is empty; name one device per rank")
    return found


def _parse(spec: str) -> list[torch.device]:
    if len(spec) > _MOST_CHARACTERS:
        raise ValueError(
            f"devices: {spec[:32]!r}... has {len(spec)} characters; at most {_MOST_CHARACTERS} are "
            "allowed"
        )
    exact = _EXACT.fullmatch(spec)
    if exact is None:
        return _match(spec)
    index, times = exact["index"], int(exact["times"] or 1)
    if not 1 <= times <= _MOST_RANKS:
        raise ValueError(
            f"devices: {spec!r} asks for {times} ranks; allowed are *1 to *{_MOST_RANKS}"
        )
    if exact["kind"].lower() == "cpu":
        if index not in (None, "0"):
            raise ValueError(f"devices: {spec!r} does not exist; the CPU is one device, 'cpu'")
        return [torch.device("cpu")] * times
    if index == "*":
        gpus = _gpus()
        if not gpus:
            raise ValueError(f"devices: {spec!r} matches nothing: no CUDA device is visible")
        return gpus * times
    current = torch.cuda.current_device() if index is None and _gpus() else 0
    return [_gpu(current if index is None else int(index), spec)] * times


def _match(pattern: str) -> list[torch.device]:
    known = [torch.device("cpu"), *_gpus()]
    try:
        expression = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ValueError(
            f"devices: {pattern!r} is not a valid regular expression ({error}); allowed are "
            f"{_FORMS}"
        ) from error
    names = {d: {str(d), str(d).replace("cuda", "gpu")} for d in known}
    found = [d for d in known if any(expression.fullmatch(name) for name in names[d])]
    if not found:
        visible = ", ".join(map(str, known))
        raise ValueError(f"devices: {pattern!r} matches none of {visible}; allowed are {_FORMS}")
    return found


def _is_index(spec: object) -> TypeGuard[int]:
    """Return whether `spec` is an integer, of Python or NumPy, but not a bool or an array."""
    return isinstance(spec, Integral) and not isinstance(spec, bool)


def _gpus() -> list[torch.device]:
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


def _gpu(index: int, spec: object) -> torch.device:
    count = len(_gpus())
    if not 0 <= index < count:
        visible = f"allowed are 0 to {count - 1}" if count else "no CUDA device is visible"
        raise ValueError(f"devices: {spec!r} does not exist; {visible}")
    return torch.device("cuda", index)
