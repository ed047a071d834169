"""Program of one rank on its host: makes the groups, measures the cases, sends the results."""

from __future__ import annotations

import datetime
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from ..processes import worker
from ..processes.spin_barrier import SpinBarrier
from .comparison import run_case
from .groups import HostRanks
from .pool import HostJob


def _work(job: HostJob, rank: int, parent: Connection[Any, Any]) -> None:
    torch.set_num_threads(job.threads)
    spin_barrier = SpinBarrier(job.page, rank, job.world)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=job.timeout))
    ranks = HostRanks(spin_barrier, job.hosts, job.rate)
    ranks.make_groups(job.peers)
    for number, case in enumerate(job.cases):
        result = run_case(case, ranks, job.peers, job.effort, number)
        if rank == 0:
            parent.send(result)
    spin_barrier.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(worker.main(sys.argv[1], _work))
