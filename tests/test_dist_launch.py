"""Ways to launch programs: torchrun, spawn, fork, and launcher libraries if they are installed.

Each program starts with torch imported, in its own session, which is killed on a hang.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import programs
import pytest
from dist_pool import BACKEND

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
BEGIN = f"""
import os, sys
import torch, torch.distributed as dist
torch.set_num_threads(1)
if {BACKEND!r} == "pycollect": import pycollect
"""
WORK = """
def work():
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.full((100_000,), float(rank + 1))
    dist.all_reduce(x)
    assert x.eq(world * (world + 1) / 2).all()
    names = [None] * world
    dist.all_gather_object(names, rank)
    assert names == list(range(world))
    dist.all_reduce(x, async_op=True).wait()
    dist.barrier()
    os.write(1, f"rank {rank} of {world} is right\\n".encode())
"""
PROGRAM = f"""{BEGIN}{WORK}
dist.init_process_group({BACKEND!r})
work()
dist.destroy_process_group()
"""
START_METHODS = f"""{BEGIN}{WORK}
import torch.multiprocessing as mp
def body(rank, world, where):
    dist.init_process_group({BACKEND!r}, init_method=where, rank=rank, world_size=world)
    work()
    dist.destroy_process_group()
if __name__ == "__main__":
    how, where = sys.argv[1:3]
    if how == "spawn":
        mp.spawn(body, (2, where), nprocs=2)
    else:
        mp.start_processes(body, (2, where), nprocs=2, start_method=how)
"""


def written(folder: Path, text: str) -> str:
    program = folder / "program.py"
    program.write_text(text)
    return str(program)


def assert_two_ranks_succeed(*arguments: str) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = programs.run([sys.executable, *arguments], timeout=90, env=environ)
    output = ran.stdout + ran.stderr
    assert ran.returncode == 0, output
    for rank in range(2):
        assert f"rank {rank} of 2 is right" in output, output
    for word in ("Traceback", "terminate", "leaked"):
        assert word not in output, output


# README's program, which test_documents.py runs, exits without destroying its group.
def test_torchrun(tmp_path):
    assert_two_ranks_succeed(*TORCHRUN, written(tmp_path, PROGRAM))


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_start_methods(tmp_path, how):
    assert_two_ranks_succeed(written(tmp_path, START_METHODS), how, f"file://{tmp_path}/store")


ACCELERATE = f"""{BEGIN}{WORK}
from accelerate import Accelerator
dist.init_process_group({BACKEND!r})  # otherwise Accelerator chooses the backend
accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2
assert dist.get_backend() == {BACKEND!r}
model = torch.nn.Linear(4, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
accelerator.backward(model(torch.ones(3, 4)).sum())
assert accelerator.gather(torch.ones(2)).numel() == 2 * accelerator.num_processes
work()
"""
LIGHTNING = f"""{BEGIN}
import lightning as L
strategy = L.fabric.strategies.DDPStrategy(process_group_backend={BACKEND!r})
fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
if __name__ == "__main__":
    fabric.launch()
    assert dist.get_backend() == {BACKEND!r}
    assert fabric.all_reduce(torch.ones(2), reduce_op="sum").sum() == 4
    os.write(1, f"rank {{dist.get_rank()}} of {{dist.get_world_size()}} is right\\n".encode())
"""


def require(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install {library} to run this")


def test_accelerate(tmp_path):
    require("accelerate")
    assert_two_ranks_succeed(*TORCHRUN, written(tmp_path, ACCELERATE))


def test_lightning(tmp_path):
    require("lightning")
    assert_two_ranks_succeed(written(tmp_path, LIGHTNING))
