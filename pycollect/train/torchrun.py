"""Runs with one process per rank, which torchrun starts.

An error is printed once: the first process to fail records this in the shared store, and processes
that fail afterwards, for example because that process is gone, print nothing.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import pycollect as pc

from .interrupt import StopConsensus
from .options import Options
from .output import ProgressPrinter
from .prepared_run import PreparedRun
from .results import wait_for
from .training_run import run

T = TypeVar("T")
_dist: Any = dist  # torch's type stubs lack exports

# Environment variables that torchrun sets in every process it starts.
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FAILED = "pycollect.train/failed"
_PREPARED = "pycollect.train/prepared"
# Timeout of the other ranks while rank 0 downloads a data set, which may take long.
_DOWNLOAD_TIMEOUT = timedelta(hours=1)


@dataclass
class LaunchContext:
    """Rank, world size and store of a launch; without a store there is one process."""

    rank: int = 0
    world: int = 1
    store: Any = None
    _first: bool | None = None

    def first_to_fail(self) -> bool:
        """Record in the store that this process fails; return whether it is the first."""
        if self._first is None:
            try:
                self._first = self.store is None or int(self.store.add(_FAILED, 1)) == 1
            except RuntimeError:  # the process that hosts the store is gone, so it failed first
                self._first = False
        return self._first

    def after_rank_0(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0, which may download data, and then on all other ranks."""
        if self.store is None:
            return make()
        if self.rank:
            self.store.wait([_PREPARED], _DOWNLOAD_TIMEOUT)
            if self.store.get(_PREPARED) != b"done":
                raise RuntimeError("rank 0 has failed")
            return make()
        try:
            made = make()
        except BaseException:
            self.first_to_fail()
            self.store.set(_PREPARED, "failed")
            raise
        self.store.set(_PREPARED, "done")
        return made


def under_torchrun() -> bool:
    """Return whether torchrun, or a launcher with its variables, has started this process."""
    return all(variable in os.environ for variable in _VARIABLES)


def rank_of_this_process() -> int:
    """Return the rank that torchrun set, 0 without torchrun."""
    given = os.environ.get("RANK", "0")
    return int(given) if given.isdecimal() else 0  # `check_backend` raises for a bad number


def check_backend(backend: str | None) -> None:
    """Raise ValueError unless the backend fits the way in which this process was started."""
    for variable in ("RANK", "WORLD_SIZE", "MASTER_PORT") if under_torchrun() else ():
        value = os.environ[variable]
        if not value.isdecimal():
            raise ValueError(
                f"{variable} must be a whole number, as torchrun sets it, not {value!r}"
            )
    if backend is None and under_torchrun() and os.environ["WORLD_SIZE"] != "1":
        raise ValueError(
            f"torchrun has started {os.environ['WORLD_SIZE']} processes: choose how they "
            "communicate with --backend pycollect, gloo or nccl"
        )
    if backend is not None and not under_torchrun():
        raise ValueError(
            f"--backend {backend} is for one process per rank; start them with "
            f"torchrun --nproc-per-node 2 -m pycollect.train --backend {backend}"
        )
    for name in backend.split(",") if backend is not None else ():  # as in "cpu:gloo,cuda:nccl"
        plain = name.rpartition(":")[2]
        if not dist.is_backend_available(plain):
            raise ValueError(f"torch has no backend {plain!r} here; choose pycollect, gloo or nccl")


def torchrun_context(backend: str | None) -> LaunchContext:
    """Return the launch context after torchrun's rendezvous; without a backend one process."""
    if backend is None:
        return LaunchContext()
    store, rank, world = next(iter(_dist.rendezvous("env://")))
    return LaunchContext(rank, world, store)


def with_devices(asked: Options, backend: str, world: int) -> Options:
    """Return the options with every process's device, those of one host repeated.

    Without devices all are the CPU, but for NCCL the GPUs. Raises ValueError if the devices do not
    divide the processes.

    >>> with_devices(Options(), "gloo", 2).devices
    (device(type='cpu'), device(type='cpu'))
    """
    if asked.num_gpus is not None:
        raise ValueError("the number of processes is the number of ranks; leave out --num-gpus")
    default = None if backend == "nccl" else "cpu"
    found = pc.devices(default if asked.devices is None else asked.devices)
    if world % len(found):
        raise ValueError(
            f"there are {world} processes for {len(found)} devices; "
            "start one per device, or name one"
        )
    return replace(asked, devices=tuple(found * (world // len(found))))


def run_rank(
    prepared: PreparedRun, launch_context: LaunchContext, printer: ProgressPrinter
) -> None:
    """Train as one rank of several processes; only rank 0 prints and writes files."""
    rank, world, store = launch_context.rank, launch_context.world, launch_context.store
    own = prepared.options.devices[rank]
    if own.type == "cuda":
        torch.cuda.set_device(own)  # NCCL sends objects by the current device
    group_store = _dist.PrefixStore("pycollect.train/group", store)
    dist.init_process_group(prepared.backend, store=group_store, rank=rank, world_size=world)
    if rank:
        prepared = replace(prepared, options=replace(prepared.options, log=None, plot=None))
        printer = ProgressPrinter(quiet=True)
    consensus = StopConsensus(store, rank, world, lambda: wait_for([own]))
    run(prepared, printer, consensus)
    dist.destroy_process_group()
