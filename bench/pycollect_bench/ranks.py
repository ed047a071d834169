"""The one way to start ranks as processes: once for many cases, monitored, and always ended.

`Ranks` starts them with mpirun if MPI is measured, in network namespaces if they stand for hosts,
and otherwise by itself. Each rank has a connection to this process, which sleeps until an answer
arrives or a rank ends.
"""

from __future__ import annotations

import datetime
import mmap
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
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
# Timeouts in seconds: until all ranks have imported torch on a slow machine, of a barrier, and
# until the ranks have ended after their last answer.
_START_SECONDS, _BARRIER_SECONDS, _END_SECONDS = 180, 300, 30
# Seconds between two checks whether processes have ended before they connected.
_POLL_SECONDS = 0.5

# The counter and the number of a rank are this many 8-byte words apart in the page that all ranks
# map, two ranks twice as many: 64 and 128 bytes, so that the writes of one do not slow another's
# reads.
_NUMBER, _LINE = 8, 16
# Number of polls before the core is yielded, if every rank has its own core: about 0.2 ms.
_POLLS = 2_000


class RanksFailed(RuntimeError):
    """A rank failed, ended, or did not answer in time."""


def output(*command: str | Path, seconds: float = 60.0) -> str:
    """Return what a command prints; raise RanksFailed with its error if it fails."""
    how: Any = {"capture_output": True, "text": True, "timeout": seconds, "check": True}
    try:
        return str(subprocess.run(list(map(str, command)), **how).stdout)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        raise RanksFailed(f"{error} {str(error.stderr or '').strip()}") from None


def threads_of(world: int) -> int:
    """Return the threads of each rank, which divide the cores."""
    return max(1, len(os.sched_getaffinity(0)) // world)


class SpinBarrier:
    """Barrier and all-gather of the ranks, independent of every measured library.

    A page that all ranks map has a counter and a number for each rank. The barrier takes a
    microsecond and releases all ranks at nearly the same time. `numbers` has the number that each
    rank wrote last.

    Raises:
        TimeoutError: names the missing ranks; also raised by `barrier` and `gather`.
    """

    def __init__(self, path: Path, rank: int, world: int) -> None:
        with path.open("r+b") as file:
            memory = memoryview(mmap.mmap(file.fileno(), world * _LINE * 8))
        self._counters = memory.cast("q")[::_LINE]
        self.numbers = memory.cast("d")[_NUMBER::_LINE]
        self.rank = rank
        self._barriers = 0
        self._polls = _POLLS if world <= len(os.sched_getaffinity(0)) else 0
        self.barrier()

    def barrier(self) -> None:
        """Return when all ranks have called it, on all ranks at nearly the same time."""
        self._barriers = barriers = self._barriers + 1
        counters = self._counters
        counters[self.rank] = barriers
        for peer in range(len(counters)):
            polls = self._polls
            while counters[peer] < barriers and polls:
                polls -= 1
            begin = time.monotonic()
            while counters[peer] < barriers:
                os.sched_yield()
                if time.monotonic() - begin > _BARRIER_SECONDS:
                    missing = [rank for rank, count in enumerate(counters) if count < barriers]
                    raise TimeoutError(f"ranks {missing} did not reach the barrier in time")

    def gather(self, number: float) -> list[float]:
        """Return the numbers of all ranks, in rank order; collective."""
        self.numbers[self.rank] = number
        self.barrier()
        numbers = list(self.numbers)
        self.barrier()  # before any rank writes its next number
        return numbers


class Rank:
    """One rank, in its own process, as its program sees it."""

    def __init__(
        self, number: int, parent: Connection[Any, Any], folder: Path, world: int, timeout: float
    ) -> None:
        self.number, self.world, self.folder = number, world, folder
        self.threads = torch.get_num_threads()
        self.timeout = datetime.timedelta(seconds=timeout)  # of a call of a group
        self.barrier = SpinBarrier(folder / "page", number, world)
        self._parent = parent

    def init_process_group(self, backend: str = "gloo", device: torch.device | None = None) -> None:
        """Make torch's default group of all ranks, and use this GPU."""
        if device and device.type == "cuda":
            torch.cuda.set_device(device)
        store = dist.FileStore(str(self.folder / "store"), self.world)
        about = {"rank": self.number, "world_size": self.world, "timeout": self.timeout}
        dist.init_process_group(backend, store=store, **about)

    def send(self, answer: object) -> None:
        """Send this rank's answer to `Ranks.ask`."""
        self._parent.send(answer)

    def requests(self) -> Iterator[Any]:
        """Yield the requests of `Ranks.ask` until the measurement ends."""
        with suppress(EOFError):  # the parent process has ended
            yield from iter(self._parent.recv, None)

    def slowest(self, seconds: float) -> float:
        """Return the seconds of the slowest rank; collective."""
        return max(self.barrier.gather(seconds))


class Ranks:
    """Context manager of the processes of one world: they have ended when it exits.

    `program` is "module:function", called on every rank with its `Rank` and the task. `threads` are
    those of torch in a rank (usually the ranks divide the cores), `timeout` the limit in seconds of
    a call of a group. With `hosts` rank r is on host r // (world / number of hosts).

    All that the processes share is in one folder: the task, a socket for their connections, the
    page of the barrier, and the store of torch's groups.

    Raises:
        RanksFailed: if a rank failed or died, with its error.
    """

    def __init__(
        self,
        world: int,
        program: str,
        task: Any = None,
        threads: int | None = None,
        timeout: float = 120.0,
        mpi: Mpi | None = None,
        hosts: Namespaces | None = None,
    ) -> None:
        self.world, self._mpi, self._hosts = world, mpi, hosts
        self._threads = threads or threads_of(world)
        self._job = program, task, self._threads, world, timeout
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[subprocess.Popen[Any]] = []
        self._ranks: dict[Connection[Any, Any], int] = {}
        self._failed = ""

    def __enter__(self) -> Ranks:
        folder = Path(self._folder.name)
        try:
            (folder / "job").write_bytes(pickle.dumps(self._job))
            (folder / "page").write_bytes(bytes(self.world * _LINE * 8))
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(folder / "ranks"))
                listener.listen(self.world)
                with interrupts_kept_from_children():
                    self._start([sys.executable, "-m", WORKER, str(folder)])
                self._accept(listener)
        except BaseException:
            self._end(at_once=True)
            raise
        return self

    def _start(self, worker: list[str]) -> None:
        packages = [*pycollect.__path__, *pycollect_bench.__path__]
        folders = [str(Path(package).resolve().parent) for package in packages]
        path = os.pathsep.join(filter(None, (*folders, os.environ.get("PYTHONPATH"))))
        about = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(self._threads)}
        # Loopback is gloo's fastest interface on one host, whatever the host's name resolves to.
        on_one_host = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **about}
        if self._mpi:
            command = [*self._mpi.launch_command(self.world), *worker]
            self._processes.append(subprocess.Popen(command, env=on_one_host))
            return
        for rank in range(self.world):
            command = [*worker, str(rank)]
            own = {"RANK": str(rank), "WORLD_SIZE": str(self.world)}  # for libraries of the program
            if self._hosts:
                host = rank // (self.world // len(self._hosts.names))
                self._processes.append(self._hosts.start(host, command, about | own))
            else:
                self._processes.append(subprocess.Popen(command, env=on_one_host | own))

    def _accept(self, listener: socket.socket) -> None:
        """Wait for the connections of all ranks, each of which sends its number."""
        listener.settimeout(_POLL_SECONDS)
        deadline = time.monotonic() + _START_SECONDS
        while len(self._ranks) < self.world:
            try:
                rank: Connection[Any, Any] = Connection(listener.accept()[0].detach())
                if not rank.poll(_POLL_SECONDS):
                    raise TimeoutError
                self._ranks[rank] = rank.recv()
            except (TimeoutError, EOFError):
                ended = [p.returncode for p in self._processes if p.poll() is not None]
                if ended or time.monotonic() > deadline:
                    raise RanksFailed(
                        f"{len(self._ranks)} of {self.world} ranks connected; exit statuses "
                        f"of those that ended: {ended}"
                    ) from None

    def ask(self, request: object, seconds: float | None = None) -> list[Any]:
        """Send a request to all ranks and return their answers, in rank order; None lets them end.

        After a failure there are no answers: a late one would be taken for that to a later request.

        Raises:
            RanksFailed: if a rank fails, ends unasked, or does not answer within `seconds`.
        """
        for rank in self._ranks:
            with suppress(OSError):  # it has ended; so is its answer missing
                rank.send(request)
        answers: dict[int, Any] = {}
        while missing := [rank for rank, number in self._ranks.items() if number not in answers]:
            if self._failed:
                raise RanksFailed(self._failed)
            ready = {*missing}.intersection(wait(missing, seconds))
            if not ready:
                self._failed = f"the ranks did not answer within {seconds:.0f} s"
            for rank in ready:
                try:
                    answer = rank.recv()
                except (EOFError, ConnectionResetError):
                    ended = RanksFailed("a rank ended without an answer")
                    answer = None if request is None else ended
                if isinstance(answer, RanksFailed):
                    self._failed = str(answer)
                else:
                    answers[self._ranks[rank]] = answer
        return [answers[number] for number in range(self.world)]

    def __exit__(self, kind: object, *raised: object) -> None:
        ended = False
        try:
            if kind is None:
                self.ask(None, _END_SECONDS)
                ended = True
        finally:
            status = self._end(at_once=not ended)
        if ended and any(status):
            raise RanksFailed(f"after the last answer the processes ended with {status}")

    def _end(self, at_once: bool) -> list[int]:
        try:
            for process in self._processes if at_once else ():
                # A process that hangs in a driver needs SIGKILL. mpirun ends its ranks itself.
                process.terminate() if self._mpi else process.kill()
            for process in self._processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS)
        finally:
            for process in self._processes:  # those that hang, or if the wait was interrupted
                process.kill()
            for rank in self._ranks:
                rank.close()
            self._folder.cleanup()
        return [process.wait() for process in self._processes]


def main(folder: str, number: str = "") -> int:
    """Run the program of the job in this folder; return the exit status."""
    number = number or os.environ["OMPI_COMM_WORLD_RANK"]
    try:
        parent = Client(str(Path(folder, "ranks")))
        parent.send(int(number))
    except OSError:
        return 1  # the parent process has ended, and has reported why
    try:
        program, task, threads, *about = pickle.loads(Path(folder, "job").read_bytes())
        torch.set_num_threads(threads)
        module, _, function = program.partition(":")
        rank = Rank(int(number), parent, Path(folder), *about)
        getattr(import_module(module), function)(rank, task)
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception:
        parent.send(RanksFailed(f"rank {number}: {traceback.format_exc()}"))
        return 1
    return 0


if __name__ == "__main__":  # of the imported module, so that what is sent has its classes
    sys.exit(import_module("pycollect_bench.ranks").main(*sys.argv[1:]))
