"""Describes this machine's GPUs: devices, peer access and copy rates.

All values are plain, for `pycollect info --json`. Without a usable GPU, one sentence says why.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import permutations
from typing import Any

import torch

from . import _C
from ._timing import host_time, nothing
from .collectives import copy_
from .devices import devices as devices_of

# Large enough that the start of a copy hardly counts, small enough for any GPU.
_RATE_BYTES = 64 << 20
_RATE_COPIES = 5
_cuda: Any = torch.cuda
# The keys of `describe`'s result.
KEYS = ("gpus", "no_gpu", "gpu_software", "gpu_links", "copy_rates")


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


def describe(rates: bool = False) -> dict[str, Any]:
    """Return devices, software, peer access and, if `rates`, copy rates; or why there is no GPU.

    Keys: "gpus", a list with name, compute capability, memory in bytes and multiprocessors of each
    GPU; "no_gpu", a sentence, only if no GPU can be used; with a visible GPU also "gpu_software",
    versions of CUDA, "gpu_links", the peer access of every ordered pair, and, if `rates` (default
    False), "copy_rates", the result of `copy_rates`.

    >>> describe()["gpus"] == [] or "name" in describe()["gpus"][0]
    True
    """
    why = absence()
    no_gpu = {"no_gpu": why} if why else {}
    count = torch.cuda.device_count()
    if count == 0:
        return {"gpus": [], **no_gpu}
    found = {
        "gpus": [_device(i) for i in range(count)],
        "gpu_software": _software(),
        "gpu_links": [] if why else _links(count),
        **no_gpu,
    }
    if rates:
        found["copy_rates"] = [] if why else copy_rates(devices_of("cuda:*"))
    return found


def _device(index: int) -> dict[str, Any]:
    about = _cuda.get_device_properties(index)
    return {
        "device": f"cuda:{index}",
        "name": about.name,
        "capability": f"{about.major}.{about.minor}",
        "memory_bytes": about.total_memory,
        "multiprocessors": about.multi_processor_count,
    }


def _software() -> dict[str, str | None]:
    newest: int = getattr(torch._C, "_cuda_getDriverVersion")()  # noqa: B009 (not in torch's types)
    return {
        "driver_cuda": f"{newest // 1000}.{newest % 1000 // 10}",
        "runtime_cuda": torch.version.cuda,
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


def copy_rates(
    devices: Sequence[torch.device], nbytes: int = _RATE_BYTES
) -> list[dict[str, str | float]]:
    """Measure copies from and to host memory, within devices and between them.

    Returns a list of dicts: "what" names source and destination, and "bytes_per_second" is the
    rate by the median of five copies of `nbytes` bytes (default 64 MiB), after a warm-up. On GPUs,
    the whole list takes about a second.

    >>> [rate["what"] for rate in copy_rates([torch.device("cpu")], 4096)][:1]
    ['pageable to cpu']
    """

    def on(device: torch.device, pinned: bool = False) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)

    def copies() -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        for device in devices:
            there = on(device)
            for kind in ("pageable", "pinned") if device.type == "cuda" else ("pageable",):
                here = on(torch.device("cpu"), kind == "pinned")
                yield f"{kind} to {device}", there, here
                yield f"{device} to {kind}", here, there
            yield f"within {device}", on(device), there
        for one, other in permutations(devices, 2):
            yield f"{one} to {other}", on(other), on(one)

    rates: list[dict[str, str | float]] = []
    for what, dst, src in copies():
        sample = host_time(partial(copy_, dst, src), synchronize=synchronizer(devices))
        sample(1)
        seconds = statistics.median(sample(_RATE_COPIES))
        rates.append({"what": what, "bytes_per_second": nbytes / seconds})
    return rates


def synchronizer(devices: Iterable[torch.device]) -> Callable[[], None]:
    """Return a function that waits for the GPUs among the devices, each once."""
    gpus = sorted({d for d in devices if d.type == "cuda"}, key=str)

    def synchronize() -> None:
        for device in gpus:
            _cuda.synchronize(device)

    return synchronize if gpus else nothing


def lines(found: dict[str, Any]) -> dict[str, list[str]]:
    """Format the result of `describe` as lines of text, by heading.

    >>> lines({"gpus": [], "no_gpu": "the installed torch has no CUDA part"})
    {'gpus': ['none: the installed torch has no CUDA part']}
    """
    texts = {"gpus": [_device_line(d) for d in found["gpus"]]}
    if "no_gpu" in found:
        texts["gpus"].append(f"none{' is used' if found['gpus'] else ''}: {found['no_gpu']}")
    if not found["gpus"]:
        return texts
    software = found["gpu_software"]
    texts["gpu_software"] = [f"{k}: {v or 'unknown'}" for k, v in software.items()]
    if found["gpu_links"]:
        texts["gpu_links"] = [_link_line(link) for link in found["gpu_links"]]
    if found.get("copy_rates"):
        texts["copy_rates"] = [
            f"{r['what']}: {r['bytes_per_second'] / 1e9:.1f} GB/s" for r in found["copy_rates"]
        ]
    return texts


def _device_line(device: dict[str, Any]) -> str:
    return (
        f"{device['device']}: {device['name']}, compute capability {device['capability']}, "
        f"{device['memory_bytes'] / 2**30:.1f} GiB, {device['multiprocessors']} multiprocessors"
    )


def _link_line(link: dict[str, Any]) -> str:
    reach = "peer access, tried" if link["works"] else f"peer access reported, but {link['defect']}"
    if not link["peer_access"]:
        reach = "no peer access"
    rank = link["performance_rank"]
    ranked = "" if rank is None else f", performance rank {rank}"
    return f"{link['from']} -> {link['to']}: {reach}{ranked}"
