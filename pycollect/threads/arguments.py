"""The checks of the arguments of a launch."""

from __future__ import annotations

import datetime
from typing import Any

import torch

from ..errors import shown


def seconds_of(timeout: float | datetime.timedelta) -> float:
    if isinstance(timeout, datetime.timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"launch: timeout is a {type(timeout).__name__}; pass seconds, or None")
    if timeout < 0:
        raise ValueError(f"launch: timeout is {timeout}; it must not be negative")
    return timeout


def devices_of(device: Any, world: int) -> list[torch.device | None]:
    if device is None or isinstance(device, (str, int, torch.device)):
        device = [device] * world
    devices = [None if d is None else _device_of(d) for d in device]
    if len(devices) != world:
        raise ValueError(f"launch: {len(devices)} devices for {world} ranks; pass one for each")
    return devices


def _device_of(given: Any) -> torch.device:
    try:
        found = torch.device(given)
    except RuntimeError as error:
        raise ValueError(
            f"launch: device is {shown(given)}; torch has no such device: {error}"
        ) from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"launch: device is '{found}'; pass None, 'cpu' or a GPU ('cuda:0')")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"launch: device is '{found}', and torch finds no GPU here")
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found
