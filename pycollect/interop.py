"""What is not a torch tensor and yet may stand where one does: anything that speaks DLPack.

The memory is shared, never copied, so that a collective in place changes the caller's own array.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY


class _Version(ctypes.Structure):
    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32))


class _Versioned(ctypes.Structure):
    """The head of DLManagedTensorVersioned: all that is needed to reach its flags."""

    _fields_ = (
        ("version", _Version),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )


def _flags(capsule: object) -> int:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype = ctypes.c_void_p
    pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    address = pointer(capsule, b"dltensor_versioned")
    return int(_Versioned.from_address(address or 0).flags)


def _is_read_only(array: Any) -> bool:
    """Tell whether writing to the array is forbidden, from whichever protocol says so."""
    for name in ("__array_interface__", "__cuda_array_interface__"):
        interface = getattr(array, name, None)
        if isinstance(interface, dict) and interface.get("data") is not None:
            return bool(interface["data"][1])
    try:
        capsule = array.__dlpack__(max_version=(1, 0))
    except TypeError:  # an exporter from before flags: what it exports may be written
        return False
    return "dltensor_versioned" in repr(capsule) and bool(_flags(capsule) & _READ_ONLY)


def as_tensor(array: Any, written: bool, where: str) -> torch.Tensor:
    """Return a tensor over the array's own memory.

    ``written`` says that the collective will write to it; ``where`` names the argument in messages.
    Raises TypeError for what is neither a tensor nor speaks DLPack, ValueError for a read-only array
    that would be written and for an array that cannot be shared.
    """
    if isinstance(array, torch.Tensor):
        return array
    if not hasattr(array, "__dlpack__"):
        kind = type(array).__name__
        raise TypeError(
            f"{where} is a {kind}; pass a torch.Tensor or an array with __dlpack__ (NumPy, CuPy)"
        )
    read_only = _is_read_only(array)
    if read_only and written:
        raise ValueError(f"{where} is a read-only array and would be written; pass .copy()")
    if read_only:  # torch would refuse it, or warn; nothing writes to the copy of a view
        array = array.copy() if hasattr(array, "copy") else array
    try:
        return torch.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError) as error:
        raise ValueError(f"{where} cannot be shared through DLPack: {error}") from error


def op_name(op: object, call: str) -> str:
    """Return pycollect's name of a torch.distributed.ReduceOp.

    >>> op_name(torch.distributed.ReduceOp.SUM, "all_reduce")
    'sum'
    """
    name = getattr(op, "name", None)
    if name is None and type(op).__name__ == "ReduceOp":  # torch wraps its enum in a class
        name = getattr(getattr(op, "op", None), "name", None)
    if not isinstance(name, str):
        kind = type(op).__name__
        raise TypeError(
            f"{call}: op is a {kind}; pass a name such as 'sum' or a torch.distributed.ReduceOp"
        )
    return {"PRODUCT": "prod"}.get(name, name.lower())
