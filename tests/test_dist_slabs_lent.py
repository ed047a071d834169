"""Tensors that others read and write where they are, when something goes wrong: a rank dies or is
late, or memory cannot be opened.

An error in time on all ranks, no wrong data, and nothing that a slow launch of another rank's may
still write into is given to anybody else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import dist_fake
import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Me, Pool, begun, caught, fresh
from dist_tracts import LARGE, in_the_end, launches, listened, make, use
from dist_waits import heard, say
from test_dist_slabs_faults import NOTICED, VICTIM, bereave, work_of

pytestmark = pytest.mark.skipif(not OURS, reason="has memory of its own")


def bereaved(me: Me) -> tuple[Any, ...]:
    """The victim has lent its tensor."""
    x, y = make(1000).fill_(3), make(3).fill_(1)
    dist.all_reduce(y)  # and is kept: in the emulator, to free memory waits for the victim
    work, over, took = bereave(me, x)
    said = str(work.exception())
    error = caught(work.wait)
    values = x.unique().tolist()
    address, nbytes = x.data_ptr(), x.nbytes
    del x, y, work
    time.sleep(0.1)
    kept = use().used >= nbytes and make(1000).data_ptr() != address
    return over, took, said, error, values, kept, me.fake.gpu.fouls()


def test_a_rank_is_killed_with_its_tensor_lent():
    with fresh(3, staged="eager:stream") as pool:
        for rank, outcome in enumerate(pool.outcomes(bereaved)):
            assert outcome.died == (rank == VICTIM)
            if rank == VICTIM:
                continue
            assert not outcome.error, outcome.error
            over, took, said, error, values, kept, fouls = outcome.value
            assert over
            assert took < 0.2 + NOTICED
            assert f"rank {VICTIM}" in said
            assert error.kind == "PeerLost", error
            assert values == [3.0]  # no result is written after that
            assert kept
            assert fouls == []


def dropped(me: Me) -> list[str]:
    """Nobody holds what was lent: whoever asks for memory, or makes a call, gives it back."""
    for _ in range(3):
        work_of(make(1000).fill_(1))
        end = time.monotonic() + 5.0
        while use().used and time.monotonic() < end:
            time.sleep(0.001)
        assert use().used == 0
    return me.fake.gpu.fouls()


def test_nobody_waits_for_the_streams_who_lets_them_go():
    with fresh(3, staged="late:stream") as pool:
        assert pool.run(dropped) == [[]] * 3


def waited_for(x: torch.Tensor) -> None:
    work_of(x).wait()


def held_up(me: Me) -> tuple[Any, ...]:
    """The victim's stream does not come to it in time."""
    x = make(1000).fill_(3)
    dist.all_reduce(make(3).fill_(1))
    me.fake.look(False)
    if me.rank == VICTIM:
        me.fake.stall(True)
        me.fake.fill_later(x, 3.0)
    first = caught(waited_for, x)
    time.sleep(1.5)
    second = caught(dist.all_reduce, x)
    me.fake.stall(False)
    total = x.sum().item()
    before = use().used
    del x
    time.sleep(0.1)
    return first.kind == "", first, second, total, use().used == before


@pytest.fixture(scope="module", autouse=True)
def held() -> Iterator[dict[str, Pool]]:
    yield from begun({"held up": (held_up,)}, 3, staged="eager:stream", timeout=1.0)


def test_a_stream_that_never_comes_to_it(held):
    for passed, first, second, total, kept in held["held up"].results():
        assert passed, first
        error = second
        assert "Timeout" in error.kinds, error
        assert f"rank {VICTIM}" in error.text, error
        assert "CollectiveError" in second.kinds
        assert total == 3000.0
        assert kept


def well(me: Me) -> list[int]:
    """What a call that goes well was lent is nobody's any more soon after."""
    used = []
    for turn in range(20):
        x = make(LARGE).fill_(turn)
        dist.all_reduce(x)
        assert x.eq(turn * me.world).all()
        del x
        end = time.monotonic() + 2.0
        while use().used and time.monotonic() < end:
            time.sleep(0.001)
        used.append(use().used)
    return used


def test_what_goes_well_comes_back():
    with fresh(3, staged="late:stream") as pool:
        assert pool.run(well) == [[0] * 20] * 3


CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "all_reduce": lambda x, whole: dist.all_reduce(x),
    "all_gather": lambda x, whole: dist.all_gather_into_tensor(whole, x),
}


def unopened(me: Me, call: str, victim: int) -> tuple[Any, ...]:
    """One rank cannot open the others' tensors, which it learns when all have agreed on them."""
    x, whole = make(LARGE).fill_(me.rank), make(me.world * LARGE).fill_(-1)
    dist.all_reduce(torch.ones(3))  # the meeting
    if me.rank == victim:
        me.fake.gpu.fail("map")
    begin = time.monotonic()
    error = caught(CALLS[call], x, whole)
    took = time.monotonic() - begin
    me.fake.gpu.fail("map", -1)
    again = caught(CALLS[call], x, whole)
    return error, again, took, x.unique().tolist(), me.fake.gpu.fouls()


@pytest.mark.parametrize(("call", "victim"), [("all_reduce", 0), ("all_gather", 1)])
def test_memory_that_one_rank_cannot_open(call, victim):
    with fresh(3, staged="eager:stream") as pool:
        found = pool.run(unopened, call, victim)
        for rank, (_, again, took, values, fouls) in enumerate(found):
            assert "CollectiveError" in again.kinds, again
            assert took < NOTICED
            assert values == [rank]
            assert fouls == []
        assert "'s tensor cannot be reached: CUDA error: made up, in map" in found[victim][0].text


def unshared(me: Me) -> list[int]:
    """Memory of one rank's that cannot be handed over is memory, and its tensors are copied."""
    dist.all_reduce(torch.ones(3))  # the meeting
    lines = listened()
    if me.rank == VICTIM:
        me.fake.gpu.fail("export_memory")
    x, y = make(LARGE).fill_(me.rank), make(LARGE).fill_(me.rank)
    me.fake.gpu.fail("export_memory", -1)
    heard = [line for line in lines if "cannot be handed to other processes" in line]
    assert len(heard) == (me.rank == VICTIM), lines
    assert all("made up, in export_memory" in line for line in heard)
    counts = [launches(me, lambda: dist.all_reduce(x))]
    assert x.eq(3).all()
    y = make(LARGE).fill_(me.rank)
    counts.append(launches(me, lambda: dist.all_reduce(y)))
    assert y.eq(3).all()
    return counts


def test_memory_that_cannot_be_handed_over():
    with fresh(3, staged="eager:stream") as pool:
        for rank, (copied, placed) in enumerate(pool.run(unshared)):
            assert copied > 1
            assert placed == (rank == 0)


def alone(me: Me) -> tuple[float, dict[str, int], list[str], bool]:
    """One rank destroys the group long before the other, which has its memory open."""
    made, fake = dist_fake.options("eager:stream")
    me.init("alone", pg_options=made)
    x = make(LARGE).fill_(1)
    dist.all_reduce(x)
    if me.rank == 0:
        heard(me, "destroyed", [1])
    begin = time.monotonic()
    dist.destroy_process_group()
    took = time.monotonic() - begin
    say(me, "destroyed")
    right = bool(x.eq(me.world).all())
    del x
    return took, in_the_end(fake), fake.gpu.fouls(), right


def test_a_group_that_one_rank_destroys():
    """It waits for nobody: memory that others have mapped is theirs until they let go of it."""
    with fresh(2, group=False) as pool:
        for took, left, fouls, right in pool.run(alone):
            assert took < 1.0
            assert (left, fouls, right) == ({}, [], True)


def forked(me: Me) -> int:
    """A child that a rank has forked lets go of tensors, which are its parent's."""
    x, whole = make(LARGE).fill_(me.rank), make(me.world * LARGE)
    dist.all_reduce(torch.ones(3))
    time.sleep(0.05)  # nothing else holds it then
    child = os.fork()
    if child == 0:
        del x, whole
        os._exit(0)
    os.waitpid(child, 0)
    count = launches(me, lambda: dist.all_gather_into_tensor(whole, x))
    assert whole.view(me.world, LARGE)[:, -1].tolist() == [0, 1, 2]
    return count


def test_a_forked_child():
    with fresh(3, staged="eager:stream") as pool:
        assert pool.run(forked) == [1, 1, 1]
