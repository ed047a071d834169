"""The processes of one world on several hosts: ranks 0 to R - 1 on the first host, and so on."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

from ..processes.worker_pool import RANK, PoolJob, WorkerPool
from .namespaces import Namespaces

# Port of the ranks' store on the first host. No other program listens in a new namespace.
_PORT = 29500


@dataclass(frozen=True)
class HostJob(PoolJob):
    """The job of ranks on several hosts; `rate` is that of a link in bits per second, if any."""

    hosts: int = 2
    rate: float | None = None

    @property
    def ranks_per_host(self) -> int:
        """The number of ranks of each host."""
        return self.world // self.hosts


class HostPool(WorkerPool):
    """Context manager of the processes of one world, each in the namespace of its host."""

    worker = "pycollect_bench.hosts.worker"

    def __init__(self, job: HostJob, namespaces: Namespaces) -> None:
        super().__init__(job)
        self._ranks_per_host, self._namespaces = job.ranks_per_host, namespaces

    def _start(self, address: str) -> None:
        about = self._environ() | {"WORLD_SIZE": str(self._job.world), "MASTER_PORT": str(_PORT)}
        about.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns that addresses have no names
        worker = [sys.executable, "-m", self.worker, address]
        for rank in range(self._job.world):
            host = rank // self._ranks_per_host
            own = {"RANK": str(rank), RANK: str(rank), **self._namespaces.environ(host)}
            command = self._namespaces.command(host, worker)
            self._processes.append(subprocess.Popen(command, env={**about, **own}))
