"""Benchmark cases of scatter and copy_: sources, targets, and the candidates of each copy.

Peers are the usual calls of torch. `bare` is the limit: one copy of the same number of bytes from
or to pinned memory. The results of pycollect are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import pycollect
from pycollect._sizes import binary_size
from pycollect._timing import Effort, Timing, host_time, interleave, median_ratio

from .baselines import comm
from .cases import Call
from .gpu import synchronizer
from .targets import Outcome

# Names of pycollect's copy, of the plain `.to()` to compare with, and of the limit.
OURS, PLAIN, BARE = "pycollect", "to", "bare"


@dataclass(frozen=True)
class CopyCase:
    """One copy to measure. `ways` are the candidates; ours writes `wanted()` to `results`."""

    what: str
    source: Tensor
    ways: dict[str, Call]
    results: list[Tensor]
    wanted: Callable[[], Sequence[Tensor]]
    devices: tuple[torch.device, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that are copied."""
        return self.source.nbytes

    @property
    def synchronize(self) -> Callable[[], None]:
        """A function that waits for the GPUs."""
        return synchronizer(self.devices)


@dataclass(frozen=True)
class CopyResult:
    """Times of all candidates, and the number of wrong elements in pycollect's result."""

    copy: CopyCase
    timings: dict[str, Timing]
    wrong: int

    def times_faster(self, name: str, than: str) -> float | None:
        """Return the time of `than` divided by that of `name`: the median over rounds, or None."""
        if than not in self.timings:
            return None
        return median_ratio(self.timings[than].rounds, self.timings[name].rounds)


def host_kinds(device: torch.device) -> tuple[str, ...]:
    """Return the kinds of host memory between which copies with this device differ."""
    return ("pinned", "pageable") if device.type == "cuda" else ("pageable",)


def _source(kind: str, shape: tuple[int, int], device: torch.device) -> Tensor:
    where = device if kind == "device" else torch.device("cpu")
    return torch.zeros(shape, device=where, pin_memory=kind == "pinned")


def _to(parts: Sequence[Tensor], devices: Sequence[torch.device], non_blocking: bool) -> list[Any]:
    # Without copy=True, .to() does not copy to the tensor's own device.
    pairs = zip(parts, devices, strict=True)
    return [p.to(d, non_blocking=non_blocking, copy=True) for p, d in pairs]


def _clones(tensor: Tensor, world: int, dim: int) -> list[Tensor]:
    return [part.clone() for part in torch.tensor_split(tensor, world, dim)]


def _write(tensor: Tensor) -> None:
    """Fill with small integers, exact in float32; neighbours differ."""
    torch.arange(tensor.numel(), out=tensor.view(-1)).remainder_(1 << 20)


def _differ(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> int:
    return sum(int((g.cpu() != w).sum()) for g, w in zip(got, wanted, strict=True))


def scatter_copies(
    nbytes: int, devices: tuple[torch.device, ...], dims: Sequence[int]
) -> Iterator[CopyCase]:
    """Yield a float32 scatter of `nbytes` for each kind of source memory and each dim."""
    world, first = len(devices), devices[0]
    kinds = (*host_kinds(first), *(["device"] if first.type == "cuda" else []))
    rows = nbytes // 4 // (64 * world) * world
    if not rows:
        raise ValueError(
            f"{nbytes} bytes are too few to scatter over {world} ranks; "
            f"begin with at least {4 * 64 * world} bytes"
        )
    for kind in kinds:
        for dim in dims:
            yield _scatter(kind, _source(kind, (rows, 64), first), devices, dim)


def _scatter(kind: str, source: Tensor, devices: tuple[torch.device, ...], dim: int) -> CopyCase:
    world, gpus = len(devices), all(d.type == "cuda" for d in devices)
    parts = torch.tensor_split(source, world, dim)
    out = [torch.empty(p.shape, device=d) for p, d in zip(parts, devices, strict=True)]
    ways: dict[str, Call] = {
        OURS: partial(pycollect.scatter, source, list(devices), dim=dim, out=out),
        PLAIN: partial(_to, parts, devices, False),
    }
    if gpus:
        ways["to async"] = partial(_to, parts, devices, True)
        indices = [d.index for d in devices]
        ways["comm"] = partial(comm.scatter, source, indices, dim=dim)
        bare = source if kind == "device" else torch.zeros(source.shape, pin_memory=True)
        ways[BARE] = partial(torch.empty(source.shape, device=devices[0]).copy_, bare, True)
    else:
        ways["split"] = partial(_clones, source, world, dim)

    def wanted() -> Sequence[Tensor]:
        return torch.tensor_split(source.cpu(), world, dim)

    names = f"{world} x {devices[0]}" if len(set(devices)) == 1 else f"{world} devices"
    what = f"scatter {kind} -> {names}, dim {dim}"
    return CopyCase(what, source, ways, out, wanted, devices)


def direct_copies(nbytes: int, device: torch.device) -> Iterator[CopyCase]:
    """Yield copy_ between the device and each kind of host memory, and on the device."""
    shape = (max(1, nbytes // 256), 64)
    pairs = [("device", "device")]
    if device.type == "cuda":
        for kind in host_kinds(device):
            pairs += [(kind, "device"), ("device", kind)]
    for source, target in pairs:
        yield _direct(source, target, shape, device)


def _direct(source: str, target: str, shape: tuple[int, int], device: torch.device) -> CopyCase:
    src, dst = _source(source, shape, device), _source(target, shape, device)
    ways: dict[str, Call] = {
        OURS: partial(pycollect.copy_, dst, src),
        PLAIN: partial(_to, [src], [dst.device], False),
        "copy_": partial(dst.copy_, src),
    }
    if device.type == "cuda":
        ways["copy_ async"] = partial(dst.copy_, src, True)
        kinds = ["pinned" if k == "pageable" else k for k in (source, target)]
        one, other = (_source(k, shape, device) for k in kinds)
        ways[BARE] = partial(other.copy_, one, True)

    what = f"copy_ {source} -> {target}, {device}"
    return CopyCase(what, src, ways, [dst], lambda: [src.cpu()], (device,))


def measure_copy(copy: CopyCase, effort: Effort) -> CopyResult:
    """Time all candidates in turns, and check pycollect's result."""
    rewrite = partial(copy.source.fill_, 1.0)
    samplers = {n: host_time(w, rewrite, copy.synchronize) for n, w in copy.ways.items()}
    timings = interleave(samplers, effort)
    _write(copy.source)
    copy.ways[OURS]()
    copy.synchronize()
    return CopyResult(copy, timings, _differ(copy.results, copy.wanted()))


# Least size in bytes of a scatter with a target: for fewer bytes, the call takes as long as the
# copies.
_JUDGED_BYTES = 16 << 20


def outcomes(results: Sequence[CopyResult]) -> list[Outcome]:
    """Return the outcomes of the targets for scatters to GPUs, each at its worst point."""
    scatters = [
        r for r in results if r.copy.nbytes >= _JUDGED_BYTES and r.copy.what.startswith("scatter")
    ]

    def worst(kind: str, than: str, scale: float) -> tuple[float | None, str]:
        points = [
            (scale * value, f"{r.copy.what}, {binary_size(r.copy.nbytes)}")
            for r in scatters
            if f" {kind} " in r.copy.what and BARE in r.timings
            for value in [r.times_faster(OURS, than)]
            if value is not None
        ]
        return min(points, default=(None, ""))

    pinned, where = worst("pinned", BARE, 100)
    pageable, there = worst("pageable", PLAIN, 1)
    return [
        Outcome("pinned scatter, a bare pinned copy", 95, pinned, unit="%", where=where),
        Outcome("pageable scatter, .to()", 2.0, pageable, where=there),
    ]


def copy_record(result: CopyResult) -> dict[str, Any]:
    """Return one result for `output.write_json`: seconds, and bytes per second."""
    from .record import call_record

    rows = [
        {
            **call_record(name, timing),
            "bandwidth": result.copy.nbytes / timing.percentile(50),
            "times_faster_than_to": result.times_faster(name, PLAIN),
            "share_of_bare": result.times_faster(name, BARE),
            "wrong": result.wrong if name == OURS else None,
        }
        for name, timing in result.timings.items()
    ]
    return {"what": result.copy.what, "bytes": result.copy.nbytes, "rows": rows}
