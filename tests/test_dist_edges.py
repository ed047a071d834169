"""Edge cases seen by users: options that differ, a backend that is shut down twice, full queues.

Every job has its own processes.
"""

from __future__ import annotations

import datetime
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import (
    BACKEND,
    OURS,
    Caught,
    RankContext,
    backend_of,
    caught,
    fresh,
)
from sites import HOSTS, THREADS

ours_only = pytest.mark.skipif(not OURS, reason=f"{BACKEND} lacks this feature, or hangs")


def seconds(value: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=value)


# --- bootstrap ------------------------------------------------------------------------------------


IN_ANOTHER_ORDER = (1e8, 1.0, -1e8)  # one value per rank; the sum depends on the order


def with_an_algorithm(me: RankContext, name: str) -> torch.Tensor:
    import pycollect as pc

    me.init("algorithm", pg_options=pc.distributed.options(algorithm=name))
    summed, gathered = torch.full((9,), IN_ANOTHER_ORDER[me.rank]), torch.empty(27)
    dist.all_reduce(summed)
    x = summed.clone()
    dist.broadcast(x, 0)
    dist.all_gather_into_tensor(gathered, x)
    dist.barrier()
    assert torch.equal(gathered, x.repeat(3))
    return summed


@ours_only
@pytest.mark.parametrize("name", ["fused", "ring", "host_chain"])
def test_an_algorithm_is_for_the_collectives_that_have_it(name, pools):
    """With the order of its sums, which shows on one host."""
    import pycollect as pc

    wanted = [torch.full((9,), value) for value in IN_ANOTHER_ORDER]
    pc.all_reduce(wanted, algorithm=name)
    assert torch.equal(wanted[0], torch.zeros(9)) == (name != "ring")
    with pools.fresh(3, group=False) as pool:
        found = pool.run(with_an_algorithm, name)
    if pools.ranks_as != HOSTS:
        assert [t.tolist() for t in found] == [t.tolist() for t in wanted]


def with_option(me: RankContext, name: str, values: list[Any]) -> tuple[Caught, float]:
    import pycollect as pc

    value, start = values[me.rank], time.monotonic()
    options = pc.distributed.options(**({} if value == "exactly" else {name: value}))
    setattr(options, name, value)  # a word that the function above would refuse

    def use() -> None:
        me.init("bootstrap", timeout=seconds(3), pg_options=options)
        dist.all_reduce(torch.ones(9))

    error = caught(use)
    return error, error.when - start


# Option, value of each rank, words of the error, and where the ranks are. Ranks with different
# algorithms would add in different orders; threads have no buffers.
ALGORITHMS, DIFFERENT = ["ring", "ring", "fused"], "different algorithms"
HEAPS = f"symmetric_heap_bytes={1 << 20}.*symmetric_heap_bytes={1 << 21}"
NOT_ONE = "hosts='one', but ranks 0, 1 are on a, rank 2 is on b"
REFUSED: list[tuple[str, list[Any], str, dict[str, str]]] = [
    ("buffer_bytes", [8192, 8192, 4096], "buffer_bytes=8192.*buffer_bytes=4096", {}),
    ("symmetric_heap_bytes", [1 << 20, 1 << 20, 1 << 21], HEAPS, {}),
    ("algorithm", ALGORITHMS, DIFFERENT, {}),
    ("algorithm", ALGORITHMS, DIFFERENT, {"ranks_as": HOSTS}),
    ("algorithm", ALGORITHMS, "same options", {"ranks_as": THREADS}),
    ("hosts", ["exactly"] * 3, "hosts is 'exactly'; allowed are ", {}),
    ("hosts", ["one"] * 3, NOT_ONE, {"placement": "aab"}),
]


@ours_only
@pytest.mark.parametrize(("name", "values", "words", "where"), REFUSED)
def test_options_that_ranks_refuse(name, values, words, where):
    with fresh(3, group=False, **where) as pool:
        for error, took in pool.run(with_option, name, values):
            assert error.kind == "ValueError", error
            assert re.search(words, error.text), error
            assert took < 3


# --- ends and queues ------------------------------------------------------------------------------


def shut_down(me: RankContext) -> Caught:
    """The backend's shutdown() may be called more than once, and abort() after it."""
    dist.barrier()
    backend = backend_of()
    backend.shutdown()
    backend.shutdown()
    error = caught(dist.all_reduce, torch.ones(3))
    backend.abort()
    dist.destroy_process_group()
    return error


@ours_only
def test_shutdown(pools):
    with pools.fresh(2) as pool:
        for error in pool.run(shut_down):
            assert error.kind, "nothing was raised"


def many_queued_calls(me: RankContext) -> None:
    """A thousand queued collectives of large and small tensors, without any wait."""
    tensors = [torch.full((1 + 10_000 * (n % 7 == 0),), float(n)) for n in range(1000)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    dist.barrier()
    assert all(work.is_completed() for work in works)
    assert all(t.eq(n * me.world).all() for n, t in enumerate(tensors))


@ours_only
def test_a_barrier_runs_after_all_earlier_calls(pools):
    with pools.fresh(3) as pool:
        pool.run(many_queued_calls)


def at_the_end(me: RankContext) -> None:
    """All-gather of blocks of unlike sizes, the small one at the end of the symmetric heap."""
    import pycollect as pc

    counts = [1 << 20, 1 << 14]
    options = pc.distributed.options(symmetric_heap_bytes=12 << 20)
    group = dist.new_group([0, 1], backend=BACKEND, pg_options=options)
    whole = pc.symmetric_empty(sum(counts), group=group)
    parts = []
    while not caught(lambda: parts.append(pc.symmetric_empty(counts[me.rank], group=group))).kind:
        pass
    parts[-1].fill_(me.rank + 1.0)
    dist.all_gather(list(whole.split(counts)), parts[-1], group)
    assert [part.unique().tolist() for part in whole.split(counts)] == [[1.0], [2.0]]


@ours_only
def test_a_tensor_at_the_end_of_the_symmetric_heap():
    with fresh(2) as pool:
        pool.run(at_the_end)
