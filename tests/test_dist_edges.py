"""Edge cases seen by users: options that differ, a backend that is shut down twice, full queues.

Every job has its own processes.
"""

from __future__ import annotations

import datetime
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
from dist_ranks import HOSTS, THREADS

ours_only = pytest.mark.skipif(not OURS, reason=f"{BACKEND} lacks this feature, or hangs")


def seconds(value: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=value)


# --- bootstrap ------------------------------------------------------------------------------------


def with_option(me: RankContext, name: str, values: list[Any]) -> tuple[Caught, float]:
    import pycollect as pc

    start = time.monotonic()
    options = pc.distributed.options(**{name: values[me.rank]})
    error = caught(me.init, "bootstrap", timeout=seconds(3), pg_options=options)
    return error, error.when - start


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
def test_an_algorithm_is_for_the_collectives_that_have_it(name, ranks_as):
    """With the order of its sums, which shows on one host."""
    import pycollect as pc

    wanted = [torch.full((9,), value) for value in IN_ANOTHER_ORDER]
    pc.all_reduce(wanted, algorithm=name)
    assert torch.equal(wanted[0], torch.zeros(9)) == (name != "ring")
    with fresh(3, group=False, ranks_as=ranks_as) as pool:
        found = pool.run(with_an_algorithm, name)
    if ranks_as != HOSTS:
        assert [t.tolist() for t in found] == [t.tolist() for t in wanted]


def with_algorithms(me: RankContext) -> Caught:
    import pycollect as pc

    algorithm = "ring" if me.rank < 2 else "fused"
    options = pc.distributed.options(algorithm=algorithm)
    return caught(lambda: (me.init("a", pg_options=options), dist.all_reduce(torch.ones(9))))


@ours_only
def test_ranks_with_other_algorithms_raise(ranks_as):
    """Each of them would add in its own order. Threads compare when the group is made."""
    with fresh(3, group=False, ranks_as=ranks_as) as pool:
        for error in pool.run(with_algorithms):
            assert error.kind == "ValueError", error
            why = "same options" if ranks_as == THREADS else "different algorithms"
            assert why in error.text


def with_other_hosts(me: RankContext) -> Caught:
    import pycollect as pc

    return caught(me.init, "hosts", pg_options=pc.distributed.options(hosts="one"))


@ours_only
def test_other_hosts_may_be_refused():
    with fresh(3, group=False, placement="aab") as pool:
        for error in pool.run(with_other_hosts):
            assert error.kind == "ValueError", error
            assert "hosts='one', but ranks 0, 1 are on a, rank 2 is on b" in error.text


@ours_only
@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("buffer_bytes", 8192, 4096),
        ("symmetric_heap_bytes", 1 << 20, 1 << 21),
    ],
)
def test_mismatched_options_raise(name, one, other):
    with fresh(3, group=False) as pool:
        for error, took in pool.run(with_option, name, [one, one, other]):
            assert error.kind == "ValueError", error
            assert f"{name}={one}" in error.text, error
            assert f"{name}={other}" in error.text, error
            assert took < 3


def with_changed_option(me: RankContext) -> Caught:
    import pycollect as pc

    options = pc.distributed.options()
    options.hosts = "exactly"
    return caught(me.init, "bootstrap", timeout=seconds(3), pg_options=options)


@ours_only
def test_an_option_changed_to_an_unknown_word_raises():
    with fresh(1, group=False) as pool:
        (error,) = pool.run(with_changed_option)
    assert error.kind == "ValueError", error
    assert "hosts is 'exactly'; allowed are " in error.text, error


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
def test_shutdown(ranks_as):
    with fresh(2, ranks_as=ranks_as) as pool:
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
def test_a_barrier_runs_after_all_earlier_calls(ranks_as):
    with fresh(3, ranks_as=ranks_as) as pool:
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
