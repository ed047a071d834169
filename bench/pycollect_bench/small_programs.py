"""Small programs of `torch.distributed`, such as tests of distributed code: each checks its result.

A program is called on every rank with the rank, the world and the device. Modules of torch that a
program needs are imported in it, so that a process imports only those of its own program. The peer
of ranks as threads is `run_in_processes`: a world that is started for one program and ended with
it, by `torch.multiprocessing.spawn`, as most tests of distributed programs do.
"""

from __future__ import annotations

import copy
import datetime
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pycollect._command import interrupts_kept_from_children

Program = Callable[[int, int, torch.device], object]
_spawn: Any = vars(torch.multiprocessing)["spawn"]  # without types in torch
# Limits in seconds: of a collective, and of a whole program, most of which is the start.
_CALL_LIMIT, _PROGRAM_LIMIT = datetime.timedelta(seconds=60), 180.0
# Seconds between two looks at the clock while processes run.
_POLL_SECONDS = 1.0
# Input features of the model, and hidden features for each rank, which tensor parallelism divides.
_FEATURES, _HIDDEN = 16, 8
_BARRIERS = 10


def nothing(rank: int, world: int, device: torch.device) -> None:
    """Do nothing: only the start and the end of a world take time."""


def _model(world: int, device: torch.device, dropout: float = 0.0) -> nn.Sequential:
    """Return a small model with equal parameters on all ranks."""
    torch.manual_seed(0)
    hidden = _HIDDEN * world
    layers = (nn.Linear(_FEATURES, hidden), nn.ReLU(), nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(hidden, _FEATURES)).to(device)


def _batch(rank: int, device: torch.device) -> Tensor:
    """Return the rank's own batch."""
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randn(8, _FEATURES, generator=generator).to(device)


def _check(right: object, what: str) -> None:
    if not right:
        raise AssertionError(f"{what} is wrong")


def _check_equal_on_ranks(tensor: Tensor) -> None:
    of_first = tensor.detach().clone()
    dist.broadcast(of_first, 0)
    _check(torch.equal(of_first, tensor), "a value that all ranks should share")


def _ddp_step(rank: int, world: int, device: torch.device, dropout: float) -> None:
    model = nn.parallel.DistributedDataParallel(_model(world, device, dropout))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    model(_batch(rank, device)).square().mean().backward()
    optimizer.step()
    for old, new in zip(before, model.parameters(), strict=True):
        _check(not torch.equal(old, new), "a parameter after a step")
        _check_equal_on_ranks(new)


def ddp(rank: int, world: int, device: torch.device) -> None:
    """Take a step with DistributedDataParallel."""
    _ddp_step(rank, world, device, dropout=0.0)


def ddp_with_dropout(rank: int, world: int, device: torch.device) -> None:
    """Take a step of a model with dropout, of another random state on each rank."""
    _ddp_step(rank, world, device, dropout=0.5)


def fsdp2(rank: int, world: int, device: torch.device) -> None:
    """Take a step with FSDP2, and compare the gradients with those of one whole model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    whole = _model(world, device)
    sharded = copy.deepcopy(whole)
    fully_shard(sharded, mesh=init_device_mesh(device.type, (world,)))
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    for model in (whole, sharded):
        model(_batch(rank, device)).square().mean().backward()
    for mine, theirs in zip(sharded.parameters(), whole.parameters(), strict=True):
        assert theirs.grad is not None
        dist.all_reduce(theirs.grad)
        gathered: Any = mine.grad
        torch.testing.assert_close(gathered.full_tensor(), theirs.grad / world)
    optimizer.step()


def tensor_parallel(rank: int, world: int, device: torch.device) -> None:
    """Compute the forward pass of a model whose two matrices are divided among the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    whole = _model(world, device)
    mesh = init_device_mesh(device.type, (world,))
    plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
    parallel = parallelize_module(copy.deepcopy(whole), mesh, plan)
    batch = _batch(0, device)
    torch.testing.assert_close(parallel(batch), whole(batch))


def checkpoint(rank: int, world: int, device: torch.device) -> None:
    """Save a sharded tensor as a distributed checkpoint, and load it."""
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(device.type, (world,))
    values = torch.arange(4.0 * world, device=device)
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    try:
        save({"x": distribute_tensor(values, mesh, [Shard(0)])}, checkpoint_id=folder[0])
        state = {"x": distribute_tensor(torch.zeros_like(values), mesh, [Shard(0)])}
        load(state, checkpoint_id=folder[0])
        _check(torch.equal(state["x"].full_tensor(), values), "the loaded tensor")
    finally:
        if rank == 0:
            shutil.rmtree(folder[0])


def all_gather_object(rank: int, world: int, device: torch.device) -> None:
    """Gather an object of every rank."""
    found: list[object] = [None] * world
    dist.all_gather_object(found, {"rank": rank, "words": ["word"] * rank})
    _check(found == [{"rank": r, "words": ["word"] * r} for r in range(world)], "an object")


def all_to_all(rank: int, world: int, device: torch.device) -> None:
    """Exchange parts, one element longer for every following rank."""
    sizes = [1 + r for r in range(world)]
    source = torch.full((sum(sizes),), float(rank), device=device)
    result = torch.empty(world * (1 + rank), device=device)
    dist.all_to_all_single(result, source, [1 + rank] * world, sizes)
    wanted = torch.arange(float(world), device=device).repeat_interleave(1 + rank)
    _check(torch.equal(result, wanted), "an exchanged part")


def ring(rank: int, world: int, device: torch.device) -> None:
    """Send around the ring until every rank has its own tensor again."""
    token = torch.full((4,), float(rank), device=device)
    for _ in range(world):
        received = torch.empty_like(token)
        sent = dist.isend(token, (rank + 1) % world)
        dist.recv(received, (rank - 1) % world)
        assert sent is not None
        sent.wait()
        token = received
    _check(torch.equal(token, torch.full_like(token, rank)), "a message")


def subgroups(rank: int, world: int, device: torch.device) -> None:
    """Reduce in subgroups of the even and the odd ranks."""
    members = [list(range(parity, world, 2)) for parity in (0, 1)]
    groups: list[Any] = [dist.new_group(ranks) for ranks in members if ranks]
    value = torch.tensor([float(rank)], device=device)
    dist.all_reduce(value, group=groups[rank % 2])
    _check(value.item() == sum(members[rank % 2]), "the sum of a subgroup")


def barrier(rank: int, world: int, device: torch.device) -> None:
    """Pass some barriers."""
    for _ in range(_BARRIERS):
        dist.barrier()


PROGRAMS: dict[str, Program] = {
    "DDP": ddp,
    "DDP with dropout": ddp_with_dropout,
    "FSDP2": fsdp2,
    "tensor parallel": tensor_parallel,
    "checkpoint": checkpoint,
    "all_gather_object": all_gather_object,
    "all_to_all": all_to_all,
    "send/recv ring": ring,
    "subgroups": subgroups,
    "barrier": barrier,
}


def _run_rank(
    rank: int, program: Program, world: int, backend: str, device: torch.device, store: str
) -> None:
    import pycollect  # noqa: F401  # registers the backend

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    own = {"init_method": f"file://{store}", "rank": rank, "world_size": world}
    dist.init_process_group(backend, timeout=_CALL_LIMIT, **own)  # type: ignore[arg-type]
    program(rank, world, device)
    # A DDP module is part of a reference cycle, and keeps its group alive. gloo aborts a process
    # that still has a group when the interpreter ends.
    gc.collect()
    dist.destroy_process_group()


def run_in_processes(program: Program, world: int, backend: str, device: torch.device) -> None:
    """Run the program in new processes, which divide the cores; return when they have ended.

    Raises:
        RuntimeError: if the ranks do not end. A rank that fails raises torch's own exceptions.
    """
    deadline = time.monotonic() + _PROGRAM_LIMIT
    with tempfile.TemporaryDirectory() as folder:
        arguments = (program, world, backend, device, str(Path(folder, "store")))
        with interrupts_kept_from_children(by_multiprocessing=True):
            ranks = _spawn(_run_rank, arguments, world, join=False, daemon=True)
        try:
            while not ranks.join(_POLL_SECONDS):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the ranks did not end within {_PROGRAM_LIMIT:g} s")
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
