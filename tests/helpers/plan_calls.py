"""Any plan as a call on a list of emulated GPUs' tensors, with its callers and its checks.

`PlanCall` runs a plan with `GpuCalls`, as a collective runs that of its algorithm. All memory is
the test's, scratch and staging memory too: callers write it before a call, and read and overwrite
it after, so that each wait at the call's begin and end is needed.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from emulated_gpus import Gpus, Stream
from plan_cases import Case, cases
from torch import Tensor

from pycollect import _C, _testing

PINNED, PAGEABLE = -1, -2  # in place of a rank's device
BUFFERS = ("in", "out", "tmp", "host")
HOST = torch.device("cpu")
Devices = list[int]
Site = tuple[int, str]  # a rank, and the kind of its memory: "device", "pinned" or "pageable"


def all_reduce(name: str, world: int, pieces: int = 4) -> _C.Plan:
    return _C.find_algorithm("all_reduce", name).plan(world, 0, pieces)


def layouts() -> Iterator[dict[str, Any]]:
    """Ways to issue a call, endlessly, in a fixed order that is not that of the caller's loops."""
    pick = random.Random(0)
    while True:
        yield {"apart": pick.random() < 0.5, "level_policy": pick.choice(("any", "one_task"))}


def placements(world: int) -> Iterator[Devices]:
    """Device of each rank, for 1 .. world devices: ranks in blocks, and ranks in turns."""
    for devices in range(1, world + 1):
        blocks = [rank * devices // world for rank in range(world)]
        yield blocks
        turns = [rank % devices for rank in range(world)]
        if turns != blocks:
            yield turns


def calls(
    algorithm: _C.Algorithm, worlds: Sequence[int]
) -> Iterator[tuple[Case, Devices, dict[str, Any]]]:
    """Each case on each placement, with peer access and, on several devices, also staged."""
    layout = layouts()
    for case in cases(algorithm, worlds):
        for devices in placements(case.world):
            yield case, devices, next(layout) | {"peers": True}
            if len(set(devices)) > 1:
                yield case, devices, next(layout) | {"peers": False}


def offsets_of(how: str, written: _C.Plan, plan: _C.Plan, pieces: int, number: int) -> Any:
    """Chunk sizes of tensor `number` for a plan that is `written` or staged; no piece is empty."""

    def size(a: int) -> int:
        return pieces + (0 if how == "even" else (7 * a + number) % 3)

    offsets = _C.PlanOffsets(plan, [size(c) for c in range(written.chunks)])
    for r in range(written.world) if how == "each" else ():
        offsets.set(r, "in", [size(3 * r + of) for of in range(written.chunks)])
        offsets.set(r, "out", [size(3 * of + r) for of in range(written.chunks)])
    _testing.cut_host_memory(plan, offsets)
    return offsets


class PlanCall:
    """`apart`: a stream for each rank, in place of the current stream of its device. `peers`: GPUs
    reach each other; otherwise the plan is staged, in `pieces` pieces. `tensors`: number of tensors
    of a rank; every second one has two rows. `ring`: bytes of a pinned piece, and pieces; few and
    small, so that copies are split and pieces reused. `on`: the GPUs of another call.
    """

    def __init__(
        self,
        plan: _C.Plan,
        in_place: bool,
        devices: Devices,
        *,
        apart: bool = False,
        level_policy: str = "any",
        peers: bool = True,
        pieces: int = 1,
        dtype: torch.dtype = torch.float32,
        op: str = "sum",
        tensors: int = 1,
        ring: tuple[int, int] = (256, 3),
        on: PlanCall | None = None,
    ) -> None:
        self.devices, self.apart, self.dtype, self.op = devices, apart, dtype, op
        hosts = [d < 0 for d in devices]
        directly = [[peers or a == b for b in devices] for a in devices]
        reached = not any(hosts) and all(map(all, directly))
        reach = None if reached else _testing.MemoryReach(hosts, directly)
        self.written = _testing.CompiledPlan(plan, in_place)
        self.compiled = _testing.CompiledPlan(plan, in_place, level_policy, reach, pieces)
        self.chunk_sizes, offsets = self._choose_sizes(pieces, tensors)
        self.gpus = on.gpus if on else Gpus(max(devices) + 1)
        self.cuda = self.gpus.cuda
        self.gpus.torch.connect(peers)
        self.cuda.set_ring(*ring)
        self._streams: dict[int, Stream] = {}
        self._found: list[tuple[Tensor, Site]] = []
        self._lay_out(in_place, offsets)

    def _choose_sizes(self, pieces: int, tensors: int) -> tuple[str, Any]:
        """Return the first kind of chunk sizes that the plan allows, and the offsets."""
        written, run = self.written.plan, self.compiled.plan
        for how in ("uneven", "each", "even"):
            with contextlib.suppress(ValueError):
                return how, [
                    [offsets_of(how, written, plan, pieces, n) for plan in (written, run)]
                    for n in range(tensors)
                ]
        raise AssertionError

    # --- memory -----------------------------------------------------------------------------------

    def kind(self, rank: int, buffer: str) -> str:
        if self.devices[rank] == PAGEABLE and buffer in ("in", "out"):
            return "pageable"
        return "device" if self.devices[rank] >= 0 and buffer != "host" else "pinned"

    def _lay_out(self, in_place: bool, offsets: Any) -> None:
        """All buffers of a rank on one device, or in host memory of a kind, lie in one tensor."""
        ends: Counter[Site] = Counter()
        views: list[Any] = []  # [tensor][rank and buffer]: site, first element, rows, pitch, count
        for number, (_, run) in enumerate(offsets):
            rows, places = 1 + number % 2, []
            for rank, buffer in itertools.product(range(len(self.devices)), BUFFERS):
                if in_place and buffer == "out":
                    places.append(places[-1])
                    continue
                site, count = (rank, self.kind(rank, buffer)), run.total(rank, buffer)
                places.append((site, ends[site], rows, count + 2, count))  # rows with gaps
                ends[site] += rows * (count + 2)
            views.append(places)
        self.before = {site: random_values(end, self.dtype, site) for site, end in ends.items()}
        self.after = {site: values.clone() for site, values in self.before.items()}
        self.memory = {site: self._allocate(site, end) for site, end in ends.items()}
        self.checked = {site: torch.ones(end, dtype=torch.bool) for site, end in ends.items()}
        for places in views:
            for i, (site, first, rows, pitch, count) in enumerate(places):
                if BUFFERS[i % 4] in ("tmp", "host"):  # a staged plan uses it in another way
                    in_rows(self.checked[site], first, rows, pitch, count)[:] = False

        def bound(memory: dict[Site, Tensor], which: int) -> Any:
            return [
                (each[which], [in_rows(memory[site], *where) for site, *where in places])
                for each, places in zip(offsets, views, strict=True)
            ]

        self.bindings = bound(self.memory, 1)
        hosts = [HOST] * len(self.devices)
        _testing.run_plan(self.written, self.op, bound(self.after, 0), hosts, [])

    def _allocate(self, site: Site, count: int) -> Tensor:
        rank, kind = site
        if kind == "device":
            floats = self.gpus.empty(
                -(-count * self.dtype.itemsize // 4), device=self.devices[rank]
            )
            return torch.as_strided(floats.view(self.dtype), (count,), (1,))
        memory = torch.empty(count, dtype=self.dtype)
        self.gpus.torch.adopt(memory, kind == "pinned")
        return memory

    # --- callers ----------------------------------------------------------------------------------

    def caller(self, rank: int) -> Stream:
        device = self.devices[rank]
        if device < 0:  # host memory goes with the first GPU
            device = next(d for d in self.devices if d >= 0)
        elif self.apart:
            if rank not in self._streams:
                self._streams[rank] = self.cuda.stream(device)
            return self._streams[rank]
        return self.gpus.torch.current(device)

    def _stream(self, site: Site, capture: bool) -> Stream | None:
        """The stream on which callers access memory; None: the host does."""
        rank, kind = site
        by_host = kind == "pageable" or (self.devices[rank] == PINNED and not capture)
        return None if by_host else self.caller(rank)

    def _call(self, capture: bool, fail_after: int | None) -> None:
        for site, memory in self.memory.items():
            self.gpus.torch.write(memory, self.before[site], self._stream(site, capture))
        own = [
            self.caller(r) if self.apart and d >= 0 else None for r, d in enumerate(self.devices)
        ]
        at = [torch.device("privateuseone", d) if d >= 0 else HOST for d in self.devices]
        self.cuda.set_device(0)
        if fail_after is not None:
            self.cuda.inject("fail", after=fail_after)
        failed = True
        try:
            _testing.run_plan(self.compiled, self.op, self.bindings, at, own)
            failed = False
        finally:
            if fail_after is not None:
                self.cuda.heal()
            assert self.cuda.current_device() == 0
            for site, memory in self.memory.items():
                stream = self._stream(site, capture)
                found = self.gpus.torch.read(memory, stream)
                if not failed:
                    self._found.append((found, site))
                self.gpus.torch.write(memory, torch.zeros_like(self.before[site]), stream)

    def issue(self, times: int = 1, capture: bool = False, fail_after: int | None = None) -> None:
        """Call without waiting, in the capture of a graph if wanted. Callers access their memory
        after the call even if it fails: the call of CUDA after `fail_after` successful ones."""
        with self._captured() if capture else contextlib.nullcontext():
            for _ in range(times):
                self._call(capture, fail_after)

    @contextlib.contextmanager
    def _captured(self) -> Iterator[None]:
        origin = self.caller(0)
        others = []
        for rank in range(len(self.devices)):
            if all(self.caller(rank) != known for known in [origin, *others]):
                others.append(self.caller(rank))
        self.gpus.torch.begin_capture(origin)
        for stream in others:
            self.gpus.fork(origin, stream)
        try:
            yield
        finally:
            for stream in others:
                self.gpus.fork(stream, origin)
            self.gpus.torch.end_capture(origin)

    # --- checks -----------------------------------------------------------------------------------

    def is_right(self, seed: int = 0) -> bool:
        """Run all work in a random order; return whether the calls gave the results of the plan as
        written, bit by bit, and wrote nothing beside them."""
        self.gpus.torch.run(seed)
        found, self._found = self._found, []
        assert found, "no call has been read"
        return all(
            torch.equal(
                values.view(torch.uint8).view(len(values), -1)[self.checked[site]],
                self.after[site].view(torch.uint8).view(len(values), -1)[self.checked[site]],
            )
            for values, site in found
        )

    def check(
        self, times: int = 1, seed: int = 0, order: str = "late", capture: bool = False
    ) -> PlanCall:
        """Call; assert that nothing races and that the results are right."""
        self.cuda.set_order(order, seed)
        self.issue(times, capture)
        assert self.cuda.race is None, self.cuda.race
        assert self.is_right(seed)
        return self

    def check_orders(self, seed: int, times: int = 2) -> None:
        """`check` as issued, the only order with CUDA_LAUNCH_BLOCKING=1, and in random orders."""
        for order, number in (("as_issued", seed), ("random", seed), ("random", seed + 1)):
            self.check(times, number, order)

    def count(self, times: int = 1) -> Counter[str]:
        """Call, and return the number of CUDA calls by name."""
        return self.gpus.count(lambda: self.issue(times))

    def __enter__(self) -> PlanCall:
        return self

    def __exit__(self, *_: object) -> None:
        self.gpus.torch.run(0)
        self.gpus.close()


def in_rows(memory: Tensor, first: int, rows: int, pitch: int, count: int) -> Tensor:
    return torch.as_strided(memory, (rows, count), (pitch, 1), first)


_RANDOM: dict[torch.dtype, Tensor] = {}


def random_values(count: int, dtype: torch.dtype, site: Site) -> Tensor:
    """Values that differ from rank to rank; the bits of a sum of floats depend on its order."""
    if dtype not in _RANDOM:
        generator = torch.Generator().manual_seed(0)
        _RANDOM[dtype] = (torch.rand(1 << 16, generator=generator) * 2 - 1).to(dtype)
    first = 997 * (3 * site[0] + ("device", "pinned", "pageable").index(site[1]))
    assert first + count <= 1 << 16
    return _RANDOM[dtype][first : first + count].clone()
