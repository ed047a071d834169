"""Measure scatter and copy_ against `.to()`, torch.cuda.comm.scatter and a bare pinned copy.

Try `python bench/copies.py -e 256M --world 4`. On the CPU the peers are .to() and
torch.tensor_split with clone. --overlap measures asynchronous copies instead, in the example of
Dive into Deep Learning: products of matrices, each followed by its copy to the CPU. On a CPU no
call is asynchronous.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import pycollect
from pycollect._sizes import bytes_text, size_argument, size_range
from pycollect._timing import Effort, host_time
from pycollect.gpus import synchronizer
from pycollect_bench import options, report
from pycollect_bench.cases import CPU, Call
from pycollect_bench.peers import comm
from pycollect_bench.report import Column
from pycollect_bench.runner import LIMIT, OURS, PEER, Item, Result, Row, Script, Way, in_turns

Pairs = Sequence[tuple[Tensor, Tensor]]  # outputs, and what they must be
Calls = dict[str, Call]
Devices = Sequence[torch.device]

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
        Column("what", width=-42),
        Column("size", lambda about, row: bytes_text(about["bytes"]), width=8),
        Column("way", "name", width=-12),
        *report.times(),
        Column("bandwidth", "algbw", "(GB/s)", 8, scale=1e-9),
        Column("x to", f"x{PLAIN}"),
        report.LIMIT,
        report.WRONG,
    ],
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-b", "--minbytes", type=size_argument, help="smallest whole tensor (1M)")
    add("-e", "--maxbytes", type=size_argument, help="largest whole tensor (256M)")
    add("-f", "--stepfactor", type=int, help="from size to size (16)")
    add("--world", type=options.positive, help="ranks of a scatter (4)")
    add("--devices", help="devices of the ranks, in turn, as pycollect.devices reads them")
    what = "instead: products of matrices of this size (4000; less on a CPU), and their copies"
    add("--overlap", metavar="SIZE", nargs="?", type=options.positive, const=4000, help=what)


def tensor(kind: str, rows: int, device: torch.device) -> Tensor:
    """Return a matrix in this kind of memory: device, pinned or pageable."""
    where = device if kind == "device" else CPU
    return torch.zeros(rows, WIDTH, device=where, pin_memory=kind == "pinned")


def to(parts: Sequence[Tensor], devices: Devices, non_blocking: bool) -> list[Any]:
    # Without copy=True, .to() does not copy to the tensor's own device.
    pairs = zip(parts, devices, strict=True)
    return [p.to(d, non_blocking=non_blocking, copy=True) for p, d in pairs]


def measured(what: str, calls: Calls, source: Tensor, pairs: Pairs, wanted: Effort) -> Result:
    """Time all ways in turns, and count the wrong elements of pycollect's result.

    A pair is an output of ours and a view of the source, to which it must then be equal.
    """
    synchronize = synchronizer([source.device, *(out.device for out, _ in pairs)])
    rewrite = partial(source.fill_, 1.0)

    def wrong() -> int:
        # Small integers are exact in float32; neighbours differ.
        torch.arange(source.numel(), out=source.view(-1)).remainder_(1 << 20)
        calls[OURS]()
        synchronize()
        return sum(int((out.cpu() != part.cpu()).sum()) for out, part in pairs)

    ways = {
        name: Way(host_time(call, rewrite, synchronize), KINDS.get(name, PEER))
        for name, call in calls.items()
    }
    ways[OURS] = replace(ways[OURS], check=wrong)
    rows = in_turns(ways, wanted)
    kind = what.partition(" ->")[0]
    return Result({"what": what, "kind": kind, "bytes": source.nbytes}, rows)


def scatter(kind: str, rows: int, devices: Devices, dim: int, wanted: Effort) -> Result:
    """Measure a float32 scatter from this kind of memory."""
    source, world = tensor(kind, rows, devices[0]), len(devices)
    parts = torch.tensor_split(source, world, dim)
    out = [torch.full(p.shape, -1.0, device=d) for p, d in zip(parts, devices, strict=True)]
    calls: Calls = {
        OURS: partial(pycollect.scatter, source, list(devices), dim=dim, out=out),
        PLAIN: partial(to, parts, devices, False),
    }
    if all(d.type == "cuda" for d in devices):
        calls["to async"] = partial(to, parts, devices, True)
        calls["comm"] = partial(comm.scatter, source, [d.index for d in devices], dim=dim)
        bare = source if kind == "device" else tensor("pinned", rows, devices[0])
        calls[BARE] = partial(torch.empty(source.shape, device=devices[0]).copy_, bare, True)
    else:
        calls["split"] = lambda: [part.clone() for part in torch.tensor_split(source, world, dim)]
    names = f"{world} x {devices[0]}" if len(set(devices)) == 1 else f"{world} devices"
    pairs = list(zip(out, parts, strict=True))
    return measured(f"scatter {kind} -> {names}, dim {dim}", calls, source, pairs, wanted)


def direct_copy(
    source: str, target: str, rows: int, device: torch.device, wanted: Effort
) -> Result:
    """Measure a copy_ between these kinds of memory."""
    src, dst = tensor(source, rows, device), tensor(target, rows, device)
    calls: Calls = {
        OURS: partial(pycollect.copy_, dst, src),
        PLAIN: partial(to, [src], [dst.device], False),
        "copy_": partial(dst.copy_, src),
    }
    if device.type == "cuda":
        calls["copy_ async"] = partial(dst.copy_, src, True)
        kinds = ["pinned" if k == "pageable" else k for k in (source, target)]
        one, other = (tensor(k, rows, device) for k in kinds)
        calls[BARE] = partial(other.copy_, one, True)
    return measured(f"copy_ {source} -> {target}, {device}", calls, src, [(dst, src)], wanted)


def overlapped(size: int, devices: Devices, synchronize: Call) -> Calls:
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
    yield report.Table(
        title.format_map(about), [Column("run", "name", width=-50), report.times("s")[0]]
    )
    synchronize, kept = synchronizer(devices), list[object]()
    timer = partial(host_time, rewrite=kept.clear, synchronize=synchronize)
    ways = {
        name: Way(timer(lambda run=run: kept.append(run())), OURS if "copy_" in name else PEER)
        for name, run in overlapped(size, devices, synchronize).items()
    }
    yield Result(about, in_turns(ways, wanted))


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
    named, world, wanted = pycollect.devices(args.devices), args.world, options.effort(args)
    if args.overlap:
        devices = list(dict.fromkeys(named))
        yield from measure_overlap(args.overlap, devices, options.effort(args, single_calls=True))
        return
    devices = options.devices(args.devices, world)
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
    return row.speedup.get(PLAIN) if row.limit_share else None


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
