"""Queries NVIDIA's management library (NVML) for the driver's version and the links of GPUs.

The library is part of the driver and is opened by name, without linking. A query that it does not
have, or that fails, returns None.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SUCCESS = 0
_NVLINK_CAPABILITY = 2  # NVML_P2P_CAPS_INDEX_NVLINK
_MOST_NVLINKS = 36  # more than any GPU has; a query for a missing one fails
# nvmlGpuTopologyLevel_t: the closest common ancestor of two GPUs.
_ANCESTORS = {
    0: "PCIe, on one board",
    10: "PCIe, one switch",
    20: "PCIe, several switches",
    30: "PCIe, one host bridge",
    40: "PCIe, one NUMA node",
    50: "PCIe, between sockets",
}


class Nvml:
    """A session of the library. GPUs are named by UUID as in torch, without the prefix "GPU-"."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def driver(self) -> str | None:
        """Return the driver's version, such as "580.95.05"."""
        text = ctypes.create_string_buffer(80)  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE
        ok = self._query("nvmlSystemGetDriverVersion", text, ctypes.c_uint(len(text)))
        return text.value.decode() if ok else None

    def link(self, one: str, other: str) -> str | None:
        """Return the fastest kind of link between two GPUs."""
        handles = self._handle(one), self._handle(other)
        found = ctypes.c_int(-1)
        nvlink = ctypes.c_int(_NVLINK_CAPABILITY)
        ok = self._query("nvmlDeviceGetP2PStatus", *handles, nvlink, ctypes.byref(found))
        if ok and found.value == 0:  # NVML_P2P_STATUS_OK
            return "NVLink"
        if self._query("nvmlDeviceGetTopologyCommonAncestor", *handles, ctypes.byref(found)):
            return _ANCESTORS.get(found.value)
        return None

    def nvlinks(self, one: str) -> int | None:
        """Return the number of NVLinks of a GPU that are up."""
        handle = self._handle(one)
        if handle is None:
            return None
        up = ctypes.c_uint(0)
        links = map(ctypes.c_uint, range(_MOST_NVLINKS))
        state = "nvmlDeviceGetNvLinkState", handle
        return sum(up.value for link in links if self._query(*state, link, ctypes.byref(up)))

    def _handle(self, uuid: str) -> ctypes.c_void_p | None:
        handle = ctypes.c_void_p()
        name = f"GPU-{uuid.removeprefix('GPU-')}".encode()
        found = self._query("nvmlDeviceGetHandleByUUID", name, ctypes.byref(handle))
        return handle if found else None

    def _query(self, function: str, *arguments: Any) -> bool:
        """Call a function; return False if it fails or is missing, as in an old library.

        Also returns False if an argument is None, the handle of an unknown GPU.
        """
        call = getattr(self._library, function, None)
        return call is not None and None not in arguments and call(*arguments) == _SUCCESS


@contextmanager
def session(name: str = "libnvidia-ml.so.1") -> Iterator[Nvml | None]:
    """Open the library in this context; yield None if it is missing or does not work."""
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
