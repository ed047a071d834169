"""The process of one rank of a pool: its start, its job loop, and the context given to jobs."""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import os
import signal
import time
import traceback
from typing import Any

import devices
import torch
import torch.distributed as dist
from sites import BACKEND, HOSTS, ON_HOSTS, OURS, THREADS  # noqa: F401

OLD_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)  # lacks some features


@dataclasses.dataclass(frozen=True)
class Spec:
    """Start options of a pool's processes; pools are cached by it."""

    world: int
    backend: str = BACKEND
    timeout: float = 60.0  # seconds, of the process group
    environ: tuple[tuple[str, str], ...] = ()
    second_backend: str | None = None  # of a second group of the same ranks, for comparison
    group: bool = True  # False: the job creates the default group itself
    site: str = ""  # site of the tensors (sites.py); "" is host memory
    ranks_as: str = "processes"  # or "threads", or "hosts": processes placed by ON_HOSTS
    parallel: bool = False  # ranks that are threads run at once, instead of taking turns
    buffer_bytes: int = 0  # of the group's buffers; 0: the default
    placement: str = ""  # a letter per rank: ranks with equal letters are on one host; "": all are

    @property
    def takes_turns(self) -> bool:
        return self.ranks_as == THREADS and not self.parallel

    @property
    def host_of(self) -> str:
        """The placement; empty if all ranks are on this host."""
        return self.placement or (ON_HOSTS[self.world] if self.ranks_as == HOSTS else "")


@dataclasses.dataclass(frozen=True)
class RankContext:
    """Context of the rank on which a job runs; the first argument of every job."""

    rank: int
    spec: Spec
    folder: str  # the pool's folder, shared by all ranks
    second_group: Any = None  # the group of Spec.second_backend
    site: Any = devices.HOST

    @property
    def world(self) -> int:
        return self.spec.world

    @property
    def fake(self) -> Any:
        """The emulated devices of the site, or None."""
        return self.site.fake

    def start(self, name: str, site: Any = None, **options: Any) -> Any:
        """Initialise the default group on a new site, and return the site."""
        site = site or devices.of(self.spec.site)
        self.init(name, pg_options=site.options, **options)
        return site

    def be_late(self, seconds: float) -> None:
        """Let the other ranks go first. Threads take turns, so sleeping would stop all of them."""
        if not self.spec.takes_turns:
            time.sleep(seconds)

    def with_groups(self) -> RankContext:
        """Initialise the default group and the second group of the spec."""
        options = self.site.options
        if self.spec.buffer_bytes:
            from pycollect.distributed import options as with_options  # late: loads the extension

            options = with_options(buffer_bytes=self.spec.buffer_bytes)
        self.init("store", pg_options=options)
        if not self.spec.second_backend:
            return self
        second_group = dist.new_group(backend=self.spec.second_backend)
        return dataclasses.replace(self, second_group=second_group)

    def init(self, name: str, **options: Any) -> None:
        """Initialise the default group, with a file of this name as its store."""
        options.setdefault("timeout", datetime.timedelta(seconds=self.spec.timeout))
        dist.init_process_group(
            self.spec.backend,
            init_method=f"file://{self.folder}/{name}",
            rank=self.rank,
            world_size=self.world,
            **options,
        )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of one rank's job."""

    value: Any = None
    error: str = ""  # the traceback, or how the process ended
    died: bool = False


def serve(rank: int, spec: Spec, pipe: Any, folder: str) -> None:
    log = os.open(f"{folder}/rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    os.set_inheritable(pipe.fileno(), False)  # a rank that calls exec counts as dead
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ.update(dict(spec.environ), OMP_NUM_THREADS="1")
    if spec.host_of:
        os.environ["PYCOLLECT_HOST"] = spec.host_of[rank]
    torch.set_num_threads(1)
    me = RankContext(rank, spec, folder)
    while True:
        try:
            job, args = pipe.recv()
        except EOFError:
            os._exit(0)  # the test process has ended
        try:
            if job is begin:
                me, value = begin(me), None
            else:
                with me.site.as_default_device():
                    value = job(me, *args)
            answer = Outcome(value=value)
        except BaseException:
            answer = Outcome(error=traceback.format_exc())
        pipe.send(answer)


def begin(me: RankContext) -> RankContext:
    if "pycollect" in me.spec.backend:
        import pycollect

        pycollect.log.configure()  # again: the import ran before the environment was set
    me = dataclasses.replace(me, site=devices.of(me.spec.site))
    return me.with_groups() if me.spec.group else me
