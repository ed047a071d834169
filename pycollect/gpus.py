"""Describes this machine's GPUs: devices and peer access.

All values are plain, for `pycollect info --json`. Without a usable GPU, one sentence says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import permutations
from typing import Any

import torch

from . import _C
from ._timing import nothing

_cuda: Any = torch.cuda


def absence() -> str | None:
    """Return in one sentence why no GPU can be used; None if one can.

    >>> isinstance(absence(), str) == (torch.cuda.device_count() == 0)
    True
    """
    if torch.cuda.device_count() > 0:
        return None if _C.has_cuda() else "this build of pycollect has no CUDA part"
    if torch.version.cuda is None:
        return "the installed torch has no CUDA part"
    return "no CUDA device is visible: no driver, no GPU, or CUDA_VISIBLE_DEVICES hides it"


def describe() -> dict[str, Any]:
    """Return devices and their peer access; or why no GPU can be used.

    Keys: "gpus", a list with name, compute capability, memory in bytes and multiprocessors of each
    GPU; "no_gpu", a sentence, only if no GPU can be used; with a visible GPU also "driver_cuda",
    the newest CUDA of the driver, and "gpu_links", the peer access of every ordered pair.

    >>> describe()["gpus"] == [] or "name" in describe()["gpus"][0]
    True
    """
    why = absence()
    no_gpu = {"no_gpu": why} if why else {}
    count = torch.cuda.device_count()
    if count == 0:
        return {"gpus": [], **no_gpu}
    newest: int = getattr(torch._C, "_cuda_getDriverVersion")()  # noqa: B009 (not in torch's types)
    return {
        "gpus": [_device(i) for i in range(count)],
        "driver_cuda": f"{newest // 1000}.{newest % 1000 // 10}",
        "gpu_links": [] if why else _links(count),
        **no_gpu,
    }


def _device(index: int) -> dict[str, Any]:
    about = _cuda.get_device_properties(index)
    return {
        "device": f"cuda:{index}",
        "name": about.name,
        "capability": f"{about.major}.{about.minor}",
        "memory_bytes": about.total_memory,
        "multiprocessors": about.multi_processor_count,
    }


def _links(count: int) -> list[dict[str, Any]]:
    """Return for each ordered pair of GPUs what the driver and the self-test report.

    "peer_access" is the driver's answer, and "works" is true if the self-test confirms it.
    """
    links = []
    for one, other in permutations(range(count), 2):
        reported, defect, rank = _C.peer_access(one, other)
        links.append(
            {
                "from": f"cuda:{one}",
                "to": f"cuda:{other}",
                "peer_access": reported,
                "works": reported and not defect,
                "defect": defect or None,
                "performance_rank": rank if rank >= 0 else None,
            }
        )
    return links


def synchronizer(devices: Iterable[torch.device]) -> Callable[[], None]:
    """Return a function that waits for the GPUs among the devices, each once."""
    gpus = sorted({d for d in devices if d.type == "cuda"}, key=str)

    def synchronize() -> None:
        for device in gpus:
            _cuda.synchronize(device)

    return synchronize if gpus else nothing
