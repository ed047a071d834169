"""How GPUs are connected, asked of NVIDIA's management library if it is there.

The library comes with the driver; it is opened by name, so nothing links to it, and whatever it
does not know, or refuses to tell, is None.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAME = "libnvidia-ml.so.1"
_SUCCESS = 0
_NVLINK_CAPABILITY = 2  # NVML_P2P_CAPS_INDEX_NVLINK
_MOST_NVLINKS = 36  # more than any GPU has; asking for one that it does not have is an error
# nvmlGpuTopologyLevel_t: the closest that two GPUs have in common.
_ANCESTORS = {
    0: "PCIe, on one board",
    10: "PCIe, one switch",
    20: "PCIe, several switches",
    30: "PCIe, one host bridge",
    40: "PCIe, one NUMA node",
    50: "PCIe, between sockets",
}


class Nvml:
    """One session; devices are named by UUID, as torch has it: without "GPU-" in front."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._handles: dict[str, ctypes.c_void_p | None] = {}

    def driver(self) -> str | None:
        """Return the driver's version, such as "580.95.05"."""
        text = ctypes.create_string_buffer(80)  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE
        asked = self._ask("nvmlSystemGetDriverVersion", text, ctypes.c_uint(len(text)))
        return text.value.decode() if asked else None

    def link(self, one: str, other: str) -> str | None:
        """Return the kind of link between two GPUs, the fastest there is."""
        handles = self._handle(one), self._handle(other)
        if None in handles:
            return None
        found = ctypes.c_int(-1)
        nvlink = ctypes.c_int(_NVLINK_CAPABILITY)
        told = self._ask("nvmlDeviceGetP2PStatus", *handles, nvlink, ctypes.byref(found))
        if told and found.value == 0:  # NVML_P2P_STATUS_OK
            return "NVLink"
        if self._ask("nvmlDeviceGetTopologyCommonAncestor", *handles, ctypes.byref(found)):
            return _ANCESTORS.get(found.value)
        return None

    def nvlinks(self, one: str) -> int | None:
        """Return how many NVLinks of a GPU are up."""
        handle = self._handle(one)
        if handle is None:
            return None
        up = ctypes.c_uint(0)
        states = []
        for number in range(_MOST_NVLINKS):
            link = ctypes.c_uint(number)
            if self._ask("nvmlDeviceGetNvLinkState", handle, link, ctypes.byref(up)):
                states.append(up.value)
        return sum(states)

    def _handle(self, uuid: str) -> ctypes.c_void_p | None:
        if uuid not in self._handles:
            handle = ctypes.c_void_p()
            name = f"GPU-{uuid.removeprefix('GPU-')}".encode()
            found = self._ask("nvmlDeviceGetHandleByUUID", name, ctypes.byref(handle))
            self._handles[uuid] = handle if found else None
        return self._handles[uuid]

    def _ask(self, function: str, *arguments: Any) -> bool:
        """Call a function that this library may be too old to have."""
        call = getattr(self._library, function, None)
        return call is not None and call(*arguments) == _SUCCESS


@contextmanager
def session(name: str = NAME) -> Iterator[Nvml | None]:
    """Open the library for a while; None where it is not there or does not work."""
    try:
        library = ctypes.CDLL(name)
        begun = library.nvmlInit_v2() == _SUCCESS
    except (OSError, AttributeError):
        begun = False
    if not begun:
        yield None
        return
    try:
        yield Nvml(library)
    finally:
        library.nvmlShutdown()
