"""The ways in which processes exchange CUDA tensors, for tests that run on each of them."""

from __future__ import annotations

RUNGS = ("stream", "host")


def on_rung(name: str) -> tuple[tuple[str, str], ...]:
    """The environment of ranks that are to take this one."""
    return (("PYCOLLECT_CUDA_SYNC", name),)
