"""How ranks find out what their GPUs can do, without one: each call of CUDA fails on one rank, and
all come to the same end.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from typing import Any

import dist_fake
import pytest
import torch
import torch.distributed as dist
from dist_fake import alive
from dist_pool import OURS, Caught, Me, Pool, backend_of, begun, caught, fresh

pytestmark = pytest.mark.skipif(not OURS, reason="has slabs of its own")
VICTIM = 1


def met(me: Me, rung: str, call: str, after: int, lost: bool) -> tuple[Any, ...]:
    """A call of CUDA fails on one rank, or does nothing."""
    made, fake = dist_fake.options(f"eager:{rung}")
    me.init(f"{rung}_{call}_{after}_{lost}", pg_options=made)
    if me.rank == VICTIM and lost:
        fake.gpu.drop(call)
    elif me.rank == VICTIM:
        fake.gpu.fail(call, after)
    x = torch.ones(100)
    first = caught(dist.all_reduce, x)
    fake.gpu.fail(call, -1)
    fake.gpu.drop(call, False)
    second = caught(dist.all_reduce, x)
    books = fake.gpu.books()
    calls = {name: books.get(name, 0) for name in ("opened", "launch")}
    staged = "copy_ caller" in fake.calls()
    dist.destroy_process_group()
    return first, second, x.sum().item(), staged, calls, alive(fake), fake.gpu.fouls()


MEMORY = ("register_host", "allocate", "create_stream", "fill", "export_memory", "map", "launch")


@pytest.mark.parametrize(
    ("call", "after"),
    [
        *((call, 0) for call in MEMORY),
        ("launch", 3),
        ("copy", 0),
        ("write_value", 0),
        ("wait_value", 0),
    ],
)
def test_every_step_of_the_meeting(call, after):
    """Memory that one rank cannot share, nobody does."""
    with fresh(3, group=False) as pool:
        for first, second, total, staged, _, left, fouls in pool.run(
            met, "best", call, after, False
        ):
            assert (first.kind, second.kind) == ("", ""), (first, second)
            assert total == 900.0
            assert staged
            assert left == {}
            assert fouls == []
        for first, second, *_, left, fouls in pool.run(met, "stream", call, after, False):
            assert "PYCOLLECT_CUDA_SYNC=stream does not work here: rank 1: " in first.text, first
            assert "made up" in first.text
            assert "does not work here" in second.text
            assert (left, fouls) == ({}, [])


def test_what_tensors_have_left_is_room_for_a_slab():
    with fresh(3, group=False) as pool:
        for first, second, total, staged, books, left, fouls in pool.run(
            met, "best", "out of memory", 0, False
        ):
            assert (first.kind, second.kind) == ("", ""), (first, second)
            assert (total, staged, books["opened"]) == (900.0, False, 2)
            assert (left, fouls) == ({}, [])


def test_memory_that_does_not_arrive():
    with fresh(3, group=False) as pool:
        for first, *_ in pool.run(met, "stream", "launch", 0, True):
            assert "rank 0: what rank 1 wrote here has not arrived" in first.text, first


def left_alone(me: Me) -> tuple[Caught, dict[str, int], list[str]]:
    """One rank is so slow in the meeting that the others give up, while it has their memory."""
    made, fake = dist_fake.options("eager:stream")
    me.init("left_alone", pg_options=made, timeout=datetime.timedelta(seconds=2))
    fake.gpu.drop("write_value" if me.rank == VICTIM else "wait_value")
    error = caught(dist.all_reduce, torch.ones(3))
    return error, alive(fake), fake.gpu.fouls()


@pytest.fixture(scope="module")
def long() -> Iterator[dict[str, Pool]]:
    jobs = {"lost": (met, "best", "write_value", 0, True), "left alone": (left_alone,)}
    yield from begun(jobs, 3, group=False)


@pytest.mark.slow  # for the 10 seconds that a step has
def test_a_wait_for_what_does_not_come_is_let_go(long):
    """One rank's writes are lost: all end in the meeting, and the device keeps no memory."""
    for first, second, total, staged, _, left, fouls in long["lost"].results(60):
        assert (first.kind, second.kind) == ("", ""), (first, second)
        assert (total, staged) == (900.0, True)
        assert (left, fouls) == ({}, [])


@pytest.mark.slow  # for the 10 seconds that a step has
def test_memory_that_others_may_have_open_is_theirs(long):
    for error, left, fouls in long["left alone"].results(60):
        assert error.kind == "Timeout", error
        assert f"rank {VICTIM} did not arrive" in error.text
        assert (left, fouls) == ({}, [])


def met_in_a_callback(me: Me, turn: int) -> list[float]:
    """What a call before the first one of GPUs is followed by comes to them as well."""
    made, fake = dist_fake.options("eager:stream")
    me.init(f"callback_{turn}", pg_options=made)
    host, x, y = torch.ones(4), torch.full((5,), 3.0), torch.full((5,), 2.0)
    fake.put_on_host(host)
    inner = []

    def then(future: torch.futures.Future[Any]) -> Any:
        inner.append(dist.all_reduce(x, async_op=True))
        return future.value()

    chained = dist.all_reduce(host, async_op=True).get_future().then(then)
    dist.all_reduce(y)
    chained.wait()
    inner[0].wait()
    dist.destroy_process_group()
    return (x + y).tolist()


def test_ranks_meet_in_a_callback():
    with fresh(2, group=False) as pool:
        for turn in range(3):
            assert pool.run(met_in_a_callback, turn, seconds=20) == [[10.0] * 5] * 2


def of_odd_sizes(me: Me) -> list[float]:
    made, _ = dist_fake.options("eager:stream")
    made.slab_bytes = 33_333
    me.init("odd", pg_options=made)
    totals = []
    for _ in range(3):
        x = torch.ones(30_000)
        dist.all_reduce(x)
        totals.append(x.sum().item())
    return totals


def test_a_slab_of_an_odd_size():
    with fresh(2, group=False) as pool:
        assert pool.run(of_odd_sizes) == [[60_000.0] * 3] * 2


def unlike(me: Me) -> tuple[Caught, Caught, float]:
    """The group's first call is one rank's for the host, or is refused by it."""
    made, fake = dist_fake.options("eager:best")
    me.init("unlike", pg_options=made)
    x, y = torch.ones(4), torch.ones(4)
    if me.rank == VICTIM:
        fake.put_on_host(x)
    errors = caught(dist.all_reduce, x), caught(dist.broadcast, y, 7 if me.rank == VICTIM else 0)
    dist.all_reduce(y)
    return *errors, y.sum().item()


def test_a_first_call_that_is_not_everybodys():
    with fresh(3, group=False) as pool:
        for rank, (first, second, total) in enumerate(pool.run(unlike)):
            assert first.kind == "ValueError", first
            assert "rank 1 called all_reduce of 4 float32" in first.text
            assert "on GPUs, for the first time" in first.text
            assert second.kind == "ValueError" or rank == VICTIM, second
            assert total == 12.0


# What torch does for groups that are made with a device_id; not for one on the CPU.
def connect(group: dist.ProcessGroup | None = None) -> None:
    backend_of(group).eager_connect_single_device(torch.device("cpu"))


def bound(me: Me, how: str) -> tuple[int, int, float, list[str]]:
    """Groups that have met before anybody calls: in first calls, nobody waits for another's."""
    made, fake = dist_fake.options(how)
    me.init("bound", pg_options=made)
    connect()
    at_once = fake.gpu.books().get("allocated", 0)
    fake.look(False)
    groups = []
    for ranks in ((0, 1), (1, 2), (0, 2)):
        groups.append(dist.new_group(list(ranks), pg_options=made))
        if me.rank in ranks:
            connect(groups[-1])
    all_made = fake.gpu.books().get("allocated", 0)
    xs = [torch.full((500,), 1.0 + me.rank) for _ in range(2)]
    works = [
        dist.all_reduce(x, group=groups[g], async_op=True)
        for g, x in zip(((2, 0), (0, 1), (1, 2))[me.rank], xs, strict=True)
    ]
    for work in works:
        work.wait()
    while not all(work.is_completed() for work in works):
        time.sleep(0.001)
    return at_once, all_made, sum(x.sum().item() for x in xs), fake.gpu.fouls()


def test_a_group_with_a_device_meets_when_it_is_made():
    with fresh(3, group=False) as pool:
        for rank, found in enumerate(pool.run(bound, "eager:stream")):
            pairs = (3 + 4, 3 + 5, 4 + 5)[rank]
            assert found == (1, 3, 500.0 * pairs, [])


def unbound(me: Me) -> tuple[float, list[str]]:
    made, fake = dist_fake.options("eager")
    me.init("unbound", pg_options=made)
    connect()
    before = fake.calls()
    x = torch.ones(3)
    dist.all_reduce(x)
    return x.sum().item(), before


def test_a_group_without_slabs_has_nothing_to_meet_for():
    with fresh(2, group=False) as pool:
        assert pool.run(unbound) == [(6.0, [])] * 2


def half_bound(me: Me) -> Caught:
    made, _ = dist_fake.options("eager:stream")
    me.init("half", pg_options=made)
    return caught(dist.all_reduce, torch.ones(3)) if me.rank == VICTIM else caught(connect)


def test_some_ranks_give_a_device():
    with fresh(3, group=False) as pool:
        for error in pool.run(half_bound):
            assert error.kind == "ValueError", error
            assert "rank 0 called init_process_group with a device_id" in error.text
            assert "all_reduce of tensors on GPUs, for the first time" in error.text


def failing(me: Me) -> Caught:
    made, fake = dist_fake.options("eager:stream")
    me.init("failing", pg_options=made)
    if me.rank == VICTIM:
        fake.gpu.fail("register_host", 0)
    return caught(connect)


def test_a_rung_that_does_not_work_is_said_when_the_group_is_made():
    with fresh(3, group=False) as pool:
        for error in pool.run(failing):
            says = "init_process_group: PYCOLLECT_CUDA_SYNC=stream does not work here: rank 1: "
            assert says in error.text, error
