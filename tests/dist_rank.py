"""A rank of a pool: what its process does, and what a job learns of where it runs."""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import os
import signal
import traceback
from typing import Any

import dist_site
import torch
import torch.distributed as dist

BACKEND = os.environ.get("PYCOLLECT_TEST_BACKEND", "pycollect")  # gloo: is the harness right?
OURS = BACKEND == "pycollect"
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)  # what that lacks is named there


@dataclasses.dataclass(frozen=True)
class Spec:
    """How a pool's processes begin."""

    world: int
    backend: str = BACKEND
    timeout: float = 60.0  # of the group, seconds
    environ: tuple[tuple[str, str], ...] = ()
    beside: str | None = "gloo"  # a second group of the same ranks, to compare with
    group: bool = True  # False: the test makes its own
    site: str = ""  # where tensors are, if not in host memory (dist_site.py)


@dataclasses.dataclass(frozen=True)
class Me:
    """What a job learns of the rank that it runs as."""

    rank: int
    spec: Spec
    folder: str  # of the pool, the same for all ranks
    peer: Any = None  # the group beside
    site: Any = dist_site.HOST

    @property
    def world(self) -> int:
        return self.spec.world

    @property
    def fake(self) -> Any:
        """The devices that are not there."""
        return self.site.fake

    def start(self, name: str, site: Any = None, **options: Any) -> Any:
        """The default group on a site of its own, which is returned."""
        site = site or dist_site.of(self.spec.site)
        self.init(name, pg_options=site.options, **options)
        return site

    def init(self, name: str, **options: Any) -> None:
        """The default group, met through a file of this name."""
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
    """What became of one rank's job."""

    value: Any = None
    error: str = ""  # the traceback, or how the process ended
    died: bool = False


def serve(rank: int, spec: Spec, pipe: Any, folder: str) -> None:
    log = os.open(f"{folder}/rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    os.set_inheritable(pipe.fileno(), False)  # a rank that becomes another program is gone
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ.update(dict(spec.environ), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    me = Me(rank, spec, folder)
    while True:
        try:
            job, args = pipe.recv()
        except EOFError:
            os._exit(0)  # whoever gave the commands is gone
        try:
            if job is begin:
                me, value = begin(me), None
            else:
                with me.site.here():
                    value = job(me, *args)
            answer = Outcome(value=value)
        except BaseException:
            answer = Outcome(error=traceback.format_exc())
        pipe.send(answer)


def begin(me: Me) -> Me:
    if "pycollect" in me.spec.backend:
        import pycollect

        pycollect.log.configure()  # again: it is loaded already, and the variables are new
    me = dataclasses.replace(me, site=dist_site.of(me.spec.site))
    if not me.spec.group:
        return me
    me.init("store", pg_options=me.site.options)
    peer = dist.new_group(backend=me.spec.beside) if me.spec.beside else None
    return dataclasses.replace(me, peer=peer)
