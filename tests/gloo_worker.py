"""What one process of test_gloo.py does: the same collectives through torch.distributed and gloo.

Knows nothing of pycollect. Inputs come from seeds, so that only results travel.
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
_THEIRS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


@dataclasses.dataclass(frozen=True)
class Case:
    collective: str
    dtype: torch.dtype
    op: str = "sum"

    def inputs(self, world: int) -> list[torch.Tensor]:
        """Rows for every rank, so that every collective can cut them."""
        return randoms(world, (2 * world, 5), self.dtype, seed=world, tame=True)


def ask_gloo(case: Case, rank: int, world: int) -> torch.Tensor | None:
    """This rank's result; None where torch.distributed leaves it undefined."""
    x = case.inputs(world)[rank]
    op = getattr(dist.ReduceOp, dict(zip(OPS, _THEIRS, strict=True))[case.op])
    cut = [c.contiguous() for c in x.chunk(world)]
    like = [torch.empty_like(x) for _ in range(world)]
    root = rank == ROOT
    if case.collective == "all_reduce":
        dist.all_reduce(x, op)
    elif case.collective == "reduce":
        dist.reduce(x, ROOT, op)
        return x if root else None
    elif case.collective == "broadcast":
        dist.broadcast(x, ROOT)
    elif case.collective == "all_gather":
        dist.all_gather(like, x)
        return torch.cat(like)
    elif case.collective == "reduce_scatter":
        out = torch.empty_like(cut[0])
        dist.reduce_scatter(out, cut, op)
        return out
    elif case.collective == "all_to_all":
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out
    elif case.collective == "all_to_all_v":
        # Rank s sends s + r rows, modulo the world, to rank r.
        sizes = [[(s + r) % world for r in range(world)] for s in range(world)]
        x = case.inputs(world)[rank][:1].repeat(sum(sizes[rank]), 1)
        received = [row[rank] for row in sizes]
        out = x.new_empty(sum(received), 5)
        dist.all_to_all_single(out, x, received, sizes[rank])
        return out
    elif case.collective == "gather":
        dist.gather(x, like if root else None, ROOT)
        return torch.cat(like) if root else None
    elif case.collective == "scatter":
        out = torch.empty_like(cut[0])
        dist.scatter(out, cut if root else None, ROOT)
        return out
    else:
        assert case.collective == "coalesced"
        y = x[0].clone()
        dist.all_reduce_coalesced([x, y], op)
        return torch.cat([x.flatten(), y])
    return x


def work(rank: int, cases: list[Case], folder: str) -> None:
    """Join every world that has this rank, and leave the results in a file a rank."""
    results = {}
    for world in (w for w in WORLDS if rank < w):
        store = f"file://{folder}/store_{world}"
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=world, timeout=TIMEOUT
        )
        for case in cases:
            results[world, case] = ask_gloo(case, rank, world)
        dist.barrier()
        dist.destroy_process_group()
    torch.save(results, Path(folder) / f"rank_{rank}.pt")
