"""The worker pool: processes that are started once for many cases, monitored, and always ended.

Each rank has a connection to this process, which sleeps until a result arrives or a rank ends.
mpirun starts the ranks if MPI is measured, otherwise this process does.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import pycollect
import pycollect_bench
from pycollect._command import interrupts_kept_from_children
from pycollect._timing import Effort

from .. import mpi
from .spin_barrier import page_bytes

dist: Any = import_module("torch.distributed")  # torch has no type annotations for its stores
RANK = "PYCOLLECT_BENCH_RANK"
HOST = "127.0.0.1"
# Timeouts in seconds: until all ranks have imported torch on a slow machine, and until they have
# ended after their last result.
_START_SECONDS, _END_SECONDS = 180, 30
# Seconds between two checks whether processes have ended before they connected.
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class PoolJob:
    """The job of the ranks. `no_mpi` is the reason why MPI is not measured, or "".

    Rank 0 sends a result for every case; a rank that fails sends a Failure. `ours` and `peers`
    are the candidates. With `both_clocks` they are timed by the host's and by the device's clock.
    `timeout` is the limit in seconds of a call.
    """

    devices: tuple[torch.device, ...]
    cases: tuple[Any, ...]
    ours: tuple[str, ...]
    peers: tuple[str, ...]
    backend: str
    effort: Effort
    threads: int
    no_mpi: str = ""
    both_clocks: bool = False
    timeout: float = 120.0
    page: str = ""
    port: int = 0

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.devices)


@dataclass(frozen=True)
class Failure:
    """An exception of a rank, as text."""

    text: str


def why_no_mpi() -> str:
    """Return the reason why MPI cannot be measured here, or "" if it can.

    Only Open MPI is measured between processes of Python.
    """
    if find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return "" if mpi.find(mpi.OPEN_MPI) else "Open MPI was not found"


class WorkerPool:
    """Context manager of the processes of one world: they have ended when it exits.

    Raises:
        RuntimeError: if a rank failed or died, with its error.
    """

    worker = "pycollect_bench.processes.worker"  # the module that each rank runs

    def __init__(self, job: PoolJob) -> None:
        self._job = job
        self._folder = tempfile.TemporaryDirectory()
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[Connection[Any, Any]] = []

    def __enter__(self) -> WorkerPool:
        page = Path(self._folder.name, "page")
        page.write_bytes(bytes(page_bytes(self._job.world)))
        job = replace(self._job, page=str(page), port=self._store.port)
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                address = str(Path(self._folder.name, "ranks"))
                listener.bind(address)
                listener.listen(job.world)
                with interrupts_kept_from_children():
                    self._start(address)
                self._accept(listener)
            for rank in self._ranks:
                rank.send(job)
        except BaseException:
            self._end(at_once=True)
            raise
        return self

    def _environ(self) -> dict[str, str]:
        """Return the environment of all ranks, in which they find this package."""
        packages = [*pycollect.__path__, *pycollect_bench.__path__]
        folders = [str(Path(package).resolve().parent) for package in packages]
        path = os.pathsep.join(filter(None, (*folders, os.environ.get("PYTHONPATH"))))
        # Loopback is gloo's fastest interface on one host, whatever the host's name resolves to.
        about = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "PYTHONPATH": path}
        return about | {"OMP_NUM_THREADS": str(self._job.threads)}

    def _start(self, address: str) -> None:
        job, about = self._job, self._environ()
        worker = [sys.executable, "-m", self.worker, address]
        if not job.no_mpi:
            found = mpi.find(mpi.OPEN_MPI)
            assert found is not None
            command = [*found.launch_command(job.world), *worker]
            self._processes = [subprocess.Popen(command, env=about)]
            return
        for rank in range(job.world):
            self._processes.append(subprocess.Popen(worker, env={**about, RANK: str(rank)}))

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(_POLL_SECONDS)
        deadline = time.monotonic() + _START_SECONDS
        while len(self._ranks) < self._job.world:
            try:
                self._ranks.append(Connection(listener.accept()[0].detach()))
            except TimeoutError:
                ended = [p.returncode for p in self._processes if p.poll() is not None]
                if ended or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"{len(self._ranks)} of {self._job.world} ranks connected; exit statuses "
                        f"of those that ended: {ended}"
                    ) from None

    def result(self, seconds: float | None = None) -> Any:
        """Return the next result of rank 0; raise TimeoutError after `seconds`."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait(self._ranks, left)
            if not ready:
                raise TimeoutError(f"the processes did not answer within {seconds:.0f} s")
            for rank in ready:
                assert isinstance(rank, Connection)
                try:
                    answer = rank.recv()
                except (EOFError, ConnectionResetError):
                    continue  # it may have ended after rank 0 has sent the last result
                if isinstance(answer, Failure):
                    raise RuntimeError(answer.text)
                return answer
            raise RuntimeError("a rank ended without an answer")

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        status = self._end(at_once=kind is not None)
        if kind is None and any(status):
            raise RuntimeError(f"after the last result the processes ended with {status}")

    def _end(self, at_once: bool) -> list[int]:
        status = []
        if at_once:
            for process in self._processes:
                # A process that hangs in a driver needs SIGKILL. mpirun ends its ranks itself.
                process.kill() if self._job.no_mpi else process.terminate()
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
