"""Random programs of calls on lists of tensors of emulated GPUs: no race, and the right values.

A program has ranks on some devices and in host memory, with streams of their own or the current
ones, and calls collectives one after the other: some asynchronously, some of them waited for late
or never, some in the capture of a graph. Between calls other tensors come and go.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from emulated_gpus import Gpus, Stream, values
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import COLLECTIVES, IN_PLACE, expected
from torch import Tensor

import pycollect as pc

SIZE = 24
PINNED, PAGEABLE = -1, -2  # in place of a device
TINY = 9  # sums of a few calls are exact in float32


@dataclass
class Call:
    collective: str
    algorithm: str | None
    async_op: bool
    waits: str  # "now", "late" or "never"


@st.composite
def calls(draw: st.DrawFn) -> Call:
    collective = draw(st.sampled_from(COLLECTIVES))
    algorithms = () if collective == "all_to_all" else pc.algorithms(collective)
    algorithm = draw(st.sampled_from([None, *algorithms]))
    waits = draw(st.sampled_from(["now", "late", "never"]))
    return Call(collective, algorithm, draw(st.booleans()), waits)


@dataclass
class Program:
    """Runs calls on the emulated GPUs, and on CPU tensors for the expected values."""

    gpus: Gpus
    places: list[int]  # [rank]: its device, PINNED or PAGEABLE
    named: str  # "apart", "shared": every call names a stream for each rank, or for each device
    tensors: list[Tensor] = field(default_factory=list)
    wanted: list[Tensor] = field(default_factory=list)
    works: list[Any] = field(default_factory=list)
    results: list[tuple[list[Tensor], list[Tensor]]] = field(default_factory=list)
    forgotten: bool = False  # an asynchronous call that nobody waits for
    streams: list[Stream | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.wanted = [v.remainder(TINY) for v in values(len(self.places), SIZE)]
        shared = [self.gpus.stream(device) for device in range(3)]
        for place, v in zip(self.places, self.wanted, strict=True):
            if place >= 0:
                stream = self.gpus.stream(place) if self.named == "apart" else None
                stream = shared[place] if self.named == "shared" else stream
                self.tensors.append(self.gpus.tensor(v, place, stream))
            else:
                stream = None
                self.tensors.append(v.clone())
                self.gpus.torch.adopt(self.tensors[-1], place == PINNED)
            self.streams.append(stream)

    def call(self, call: Call) -> None:
        if call.collective not in IN_PLACE and min(self.places) < 0:
            return  # results in host memory are new CPU tensors, which the emulator does not know
        more: dict[str, Any] = {"async_op": call.async_op}
        if call.collective != "all_to_all":
            more["algorithm"] = call.algorithm
        if self.named:
            more["streams"] = self.streams
        found = getattr(self.gpus, call.collective)(self.tensors, **more)
        wanted = expected(call.collective, self.wanted)
        if call.collective in IN_PLACE:
            self.wanted = wanted
        if call.async_op and call.waits == "now":
            self.wait(found)
        elif call.async_op and call.waits == "late":
            self.works.append(found)
        elif call.async_op:
            self.forgotten = True
            found = None
        if call.collective not in IN_PLACE and found is not None:
            self.results.append((found.result() if call.async_op else found, wanted))
        del found
        self.other_tensors()

    def wait(self, work: Any) -> None:
        work.wait()
        for s in self.streams:
            if s is not None:
                with self.gpus.on(s):
                    work.wait()

    def other_tensors(self) -> None:
        """Write tensors that are freed at once, of all sizes that a call may use."""
        for place in {p for p in self.places if p >= 0}:
            for size in (SIZE, len(self.places) * SIZE, 4):
                self.gpus.torch.write(self.gpus.empty(size, device=place), torch.ones(size))

    def end(self) -> None:
        for work in self.works:
            self.wait(work)
        if self.forgotten:  # a call is behind all earlier ones
            self.call(Call("all_reduce", None, False, "now"))
        for found, wanted in [*self.results, (self.tensors, self.wanted)]:
            for t, v, s in zip(found, wanted, self.streams, strict=True):
                self.gpus.expect(t, v, s)
        self.results.clear()
        for s in filter(None, self.streams):
            with self.gpus.on(s):
                self.other_tensors()


NAMED = st.sampled_from(["", "apart", "shared"])
ORDERS = st.sampled_from(["late", "random", "as_issued"])  # of the streams' work
PLACES = st.lists(st.sampled_from([0, 0, 1, 2, PINNED, PAGEABLE]), min_size=1, max_size=4).filter(
    lambda places: max(places) >= 0
)


@settings(max_examples=1000)
@given(
    places=PLACES,
    named=NAMED,
    connected=st.booleans(),
    of=st.lists(calls(), max_size=4),
    order=ORDERS,
)
def test_programs(
    places: list[int], named: str, connected: bool, of: list[Call], order: str
) -> None:
    gpus = Gpus(3)
    gpus.cuda.set_order(order, len(of))
    try:
        gpus.torch.connect(connected)
        program = Program(gpus, places, named)
        for call in of:
            program.call(call)
        program.end()
        gpus.check(len(of))
        del program
    finally:
        gpus.close()


@settings(max_examples=500)
@given(
    devices=st.lists(st.sampled_from([0, 0, 1, 2]), min_size=1, max_size=4),
    named=NAMED,
    of=st.lists(calls(), min_size=1, max_size=3),
    order=ORDERS,
)
def test_captured_programs(devices: list[int], named: str, of: list[Call], order: str) -> None:
    gpus = Gpus(3)
    gpus.cuda.set_order(order, len(of))
    try:
        program = Program(gpus, devices, named)
        streams = {(s.device, s.stream_id): s for s in program.streams if s is not None}
        for device in {0, *devices}:
            current = gpus.torch.current(device)
            streams[device, current.stream_id] = current
        origin = gpus.torch.current(0)
        gpus.torch.begin_capture(origin)
        joined = [s for s in streams.values() if s.stream_id != origin.stream_id]
        for s in joined:
            gpus.fork(origin, s)
        for call in of:
            program.call(call)
        program.end()
        for s in joined:
            gpus.fork(s, origin)
        gpus.torch.end_capture(origin)
        gpus.check(len(of))
        del program
    finally:
        gpus.close()
