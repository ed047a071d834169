"""Converts arguments of other libraries: DLPack arrays to tensors, and torch's ReduceOp to names.

A tensor shares the array's memory, so that a collective in place changes the caller's array; only a
read-only input is copied. torch.from_dlpack accepts read-only arrays silently and ends the process
on negative strides, so the capsule is inspected here first.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import Any

import torch
import torch.utils.dlpack

from . import _C

_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
# Libraries whose arrays are immutable and may share memory, although their capsules do not say so.
_IMMUTABLE = {"jax", "jaxlib", "mlx", "pyarrow", "tensorflow"}


class _Tensor(ctypes.Structure):
    """DLTensor, of DLPack's C header."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned; its predecessor, DLManagedTensor, begins with the DLTensor."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_ON_GPUS = (2, 13)  # DLPack's kDLCUDA and kDLCUDAManaged
_UNORDERED = -1  # DLPack's stream argument: the exporter orders nothing
_LEGACY_STREAM = 1  # the handle of CUDA's default stream in both protocols


def producer_stream(array: Any) -> int | None:
    """Return CUDA's handle of the stream on which the array's library now uses it.

    None: the array is not on a GPU, or its library does not tell (`__cuda_array_interface__`).
    """
    device = getattr(array, "device", None)
    current: Any = device if hasattr(device, "__enter__") else nullcontext()  # CuPy's is a context
    with current:
        interface = getattr(array, "__cuda_array_interface__", None)
    return interface.get("stream") if isinstance(interface, dict) else None


def _captures(index: int) -> bool:
    """Return whether the device's current stream is in the capture of a CUDA graph.

    An exporter must not order it: the stream would wait for work outside of the capture.
    """
    with torch.cuda.device(index):
        return torch.cuda.is_current_stream_capturing()


def _capsule(array: Any, producer: int | None) -> object:
    kind, index = array.__dlpack_device__() if hasattr(array, "__dlpack_device__") else (1, 0)
    stream: dict[str, int] = {}
    if kind in _ON_GPUS:
        # The call itself orders a stream that is known, and before that, nothing uses the memory.
        known = producer is not None or _captures(index)
        ours = _UNORDERED if known else torch.cuda.current_stream(index).cuda_stream
        stream = {"stream": ours or _LEGACY_STREAM}
    try:
        return array.__dlpack__(max_version=(1, 0), **stream)
    except TypeError:  # an exporter older than DLPack 1.0, without versions and flags
        return array.__dlpack__(**stream)


def _inspect(capsule: object) -> tuple[bool, list[int]]:
    """Return whether the array is read-only, and its strides in elements ([] for C order)."""
    name = b"dltensor_versioned" if "dltensor_versioned" in repr(capsule) else b"dltensor"
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype = ctypes.c_void_p
    pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    address = pointer(capsule, name)
    if name == b"dltensor":
        tensor, flags = _Tensor.from_address(address), 0
    else:
        managed = _Versioned.from_address(address)
        tensor, flags = managed.tensor, managed.flags
    strides = tensor.strides[: tensor.ndim] if tensor.strides else []
    return bool(flags & _READ_ONLY), list(strides)


def as_tensor(array: Any, written: bool, where: str, producer: int | None = None) -> torch.Tensor:
    """Return a tensor that shares the array's memory, or a copy of a read-only input.

    ``written``: the collective writes to it. ``where``: its name in messages. ``producer``: the
    result of `producer_stream`; the collective is ordered with that stream. Without it, the array's
    library orders its work before torch's current stream. Raises TypeError for an object that is
    neither a tensor nor exports DLPack, and ValueError for a read-only array if ``written``, or one
    of a library whose arrays are immutable (JAX), and for an array that cannot be shared.
    """
    if isinstance(array, torch.Tensor):
        return array
    if not hasattr(array, "__dlpack__"):
        kind = type(array).__name__
        raise TypeError(
            f"{where} is a {kind}; pass a torch.Tensor or an array with __dlpack__ (NumPy, CuPy)"
        )
    owners = {base.__module__.partition(".")[0] for base in type(array).__mro__} & _IMMUTABLE
    if written and owners:
        raise ValueError(
            f"{where} is a {type(array).__name__} of {min(owners)}, whose arrays are immutable, "
            "and would be written; pass a copy as a tensor or a NumPy array"
        )
    flags = getattr(array, "flags", None)  # NumPy's; its capsules have the flag only since 2.1
    read_only = getattr(flags, "writeable", True) is False
    try:
        if read_only and not written:
            _C.drain()  # earlier asynchronous calls may write the array's memory
            array = array.copy()  # torch rejects its capsule; an input may be a copy
        capsule = None if read_only and written else _capsule(array, producer)
        marked, strides = _inspect(capsule) if capsule is not None else (True, [])
        if written and (read_only or marked):
            raise ValueError(f"{where} is a read-only array and would be written; pass .copy()")
        if any(stride < 0 for stride in strides):
            raise ValueError(f"{where} has negative strides, {strides}; pass .copy()")
        return torch.utils.dlpack.from_dlpack(capsule)
    except (BufferError, RuntimeError, TypeError) as error:
        raise ValueError(f"{where} cannot be shared through DLPack: {error}") from error


def op_name(op: object, call: str) -> str:
    """Return pycollect's name of a torch.distributed.ReduceOp; raise TypeError for other types.

    >>> op_name(torch.distributed.ReduceOp.PRODUCT, "all_reduce")
    'prod'
    """
    name = getattr(getattr(op, "op", op), "name", None)  # torch wraps its enum in a class
    if not isinstance(name, str):
        kind = type(op).__name__
        raise TypeError(
            f"{call}: op is a {kind}; pass a name such as 'sum' or a torch.distributed.ReduceOp"
        )
    return "prod" if name == "PRODUCT" else name.lower()
