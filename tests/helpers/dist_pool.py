"""Pools of processes for the torch.distributed tests: one process per rank, reused by many tests.

Importing torch takes seconds, so a pool is forked once; jobs are functions sent by name. Every job
has a time limit: a hang fails the test within seconds with the stacks of the hung ranks, and ends
the pool.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import multiprocessing
import os
import secrets
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from dist_rank import BACKEND, OLD_TORCH, OURS, Outcome, RankContext, Spec, begin, serve  # noqa: F401
from dist_threads import MOST_SECONDS, SECONDS, JobPool, ThreadPool
from sites import is_real

GPU_SECONDS = 180.0  # limit on a GPU, where the first job creates a CUDA context in each process
_DUMP_SECONDS = 0.5  # time for the stacks of a hung rank to arrive in its log file
_ENDED_SECONDS = 0.3  # time for a dead rank to get an exit code; after exec it has none


class Pool(JobPool):
    """The rank processes of a world."""

    _numbers = itertools.count()

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        number = next(self._numbers)
        self._folder = tempfile.TemporaryDirectory(prefix=f"pool_{number}_")
        self.folder = Path(self._folder.name)
        self.usable = True
        context = multiprocessing.get_context("forkserver")
        pairs = [context.Pipe() for _ in range(spec.world)]
        self.pipes = [ours for ours, _ in pairs]
        self.ranks = [
            context.Process(target=serve, args=(rank, spec, theirs, str(self.folder)), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for rank in self.ranks:
            rank.start()
        for _, theirs in pairs:
            theirs.close()
        self.run(begin, seconds=60)

    def begin(self, job: Callable[..., Any], *args: Any) -> None:
        """Start a job and return at once, so that several pools can run jobs in parallel; collect
        with `results` or `collect_outcomes`."""
        self._job = job.__name__
        for pipe in self.pipes:
            pipe.send((job, args))

    def is_over(self) -> bool:
        return all(pipe.poll() for pipe in self.pipes)

    def collect_outcomes(self, seconds: float = 0.0) -> list[Outcome]:
        seconds = seconds or (GPU_SECONDS if is_real(self.spec.site) else SECONDS)
        deadline = time.monotonic() + min(seconds, MOST_SECONDS)
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(self.ranks):
            missing = [r for r in range(len(self.ranks)) if r not in outcomes]
            ready = wait([self.pipes[r] for r in missing], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._hung(missing)
            for rank in (r for r in missing if self.pipes[r] in ready):
                try:
                    outcomes[rank] = self.pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    self.ranks[rank].join(_ENDED_SECONDS)
                    self.usable = False
                    code = self.ranks[rank].exitcode
                    outcomes[rank] = Outcome(error=f"the process ended: {code}", died=True)
        return [outcomes[r] for r in range(len(self.ranks))]

    def _hung(self, ranks: list[int]) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(self.ranks[rank].pid, signal.SIGUSR1)
        time.sleep(_DUMP_SECONDS)
        asleep = [f"rank {r} threads in {_wait_channels(self.ranks[r].pid)}" for r in ranks]
        self._fail([f"{self._job}: ranks {ranks} hang", *asleep])

    def _logs(self) -> list[str]:
        logs = [(r, self.folder / f"rank_{r}.log") for r in range(len(self.ranks))]
        texts = [(r, log.read_text(errors="replace")[-6000:]) for r, log in logs if log.exists()]
        return [f"--- output of rank {r}\n{text}" for r, text in texts if text]

    def pids(self) -> list[int]:
        return [rank.pid or 0 for rank in self.ranks]

    def close(self) -> None:
        """Kill and join the processes, in whatever state they are, and remove the folder."""
        self.usable = False
        for rank in self.ranks:
            if rank.is_alive():
                rank.kill()
        for rank, pipe in zip(self.ranks, self.pipes, strict=True):
            rank.join(5)
            pipe.close()
        self._folder.cleanup()


def _wait_channels(pid: int | None) -> list[str]:
    names = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(OSError):
            names.append(f"{(task / 'comm').read_text().strip()}:{(task / 'wchan').read_text()}")
    return names


def pool_of(spec: Spec) -> JobPool:
    """A new pool of processes, or of threads."""
    return ThreadPool(spec) if spec.ranks_as == "threads" else Pool(spec)


class Pools:
    """One pool per spec, created on first use, and again after a failure ended the pool."""

    def __init__(self, **always: Any) -> None:
        self._always = always
        self.made: dict[Spec, JobPool] = {}

    def __call__(self, world: int, **spec: Any) -> JobPool:
        key = Spec(world, **(self._always | spec))
        if key not in self.made or not self.made[key].usable:
            self.made[key] = pool_of(key)
        return self.made[key]

    @property
    def ranks_as(self) -> str:
        """What the ranks are: a kind of sites.py."""
        return self._always["ranks_as"]  # type: ignore[no-any-return]

    def fresh(self, world: int, **spec: Any) -> Any:
        """A pool of this kind used by one test, for jobs that break the pool."""
        return fresh(world, **(self._always | spec))

    def check_sites(self) -> None:
        """Assert that no emulated device was used in a wrong way."""
        for spec, pool in self.made.items():
            assert not pool.usable or pool.run(_violations) == [[]] * spec.world

    def close(self) -> None:
        for pool in self.made.values():
            pool.close()


@dataclasses.dataclass(frozen=True)
class Caught:
    """An exception of a call: the names of its type and base types, empty if the call returned."""

    kinds: tuple[str, ...]
    text: str
    when: float  # time.monotonic(), which all processes of a host share

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


def _violations(me: RankContext) -> list[str]:
    return me.site.violations()


def backend_of(group: dist.ProcessGroup | None = None) -> Any:
    """The backend object of a group, for calls that torch.distributed allows only to its own
    backends."""
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))


def assert_in_step(me: RankContext) -> None:
    """Assert that the next calls match on all ranks, as after calls that failed; each call has
    another size."""
    for n in (3, 20, 10):
        x = torch.full((n,), float(n))
        dist.all_reduce(x)
        assert x.tolist() == [float(n) * me.world] * n


def open_resources() -> dict[str, int]:
    """Numbers of the resources of this process that can leak."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared mappings": sum(" rw-s " in line or "memfd" in line for line in maps),
    }


def free_port() -> int:
    """One below those that the system gives to connections, which could take it before its use."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", 10_000 + secrets.randbelow(20_000)))
            return probe.getsockname()[1]


class ForwardingStore(dist.Store):
    """A store that forwards to another store."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self.store = store

    def has_extended_api(self) -> bool:
        return False

    def before(self, call: str, key: str) -> None:
        """What happens before each call that is forwarded, which has this key first."""


def forward(name: str) -> None:
    def call(self: ForwardingStore, keys: Any, *args: Any) -> Any:
        self.before(name, keys if isinstance(keys, str) else keys[0])
        return getattr(self.store, name)(keys, *args)

    setattr(ForwardingStore, name, call)


for name in ("set", "add", "check", "wait", "get"):
    forward(name)


@contextlib.contextmanager
def fresh(world: int, **spec: Any) -> Any:
    """A pool used by one test, for jobs that break the pool."""
    pool = pool_of(Spec(world, **spec))
    try:
        yield pool
    finally:
        pool.close()


AT_A_TIME = 24  # ranks of `check_side_by_side`: their jobs mostly wait
MOST_WRONG = 4  # jobs; the rest would go wrong in the same way
_Key = TypeVar("_Key")
_Run = tuple[_Key, Spec, Callable[..., Any], tuple[Any, ...]]  # key, options, job, arguments


def check_side_by_side(runs: Iterable[_Run[_Key]], check: Callable[[_Key, JobPool], None]) -> None:
    """Run each job in a fresh pool, several at a time, because they mostly wait.

    `check(key, pool)` collects the outcomes of a job, and raises if they are wrong. Fails with the
    keys that are.
    """
    wrong: list[str] = []
    with contextlib.closing(_side_by_side(runs)) as begun:
        for key, pool in begun:
            try:
                check(key, pool)
            except (Exception, pytest.fail.Exception):
                wrong += [f"{key}: {traceback.format_exc()}", *pool._logs()]
            if len(wrong) >= MOST_WRONG:
                break
    assert not wrong, "\n".join(wrong)


def _side_by_side(runs: Iterable[_Run[_Key]]) -> Iterator[tuple[_Key, JobPool]]:
    """Yield the key and the pool of a job that is over, or that takes long."""
    begun: list[tuple[_Key, JobPool]] = []
    rest = iter(runs)
    try:
        while True:
            while sum(pool.spec.world for _, pool in begun) < AT_A_TIME and (
                run := next(rest, None)
            ):
                key, spec, job, args = run
                begun.append((key, pool_of(spec)))
                begun[-1][1].begin(job, *args)
            if not begun:
                return
            limit = time.monotonic() + SECONDS
            while time.monotonic() < limit and not any(pool.is_over() for _, pool in begun):
                time.sleep(0.002)
            yield (over := next((run for run in begun if run[1].is_over()), begun[0]))
            begun.remove(over)
            over[1].close()
    finally:
        for _, pool in begun:
            pool.close()
