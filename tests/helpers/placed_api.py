"""Calls of pycollect on the devices of a placement of sites.py, with CPU tensors for arguments.

A PlacedApi stands for the `pycollect` module: it moves the tensors of a call to the devices, makes
the call there, and copies all memory back, including the memory around views.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from reference import as_bits, viewed_as, whole_memory
from sites import Placement
from torch import Tensor

import pycollect as pc


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

    def tree_sum(self, tensors: Any, **options: Any) -> Tensor:
        placed_call, (device, *_) = PlacedCall(), self._placement.devices(len(tensors))
        result = pc.tree_sum(placed_call.to_device(list(tensors), device), **options)
        placed_call.copy_back()
        return to_cpu([result], [device])[0]

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
