"""One rank of the measurement, started by crew.py: `python -m pycollect.bench.processes.worker`.

Gets its job through a connection, measures case after case with the others, and answers there.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
import traceback
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import torch

from .contest import run_case
from .contestants import Ranks
from .crew import HOST, RANK, Failure, Job, dist
from .groups import MPI, make_groups
from .meeting import Meeting


def _work(job: Job, rank: int, parent: Connection[Any, Any]) -> None:
    torch.set_num_threads(job.threads)
    # The import initializes MPI.
    mpi = None if job.no_mpi else import_module("mpi4py.MPI")
    device = job.devices[rank]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    meeting = Meeting(job.page, rank, job.world)
    store = dist.TCPStore(HOST, job.port, is_master=False)
    limit = datetime.timedelta(seconds=job.timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world, timeout=limit)
    groups, missing = make_groups(job.backend, (*job.ours, *job.peers))
    ranks = Ranks(meeting, groups, mpi, {MPI: job.no_mpi, **missing}, job.apart)
    for number, case in enumerate(job.cases):
        result = run_case(case, ranks, (*job.ours, *job.peers), job.effort, number)
        if rank == 0:
            parent.send(result)
    dist.destroy_process_group()


def main(address: str) -> int:
    """Do the job that is given at this address; return the exit status."""
    rank = int(os.environ.get(RANK) or os.environ["OMPI_COMM_WORLD_RANK"])
    with socket.socket(socket.AF_UNIX) as end:
        try:
            end.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):
            return 1  # whoever gave the job has been stopped in the meantime, and has said so
        parent: Connection[Any, Any] = Connection(end.detach())
    try:
        _work(parent.recv(), rank, parent)
    except Exception:
        parent.send(Failure(f"rank {rank}: {traceback.format_exc()}"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
