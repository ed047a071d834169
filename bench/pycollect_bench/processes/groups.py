"""The process groups of the candidates, each over all ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

OURS, ZERO_COPY = "pycollect", "zero-copy"
GLOO, MPI = "gloo", "mpi"


def make_groups(backend: str, timeout: timedelta) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the groups of gloo and of `backend`, or why the latter is missing.

    The default group belongs to gloo, and has its own timeout.
    """
    groups: dict[str, Any] = {GLOO: dist.group.WORLD}
    if not dist.is_backend_available(backend):
        return groups, {OURS: f"torch.distributed has no backend {backend!r}"}
    try:
        return groups | {OURS: dist.new_group(backend=backend, timeout=timeout)}, {}
    except (NotImplementedError, ValueError) as error:
        return groups, {OURS: str(error)}
