"""Where a run took place, and whether it was disturbed: what a number means nothing without."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import pycollect

from .._compat import build_info
from .contest import CaseResult
from .measure import MOST_SPREAD

# Of all cores; above it a run is called disturbed. A quiet machine stays below a tenth of this.
MOST_FOREIGN_CPU = 0.05


def describe(command: str) -> dict[str, Any]:
    """Return versions, machine and settings, as they go into the header and the JSON file."""
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
    """Return the command without the folders of absolute paths, which mean nothing elsewhere.

    >>> without_folders("/usr/bin/python bench/run.py --json=/tmp/a.json -e 1M")
    'python bench/run.py --json=a.json -e 1M'
    """
    return shlex.join(re.sub(r"(^|=)/(.*/)?", r"\1", word) for word in shlex.split(command))


def _commit() -> str:
    """The commit of the checkout this package lies in, or else that of its build; "unknown"."""
    return _commit_of_checkout() or known_commit(build_info().get("commit"))


def known_commit(commit: str | None) -> str:
    """Give a commit for people: a build from an sdist has none."""
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
    names = (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo", "model name"))
    return f"{next(names, platform.processor())} ({platform.machine()})"


def _lines(path: str, begin: str) -> list[str]:
    try:
        return [line for line in Path(path).read_text().splitlines() if line.startswith(begin)]
    except OSError:
        return []


def _caches() -> str:
    """The first core's caches, such as "L1 48K, L2 1024K, L3 32768K"; empty if unknown."""
    found = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((index / n).read_text().strip() for n in ("level", "type", "size"))
        if kind != "Instruction":
            found.append(f"L{level} {size}")
    return ", ".join(found)


@dataclass(frozen=True)
class Load:
    """What the machine's processors have done so far, and how much of it was ours.

    `own` is of this process and of those that it started and that have ended.
    """

    seconds: float
    busy: float
    own: float
    average: float

    @classmethod
    def now(cls) -> Load:
        """Read the counters."""
        ticks = [int(x) for line in _lines("/proc/stat", "cpu ") for x in line.split()[1:9]]
        # user, nice, system, idle, iowait, irq, softirq, steal: all but the two idle ones.
        busy = (sum(ticks) - sum(ticks[3:5])) / os.sysconf("SC_CLK_TCK")
        own = os.times()
        spent = own.user + own.system + own.children_user + own.children_system
        return cls(time.monotonic(), busy, spent, os.getloadavg()[0])


def noise(before: Load, after: Load, results: Iterable[CaseResult]) -> dict[str, Any]:
    """Return how much others used the machine meanwhile, and how the limit varied."""
    capacity = (after.seconds - before.seconds) * (os.cpu_count() or 1)
    foreign = (after.busy - before.busy) - (after.own - before.own)
    limits = [r.limit.timing for r in results if r.limit]
    return {
        "load_average_before": before.average,
        "load_average_after": after.average,
        "foreign_cpu_share": max(0.0, foreign / capacity) if capacity else 0.0,
        "limit_rounds_max_over_min": max((t.spread for t in limits), default=None),
        "limit_p99_over_p50": max((t.tail for t in limits), default=None),
    }


def header(about: dict[str, Any]) -> list[str]:
    """Return the lines over everything, as comments."""
    return [
        f"# pycollect {about['pycollect']}, commit {about['commit']}, torch {about['torch']}, "
        f"python {about['python']}, {about['time']}",
        f"# machine: {about['machine']}, {about['cores']} cores, {about['caches']}; "
        f"threads: {about['threads']}; GPU: {', '.join(about['gpus']) or 'none'}",
        f"# command: {about['command']}",
    ]


def footer(measured: dict[str, Any]) -> list[str]:
    """Return what was noticed of others on the machine, with a warning if it was much."""
    share, spread = measured["foreign_cpu_share"], measured["limit_rounds_max_over_min"]
    tail = measured["limit_p99_over_p50"]
    varied = f"; limit: rounds max/min {spread:.2f}, p99/p50 {tail:.2f}" if spread else ""
    out = [
        f"# noise: load average {measured['load_average_before']:.2f} -> "
        f"{measured['load_average_after']:.2f}, other processes {100 * share:.0f} % of all cores"
        + varied
    ]
    if share > MOST_FOREIGN_CPU or (spread or 1) > MOST_SPREAD:
        out.append("# WARNING: the machine was not quiet; trust ratios more than times, and rerun")
    return out
