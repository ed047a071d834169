"""Describes an installation for bug reports, without anything that identifies its user."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from . import _C, _machine, gpus
from ._build_check import build_info
from .plans import algorithms


def describe(rates: bool = False) -> dict[str, Any]:
    """Return versions, the record of the build, devices, links, settings and algorithms.

    All values are strings, numbers, booleans, None, and lists and dicts of these, so that the
    result can be written as JSON. `rates` (default False) also measures copies of GPUs, in bytes
    per second, which takes about a second. Without a usable GPU, the key "no_gpu" states why.

    >>> describe()["torch"] == torch.__version__
    True
    """
    machine = _machine.describe(command="")
    del machine["command"]
    return {
        **machine,
        **gpus.describe(rates),
        "cuda": {"torch": torch.version.cuda, "pycollect": build_info().get("cuda")},
        "build": _build(),
        "instruction_set": _C.instruction_set(),
        "numa": _numa(),
        "torch.distributed": dist.is_available(),  # if so, it has the backend "pycollect"
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith("PYCOLLECT_")},
        "algorithms": {name: ", ".join(algorithms(name)) for name in _C.COLLECTIVES},
    }


def _numa() -> dict[str, str]:
    """Return the cores of each node, and those on which this process may run; {} if unknown."""
    own = os.sched_getaffinity(0)
    return {
        f"node {number}": f"cores {_ranges(cores)}, this process on {_ranges(own & {*cores})}"
        for number, cores in _C.numa_nodes().items()
    }


def _ranges(numbers: Iterable[int]) -> str:
    """Format numbers as the kernel does.

    >>> _ranges([5, 1, 2, 3]), _ranges([])
    ('1-3,5', 'none')
    """
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join("-".join(map(str, dict.fromkeys(ends))) for ends in ranges) or "none"


def _build() -> dict[str, Any]:
    built = build_info()
    return {**built, "commit": _machine.known_commit(built.get("commit"))}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Format the result of `describe` as lines of text, with the names in a column.

    >>> next(lines({"torch": "2.13.0", "gpus": [], "no_gpu": "hidden"}))
    'torch  2.13.0'
    """
    plain = {name: _lines_of(value) for name, value in found.items() if name not in gpus.KEYS}
    by_name = plain | gpus.lines(found)
    width = max(map(len, by_name))
    for name, texts in by_name.items():
        for text in texts:
            yield f"{name:<{width}}  {text}"
            name = ""


def _lines_of(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [f"{key}: {item}" for key, item in value.items()] or ["none"]
    return [str(value)]
