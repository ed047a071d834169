"""Messages that do not fit their receive: an error, and unchanged memory.

test_dist_p2p.py tests matching and order.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from dist_pool import BACKEND, OURS, Caught, Pools, RankContext, caught, fresh, pools_of_a_module
from reference import short
from torch import Tensor


@pytest.fixture(scope="module")
def pools(ranks_as: str) -> Iterator[Pools]:
    yield from pools_of_a_module(ranks_as=ranks_as)


def mismatched(me: RankContext, sent: Tensor, out: Tensor, tag: int) -> tuple[Caught, bool]:
    before = out.clone()
    if me.rank == 0:
        error = caught(dist.send, sent, 1, tag=tag)
    else:
        error = caught(dist.recv, out, 0, tag=tag)
    x = torch.ones(3)
    dist.all_reduce(x)
    if me.rank == 0:
        dist.send(torch.arange(4.0), 1, tag=tag)
    else:
        good = torch.zeros(4)
        dist.recv(good, 0, tag=tag)
        assert good.tolist() == [0, 1, 2, 3]
    return error, torch.equal(out, before)


MISMATCHES = {
    "smaller": (torch.ones(8), torch.zeros(7)),
    "much smaller": (torch.ones(400_000), torch.zeros(3)),
    "dtype": (torch.ones(8), torch.zeros(8, dtype=torch.int32)),
    "moved dtype": (torch.ones(8, dtype=torch.uint16), torch.zeros(8, dtype=torch.bfloat16)),
    "moved dtypes": (
        torch.ones(600_000, dtype=torch.float8_e8m0fnu),
        torch.zeros(600_000, dtype=torch.float8_e4m3fnuz),
    ),
    "empty": (torch.ones(8), torch.zeros(0)),
}


@pytest.mark.skipif(not OURS, reason=f"{BACKEND} breaks the connection, or ignores the dtypes")
@pytest.mark.parametrize("kind", MISMATCHES)
def test_mismatched_messages_raise(pools, kind):
    sent, out = MISMATCHES[kind]
    (sender, _), (receiver, untouched) = pools(2).run(mismatched, sent, out, 7)
    assert receiver.kind == "ValueError", receiver
    assert "rank 0 " in receiver.text, receiver
    assert untouched
    large = sent.numel() > 1000
    assert sender.kind == "ValueError" or (not sender.kind and not large), sender
    words = map(short, (sent.dtype, out.dtype)) if "dtype" in kind else map(in_bytes, (sent, out))
    assert all(word in receiver.text for word in words), receiver


def in_bytes(x: Tensor) -> str:
    return f"{x.numel() * x.element_size()} bytes"


def wrong_peers(me: RankContext) -> list[Caught]:
    return [
        caught(dist.send, torch.ones(2), me.world),
        caught(dist.recv, torch.ones(2), me.world),
        caught(dist.send, torch.ones(2), me.rank),
        caught(dist.recv, torch.zeros(1).expand(3), (me.rank + 1) % me.world),
        caught(dist.recv, torch.ones(2), (me.rank + 1) % me.world, tag=-1),
    ]


@pytest.mark.skipif(not OURS, reason=f"{BACKEND} accepts some of them")
def test_invalid_messages_raise(pools):
    for errors in pools(2).run(wrong_peers):
        assert all("ValueError" in e.kinds for e in errors), errors


def receive_larger_than_message(me: RankContext) -> Caught | None:
    """A receive larger than its message is refused, or only its first elements are written."""
    if me.rank == 0:
        caught(dist.send, torch.ones(8), 1)
        return None
    out = torch.full((9,), 5.0)
    error = caught(dist.recv, out, 0)
    assert out.tolist() == ([5.0] * 9 if error.kind else [1.0] * 8 + [5.0])
    return error


@pytest.mark.skipif(not OURS, reason=f"{BACKEND} waits for more data")
def test_a_receive_larger_than_its_message(pools):
    _, error = pools(2).run(receive_larger_than_message)
    assert error.kind in ("", "ValueError"), error


def late_sender(me: RankContext) -> tuple[Caught, float] | None:
    if me.rank != 0:
        return None  # sends nothing until the pool is closed
    work = dist.irecv(torch.zeros(3), 1)
    start = time.monotonic()
    error = caught(work.wait, datetime.timedelta(seconds=0.3))
    return error, error.when - start


@pytest.mark.skipif(not OURS, reason=f"{BACKEND} has no type for this error")
def test_a_wait_with_a_timeout():
    with fresh(2) as pool:
        (error, seconds), _ = pool.run(late_sender)
    assert "Timeout" in error.kinds, error
    assert "rank 1" in error.text, error
    assert 0.2 < seconds < 1.3
