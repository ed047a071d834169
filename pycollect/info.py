"""Everything about an installation that a report needs, and nothing that identifies its owner."""

from __future__ import annotations

import os
from typing import Any

import torch

from . import _C
from ._compat import build_info
from .bench import environment
from .plans import algorithms


def describe() -> dict[str, Any]:
    """Return versions, how the extension was built, devices, settings and algorithms.

    All values are plain, so that the whole can be written as JSON.

    >>> describe()["torch"] == torch.__version__
    True
    """
    machine = environment.describe(command="")
    del machine["command"]
    return {
        **machine,
        "cuda": {"torch": torch.version.cuda, "pycollect": build_info().get("cuda")},
        "build": build_info(),
        "instruction_set": _C.instruction_set(),
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith("PYCOLLECT_")},
        "algorithms": {name: ", ".join(algorithms(name)) for name in _C.COLLECTIVES},
    }
