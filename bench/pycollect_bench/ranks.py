"""The one way to start ranks as processes: once for many cases, monitored, and always ended.

`Ranks` starts them with mpirun if MPI is measured, in network namespaces if they stand for hosts,
and otherwise by itself. Each rank has a connection to this process, which sleeps until an answer
arrives or a rank ends.
"""

from __future__ import annotations

import datetime
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

import pycollect
import pycollect_bench
from pycollect._command import interrupts_kept_from_children

if TYPE_CHECKING:
    from .mpi import Mpi
    from .namespaces import Namespaces

dist: Any = import_module("torch.distributed")  # torch has no type annotations for its stores
WORKER = "pycollect_bench.ranks"  # the module that each rank runs
_RANK = "PYCOLLECT_BENCH_RANK"
# Port of the store of ranks on several hosts, on the first host. No other program listens in a new
# namespace.
_PORT = 29500
# Timeouts in seconds: until all ranks have imported torch on a slow machine, and until they have
# ended after their last answer.
_START_SECONDS, _END_SECONDS = 180, 30
# Seconds between two checks whether processes have ended before they connected.
_POLL_SECONDS = 0.5

# Offsets in 8-byte words of the page that all ranks map. The counter and the number of a rank are
# 64 bytes apart, two ranks 128 bytes, so that the writes of one rank do not slow another's reads.
_LINE, _NUMBER = 16, 8
# Number of polls before the core is yielded, if every rank has its own core: about 0.2 ms.
_POLLS = 2_000
# Number of yields between two reads of the clock.
_YIELDS = 1 << 12


class RanksFailed(RuntimeError):
    """A rank failed, ended, or did not answer in time."""


@dataclass(frozen=True)
class _Failure:
    """An exception of a rank, as text."""

    text: str


@dataclass(frozen=True)
class _Job:
    """What every rank is told: see `Ranks`."""

    world: int
    program: str
    task: Any
    threads: int
    timeout: float
    page: str
    store: tuple[str, int]
    first_has_store: bool


def threads_of(world: int) -> int:
    """Return the threads of each rank, which divide the cores."""
    return max(1, len(os.sched_getaffinity(0)) // world)


class SpinBarrier:
    """Barrier and all-gather of the ranks, independent of every measured library.

    A page that all ranks map has a counter and a number for each rank. The barrier takes a
    microsecond and releases all ranks at nearly the same time.

    Raises:
        TimeoutError: names the missing ranks; also raised by `barrier` and `gather`.
    """

    def __init__(self, path: str, rank: int, world: int, timeout: float = 300.0) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), world * _LINE * 8)
        self._counters = memoryview(self._memory).cast("q")
        self._numbers = memoryview(self._memory).cast("d")
        self.rank, self.world, self._timeout = rank, world, timeout
        self._barriers = 0
        self._polls = _POLLS if world <= len(os.sched_getaffinity(0)) else 0
        self.barrier()
        if rank == 0:
            Path(path).unlink()  # all ranks have mapped it; no file is left behind

    def barrier(self) -> None:
        """Return when all ranks have called it, on all ranks at nearly the same time."""
        self._barriers = barriers = self._barriers + 1
        counters = self._counters
        counters[self.rank * _LINE] = barriers
        for peer in range(self.world):
            at, polls = peer * _LINE, self._polls
            while counters[at] < barriers and polls:
                polls -= 1
            if counters[at] < barriers:
                self._wait(at, barriers)

    def _wait(self, at: int, barriers: int) -> None:
        begin = time.monotonic()
        while True:
            for _ in range(_YIELDS):
                if self._counters[at] >= barriers:
                    return
                os.sched_yield()
            if time.monotonic() - begin > self._timeout:
                missing = [r for r in range(self.world) if self._counters[r * _LINE] < barriers]
                raise TimeoutError(
                    f"ranks {missing} did not reach the barrier within {self._timeout:g} s"
                )

    def publish(self, number: float) -> None:
        """Publish this rank's number for the other ranks."""
        self._numbers[self.rank * _LINE + _NUMBER] = number

    def published(self) -> list[float]:
        """Return the number that each rank published last, in rank order."""
        return [self._numbers[r * _LINE + _NUMBER] for r in range(self.world)]

    def gather(self, number: float) -> list[float]:
        """Return the numbers of all ranks, in rank order; collective."""
        self.publish(number)
        self.barrier()
        numbers = self.published()
        self.barrier()  # before any rank publishes its next number
        return numbers


class Rank:
    """One rank, in its own process, as its program sees it."""

    def __init__(self, job: _Job, number: int, parent: Connection[Any, Any]) -> None:
        self._job, self._parent = job, parent
        self.number, self.world, self.threads = number, job.world, job.threads
        self.timeout = datetime.timedelta(seconds=job.timeout)  # of a call of a group
        self.barrier = SpinBarrier(job.page, number, job.world)

    def init_process_group(self, backend: str = "gloo") -> None:
        """Make torch's default group of all ranks."""
        host, port = self._job.store
        serves = self._job.first_has_store and self.number == 0
        store = dist.TCPStore(host, port, is_master=serves, wait_for_workers=False)
        about = {"rank": self.number, "world_size": self.world, "timeout": self.timeout}
        dist.init_process_group(backend, store=store, **about)

    def send(self, answer: object) -> None:
        """Send an answer to `Ranks.answer`, or, from every rank, to `Ranks.ask`."""
        self._parent.send(answer)

    def requests(self) -> Iterator[Any]:
        """Yield the requests of `Ranks.ask` until the measurement ends."""
        with suppress(EOFError):
            while (request := self._parent.recv()) is not None:
                yield request

    def slowest(self, seconds: float) -> float:
        """Return the seconds of the slowest rank; collective."""
        return max(self.barrier.gather(seconds))


class Ranks:
    """Context manager of the processes of one world: they have ended when it exits.

    `program` is "module:function", called on every rank with its `Rank` and the task. `threads` are
    those of torch in a rank (usually the ranks divide the cores), `timeout` the limit in seconds of
    a call of a group. With `hosts` rank r is on host r // (world / number of hosts).

    Raises:
        RanksFailed: if a rank failed or died, with its error.
    """

    def __init__(
        self,
        world: int,
        program: str,
        task: Any = None,
        *,
        threads: int | None = None,
        timeout: float = 120.0,
        mpi: Mpi | None = None,
        hosts: Namespaces | None = None,
    ) -> None:
        self.world, self._mpi, self._hosts = world, mpi, hosts
        self._folder = tempfile.TemporaryDirectory()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._job = _Job(
            world,
            program,
            task,
            threads or threads_of(world),
            timeout,
            page=str(Path(self._folder.name, "page")),
            store=(hosts.addresses[0], _PORT) if hosts else ("127.0.0.1", self._store.port),
            first_has_store=bool(hosts),
        )
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[Connection[Any, Any]] = []
        self._received: list[tuple[Connection[Any, Any], Any]] = []  # at most one answer
        self._failed = ""

    def __enter__(self) -> Ranks:
        Path(self._job.page).write_bytes(bytes(self.world * _LINE * 8))
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                address = str(Path(self._folder.name, "ranks"))
                listener.bind(address)
                listener.listen(self.world)
                with interrupts_kept_from_children():
                    self._start([sys.executable, "-m", WORKER, address])
                self._accept(listener)
            for rank in self._ranks:
                rank.send(self._job)
        except BaseException as error:
            self._end(at_once=True)
            if isinstance(error, BrokenPipeError):
                raise RanksFailed("a rank ended before it had a job") from None
            raise
        return self

    def _environ(self) -> dict[str, str]:
        """Return the environment of all ranks, in which they find this package."""
        packages = [*pycollect.__path__, *pycollect_bench.__path__]
        folders = [str(Path(package).resolve().parent) for package in packages]
        path = os.pathsep.join(filter(None, (*folders, os.environ.get("PYTHONPATH"))))
        # Loopback is gloo's fastest interface on one host, whatever the host's name resolves to.
        about = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "PYTHONPATH": path}
        if self._hosts:
            about.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns that addresses lack names
        about |= {"WORLD_SIZE": str(self.world), "LOCAL_SIZE": str(self.world)}
        about |= {"MASTER_ADDR": self._job.store[0], "MASTER_PORT": str(self._job.store[1])}
        return about | {"OMP_NUM_THREADS": str(self._job.threads)}

    def _start(self, worker: list[str]) -> None:
        about = self._environ()
        if self._mpi:
            command = [*self._mpi.launch_command(self.world), *worker]
            self._processes = [subprocess.Popen(command, env=about)]
            return
        for rank in range(self.world):
            own, command = about | {"RANK": str(rank), _RANK: str(rank)}, worker
            if self._hosts:
                host = rank // (self.world // len(self._hosts.names))
                own |= self._hosts.environ(host)
                command = self._hosts.command(host, worker)
            self._processes.append(subprocess.Popen(command, env=own))

    def _accept(self, listener: socket.socket) -> None:
        """Wait for the connections of all ranks, and sort them by rank."""
        listener.settimeout(_POLL_SECONDS)
        deadline = time.monotonic() + _START_SECONDS
        found: dict[int, Connection[Any, Any]] = {}
        while len(found) < self.world:
            rank: Connection[Any, Any] | None = None
            with suppress(TimeoutError):
                rank = Connection(listener.accept()[0].detach())
                self._ranks.append(rank)  # closed at the end, whatever happens here
            with suppress(EOFError, OSError):
                if rank and rank.poll(deadline - time.monotonic()):
                    found[rank.recv()] = rank
                    continue
            ended = [p.returncode for p in self._processes if p.poll() is not None]
            if ended or rank or time.monotonic() > deadline:
                raise RanksFailed(
                    f"{len(found)} of {self.world} ranks connected; exit statuses "
                    f"of those that ended: {ended}"
                )
        self._ranks = [found[number] for number in range(self.world)]

    def answer(self, seconds: float | None = None) -> Any:
        """Return the next answer of any rank; raise RanksFailed after `seconds`."""
        return self._receive(self._ranks, seconds)[1]

    def ask(self, request: object, seconds: float | None = None) -> list[Any]:
        """Send a request to all ranks and return their answers, in rank order.

        Raises:
            RanksFailed: if a rank fails, ends, or does not answer within `seconds`.
        """
        for rank in self._ranks:
            with suppress(BrokenPipeError):  # it has ended; so is its answer missing
                rank.send(request)
        missing, found = list(self._ranks), dict[Any, Any]()
        while missing:
            rank, found_answer = self._receive(missing, seconds)
            found[rank] = found_answer
            missing.remove(rank)
        return [found[rank] for rank in self._ranks]

    def _receive(
        self, ranks: Sequence[Connection[Any, Any]], seconds: float | None
    ) -> tuple[Connection[Any, Any], Any]:
        """Return a rank of these and its answer.

        After a failure there is no other answer: a late one would be taken for that to a later
        request.
        """
        self._failed = self._failed or self._failure(ranks, seconds)
        if self._failed:
            raise RanksFailed(self._failed)
        return self._received.pop()

    def _failure(self, ranks: Sequence[Connection[Any, Any]], seconds: float | None) -> str:
        """Receive an answer of one of these ranks, or return why there is none."""
        ready = wait(ranks, seconds)
        if not ready:
            return f"the ranks did not answer within {seconds:.0f} s"
        for rank in ready:
            assert isinstance(rank, Connection)
            try:
                answer = rank.recv()
            except (EOFError, ConnectionResetError):
                continue  # another rank may have answered before this one ended
            if isinstance(answer, _Failure):
                return answer.text
            self._received.append((rank, answer))
            return ""
        return "a rank ended without an answer"

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._ask_to_end()
        status = self._end(at_once=kind is not None or bool(self._failed))
        if kind is None and (self._failed or any(status)):
            raise RanksFailed(
                self._failed or f"after the last answer the processes ended with {status}"
            )

    def _ask_to_end(self) -> None:
        """Let the ranks end, and wait for their connections to do so, or for a failure."""
        for rank in self._ranks:
            with suppress(OSError):  # it has ended already
                rank.send(None)
        left, deadline = list(self._ranks), time.monotonic() + _END_SECONDS
        while left and not self._failed and time.monotonic() < deadline:
            for ready in wait(left, deadline - time.monotonic()):
                assert isinstance(ready, Connection)
                try:
                    answer = ready.recv()
                except (EOFError, OSError):
                    left.remove(ready)
                    continue
                if isinstance(answer, _Failure):
                    self._failed = answer.text

    def _end(self, at_once: bool) -> list[int]:
        status = []
        if at_once:
            for process in self._processes:
                # A process that hangs in a driver needs SIGKILL. mpirun ends its ranks itself.
                process.terminate() if self._mpi else process.kill()
        try:
            for process in self._processes:
                try:
                    status.append(process.wait(_END_SECONDS))
                except subprocess.TimeoutExpired:
                    process.kill()
                    status.append(process.wait())
        finally:
            for process in self._processes:  # those left if the wait was interrupted
                process.kill()
            for rank in self._ranks:
                rank.close()
            self._folder.cleanup()
        return status


def main(address: str) -> int:
    """Run the program of the job received from the socket at `address`; return the exit status."""
    number = int(os.environ.get(_RANK) or os.environ["OMPI_COMM_WORLD_RANK"])
    with socket.socket(socket.AF_UNIX) as end:
        try:
            end.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):
            return 1  # the parent process has ended, and has reported why
        parent: Connection[Any, Any] = Connection(end.detach())
    parent.send(number)
    try:
        job = parent.recv()
        torch.set_num_threads(job.threads)
        module, _, function = job.program.partition(":")
        rank = Rank(job, number, parent)
        getattr(import_module(module), function)(rank, job.task)
        rank.barrier.barrier()  # a rank that ends before another has answered counts as failed
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception:
        parent.send(_Failure(f"rank {number}: {traceback.format_exc()}"))
        return 1
    return 0


if __name__ == "__main__":  # of the imported module, so that what is sent has its classes
    sys.exit(import_module("pycollect_bench.ranks").main(sys.argv[1]))
