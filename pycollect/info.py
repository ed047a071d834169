"""Describes an installation for bug reports, without anything that identifies its user."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import _C, gpus
from ._build_check import build_info
from ._sizes import runs
from ._version import __version__
from .plans import algorithms


def describe() -> dict[str, Any]:
    """Return versions, the record of the build, devices, links, settings and algorithms.

    All values are strings, numbers, booleans, None, and lists and dicts of these, so that the
    result can be written as JSON. Without a usable GPU, the key "no_gpu" states why.

    >>> describe()["torch"] == torch.__version__
    True
    """
    built = build_info()
    return {
        **machine(),
        **gpus.describe(),
        "cuda": {"torch": torch.version.cuda, "pycollect": built.get("cuda")},
        "build": {**built, "commit": built.get("commit") or "unknown"},
        "instruction_set": _C.instruction_set(),
        "numa": _numa(),
        "torch.distributed": dist.is_available(),  # if so, it has the backend "pycollect"
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith("PYCOLLECT_")},
        "algorithms": {name: ", ".join(algorithms(name)) for name in _C.COLLECTIVES},
    }


def machine() -> dict[str, Any]:
    """Return versions, machine and settings, as in a benchmark's record."""
    return {
        "pycollect": __version__,
        "commit": _commit_of_checkout() or build_info().get("commit") or "unknown",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": _processor(),
        "caches": _caches(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "openmp": {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "GOMP_"))},
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _commit_of_checkout() -> str | None:
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    names = (line.split(":", 1)[1].strip() for line in read_lines("/proc/cpuinfo", "model name"))
    return f"{next(names, platform.processor())} ({platform.machine()})"


def read_lines(path: str, begin: str) -> list[str]:
    try:
        return [line for line in Path(path).read_text().splitlines() if line.startswith(begin)]
    except OSError:
        return []


def _caches() -> str:
    """Return the first core's caches, such as "L1 48K, L2 1024K, L3 32768K"; "" if unknown."""
    found = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((index / n).read_text().strip() for n in ("level", "type", "size"))
        if kind != "Instruction":
            found.append(f"L{level} {size}")
    return ", ".join(found)


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
    ends = ((run[0], run[-1]) for run in runs(sorted(numbers)))
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in ends) or "none"


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Format the result of `describe` as lines of text, with the names in a column.

    >>> [*lines({"torch": "2.13.0", "gpus": [{"name": "H200"}, {"name": "H200"}]})]
    ['torch  2.13.0', 'gpus   name: H200', '       name: H200']
    """
    width = max(map(len, found))
    for name, value in found.items():
        for text in _lines_of(value):
            yield f"{name:<{width}}  {text}"
            name = ""


def _lines_of(value: Any) -> list[str]:
    if isinstance(value, list):  # of GPUs, or of their links
        return [", ".join(_lines_of(item)) for item in value]
    if isinstance(value, dict):
        return [f"{key}: {item}" for key, item in value.items()] or ["none"]
    return [str(value)]
