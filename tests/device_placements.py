"""Device placements: the devices of a test's ranks, so that one test covers all kinds of memory.

A PlacedApi stands for the `pycollect` module: it moves the tensors of a call to the
devices, makes the call there, and copies all memory back, including the memory around views.
PYCOLLECT_TEST_GPU_DEVICE=cpu uses the CPU in place of the GPU, which checks the tests, not the
library.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from reference import as_bits, viewed_as, whole_memory
from torch import Tensor

import pycollect as pc

GPU = os.environ.get("PYCOLLECT_TEST_GPU_DEVICE", "cuda:0")
STANDS_IN = not GPU.startswith("cuda")
# Marks of tests that can also run with the CPU as stand-in; tests that cannot are marked cuda.
MARKS = [] if STANDS_IN else [pytest.mark.cuda]


@dataclass(frozen=True)
class Placement:
    """Devices of a test: rank r is on device r mod n of `names`; "*" is all GPUs, at least two."""

    label: str
    names: tuple[str, ...]
    peer_access: bool | None = None

    def devices(self, world: int) -> list[torch.device]:
        """The device of each rank; skips the test if the placement needs more GPUs."""
        names = self.names
        if names == ("*",):
            names = several_gpus()
        return [torch.device(names[rank % len(names)]) for rank in range(world)]

    def api(self, world: int) -> Any:
        """The pycollect module, or a communicator if `peer_access` is set."""
        return pc if self.peer_access is None else _communicator(self, world)

    def bound(self, call: str, world: int) -> Callable[..., Any]:
        """scatter or replicate with the devices already bound, as a communicator has them."""
        api = self.api(world)
        if api is not pc:
            return getattr(api, call)
        function, devices = getattr(pc, call), self.devices(world)
        return lambda what, **options: function(what, devices, **options)

    def synchronize(self, world: int) -> None:
        """Synchronize every GPU that has a rank."""
        for device in {d for d in self.devices(world) if d.type == "cuda"}:
            torch.cuda.synchronize(device)


@functools.cache
def _communicator(placement: Placement, world: int) -> pc.Communicator:
    return pc.Communicator(placement.devices(world), peer_access=placement.peer_access)


def several_gpus() -> tuple[str, ...]:
    """The names of all GPUs; skips the test where there is only one."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two CUDA GPUs, and there is {count}")
    return tuple(f"cuda:{i}" for i in range(count))


VIRTUAL = Placement("virtual", (GPU,))
STAGED = Placement("staged", (GPU,), peer_access=False)
MIXED = Placement("mixed", (GPU, "cpu", GPU))
SEVERAL = Placement("several", ("*",))
SEVERAL_STAGED = Placement("several-staged", ("*",), peer_access=False)
PLACEMENTS = [
    pytest.param(placement, id=placement.label, marks=MARKS)
    for placement in (VIRTUAL, STAGED, MIXED, SEVERAL, SEVERAL_STAGED)
]


class PlacedCall:
    """Copies of one call's tensors on devices; views of one memory are views of one copy, too."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        self._views: list[tuple[Tensor, Tensor]] = []

    def to_device(self, value: Any, device: torch.device) -> Any:
        """Copy a tensor, or a list of them, to the device with the same strides and alignment."""
        if isinstance(value, (list, tuple)):
            return type(value)(self.to_device(item, device) for item in value)
        if not isinstance(value, Tensor) or value.is_meta:
            return value
        if value.layout != torch.strided:
            return value.to(device)
        with torch.no_grad():
            on_device = self._view(value, device)
        self._views.append((value, on_device))
        return on_device.requires_grad_() if value.requires_grad else on_device

    def _view(self, value: Tensor, device: torch.device) -> Tensor:
        key = (value.untyped_storage().data_ptr(), device)
        if key not in self._copies:
            whole = whole_memory(value)
            self._copies[key] = (whole, whole.to(device, copy=True))
        return viewed_as(self._copies[key][1], value)

    def copy_back(self) -> None:
        """Copy the device tensors back into their original tensors."""
        places = [address for address, _ in self._copies]
        with torch.no_grad():
            for (address, _), (whole, copy) in self._copies.items():
                if places.count(address) == 1:
                    whole.copy_(copy)
            for tensor, on_device in self._views:
                # Views of one memory on several devices.
                if places.count(tensor.untyped_storage().data_ptr()) > 1:
                    as_bits(tensor).copy_(as_bits(on_device))


class PlacedWork:
    """A Work whose results are copied back in `wait`."""

    def __init__(self, work: pc.Work, done: Callable[[Any], Any]) -> None:
        self._work, self._done = work, done

    def wait(self) -> Any:
        return self._done(self._work.wait())


class PlacedApi:
    """Makes the calls of `pycollect` on a placement's devices, with CPU tensors for arguments."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def __getattr__(self, name: str) -> Any:
        if name in ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"):
            return functools.partial(self._collective, name)
        if name in ("all_to_all", "all_reduce_coalesced", "broadcast_coalesced"):
            return functools.partial(self._collective, name)
        return getattr(pc, name)  # functions that move no data: algorithms, plan

    def _collective(self, name: str, tensors: Any, *args: Any, **options: Any) -> Any:
        placed_call, devices = PlacedCall(), self._placement.devices(len(tensors))
        on_device = [placed_call.to_device(t, d) for t, d in zip(tensors, devices, strict=True)]
        call = functools.partial(getattr(self._placement.api(len(devices)), name), on_device, *args)
        return self._finish(call, placed_call, devices, options)

    def _finish(
        self,
        call: Callable[..., Any],
        placed_call: PlacedCall,
        devices: list[torch.device],
        options: Any,
    ) -> Any:
        out = options.pop("out", None)
        if out is not None:
            targets = [placed_call.to_device(t, d) for t, d in zip(out, devices, strict=True)]
            options["out"] = targets

        def done(result: Any) -> Any:
            placed_call.copy_back()
            if out is not None:
                assert all(g is t for g, t in zip(result, targets, strict=True))
                return out
            return None if result is None else to_cpu(result, devices)

        result = call(**options)
        return PlacedWork(result, done) if options.get("async_op") else done(result)

    def scatter(self, tensor: Any, devices: Any, **options: Any) -> Any:
        placements = self._placement.devices(len(pc.devices(devices)))
        placed_call = PlacedCall()
        call = self._placement.bound("scatter", len(placements))
        source = placed_call.to_device(tensor, placements[0])
        return self._finish(functools.partial(call, source), placed_call, placements, options)

    def gather(self, tensors: Any, device: Any = None, *, dim: int = 0, out: Any = None) -> Tensor:
        placed_call, devices = PlacedCall(), self._placement.devices(len(tensors))
        on_device = [placed_call.to_device(t, d) for t, d in zip(tensors, devices, strict=True)]
        target = None if out is None else placed_call.to_device(out, devices[0])
        result = self._placement.api(len(devices)).gather(on_device, device, dim=dim, out=target)
        placed_call.copy_back()
        if out is not None:
            assert result is target
            return out
        return to_cpu([result], [torch.device(device) if device else devices[0]])[0]

    def replicate(self, tensors: Any, devices: Any) -> list[list[Tensor]]:
        placements = self._placement.devices(len(pc.devices(devices)))
        placed_call = PlacedCall()
        on_device = placed_call.to_device(list(tensors), placements[0])
        copies = self._placement.bound("replicate", len(placements))(on_device)
        placed_call.copy_back()
        flat = [copy for mine in copies for copy in mine]
        to_cpu(flat, [d for d in placements for _ in tensors])
        return [to_cpu(mine, [d] * len(mine)) for mine, d in zip(copies, placements, strict=True)]

    def copy_(self, dst: Tensor, src: Tensor, *, async_op: bool = False) -> Any:
        placed_call, (home, other) = PlacedCall(), self._placement.devices(2)
        call = functools.partial(
            self._placement.api(2).copy_,
            placed_call.to_device(dst, other),
            placed_call.to_device(src, home),
        )
        return self._finish(call, placed_call, [], {"async_op": True} if async_op else {})


def to_cpu(result: list[Tensor], devices: list[torch.device]) -> list[Tensor]:
    """Copy results to the CPU; assert that they are on their devices and share no memory."""
    assert [g.device for g in result] == devices
    filled = [g for g in result if g.numel()]
    assert len({g.untyped_storage().data_ptr() for g in filled}) == len(filled), "memory is shared"
    return [g.cpu() for g in result]
