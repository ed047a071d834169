"""The example of asynchronous copies in Dive into Deep Learning: products, then copies to the CPU.

It is timed until the calls return or the device is done, rank after rank or on all ranks at once,
with copies after the products or overlapped with them. On a CPU nothing is asynchronous.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import pycollect
from pycollect._timing import Effort, host_time, interleave

from . import report
from .clocks import synchronizer
from .runner import OURS, PEER, Result, Row

_cuda: Any = torch.cuda  # torch has no type annotations for its streams


class _Rank:
    """A rank's matrix, its stream on a GPU, and CPU memory for its results."""

    def __init__(self, args: argparse.Namespace, device: torch.device, own_stream: bool) -> None:
        gpu, shape = device.type == "cuda", (args.size, args.size)
        stream = _cuda.Stream if own_stream else _cuda.current_stream
        # A stream that is None has no effect.
        self.on_stream = partial(_cuda.stream, stream(device) if gpu else None)
        self.synchronize = synchronizer([device])
        self._matrix = torch.randn(shape, device=device)
        self._host = [torch.empty(shape, pin_memory=gpu) for _ in range(args.products)]

    def products(self) -> list[Tensor]:
        with self.on_stream():
            return [self._matrix.mm(self._matrix) for _ in self._host]

    def copies(self, results: Sequence[Tensor], non_blocking: bool) -> list[Tensor]:
        with self.on_stream():
            return [r.to("cpu", non_blocking=non_blocking, copy=True) for r in results]

    def async_copies(self, results: Sequence[Tensor]) -> list[pycollect.Work | None]:
        with self.on_stream():
            pairs = zip(self._host, results, strict=True)
            return [pycollect.copy_(host, r, async_op=True) for host, r in pairs]


def _finished(ranks: Sequence[_Rank], results: Sequence[list[Tensor]] = ()) -> Any:
    for rank in ranks:
        rank.synchronize()
    return results


def _runs(ranks: Sequence[_Rank]) -> dict[str, Callable[[], object]]:
    """Return the timed runs; they begin with idle devices, and what they return is freed after."""

    def products() -> list[list[Tensor]]:
        return [rank.products() for rank in ranks]

    def in_turn() -> None:
        for rank in ranks:
            rank.products()
            rank.synchronize()

    def then_copies() -> object:
        pairs = zip(ranks, _finished(ranks, products()), strict=True)
        return [rank.copies(results, False) for rank, results in pairs]

    def with_async_copies() -> None:
        works = [work for rank in ranks for work in rank.async_copies(rank.products())]
        for work in filter(None, works):
            work.wait()
        _finished(ranks)

    return {
        "products, until the calls return": products,
        "products, issued on all, then synchronized": lambda: _finished(ranks, products()),
        "products, rank by rank, each synchronized": in_turn,
        "products, then blocking copies to the CPU": then_copies,
        "products and non-blocking copies": lambda: _finished(
            ranks, [rank.copies(rank.products(), True) for rank in ranks]
        ),
        "products and asynchronous copy_ to pinned memory": with_async_copies,
    }


def _rows(ranks: Sequence[_Rank], effort: Effort) -> list[Row]:
    kept: list[object] = []

    def idle() -> None:
        _finished(ranks)
        kept.clear()

    def keep(run: Callable[[], object]) -> None:
        kept.append(run())

    samplers = {name: host_time(partial(keep, run), idle) for name, run in _runs(ranks).items()}
    timings = interleave(samplers, effort)
    idle()
    return [Row(name, t, OURS if "copy_" in name else PEER) for name, t in timings.items()]


def measure(args: argparse.Namespace) -> Iterator[report.Table | Result]:
    """Yield the results on one device, on all devices, and of ranks that share the first one."""
    title = "# {what}: {products} products of {size} x {size} float32 matrices per rank"
    columns = [report.name("run", 50), report.times("s")[0]]
    yield report.Table("", columns, lambda result: title.format_map(result.about))
    effort = Effort(iterations=args.iterations or 3, warmup=1, single_calls=True)  # long runs
    named = list(dict.fromkeys(pycollect.devices(args.devices)))
    shared = f"{args.world} virtual ranks on {named[0]}"
    placements = {f"one device, {named[0]}": named[:1]}
    if len(named) > 1:
        placements[f"all {len(named)} devices"] = named
    placements[shared] = named[:1] * args.world
    for what, devices in placements.items():
        ranks = [_Rank(args, device, what == shared) for device in devices]
        about = {"what": what, "size": args.size, "products": args.products}
        yield Result(about, _rows(ranks, effort))
        del ranks  # their memory, before the next ones are made
