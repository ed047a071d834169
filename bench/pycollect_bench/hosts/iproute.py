"""Calls of `ip` and `tc`, and the removal of network namespaces by their names."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

NAMES = Path("/run/netns")  # where `ip netns` keeps the names of namespaces
PREFIX = "pycollect"  # of our names, which go on with the process id of their owner


def call(*command: str) -> str:
    """Run a command and return its output; raise RuntimeError with its error if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {' '.join(done.stderr.split())}")
    return done.stdout


def remove(paths: Iterable[Path]) -> None:
    """Remove namespaces; one that another process removes at the same time is no error."""
    for path in paths:
        subprocess.run(["ip", "netns", "delete", path.name], capture_output=True, check=False)


def remove_stale() -> None:
    """Remove the namespaces of processes that were killed before they could do it."""
    for path in NAMES.glob(f"{PREFIX}-*-*"):
        if not Path("/proc", path.name.split("-")[1]).exists():
            remove([path])
