"""Slabs without a device, when something goes wrong: ranks that die or come late, and what is lost.

An error in time, on all ranks, and nothing held up; groups come and go, and cross each other.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import dist_fake
import pytest
import torch
import torch.distributed as dist
from dist_fake import alive
from dist_pool import OURS, Caught, Me, Pool, begun, caught, fresh

pytestmark = pytest.mark.skipif(not OURS, reason="has slabs of its own")
VICTIM = 1
NOTICED = 2.0  # seconds after a death in which everybody has raised


def work_of(x: torch.Tensor) -> Any:
    return dist.all_reduce(x, async_op=True)


def ended(work: Any, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.001)
    return bool(work.is_completed())


def bereave(me: Me, x: torch.Tensor) -> tuple[Any, bool, float]:
    """The victim has enqueued its part and dies before its stream comes to it.

    The others' work of that call, whether it has ended, and after how many seconds.
    """
    dist.barrier()
    me.fake.look(False)
    if me.rank == VICTIM:
        me.fake.stall(True)
        me.fake.fill_later(x, 3.0)
    work = work_of(x)
    work.wait()  # the host does not wait for it, and nothing has happened yet
    if me.rank == VICTIM:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    over = ended(work)
    return work, over, time.monotonic() - begin


def bereaved(me: Me) -> tuple[Any, ...]:
    x = torch.full((1000,), 3.0)
    dist.all_reduce(torch.ones(3))
    work, over, took = bereave(me, x)
    said = str(work.exception())
    errors = [caught(work.wait), caught(dist.all_reduce, x)]
    me.fake.look(True)
    errors.append(caught(work.wait))
    return over, took, said, errors, x.unique().tolist(), me.fake.gpu.fouls()


def test_a_rank_is_killed_with_its_work_enqueued():
    with fresh(3, staged="eager:stream") as pool:
        for rank, outcome in enumerate(pool.outcomes(bereaved)):
            assert outcome.died == (rank == VICTIM)
            if rank == VICTIM:
                continue
            assert not outcome.error, outcome.error
            over, took, said, errors, values, fouls = outcome.value
            assert over
            assert took < 0.2 + NOTICED
            assert f"rank {VICTIM}" in said
            for error in errors:
                assert error.kind == "PeerLost", error
                assert f"rank {VICTIM}" in error.text, error
            assert values == [3.0]  # no result is written after that
            assert fouls == []


def killed(me: Me) -> tuple[float, Caught, Caught]:
    x = torch.ones(1000)
    dist.all_reduce(x)
    dist.barrier()
    if me.rank == VICTIM:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    error = caught(dist.all_reduce, x)
    return begin, error, caught(dist.all_reduce, x)


def test_a_rank_is_killed_before_it_comes():
    with fresh(3, staged="late:stream") as pool:
        for rank, outcome in enumerate(pool.outcomes(killed)):
            assert outcome.died == (rank == VICTIM)
            if rank == VICTIM:
                continue
            assert not outcome.error, outcome.error
            begin, error, again = outcome.value
            assert error.kind == "PeerLost", error
            assert f"rank {VICTIM}" in error.text
            assert error.when - begin < 0.2 + NOTICED
            assert "CollectiveError" in again.kinds


def held_up(me: Me) -> tuple[bool, Caught, Caught, float]:
    """The victim's stream has something else to do."""
    x = torch.full((1000,), 3.0)
    dist.all_reduce(torch.ones(3))
    me.fake.look(False)
    if me.rank == VICTIM:
        me.fake.stall(True)
        me.fake.fill_later(x, 3.0)
    first = caught(lambda: work_of(x).wait())
    time.sleep(1.5)
    second = caught(dist.all_reduce, x)
    me.fake.stall(False)
    return first.kind == "", first, second, x.sum().item()


@pytest.fixture(scope="module", autouse=True)
def held() -> Iterator[dict[str, Pool]]:
    yield from begun({"held up": (held_up,)}, 3, staged="eager:stream", timeout=1.0)


def test_a_stream_that_never_comes_to_it(held):
    for passed, first, second, total in held["held up"].results():
        assert passed, first
        error = second
        assert "Timeout" in error.kinds, error
        assert f"rank {VICTIM}" in error.text, error
        assert "CollectiveError" in second.kinds
        assert total == 3000.0


# --- lives ----------------------------------------------------------------------------------------


def cycles(me: Me, count: int) -> list[dict[str, int]]:
    left = []
    for i in range(count):
        made, fake = dist_fake.options("eager:stream")
        me.init(f"cycle_{i}", pg_options=made)
        x = torch.ones(1000)
        dist.all_reduce(x)
        work = work_of(x)
        if i % 3:
            work.wait()
        dist.destroy_process_group()
        del work  # and with it the event of its results
        left += [alive(fake)] if alive(fake) or fake.gpu.fouls() else []
    return left


def test_groups_come_and_go():
    count = int(os.environ.get("PYCOLLECT_TEST_CYCLES", "50"))
    with fresh(2, group=False) as pool:
        assert pool.run(cycles, count, seconds=60.0) == [[], []]


def circle(me: Me) -> float:
    """Groups {0, 1}, {1, 2}, {0, 2}, each rank beginning with another: no order of waits hangs."""
    groups, fakes = [], []
    me.init("circle", pg_options=dist_fake.options("late:stream")[0])
    for ranks in ((0, 1), (1, 2), (0, 2)):
        made, fake = dist_fake.options("late:stream")
        groups.append(dist.new_group(list(ranks), pg_options=made))
        fakes.append(fake)
        fake.look(False)
        if me.rank in ranks:
            dist.all_reduce(torch.ones(3), group=groups[-1])
    mine = ((2, 0), (0, 1), (1, 2))[me.rank]
    total = 0.0
    for turn in range(5):
        xs = [torch.full((500,), float(turn)) for _ in mine]
        works = [
            dist.all_reduce(x, group=groups[g], async_op=True)
            for g, x in zip(mine, xs, strict=True)
        ]
        for work in works:
            assert ended(work)
        total += sum(x.sum().item() for x in xs)
    assert all(fake.gpu.fouls() == [] for fake in fakes)
    return total


def test_groups_in_a_circle():
    with fresh(3, group=False) as pool:
        assert pool.run(circle) == [2 * 2 * 500 * 10.0] * 3


# --- what the tests above would notice ------------------------------------------------------------


def damaged(me: Me, call: str) -> tuple[list[bool], Caught]:
    """One rank's calls of this kind do nothing; the others' streams are slow."""
    dist.all_reduce(torch.ones(3))
    me.fake.look(False)
    if me.rank == VICTIM:
        me.fake.gpu.drop(call)
    else:
        me.fake.gpu.pace(0.03)
    right = []
    for i in range(4):
        x, out = torch.full((100,), float(i)), torch.zeros(100 * me.world)
        works = [
            work_of(x),
            dist.all_gather_into_tensor(out, torch.full((100,), i + 1.0), async_op=True),
        ]
        ended(works[1], 2.0)
        right.append(bool((x == i * me.world).all() & (out == i + 1).all()))
    return right, caught(dist.all_reduce, torch.ones(3))


@pytest.mark.parametrize("call", ["write_value", "wait_value", "launch"])
def test_what_is_lost_is_noticed(call):
    with fresh(3, staged="eager:stream", timeout=1.0) as pool:
        outcomes = [o.value for o in pool.outcomes(damaged, call, seconds=30.0)]
        assert not all(all(right) and error.kind == "" for right, error in outcomes), call
