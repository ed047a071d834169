"""Calls in which a rank can wait for a failed peer, and helpers for before and after a failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from dist_pool import Caught, RankContext, backend_of, caught

FAULTY_RANK = 1
# On several hosts, the faulty rank is not the first one of its host, is alone there, and is the
# first one.
PLACEMENTS = ("aab", "aba", "abb")
# Limit in seconds for every rank to notice a death, as docs/distributed.md promises.
NOTICE_SECONDS = 2.0
AT_ONCE = 0.5  # limit in seconds for an aborted group to refuse a call, on a loaded machine
DESTROYED = 5.0  # limit in seconds for destroying an aborted group
BEFORE = 4  # successful calls before the failure
ASLEEP = 0.15  # seconds after which a waiting thread no longer spins


def large(value: float = 1.0) -> torch.Tensor:
    return torch.full((3_000_000,), value)


def asynchronous(x: torch.Tensor) -> None:
    dist.all_reduce(x, async_op=True).wait()


def future(x: torch.Tensor) -> None:
    dist.all_reduce(x, async_op=True).get_future().wait()


# Calls in which survivors wait: name -> (operation name in the error message, call).
WAITS: dict[str, tuple[str, Callable[[], object]]] = {
    "all_reduce": ("all_reduce", lambda: dist.all_reduce(torch.ones(3))),
    "large all_reduce": ("all_reduce", lambda: dist.all_reduce(large())),
    "all_reduce_coalesced": ("all_reduce", lambda: dist.all_reduce_coalesced([torch.ones(3)] * 1)),
    "async all_reduce": ("all_reduce", lambda: asynchronous(torch.ones(3))),
    "future": ("all_reduce", lambda: future(torch.ones(3))),
    "reduce": ("reduce", lambda: dist.reduce(torch.ones(3), 0)),
    "broadcast": ("broadcast", lambda: dist.broadcast(torch.ones(3), FAULTY_RANK)),
    "all_gather": (
        "all_gather",
        lambda: dist.all_gather([torch.ones(3) for _ in range(3)], torch.ones(3)),
    ),
    "all_gather_into_tensor": (
        "all_gather",
        lambda: dist.all_gather_into_tensor(torch.ones(9), torch.ones(3)),
    ),
    "reduce_scatter": (
        "reduce_scatter",
        lambda: dist.reduce_scatter_tensor(torch.ones(3), torch.ones(9)),
    ),
    "all_to_all": ("all_to_all", lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3))),
    "scatter": ("scatter", lambda: dist.scatter(torch.ones(3), None, FAULTY_RANK)),
    "barrier": ("barrier", lambda: dist.barrier()),
    "recv": ("recv", lambda: dist.recv(torch.ones(3), FAULTY_RANK)),
    "irecv": ("recv", lambda: dist.irecv(torch.ones(3), FAULTY_RANK).wait()),
    "send": ("send", lambda: dist.send(large(), FAULTY_RANK)),
    "all_gather_object": ("all_gather", lambda: dist.all_gather_object([None] * 3, "x")),
}


def calls_before_failure(me: RankContext) -> int:
    for _ in range(BEFORE):
        x = torch.ones(100)
        dist.all_reduce(x)
        assert x[0] == me.world
    return backend_of()._get_sequence_number_for_group()


def publish(me: RankContext, key: str) -> None:
    """Publish a key, as a file, for the ranks that wait for it in `wait_published`."""
    path = Path(me.folder, f"{key}_{me.rank}")
    path.with_suffix(".new").write_text(repr(time.monotonic()))
    path.with_suffix(".new").rename(path)


def wait_published(me: RankContext, key: str, ranks: Iterable[int]) -> float:
    """Wait until all ranks have published the key (`publish`); return the time of the last."""
    paths = [Path(me.folder, f"{key}_{rank}") for rank in ranks]
    limit = time.monotonic() + 15
    while not all(path.exists() for path in paths):
        assert time.monotonic() < limit, f"not all of {paths}"
        time.sleep(0.005)
    return max(float(path.read_text()) for path in paths)


def others(me: RankContext) -> list[int]:
    return [rank for rank in range(me.world) if rank != me.rank]


def after_failure(me: RankContext) -> tuple[Caught, float, float]:
    """Return the next call's error, the seconds it took, and the seconds that destroying took."""
    start = time.monotonic()
    refusal = caught(dist.all_reduce, torch.ones(3))
    refused = time.monotonic() - start
    start = time.monotonic()
    dist.destroy_process_group()
    return refusal, refused, time.monotonic() - start
