"""The life of GPU memory that other processes reach, without a device: more than can be known,
used again, groups that come and go.
"""

from __future__ import annotations

import ctypes
import gc
import time
from typing import Any

import dist_fake
import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, Me, caught, fresh
from dist_tracts import GPU, LARGE, in_the_end, launches, listened, make, reached, use

pytestmark = pytest.mark.skipif(not OURS, reason="has memory of its own")


def crowded(me: Me) -> tuple[int, int]:
    """More tensors than there are notices for; sums of each."""
    lines = listened()
    dist.all_reduce(torch.ones(1))  # the meeting
    xs = [make(100).fill_(i + me.rank) for i in range(70)]
    known = sum(map(reached, xs))
    counts = [launches(me, lambda x=x: dist.all_reduce(x)) for x in xs]
    for i, x in enumerate(xs):
        assert x.eq(me.world * i + sum(range(me.world))).all(), i
    assert sum("is in 64 parts already: what comes beyond is copied" in x for x in lines) == 1, (
        lines
    )
    return known, counts.count(0)  # a leader launches in any case


def test_more_parts_than_can_be_known():
    with fresh(3, staged="eager:stream") as pool:
        assert pool.run(crowded) == [(64, 0), (64, 64), (64, 64)]


def overlapping(me: Me) -> list[bool]:
    """Memory that begins in a tract and ends elsewhere, as neighbours may."""
    x = make(10)
    tract = use().used
    found = []
    for nbytes in (tract, tract + 4):
        window = (ctypes.c_char * nbytes).from_address(x.data_ptr())
        found.append(reached(torch.frombuffer(window, dtype=torch.float32)))
    return found


def test_memory_of_two_tracts():
    with fresh(1, staged="eager:stream") as pool:
        assert pool.run(overlapping) == [[True, False]]


def used_again(me: Me) -> None:
    """What others have open is kept, and given out again; what nobody has open is freed."""
    x = make(LARGE).fill_(1)
    first, before = x.data_ptr(), use()
    assert before.used >= x.nbytes
    assert before.used == before.reserved
    dist.all_reduce(x)
    dist.barrier()
    del x
    end = time.monotonic() + 2.0
    while use().used and time.monotonic() < end:  # the streams' own hold on it ends
        time.sleep(0.001)
    dist.barrier()
    after = use()
    assert (after.used, after.kept) == (0, 0 if me.rank == 0 else before.used)
    y = make(LARGE // 2 + 10).fill_(1)
    assert (y.data_ptr() == first) or me.rank == 0
    dist.all_reduce(y)
    assert y.eq(me.world).all()
    z = make(LARGE).fill_(2)
    assert z.data_ptr() != y.data_ptr()
    dist.all_reduce(z)
    assert z.eq(2 * me.world).all()
    assert y.eq(me.world).all()


def test_what_others_have_open_is_used_again():
    with fresh(3, staged="eager:stream") as pool:
        pool.run(used_again)


def cycles(me: Me, count: int) -> list[Any]:
    left = []
    for i in range(count):
        made, fake = dist_fake.options("eager:stream")
        me.init(f"cycle_{i}", pg_options=made)
        xs = [make(1000).fill_(1) for _ in range(3)]
        dist.all_reduce(xs[0])
        dist.all_reduce(xs[1])
        if i % 2:
            del xs[0]
        dist.destroy_process_group()
        assert xs[-1].eq(1).all()  # it may stay
        xs.clear()
        gc.collect()
        left += [books] if (books := in_the_end(fake)) or fake.gpu.fouls() else []
    return left


@pytest.mark.slow
def test_groups_come_and_go():
    with fresh(2, group=False) as pool:
        assert pool.run(cycles, 20, seconds=60.0) == [[], []]


def refused(me: Me) -> list[Caught]:
    import pycollect as pc

    errors = [caught(lambda: pc.empty(3, device="meta")), caught(lambda: make(-1))]
    me.fake.capture(True)
    errors.append(caught(lambda: make(3)))
    me.fake.capture(False)
    gloo = dist.new_group(backend="gloo")
    errors.append(caught(lambda: pc.empty(3, device=GPU, group=gloo)))
    return errors


def test_what_is_refused():
    with fresh(2, staged="late:stream") as pool:
        found = pool.run(refused)
    for meta, negative, captured, foreign in found:
        assert "allowed are 'cpu' and GPUs" in meta.text
        assert "no dimension may be negative" in negative.text
        assert "under capture" in captured.text
        assert "make it with 'pycollect'" in foreign.text or "has no memory" in foreign.text
        assert {e.kind for e in (meta, negative, captured, foreign)} == {"ValueError"}
