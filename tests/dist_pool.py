"""Processes for the tests of torch.distributed: one a rank, kept alive, told what to run by name.

Importing torch takes seconds, so a pool is forked once and serves many tests. Every command has a
time limit: a hang fails the test within seconds, with the stacks of all ranks, and ends the pool.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import dist_fake
import pytest
import torch
import torch.distributed as dist

BACKEND = os.environ.get("PYCOLLECT_TEST_BACKEND", "pycollect")  # gloo: is the harness right?
OURS = BACKEND == "pycollect"
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)  # what that lacks is named there
SECONDS = 20.0  # that a command may take where the test does not say; usual ones take milliseconds
_DUMP_SECONDS = 0.5  # for the stacks of a hung rank to arrive in its file


@dataclasses.dataclass(frozen=True)
class Spec:
    """How a pool's processes begin."""

    world: int
    backend: str = BACKEND
    timeout: float = 60.0  # of the group, seconds
    environ: tuple[tuple[str, str], ...] = ()
    beside: str | None = "gloo"  # a second group of the same ranks, to compare with
    group: bool = True  # False: the test makes its own
    staged: str = ""  # CPU tensors as if they were on a device that is "late" or "eager"


@dataclasses.dataclass(frozen=True)
class Me:
    """What a job learns of the rank that it runs as."""

    rank: int
    spec: Spec
    folder: str  # of the pool, the same for all ranks
    peer: Any = None  # the group beside
    fake: Any = None  # the devices that are not there

    @property
    def world(self) -> int:
        return self.spec.world

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


def _serve(rank: int, spec: Spec, pipe: Any, folder: str) -> None:
    log = os.open(f"{folder}/rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
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
            if job is _begin:
                me, value = _begin(me), None
            else:
                value = job(me, *args)
            answer = Outcome(value=value)
        except BaseException:
            answer = Outcome(error=traceback.format_exc())
        pipe.send(answer)


def _begin(me: Me) -> Me:
    if "pycollect" in me.spec.backend:
        import pycollect  # noqa: F401
    if not me.spec.group:
        return me
    options, fake = dist_fake.options(me.spec.staged) if me.spec.staged else (None, None)
    me.init("store", pg_options=options)
    peer = dist.new_group(backend=me.spec.beside) if me.spec.beside else None
    return dataclasses.replace(me, peer=peer, fake=fake)


class Pool:
    """The ranks of one world. `run` is for jobs that succeed, `outcomes` for those that may not."""

    _numbers = itertools.count()

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.folder = Path(tempfile.mkdtemp(prefix=f"pool_{next(self._numbers)}_"))
        self.whole = True
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed"])
        pairs = [context.Pipe() for _ in range(spec.world)]
        self.pipes = [ours for ours, _ in pairs]
        self.ranks = [
            context.Process(target=_serve, args=(rank, spec, theirs, str(self.folder)), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for rank in self.ranks:
            rank.start()
        for _, theirs in pairs:
            theirs.close()
        self.run(_begin, seconds=60)

    def run(self, job: Callable[..., Any], *args: Any, seconds: float = SECONDS) -> list[Any]:
        """Every rank's result; fails with the tracebacks of all that failed."""
        outcomes = self.outcomes(job, *args, seconds=seconds)
        errors = [f"rank {r}: {o.error}" for r, o in enumerate(outcomes) if o.error]
        if errors:
            self.close()  # who knows what the others are in
            pytest.fail("\n".join([*errors, *self._logs()]), pytrace=False)
        return [o.value for o in outcomes]

    def outcomes(
        self, job: Callable[..., Any], *args: Any, seconds: float = SECONDS
    ) -> list[Outcome]:
        """What became of every rank. Fails only on a hang."""
        for pipe in self.pipes:
            pipe.send((job, args))
        return self._answers(job.__name__, time.monotonic() + seconds)

    def _answers(self, what: str, deadline: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(self.ranks):
            missing = [r for r in range(len(self.ranks)) if r not in outcomes]
            ready = wait([self.pipes[r] for r in missing], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._hung(what, missing)
            for rank in (r for r in missing if self.pipes[r] in ready):
                try:
                    outcomes[rank] = self.pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    self.ranks[rank].join(5)
                    self.whole = False
                    code = self.ranks[rank].exitcode
                    outcomes[rank] = Outcome(error=f"the process ended: {code}", died=True)
        return [outcomes[r] for r in range(len(self.ranks))]

    def _hung(self, what: str, ranks: list[int]) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(self.ranks[rank].pid, signal.SIGUSR1)
        time.sleep(_DUMP_SECONDS)
        asleep = [f"rank {r} threads in {_kernel(self.ranks[r].pid)}" for r in ranks]
        self.close()
        pytest.fail("\n".join([f"{what}: ranks {ranks} hang", *asleep, *self._logs()]), False)

    def _logs(self) -> list[str]:
        logs = [(r, self.folder / f"rank_{r}.log") for r in range(len(self.ranks))]
        texts = [(r, log.read_text(errors="replace")[-6000:]) for r, log in logs if log.exists()]
        return [f"--- output of rank {r}\n{text}" for r, text in texts if text]

    def pids(self) -> list[int]:
        return [rank.pid or 0 for rank in self.ranks]

    def close(self) -> None:
        """End the processes, however they are."""
        self.whole = False
        for rank in self.ranks:
            if rank.is_alive():
                rank.kill()
        for rank, pipe in zip(self.ranks, self.pipes, strict=True):
            rank.join(5)
            pipe.close()


def _kernel(pid: int | None) -> list[str]:
    names = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(OSError):
            names.append(f"{(task / 'comm').read_text().strip()}:{(task / 'wchan').read_text()}")
    return names


class Pools:
    """One pool for each spec, made when it is first asked for, and again after it broke."""

    def __init__(self, **always: Any) -> None:
        self._always = always
        self.made: dict[Spec, Pool] = {}

    def __call__(self, world: int, **spec: Any) -> Pool:
        key = Spec(world, **(self._always | spec))
        if key not in self.made or not self.made[key].whole:
            self.made[key] = Pool(key)
        return self.made[key]

    def close(self) -> None:
        for pool in self.made.values():
            pool.close()


@dataclasses.dataclass(frozen=True)
class Caught:
    """What a call raised: the names of its type and of those it derives from; none: nothing."""

    kinds: tuple[str, ...]
    text: str
    when: float  # seconds, on a clock that all processes of a host share

    @property
    def kind(self) -> str:
        return self.kinds[0] if self.kinds else ""


def caught(call: Callable[..., Any], *args: Any, **options: Any) -> Caught:
    try:
        call(*args, **options)
    except Exception as error:
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        return Caught(kinds, str(error), time.monotonic())
    return Caught((), "", time.monotonic())


def pools_of_a_module(**always: Any) -> Iterator[Pools]:  # what all specs have in common
    """For a fixture."""
    with contextlib.closing(Pools(**always)) as pools:
        yield pools


def shared_files() -> list[str]:  # other programs have theirs there
    """The backend's files in /dev/shm."""
    return sorted(name for name in os.listdir("/dev/shm") if "pycollect" in name)


def backend_of(group: dist.ProcessGroup | None = None) -> Any:
    """The object behind a group, for what torch's front refuses to other names than its own."""
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))


@contextlib.contextmanager
def fresh(world: int, **spec: Any) -> Any:
    """A pool of its own, for jobs that break it."""
    pool = Pool(Spec(world, **{"beside": None, **spec}))
    try:
        yield pool
    finally:
        pool.close()


def own_process(arguments: list[str], seconds: float, **environ: str) -> str:
    """Run a Python program to its end, in a session that a hang is killed with; its output."""
    child = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
    )
    try:
        said, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        said, _ = child.communicate()
        pytest.fail(f"{arguments} hangs\n{said}", pytrace=False)
    assert child.returncode == 0, said
    return said
