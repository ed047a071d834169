"""Runs with one process per rank: under torchrun, or spawned by a comparison.

An error is printed once: the first process to fail records this in the shared store, and processes
that fail afterwards, for example because that process is gone, print nothing.
"""

import multiprocessing
import os
import pickle
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import pycollect as pc

from .._command import interrupts_kept_from_children
from . import checkpoint, records
from .interrupt import StopConsensus
from .module_replication import replicate_module
from .options import Options
from .output import ProgressPrinter
from .prepared_run import PreparedRun
from .records import RunResult, wait_for
from .training_run import run

T = TypeVar("T")
# torch's type stubs lack the exports of these two modules.
_dist: Any = dist
_mp: Any = mp

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
    if backend is not None:
        check_available(backend)


def check_available(backend: str) -> None:
    """Raise ValueError unless torch has the backend, or all of "cpu:gloo,cuda:nccl"."""
    for name in backend.split(","):
        plain = name.rpartition(":")[2]
        if not dist.is_backend_available(plain):
            raise ValueError(f"torch has no backend {plain!r} here; choose pycollect, gloo or nccl")


def devices_of(spec: Any, backend: str, world: int) -> list[torch.device]:
    """Return every rank's device, those of one host repeated; the default depends on the backend.

    >>> devices_of(None, "gloo", 2)
    [device(type='cpu'), device(type='cpu')]
    """
    if spec is None and backend != "nccl":
        return [torch.device("cpu")] * world
    found = pc.devices(spec)
    if world % len(found):
        raise ValueError(
            f"there are {world} processes for {len(found)} devices; "
            "start one per device, or name one"
        )
    return found * (world // len(found))


def torchrun_context(backend: str | None) -> LaunchContext:
    """Return the launch context after torchrun's rendezvous; without a backend one process."""
    if backend is None:
        return LaunchContext()
    store, rank, world = next(iter(_dist.rendezvous("env://")))
    return LaunchContext(rank, world, store)


def with_devices(asked: Options, backend: str, world: int) -> Options:
    """Return the options with one device per process."""
    if asked.num_gpus is not None:
        raise ValueError("the number of processes is the number of ranks; leave out --num-gpus")
    return replace(asked, devices=tuple(devices_of(asked.devices, backend, world)))


def join(backend: str, launch_context: LaunchContext) -> None:
    """Initialise the default process group over all processes of the launch context."""
    assert launch_context.store is not None
    prefix = _dist.PrefixStore("pycollect.train/group", launch_context.store)
    dist.init_process_group(
        backend, store=prefix, rank=launch_context.rank, world_size=launch_context.world
    )


def run_rank(
    prepared: PreparedRun, launch_context: LaunchContext, printer: ProgressPrinter
) -> None:
    """Train as one rank of several processes; only rank 0 prints and writes files."""
    assert prepared.backend is not None
    own = prepared.options.devices[launch_context.rank]
    if own.type == "cuda":
        torch.cuda.set_device(own)  # NCCL sends objects by the current device
    join(prepared.backend, launch_context)
    if launch_context.rank:
        prepared = replace(prepared, options=replace(prepared.options, log=None, plot=None))
        printer = ProgressPrinter(quiet=True)
    consensus = StopConsensus(
        launch_context.store, launch_context.rank, launch_context.world, lambda: wait_for([own])
    )
    run(prepared, printer, consensus)
    dist.destroy_process_group()


def run_spawned(prepared: PreparedRun, backend: str, printer: ProgressPrinter) -> RunResult:
    """Train with one spawned process per rank, each with a share of this process's threads.

    The result has the model of rank 0. Raises ValueError if data or model cannot be pickled for
    another process.
    """
    world = len(prepared.options.devices)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asked = replace(prepared.options, checkpoint=folder / "run.pt", log=None)
        try:  # a file: passed as arguments, the caller's tensors would become shared memory
            torch.save(replace(prepared, backend=backend, options=asked), folder / "prepared")
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"processes are spawned, for which data or model cannot be pickled: {error}"
            ) from error
        threads = max(1, torch.get_num_threads() // world)
        _spawn((name, world, threads, printer), world)
        state = checkpoint.load(folder / "run.pt")["run"]
    steps, epochs = records.restored(state)
    (module,) = replicate_module(prepared.module, [next(prepared.module.parameters()).device])
    module.load_state_dict(state["engine"]["replicas"]["model"])
    return RunResult("processes", prepared.options, epochs, steps, [module])


def _spawn(arguments: tuple[Any, ...], world: int) -> None:
    """Run the processes to their end; kill them if this function is left early."""
    processes: list[Any] = []
    try:
        with interrupts_kept_from_children(by_multiprocessing=True):
            context = _mp.start_processes(
                _spawned, arguments, nprocs=world, join=False, daemon=True, start_method="spawn"
            )
            processes = context.processes
        while not context.join():
            pass
    finally:
        for process in processes:
            process.kill()


def _spawned(rank: int, folder: str, world: int, threads: int, printer: ProgressPrinter) -> None:
    # Kill this process when its parent dies; torch's own choice, SIGINT, is blocked here.
    _mp._prctl_pr_set_pdeathsig(signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it died before prctl: no signal will come
        return
    torch.set_num_threads(threads)
    prepared: PreparedRun = torch.load(Path(folder) / "prepared", weights_only=False)
    launch_context = LaunchContext(rank, world, _dist.FileStore(str(Path(folder) / "store"), world))
    run_rank(prepared, launch_context, printer)
    # A gloo thread that releases its last tensor during interpreter shutdown aborts the process, so
    # skip the shutdown.
    os._exit(0)
