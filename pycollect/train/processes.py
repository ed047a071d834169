"""Runs with one process per rank: under torchrun, or started from here for a comparison.

An error comes out once: who fails first says so in the store that all processes share, and those
that fail after it, because it is gone, stay silent.
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
from . import checkpoint, history
from .config import Config
from .entrant import Entrant
from .interrupt import Together
from .job import Job
from .log import Log
from .report import Report
from .step_clock import wait_for
from .trainer import enter, run, train_epochs

T = TypeVar("T")
# torch's stubs leave out what these two modules export.
_dist: Any = dist
_mp: Any = mp

# What torchrun sets in every process it starts.
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FAILED = "pycollect.train/failed"
_PREPARED = "pycollect.train/prepared"
# A download by rank 0 may take long, and the others wait for it.
_PATIENCE = timedelta(hours=1)


@dataclass
class Family:
    """The processes of a run, as one of them sees it; without a store there is only this one."""

    rank: int = 0
    world: int = 1
    store: Any = None
    _first: bool | None = None

    def first_to_fail(self) -> bool:
        """Note that this process fails, and tell whether it is the first."""
        if self._first is None:
            try:
                self._first = self.store is None or int(self.store.add(_FAILED, 1)) == 1
            except RuntimeError:  # who kept the store is gone, so it has failed before
                self._first = False
        return self._first

    def after_rank_0(self, make: Callable[[], T]) -> T:
        """Call a function on rank 0, which may download something, and then on all others."""
        if self.store is None:
            return make()
        if self.rank:
            self.store.wait([_PREPARED], _PATIENCE)
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
    """Tell whether torchrun, or something like it, has started this process."""
    return all(variable in os.environ for variable in _VARIABLES)


def rank_of_this_process() -> int:
    """Give the rank that torchrun gave, 0 without it."""
    given = os.environ.get("RANK", "0")
    return int(given) if given.isdecimal() else 0  # `check_backend` refuses what is no number


def check_backend(backend: str | None) -> None:
    """Raise ValueError unless the processes that there are and the backend fit together."""
    for variable in ("RANK", "WORLD_SIZE", "MASTER_PORT") if under_torchrun() else ():
        value = os.environ[variable]
        if not value.isdecimal():
            raise ValueError(
                f"{variable} must be a whole number, as torchrun sets it, not {value!r}"
            )
    if backend is None and under_torchrun() and os.environ["WORLD_SIZE"] != "1":
        raise ValueError(
            f"torchrun has started {os.environ['WORLD_SIZE']} processes: say how they talk, with "
            "--backend pycollect, gloo or nccl"
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
            raise ValueError(f"torch has no backend {plain!r} here; there are pycollect and gloo")


def devices_of(spec: Any, backend: str, world: int) -> list[torch.device]:
    """Give every rank's device, those of one host over and over again; the usual is the backend's.

    >>> devices_of(None, "gloo", 2)
    [device(type='cpu'), device(type='cpu')]
    """
    if spec is None and backend != "nccl":
        return [torch.device("cpu")] * world
    found = pc.devices(spec)
    if world % len(found):
        raise ValueError(
            f"there are {world} processes for {len(found)} devices; start one for each, or name one"
        )
    return found * (world // len(found))


def torchrun_family(backend: str | None) -> Family:
    """Meet the other processes that torchrun has started; without a backend there are none."""
    if backend is None:
        return Family()
    store, rank, world = next(iter(_dist.rendezvous("env://")))
    return Family(rank, world, store)


def with_devices(config: Config, backend: str, world: int) -> Config:
    """Name a device for every process."""
    if config.num_gpus is not None:
        raise ValueError("the number of processes is the number of ranks; leave out --num-gpus")
    return replace(config, devices=devices_of(config.devices, backend, world))


def join(backend: str, family: Family) -> None:
    """Become a rank of the process group of all."""
    assert family.store is not None
    prefix = _dist.PrefixStore("pycollect.train/group", family.store)
    dist.init_process_group(backend, store=prefix, rank=family.rank, world_size=family.world)


def run_rank(job: Job, family: Family) -> None:
    """Train as one rank of several processes; rank 0 prints and writes."""
    assert job.backend is not None
    join(job.backend, family)
    if family.rank:
        job = replace(job, config=replace(job.config, log=None, plot=None))
    own = job.settings.devices[family.rank]
    together = Together(family.store, family.rank, family.world, lambda: wait_for([own]))
    run(job, Report(quiet=family.rank != 0), together)
    dist.destroy_process_group()


def run_spawned(job: Job, backend: str, report: Report) -> Entrant:
    """Train with one process per rank, started here on shares of this process's threads.

    Raises ValueError if data or model cannot be handed to another process.
    """
    world = len(job.settings.devices)
    threads = max(1, torch.get_num_threads() // world)
    with tempfile.TemporaryDirectory() as folder:
        config = replace(job.config, checkpoint=Path(folder) / "run.pt", log=None, plot=None)
        config = replace(config, overlap=None, exact_times=True)  # DDP overlaps by itself
        job = replace(job, backend=backend, config=config)
        try:
            pickle.dumps(job)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"ddp runs in processes of its own, and data or model cannot be sent there: {error}"
            ) from error
        _spawn((job, folder, world, threads, report), world)
        state = checkpoint.load(Path(folder) / "run.pt")["contestant"]
    steps, epochs = history.restored(state)
    model = state["trainee"]["replicas"]["model"]
    # As a module lists its parameters; tensors that are tied are listed once.
    named = [name for name, _ in job.module.named_parameters()]
    return Entrant("ddp", epochs, steps, [[model[name] for name in named]])


def _spawn(arguments: tuple[Any, ...], world: int) -> None:
    """Run the processes to their end; whatever ends this one ends them."""
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


def _spawned(rank: int, job: Job, folder: str, world: int, threads: int, report: Report) -> None:
    # Who started this process ends it, even by its own death; torch's SIGINT would not be heard.
    _mp._prctl_pr_set_pdeathsig(signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it died before, of which no signal tells
        return
    torch.set_num_threads(threads)
    family = Family(rank, world, _dist.FileStore(str(Path(folder) / "store"), world))
    assert job.backend is not None
    join(job.backend, family)
    quiet = replace(report, quiet=report.quiet or rank != 0)
    with Log(None) as log, job.repeatable():
        train_epochs(job, enter(job, "ddp", log), quiet, suffix=" (ddp)")
    dist.destroy_process_group()
    # DistributedDataParallel keeps the group all the same. A thread of gloo's that lets go of its
    # last tensor while the interpreter ends aborts the process, so this one ends without that.
    os._exit(0)
