"""Describes the machine, versions and settings behind a measurement or a bug report."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

import pycollect

from ._build_check import build_info


def describe(command: str) -> dict[str, Any]:
    """Return versions, machine and settings for the header and the JSON file."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "command": without_folders(command),
        "pycollect": pycollect.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": _processor(),
        "caches": _caches(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "openmp": {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "GOMP_"))},
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def without_folders(command: str) -> str:
    """Return the command without the folders of absolute paths, which differ between machines.

    >>> without_folders("/usr/bin/python bench/run.py --json=/tmp/a.json -e 1M")
    'python bench/run.py --json=a.json -e 1M'
    """
    return shlex.join(re.sub(r"(^|=)/(.*/)?", r"\1", word) for word in shlex.split(command))


def _commit() -> str:
    """Return the commit of this package's checkout, or else of its build, or "unknown"."""
    return _commit_of_checkout() or known_commit(build_info().get("commit"))


def known_commit(commit: str | None) -> str:
    """Return the commit, or "unknown" for a build from an sdist, which has none."""
    return commit or "unknown"


def _commit_of_checkout() -> str | None:
    root = Path(pycollect.__file__).resolve().parent.parent
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
