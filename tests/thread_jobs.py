"""Helpers for users of torch.distributed on ranks as threads: jobs of process pools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dist_rank import RankContext, Spec
from reference import assert_same
from test_dist_sharded import train_alone
from torch import Tensor, nn

from pycollect import threads

WORLD = 3
Job = Callable[[RankContext], Any]


def launch(job: Job, world: int, folder: Path, **options: Any) -> list[Any]:
    """Run a job of a process pool on ranks that are threads."""
    folder.mkdir(exist_ok=True)

    def program(rank: int, world: int) -> Any:
        return job(RankContext(rank, Spec(world, second_backend=None), str(folder)))

    return threads.launch(program, world, timeout=30, **options)


def launch_twice(job: Job, world: int, folder: Path) -> list[list[Tensor]]:
    """Return the tensors of all ranks, which two launches must give alike."""
    first, second = (launch(job, world, folder / str(n)) for n in range(2))
    for rank in range(world):
        assert_same(first[rank], second[rank], f"rank {rank}")
    return first


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def alone(world: int) -> list[Tensor]:
    return train_alone(RankContext(0, Spec(world), ""))[1]
