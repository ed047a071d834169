"""Measure scatter and copy_ against `.to()`, torch.cuda.comm.scatter and a bare pinned copy.

Try `python bench/copies.py -e 256M --world 4`. On the CPU the peers are .to() and
torch.tensor_split with clone. --overlap measures asynchronous copies instead, in the example of
Dive into Deep Learning: products of matrices, each followed by its copy to the CPU. On a CPU no
call is asynchronous.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pycollect  # isort: split

import torch
from torch import Tensor

from pycollect._sizes import bytes_text, size_argument, size_range
from pycollect._timing import Effort, host_time, interleave
from pycollect.gpus import synchronizer
from pycollect_bench import report
from pycollect_bench.options import effort, positive
from pycollect_bench.runner import LIMIT, OURS, PEER, Item, Result, Row, Script

comm: Any = import_module("torch.cuda.comm")  # torch has no type annotations for it
Call = Callable[[], object]
Pairs = Sequence[tuple[Tensor, Tensor]]  # outputs, and what they must be
Ways = dict[str, Call]
Devices = Sequence[torch.device]
CPU = torch.device("cpu")

# The plain copy that others are compared with, and the limit: one copy of the same number of bytes
# from or to pinned memory.
PLAIN, BARE = "to", "bare"
KINDS = {OURS: OURS, BARE: LIMIT}  # of rows; the others are peers
WIDTH = 64  # columns of the copied matrix
# Options that --overlap has not, with their usual values; and its number of products per device.
OF_COPIES = {"minbytes": 1 << 20, "maxbytes": 256 << 20, "stepfactor": 16, "world": 4}
PRODUCTS = 50

TABLE = report.Table(
    "# GB/s: bytes of the whole tensor per second. x to: times faster than .to().\n"
    "# %limit: share of the speed of a bare copy of as many bytes, from or to pinned memory.",
    [
        report.of_about("what", "what", width=-42),
        report.Column("size", "", 8, lambda about, row: bytes_text(about["bytes"])),
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
    add("--world", type=positive, help="ranks of a scatter (4)")
    add("--devices", help="devices of the ranks, in turn, as pycollect.devices reads them")
    what = "instead: products of matrices of this size (4000; less on a CPU), and their copies"
    add("--overlap", metavar="SIZE", nargs="?", type=positive, const=4000, help=what)


def tensor(kind: str, rows: int, device: torch.device) -> Tensor:
    """Return a matrix in this kind of memory: device, pinned or pageable."""
    where = device if kind == "device" else CPU
    return torch.zeros(rows, WIDTH, device=where, pin_memory=kind == "pinned")


def to(parts: Sequence[Tensor], devices: Devices, non_blocking: bool) -> list[Any]:
    # Without copy=True, .to() does not copy to the tensor's own device.
    pairs = zip(parts, devices, strict=True)
    return [p.to(d, non_blocking=non_blocking, copy=True) for p, d in pairs]


def measured(what: str, ways: Ways, source: Tensor, pairs: Pairs, wanted: Effort) -> Result:
    """Time all ways in turns, and count the wrong elements of pycollect's result.

    A pair is an output of ours and a view of the source, to which it must then be equal.
    """
    synchronize = synchronizer([source.device, *(out.device for out, _ in pairs)])
    rewrite = partial(source.fill_, 1.0)
    samplers = {name: host_time(way, rewrite, synchronize) for name, way in ways.items()}
    timings = interleave(samplers, wanted)
    # Small integers are exact in float32; neighbours differ.
    torch.arange(source.numel(), out=source.view(-1)).remainder_(1 << 20)
    ways[OURS]()
    synchronize()
    wrong = sum(int((out.cpu() != part.cpu()).sum()) for out, part in pairs)
    rows = []
    for name, timing in timings.items():
        row = Row(name, timing, KINDS.get(name, PEER), wrong=wrong if name == OURS else None)
        row = row.compared({PLAIN: timings[PLAIN]}, timings.get(BARE))
        rows.append(replace(row, numbers={"bandwidth": source.nbytes / row.seconds}))
    kind = what.partition(" ->")[0]
    return Result({"what": what, "kind": kind, "bytes": source.nbytes}, rows)


def scatter(kind: str, rows: int, devices: Devices, dim: int, wanted: Effort) -> Result:
    """Measure a float32 scatter from this kind of memory."""
    source, world = tensor(kind, rows, devices[0]), len(devices)
    parts = torch.tensor_split(source, world, dim)
    out = [torch.full(p.shape, -1.0, device=d) for p, d in zip(parts, devices, strict=True)]
    ways: Ways = {
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
    pairs = list(zip(out, parts, strict=True))
    return measured(f"scatter {kind} -> {names}, dim {dim}", ways, source, pairs, wanted)


def direct_copy(
    source: str, target: str, rows: int, device: torch.device, wanted: Effort
) -> Result:
    """Measure a copy_ between these kinds of memory."""
    src, dst = tensor(source, rows, device), tensor(target, rows, device)
    ways: Ways = {
        OURS: partial(pycollect.copy_, dst, src),
        PLAIN: partial(to, [src], [dst.device], False),
        "copy_": partial(dst.copy_, src),
    }
    if device.type == "cuda":
        ways["copy_ async"] = partial(dst.copy_, src, True)
        kinds = ["pinned" if k == "pageable" else k for k in (source, target)]
        one, other = (tensor(k, rows, device) for k in kinds)
        ways[BARE] = partial(other.copy_, one, True)
    return measured(f"copy_ {source} -> {target}, {device}", ways, src, [(dst, src)], wanted)


def overlapped(size: int, devices: Devices, synchronize: Call) -> Ways:
    """Return the runs of --overlap: products on all devices, and copies of them to the CPU."""
    shape = size, size
    matrices = [m for d in devices for m in [torch.randn(shape, device=d)] * PRODUCTS]
    hosts = [torch.empty(shape, pin_memory=m.is_cuda) for m in matrices]

    def products() -> list[Tensor]:
        return [matrix.mm(matrix) for matrix in matrices]

    def then_copies() -> object:
        results = products()
        synchronize()
        return to(results, [CPU] * len(results), False)

    def with_async_copies() -> None:  # each begins when its product is done
        pairs = zip(hosts, matrices, strict=True)
        works = [pycollect.copy_(host, m.mm(m), async_op=True) for host, m in pairs]
        for work in filter(None, works):
            work.wait()

    return {
        "products": products,
        "products, then blocking copies to the CPU": then_copies,
        "products and non-blocking copies": lambda: [
            m.mm(m).to(CPU, non_blocking=True, copy=True) for m in matrices
        ],
        "products and asynchronous copy_ to pinned memory": with_async_copies,
    }


def measure_overlap(size: int, devices: Devices, wanted: Effort) -> Iterator[Item]:
    """Yield the times until the devices are done; what a run returns is freed after its time."""
    about = {"devices": report.devices_named(devices), "size": size, "products": PRODUCTS}
    title = "# {products} products of {size} x {size} float32 matrices on each of: {devices}"
    yield report.Table(title.format_map(about), [report.name("run", 50), report.times("s")[0]])
    synchronize, kept = synchronizer(devices), list[object]()
    samplers = {
        name: host_time(lambda run=run: kept.append(run()), kept.clear, synchronize)
        for name, run in overlapped(size, devices, synchronize).items()
    }
    timings = interleave(samplers, wanted)
    yield Result(about, [Row(n, t, OURS if "copy_" in n else PEER) for n, t in timings.items()])


def check(args: argparse.Namespace) -> None:
    """Give values to options that were left out; raise ValueError for those that are wrong."""
    pycollect.devices(args.devices)
    for name in (*OF_COPIES, "targets"):
        if args.overlap and getattr(args, name):
            raise ValueError(f"--{name} has no effect with --overlap; leave it out")
    for name, value in OF_COPIES.items():
        setattr(args, name, getattr(args, name) or value)
    least = 4 * WIDTH * args.world
    if args.minbytes < least and not args.overlap:
        raise ValueError(f"sizes of a scatter over {args.world} ranks begin at {least} bytes")
    size_range(args.minbytes, args.maxbytes, args.stepfactor)


def measure(args: argparse.Namespace) -> Iterator[Item]:
    """Yield all scatters, and all copies of the first device: on it, and with the CPU's memory."""
    named, world, wanted = pycollect.devices(args.devices), args.world, effort(args)
    if args.overlap:
        devices = list(dict.fromkeys(named))
        yield from measure_overlap(args.overlap, devices, effort(args, single_calls=True))
        return
    devices = [named[rank % len(named)] for rank in range(world)]
    of_host = ("pinned", "pageable") if named[0].type == "cuda" else ()
    yield TABLE
    for size in size_range(args.minbytes, args.maxbytes, args.stepfactor):
        rows = size // 4 // WIDTH
        for kind in (*of_host, "device") if of_host else ("pageable",):
            for dim in (0, 1):
                yield scatter(kind, rows // world * world, devices, dim, wanted)
        yield direct_copy("device", "device", rows, named[0], wanted)
        for kind in of_host:
            yield direct_copy(kind, "device", rows, named[0], wanted)
            yield direct_copy("device", kind, rows, named[0], wanted)


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
