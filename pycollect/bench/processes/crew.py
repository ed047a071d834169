"""The processes that are measured: started once for many cases, watched, and ended in any case.

Each has a connection to this process, which sleeps until a result comes or a rank is gone. Where
MPI takes part, its mpirun starts them; otherwise nothing but this does.
"""

from __future__ import annotations

import os
import shutil
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

from ..._command import interrupts_kept_from_children
from ..contest import CaseResult
from ..measure import Effort
from .cases import ProcessCase
from .meeting import page_bytes

dist: Any = import_module("torch.distributed")  # whose stores have no types
RANK = "PYCOLLECT_BENCH_RANK"
_WORKER = "pycollect.bench.processes.worker"
HOST = "127.0.0.1"
# For all ranks to import torch, on a slow machine; and for them to end after their last result.
_START_SECONDS, _END_SECONDS = 180, 30
# Between two looks whether those that have not connected yet still live.
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Job:
    """What the ranks do. `no_mpi` says why MPI takes no part; empty: it does.

    Rank 0 answers with a CaseResult for every case; whoever fails answers with a Failure. `ours`
    and `peers` are the contestants; `apart`: by the host's and the device's clocks. The first
    `asked` cases were asked for, the others only targets speak of. A rank that waits `timeout`
    seconds for another has lost it.
    """

    devices: tuple[torch.device, ...]
    cases: tuple[ProcessCase, ...]
    ours: tuple[str, ...]
    peers: tuple[str, ...]
    backend: str
    effort: Effort
    threads: int
    no_mpi: str = ""
    apart: bool = False
    asked: int = 0
    timeout: float = 120.0
    environ: tuple[tuple[str, str], ...] = ()
    page: str = ""
    port: int = 0

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.devices)


@dataclass(frozen=True)
class Failure:
    """What a rank raised, as text."""

    text: str


def why_no_mpi() -> str:
    """Return why MPI cannot take part here, or nothing if it can."""
    if find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    if shutil.which("mpirun") is None:
        return "there is no mpirun"
    shown = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    return "" if "Open MPI" in shown.stdout else "mpirun is not Open MPI's"


def _mpirun(world: int) -> list[str]:
    command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(world)]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    if world > len(os.sched_getaffinity(0)):
        command += ["--mca", "mpi_yield_when_idle", "1"]
    return command


class Crew:
    """The ranks of one world, as a context: they are gone when it ends.

    Raises:
        RuntimeError: when a rank failed or died; says which, and how.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._folder = tempfile.TemporaryDirectory()
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[Connection[Any, Any]] = []
        self._abandoned = False

    def __enter__(self) -> Crew:
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

    def _start(self, address: str) -> None:
        job = self._job
        package = str(Path(pycollect.__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        # Loopback is the fastest that gloo can have here, whatever the host's name resolves to.
        about = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "PYTHONPATH": path}
        about |= {"OMP_NUM_THREADS": str(job.threads), **dict(job.environ)}
        worker = [sys.executable, "-m", _WORKER, address]
        if not job.no_mpi:
            self._processes = [subprocess.Popen([*_mpirun(job.world), *worker], env=about)]
            return
        for rank in range(job.world):
            self._processes.append(subprocess.Popen(worker, env={**about, RANK: str(rank)}))

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(_LOOK_SECONDS)
        deadline = time.monotonic() + _START_SECONDS
        while len(self._ranks) < self._job.world:
            try:
                self._ranks.append(Connection(listener.accept()[0].detach()))
            except TimeoutError:
                ended = [p.returncode for p in self._processes if p.poll() is not None]
                if ended or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"{len(self._ranks)} of {self._job.world} ranks came; ended: {ended}"
                    ) from None

    def result(self, seconds: float | None = None) -> CaseResult:
        """Wait for the result of the next case; TimeoutError if it takes longer than that."""
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
                    raise RuntimeError("a rank is gone without a word") from None
                if isinstance(answer, Failure):
                    raise RuntimeError(answer.text)
                if isinstance(answer, CaseResult):
                    return answer

    def abandon(self) -> None:
        """Let the processes be ended at once, however they are."""
        self._abandoned = True

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        status = self._end(at_once=self._abandoned or kind is not None)
        if kind is None and any(status) and not self._abandoned:
            raise RuntimeError(f"after the last result the processes ended with {status}")

    def _end(self, at_once: bool) -> list[int]:
        status = []
        if at_once:
            for process in self._processes:
                # Who is stuck in a driver hears nothing else; MPI's ranks are its mpirun's to end.
                process.kill() if self._job.no_mpi else process.terminate()
        try:
            for process in self._processes:
                try:
                    status.append(process.wait(_END_SECONDS))
                except subprocess.TimeoutExpired:
                    process.kill()
                    status.append(process.wait())
        finally:
            for process in self._processes:  # those left, if this wait was interrupted
                process.kill()
            for rank in self._ranks:
                rank.close()
            self._folder.cleanup()
        return status
