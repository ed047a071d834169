"""One process of test_gloo.py: the same collectives through torch.distributed and gloo.

Does not import pycollect. Inputs are derived from seeds, so only results are passed back.
"""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

import torch
import torch.distributed as dist
from reference import OPS, randoms

WORLDS = (2, 3, 4)
ROOT = 1
TIMEOUT = datetime.timedelta(seconds=60)
_TORCH_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


@dataclasses.dataclass(frozen=True)
class Case:
    collective: str
    dtype: torch.dtype
    op: str = "sum"

    def inputs(self, world: int) -> list[torch.Tensor]:
        """One tensor per rank, with two rows for each rank, so that collectives can split it."""
        return randoms(world, (2 * world, 5), self.dtype, seed=world, tame=True)


# Each function takes this rank's tensor (5 columns, two rows per rank) and returns this rank's
# result, or None where torch.distributed leaves the result undefined.


def all_reduce(x, op, rank, world):
    dist.all_reduce(x, op)
    return x


def reduce(x, op, rank, world):
    dist.reduce(x, ROOT, op)
    return x if rank == ROOT else None


def broadcast(x, op, rank, world):
    dist.broadcast(x, ROOT)
    return x


def all_gather(x, op, rank, world):
    like = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(like, x)
    return torch.cat(like)


def reduce_scatter(x, op, rank, world):
    out = torch.empty_like(x[:2])
    dist.reduce_scatter(out, list(x.split(2)), op)
    return out


def all_to_all(x, op, rank, world):
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


def all_to_all_v(x, op, rank, world):
    sizes = uneven(world)
    rows, received = x[:1].repeat(sum(sizes[rank]), 1), [row[rank] for row in sizes]
    out = x.new_empty(sum(received), 5)
    dist.all_to_all_single(out, rows, received, sizes[rank])
    return out


def gather(x, op, rank, world):
    like = [torch.empty_like(x) for _ in range(world)] if rank == ROOT else None
    dist.gather(x, like, ROOT)
    return torch.cat(like) if like else None


def scatter(x, op, rank, world):
    out = torch.empty_like(x[:2])
    dist.scatter(out, list(x.split(2)) if rank == ROOT else None, ROOT)
    return out


def coalesced(x, op, rank, world):
    y = x[0].clone()
    dist.all_reduce_coalesced([x, y], op)
    return torch.cat([x.flatten(), y])


def uneven(world: int) -> list[list[int]]:
    """Rank s sends [s][r] rows to rank r."""
    return [[(s + r) % world for r in range(world)] for s in range(world)]


_ALL = (all_reduce, reduce, broadcast, all_gather, reduce_scatter)
_ALL += (all_to_all, all_to_all_v, gather, scatter, coalesced)
CALLS = {f.__name__: f for f in _ALL}


def run_with_gloo(case: Case, rank: int, world: int) -> torch.Tensor | None:
    """Run the case with gloo and return this rank's result."""
    op = getattr(dist.ReduceOp, dict(zip(OPS, _TORCH_OPS, strict=True))[case.op])
    return CALLS[case.collective](case.inputs(world)[rank], op, rank, world)


def work(rank: int, cases: list[Case], folder: str) -> None:
    """Join every world that includes this rank, and save the results to the rank's file."""
    results = {}
    for world in (w for w in WORLDS if rank < w):
        store = f"file://{folder}/store_{world}"
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=world, timeout=TIMEOUT
        )
        for case in cases:
            results[world, case] = run_with_gloo(case, rank, world)
        dist.barrier()
        dist.destroy_process_group()
    torch.save(results, Path(folder) / f"rank_{rank}.pt")
