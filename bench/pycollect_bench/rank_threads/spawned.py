"""The peer of ranks as threads: a world of processes, started for one program and ended with it.

`torch.multiprocessing.spawn` starts them, as most tests of distributed programs do. The ranks
divide the cores among their threads.
"""

from __future__ import annotations

import datetime
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pycollect._command import interrupts_kept_from_children

# torch has no type annotations for these.
_spawn: Any = vars(torch.multiprocessing)["spawn"]
_RankErrors: tuple[Any, ...] = tuple(
    vars(torch.multiprocessing)[name]
    for name in ("ProcessExitedException", "ProcessRaisedException")
)
# A program of all ranks: it is called with the rank, the world and the rank's device.
Program = Callable[[int, int, torch.device], object]
# Timeout of a collective in seconds, and of a whole program, most of which is the start.
_CALL_SECONDS, _PROGRAM_SECONDS = 60.0, 180.0
# Seconds between two looks at the clock while processes run.
_POLL_SECONDS = 1.0


def _run_rank(
    rank: int,
    program: Program,
    world: int,
    backend: str,
    device: torch.device,
    store: str,
    threads: int,
) -> None:
    import pycollect  # noqa: F401  # registers the backend

    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=_CALL_SECONDS),
    )
    program(rank, world, device)
    # A DDP module is part of a reference cycle, and keeps its group alive. gloo aborts a process
    # that still has a group when the interpreter ends.
    gc.collect()
    dist.destroy_process_group()


@contextmanager
def started(program: Program, world: int, backend: str, device: torch.device) -> Iterator[Any]:
    """Start the processes, yield their torch.multiprocessing context, and wait for their end.

    Raises:
        RuntimeError: if a rank fails, or the ranks do not end.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // world)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (program, world, backend, device, str(Path(folder, "store")), threads)
        with interrupts_kept_from_children(by_multiprocessing=True):
            context = _spawn(_run_rank, arguments, world, join=False, daemon=True)
        try:
            yield context
            _join(context)
        finally:
            for process in context.processes:
                process.kill()
                process.join()


def _join(context: Any) -> None:
    deadline = time.monotonic() + _PROGRAM_SECONDS
    try:
        while not context.join(_POLL_SECONDS):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the ranks did not end within {_PROGRAM_SECONDS:g} s")
    except _RankErrors as error:
        # The last line of a rank's traceback is its error.
        last = str(error).strip().splitlines()[-1]
        raise RuntimeError(f"rank {error.error_index}: {last}") from None


def run(program: Program, world: int, backend: str, device: torch.device) -> None:
    """Run the program in new processes, and return when they have ended.

    Raises:
        RuntimeError: if a rank fails, or the ranks do not end.
    """
    with started(program, world, backend, device):
        pass
