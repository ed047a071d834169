"""Program of one rank of the measurement, started by worker_pool.py.

It receives its job through a connection, measures the cases with the other ranks, and sends
results.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import torch

from .candidates import RankState
from .comparison import run_case
from .groups import MPI, make_groups
from .spin_barrier import SpinBarrier
from .worker_pool import HOST, RANK, Failure, PoolJob, dist


def _work(job: PoolJob, rank: int, parent: Connection[Any, Any]) -> None:
    torch.set_num_threads(job.threads)
    # Importing mpi4py.MPI initialises MPI.
    mpi = None if job.no_mpi else import_module("mpi4py.MPI")
    device = job.devices[rank]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    spin_barrier = SpinBarrier(job.page, rank, job.world)
    store = dist.TCPStore(HOST, job.port, is_master=False)
    limit = datetime.timedelta(seconds=job.timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world, timeout=limit)
    groups, missing = make_groups(job.backend, limit)
    ranks = RankState(spin_barrier, groups, mpi, {MPI: job.no_mpi, **missing}, job.both_clocks)
    for number, case in enumerate(job.cases):
        result = run_case(case, ranks, (*job.ours, *job.peers), job.effort, number)
        if rank == 0:
            parent.send(result)
    dist.barrier()  # a rank that ends before rank 0 has sent its result counts as failed
    dist.destroy_process_group()


def main(address: str, work: Callable[[Any, int, Connection[Any, Any]], None] = _work) -> int:
    """Run `work` on the job received from the socket at `address`; return the exit status."""
    rank = int(os.environ.get(RANK) or os.environ["OMPI_COMM_WORLD_RANK"])
    with socket.socket(socket.AF_UNIX) as end:
        try:
            end.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):
            return 1  # the parent process has ended, and has reported why
        parent: Connection[Any, Any] = Connection(end.detach())
    try:
        work(parent.recv(), rank, parent)
    except Exception:
        parent.send(Failure(f"rank {rank}: {traceback.format_exc()}"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
