"""Counts the resources of a process that can leak: descriptors, threads, shared mappings."""

from __future__ import annotations

import gc
import os
from pathlib import Path


def open_resources() -> dict[str, int]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared mappings": sum(" rw-s " in line or "memfd" in line for line in maps),
    }
