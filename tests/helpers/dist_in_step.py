"""Check that the ranks' call sequences still match after failed calls."""

from __future__ import annotations

import torch
import torch.distributed as dist
from dist_pool import RankContext

CPU = torch.device("cpu")


def ones(n: int = 5) -> torch.Tensor:
    return torch.ones(n)


def assert_in_step(me: RankContext) -> None:
    """Assert that the next calls match on all ranks; each call has another size."""
    for n in (3, 20, 10):
        x = torch.full((n,), float(n))
        dist.all_reduce(x)
        assert x.tolist() == [float(n) * me.world] * n
