"""A group's devices that are not there: for pools whose CPU tensors stand for CUDA tensors."""

from __future__ import annotations

from typing import Any


def options(how: str) -> tuple[Any, Any]:
    """Options of a group, and its devices: they do everything "late", or are "eager"."""
    import pycollect as pc  # not before the process is a rank

    made = pc.distributed.options()
    return made, pc._C.fake_devices(made, how == "eager")
