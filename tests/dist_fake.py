"""A group's devices that are not there: for pools whose CPU tensors stand for CUDA tensors."""

from __future__ import annotations

from typing import Any

SLAB_BYTES = 1 << 16  # of a rank: 300,000 elements are dozens of pieces


def options(how: str) -> tuple[Any, Any]:
    """Options of a group, and its devices: they do everything "late", or are "eager".

    "late:stream" and so on are of devices whose memory processes can reach, on that rung.
    """
    import pycollect as pc  # not before the process is a rank
    from pycollect import _testing

    pace, rung = (*how.split(":"), "")[:2]
    made = pc.distributed.options(cuda_sync=rung or "best", slab_bytes=SLAB_BYTES)
    return made, _testing.emulate(made, pace == "eager", bool(rung))


def alive(fake: Any) -> dict[str, int]:
    """What the devices have given out and not got back."""
    kept = ("allocated", "opened", "adopted", "streams", "events")
    return {name: n for name, n in fake.gpu.books().items() if name in kept and n != 0}
