"""Time matrix products and copies to the CPU, synchronous and asynchronous, on many ranks.

The runs are those of Dive into Deep Learning: until the calls return or until the device is done;
rank after rank or on all ranks at the same time; copies after the products or overlapped with them.
`python bench/overlap.py --size 200` takes seconds on a CPU, where nothing is asynchronous.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

import pycollect
from pycollect._command import Interruption
from pycollect._timing import Effort, Sampler, host_time, interleave
from pycollect_bench import environment, scripts
from pycollect_bench.output import write_json

Run = Callable[[], object]


class Rank:
    """A rank's matrix, its stream if it is on a GPU, and CPU memory for its results."""

    def __init__(self, device: torch.device, size: int, products: int, own_stream: bool) -> None:
        self.device, self.products = device, products
        self.gpu = device.type == "cuda"
        self.stream: Any = None
        if self.gpu and own_stream:
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.matrix = torch.randn(size, size, device=device)
        self.host = [torch.empty(size, size, pin_memory=self.gpu) for _ in range(products)]
        if self.gpu:
            torch.cuda.synchronize(device)

    @contextlib.contextmanager
    def current_device(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.gpu:
                stack.enter_context(torch.cuda.device(self.device))
                stack.enter_context(torch.cuda.stream(self.stream))  # None: the current stream
            yield

    def work(self) -> list[torch.Tensor]:
        with self.current_device():
            return [self.matrix.mm(self.matrix) for _ in range(self.products)]

    def synchronize(self) -> None:
        if self.gpu:
            torch.cuda.synchronize(self.device)

    def copy(self, results: Sequence[torch.Tensor], non_blocking: bool) -> list[torch.Tensor]:
        with self.current_device():
            return [r.to("cpu", non_blocking=non_blocking, copy=True) for r in results]

    def copy_async(self, results: Sequence[torch.Tensor]) -> list[pycollect.Work | None]:
        with self.current_device():
            pairs = zip(self.host, results, strict=True)
            return [pycollect.copy_(host, r, async_op=True) for host, r in pairs]


def finish(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        rank.synchronize()


def in_turn(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        rank.work()
        rank.synchronize()


def at_once(ranks: Sequence[Rank]) -> None:
    kept = [rank.work() for rank in ranks]
    finish(ranks)
    del kept


def then_copies(ranks: Sequence[Rank]) -> None:
    results = [rank.work() for rank in ranks]
    finish(ranks)
    for rank, mine in zip(ranks, results, strict=True):
        rank.copy(mine, non_blocking=False)


def with_copies(ranks: Sequence[Rank]) -> None:
    kept = []
    for rank in ranks:
        kept.append(rank.copy(rank.work(), non_blocking=True))
    finish(ranks)


def with_async_copies(ranks: Sequence[Rank]) -> None:
    works = [work for rank in ranks for work in rank.copy_async(rank.work())]
    for work in works:
        if work is not None:
            work.wait()
    finish(ranks)


def runs_of(ranks: Sequence[Rank]) -> dict[str, Run]:
    """Return the timed runs by name; each run begins with idle devices."""
    return {
        "products, until the calls return": lambda: [rank.work() for rank in ranks],
        "products, issued on all, then synchronized": partial(at_once, ranks),
        "products, rank by rank, each synchronized": partial(in_turn, ranks),
        "products, then blocking copies to the CPU": partial(then_copies, ranks),
        "products and non-blocking copies": partial(with_copies, ranks),
        "products and asynchronous copy_ to pinned memory": partial(with_async_copies, ranks),
    }


def measure(ranks: Sequence[Rank], repeats: int) -> dict[str, float]:
    """Return the median seconds of every run, with the runs in turns."""
    kept: list[object] = []  # results, which are freed between the runs

    def idle() -> None:
        finish(ranks)
        kept.clear()

    def sampler(run: Run) -> Sampler:
        return host_time(lambda: kept.append(run()), idle)

    samplers = {name: sampler(run) for name, run in runs_of(ranks).items()}
    timings = interleave(samplers, Effort(iterations=repeats, warmup=1, single_calls=True))
    idle()
    return {name: statistics.median(timing.rounds) for name, timing in timings.items()}


def placements(args: argparse.Namespace) -> Iterator[tuple[str, list[torch.device], bool]]:
    """Yield label, devices and own-stream flag: one device, all devices, ranks on the first."""
    named = list(dict.fromkeys(pycollect.devices(args.devices)))
    yield f"one device, {named[0]}", named[:1], False
    if len(named) > 1:
        yield f"all {len(named)} devices", named, False
    yield f"{args.world} virtual ranks on {named[0]}", named[:1] * args.world, True


def main(argv: Sequence[str] | None = None) -> int:
    return scripts.run("overlap", lambda: compare(argv))


def compare(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--size", type=int, default=4000, help="rows and columns of the matrices (4000)")
    add("--products", type=int, default=50, help="products of each rank (50)")
    add("--world", type=int, default=4, help="virtual ranks (4)")
    add("--repeats", type=int, default=3, help="timed runs, whose median is reported (3)")
    add("--devices", help="as pycollect.devices reads it (all)")
    add("--json", metavar="FILE", help="write the seconds there")
    args = scripts.parse(parser, argv)
    if min(args.size, args.products, args.world, args.repeats) < 1:
        parser.error("sizes and numbers must be positive")
    about = environment.describe(shlex.join(sys.orig_argv))
    print(*environment.header(about), sep="\n")
    print(f"# {args.products} products of {args.size} x {args.size} float32 matrices per rank")
    results = {}
    with Interruption() as interruption:
        for label, devices, own_streams in placements(args):
            ranks = [Rank(d, args.size, args.products, own_streams) for d in devices]
            results[label] = measure(ranks, args.repeats)
            print(f"{label:<52} {'seconds':>9}", flush=True)
            for name, seconds in results[label].items():
                print(f"  {name:<50} {seconds:>9.4f}", flush=True)
            del ranks
    record = {"environment": about, "size": args.size, "products": args.products}
    record["overlap"] = [
        {"where": label, "way": name, "seconds": seconds}
        for label, found in results.items()
        for name, seconds in found.items()
    ]
    write_json(args.json, record, interruption)
    interruption.reraise(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
