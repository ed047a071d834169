"""Finds the line of the user's program at which a thread is."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import torch

_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (
        Path(torch.__file__).parent,
        Path(__file__).parents[1],
        sysconfig.get_path("stdlib"),
    )
)
_SITE = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("purelib", "platlib"))


def user_line(thread: int | None) -> str:
    """Return ", at script.py:12 in step", or "" if the thread runs no code of the user."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    while frame is not None:
        file = frame.f_code.co_filename
        library = file.startswith(_LIBRARIES) and not file.startswith(_SITE)
        if not (library or file.startswith(_LIBRARIES[:2]) or file.startswith("<")):
            return f", at {file}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
