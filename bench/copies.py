"""Measure scatter and copy_ against `.to()`, torch.cuda.comm.scatter and a bare pinned copy.

Try `python bench/copies.py -e 256M --world 4`. On the CPU the peers are .to() and
torch.tensor_split with clone. --overlap measures the book's asynchronous copies instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import pycollect  # isort: split

import torch
from torch import Tensor

from pycollect._sizes import binary_size, size_argument, size_range
from pycollect._timing import Effort, host_time, interleave
from pycollect_bench import overlap, report
from pycollect_bench.clocks import synchronizer
from pycollect_bench.options import effort, positive
from pycollect_bench.runner import LIMIT, OURS, PEER, Item, Result, Row, Script

comm: Any = import_module("torch.cuda.comm")  # torch has no type annotations for it
Call = Callable[[], object]

# The plain copy that others are compared with, and the limit: one copy of the same number of bytes
# from or to pinned memory.
PLAIN, BARE = "to", "bare"
KINDS = {OURS: OURS, BARE: LIMIT}  # of rows; the others are peers
WIDTH = 64  # columns of the copied matrix
# Options of the copies, and of --overlap, with their usual values.
OF_COPIES = {"minbytes": 1 << 20, "maxbytes": 256 << 20, "stepfactor": 16, "dims": (0, 1)}
OF_OVERLAP = {"size": 4000, "products": 50}

TABLE = report.Table(
    "# GB/s: bytes of the whole tensor per second. x to: times faster than .to().\n"
    "# %limit: share of the speed of a bare copy of as many bytes, from or to pinned memory.",
    [
        report.of_about("what", "what", width=-42),
        report.Column("size", "", 8, lambda about, row: binary_size(about["bytes"])),
        report.name("way", 12),
        *report.times(),
        report.of_row("bandwidth", "bandwidth", "(GB/s)", scale=1e-9),
        report.faster(PLAIN, "x to"),
        report.limit(),
        report.wrong(),
    ],
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-b", "--minbytes", type=size_argument, help="smallest whole tensor (1M)")
    add("-e", "--maxbytes", type=size_argument, help="largest whole tensor (256M)")
    add("-f", "--stepfactor", type=int, help="from size to size (16)")
    add("--world", type=positive, default=4, help="ranks of a scatter (4)")
    add("--devices", help="devices of the ranks, in turn, as pycollect.devices reads them")
    add("--dims", type=int, nargs="+", choices=(0, 1), help="of a scatter (0 1)")
    add("--overlap", action="store_true", help="matrix products and copies to the CPU instead")
    add("--size", type=positive, help="with --overlap: rows and columns (4000)")
    add("--products", type=positive, help="with --overlap: products of a rank (50)")


@dataclass(frozen=True)
class Copy:
    """One copy to measure. `ways` are the candidates; ours writes `wanted()` to `results`."""

    what: str
    source: Tensor
    ways: dict[str, Call]
    results: list[Tensor]
    wanted: Callable[[], Sequence[Tensor]]
    devices: Sequence[torch.device]

    def measured(self, wanted_effort: Effort) -> Result:
        """Time all candidates in turns, and count the wrong elements of pycollect's result."""
        synchronize, rewrite = synchronizer(self.devices), partial(self.source.fill_, 1.0)
        samplers = {n: host_time(way, rewrite, synchronize) for n, way in self.ways.items()}
        timings = interleave(samplers, wanted_effort)
        # Small integers are exact in float32; neighbours differ.
        torch.arange(self.source.numel(), out=self.source.view(-1)).remainder_(1 << 20)
        self.ways[OURS]()
        synchronize()
        pairs = zip(self.results, self.wanted(), strict=True)
        wrong = sum(int((got.cpu() != wanted).sum()) for got, wanted in pairs)
        nbytes, rows = self.source.nbytes, []
        for name, timing in timings.items():
            row = Row(name, timing, KINDS.get(name, PEER), wrong=wrong if name == OURS else None)
            row = row.compared({PLAIN: timings[PLAIN]}, timings.get(BARE))
            rows.append(replace(row, numbers={"bandwidth": nbytes / row.seconds}))
        kind = self.what.partition(" ->")[0]
        return Result({"what": self.what, "kind": kind, "bytes": nbytes}, rows)


def tensor(kind: str, rows: int, device: torch.device) -> Tensor:
    """Return a matrix in this kind of memory: device, pinned or pageable."""
    where = device if kind == "device" else torch.device("cpu")
    return torch.zeros(rows, WIDTH, device=where, pin_memory=kind == "pinned")


def to(parts: Sequence[Tensor], devices: Sequence[torch.device], non_blocking: bool) -> list[Any]:
    # Without copy=True, .to() does not copy to the tensor's own device.
    pairs = zip(parts, devices, strict=True)
    return [p.to(d, non_blocking=non_blocking, copy=True) for p, d in pairs]


def scatter(kind: str, rows: int, devices: Sequence[torch.device], dim: int) -> Copy:
    """Return a float32 scatter from this kind of memory."""
    source, world = tensor(kind, rows, devices[0]), len(devices)
    parts = torch.tensor_split(source, world, dim)
    out = [torch.full(p.shape, -1.0, device=d) for p, d in zip(parts, devices, strict=True)]
    ways: dict[str, Call] = {
        OURS: partial(pycollect.scatter, source, list(devices), dim=dim, out=out),
        PLAIN: partial(to, parts, devices, False),
    }
    if all(d.type == "cuda" for d in devices):
        ways["to async"] = partial(to, parts, devices, True)
        ways["comm"] = partial(comm.scatter, source, [d.index for d in devices], dim=dim)
        bare = source if kind == "device" else tensor("pinned", rows, devices[0])
        ways[BARE] = partial(torch.empty(source.shape, device=devices[0]).copy_, bare, True)
    else:
        ways["split"] = lambda: [part.clone() for part in torch.tensor_split(source, world, dim)]
    names = f"{world} x {devices[0]}" if len(set(devices)) == 1 else f"{world} devices"
    what = f"scatter {kind} -> {names}, dim {dim}"
    return Copy(what, source, ways, out, lambda: source.cpu().tensor_split(world, dim), devices)


def direct_copy(source: str, target: str, rows: int, device: torch.device) -> Copy:
    """Return a copy_ between these kinds of memory."""
    src, dst = tensor(source, rows, device), tensor(target, rows, device)
    ways: dict[str, Call] = {
        OURS: partial(pycollect.copy_, dst, src),
        PLAIN: partial(to, [src], [dst.device], False),
        "copy_": partial(dst.copy_, src),
    }
    if device.type == "cuda":
        ways["copy_ async"] = partial(dst.copy_, src, True)
        kinds = ["pinned" if k == "pageable" else k for k in (source, target)]
        one, other = (tensor(k, rows, device) for k in kinds)
        ways[BARE] = partial(other.copy_, one, True)
    return Copy(
        f"copy_ {source} -> {target}, {device}", src, ways, [dst], lambda: [src.cpu()], [device]
    )


def copies(nbytes: int, devices: Sequence[torch.device], dims: Sequence[int]) -> Iterator[Copy]:
    """Yield all scatters, and all copies of the first device: on it, and with the CPU's memory."""
    first, rows, world = devices[0], nbytes // 4 // WIDTH, len(devices)
    on_gpu = first.type == "cuda"
    for kind in ("pinned", "pageable", "device") if on_gpu else ("pageable",):
        for dim in dims:
            yield scatter(kind, rows // world * world, devices, dim)
    yield direct_copy("device", "device", rows, first)
    for kind in ("pinned", "pageable") if on_gpu else ():
        yield direct_copy(kind, "device", rows, first)
        yield direct_copy("device", kind, rows, first)


def check(args: argparse.Namespace) -> None:
    """Give values to options that were left out; raise ValueError for those that are wrong."""
    pycollect.devices(args.devices)
    how, others = ("with", (*OF_COPIES, "targets")) if args.overlap else ("without", OF_OVERLAP)
    for name in others:
        if getattr(args, name):
            raise ValueError(f"--{name} has no effect {how} --overlap; leave it out")
    for name, value in {**OF_COPIES, **OF_OVERLAP}.items():
        setattr(args, name, getattr(args, name) or value)
    least = 4 * WIDTH * args.world
    if args.minbytes < least and not args.overlap:
        raise ValueError(f"sizes of a scatter over {args.world} ranks begin at {least} bytes")
    size_range(args.minbytes, args.maxbytes, args.stepfactor)


def measure(args: argparse.Namespace) -> Iterator[Item]:
    if args.overlap:
        yield from overlap.measure(args)
        return
    named = pycollect.devices(args.devices)
    devices = [named[rank % len(named)] for rank in range(args.world)]
    yield TABLE
    for size in size_range(args.minbytes, args.maxbytes, args.stepfactor):
        yield from (copy.measured(effort(args)) for copy in copies(size, devices, args.dims))


def over_to(row: Row) -> float | None:
    """Return how many times faster than `.to()` a copy with a GPU is."""
    return row.faster_than(PLAIN) if row.limit_share else None


LARGE = report.where(bytes=report.at_least(16 << 20))  # for fewer bytes the call takes as long
PINNED, PAGEABLE = (report.where(LARGE, kind=(f"scatter {k}",)) for k in ("pinned", "pageable"))
TARGETS = (
    report.Target("pinned scatter, a bare pinned copy", 95, OURS, report.percent_of_limit, PINNED,
                  unit="%"),
    report.Target("pageable scatter, .to()", 2.0, OURS, over_to, PAGEABLE),
)  # fmt: skip


SCRIPT = Script(
    "copies", __doc__, add_arguments, measure, check=check, targets=lambda args: TARGETS
)
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
