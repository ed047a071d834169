"""send and recv of tensors on devices, without a device: see test_dist_staging.py."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, Me, Pools, caught, fresh, pools_of_a_module, said

pytestmark = pytest.mark.skipif(not OURS, reason="stages by itself")
WAYS = ("late", "eager")
COUNTS = (0, 1, 1000, 400_000)  # the last is not copied into the peer's queue at once


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    yield from pools_of_a_module()


def around(me: Me) -> list[str]:
    """To the right neighbour, from the left one or from anybody, strided and not."""
    right, left = (me.rank + 1) % me.world, (me.rank - 1) % me.world
    wrong = []
    for count in COUNTS:
        for stride in (1, 2):
            x = torch.full((count * stride,), float(me.rank))[::stride]
            y = torch.full((count * stride,), -1.0)[::stride]
            me.fake.fill_later(y, -2.0)
            sent = dist.isend(x, right)
            source = dist.recv(y, None if count == 1000 else left)
            sent.wait()
            if source != left or not bool((y == left).all()):
                wrong.append(f"{count} elements, stride {stride}, from {source}: {y[:3]}")
    return wrong


@pytest.mark.parametrize("staged", WAYS)
def test_around_a_ring(pools, staged):
    assert pools(3, staged=staged, beside=None).run(around) == [[]] * 3


def in_order(me: Me) -> list[float]:
    """Nothing overtakes a message whose stream is late: neither others' like it nor the host's."""
    values = []
    for _ in range(5):
        if me.rank == 0:
            me.fake.stall(True)
            on_host = torch.full((4,), 3.0)
            me.fake.put_on_host(on_host)
            works = [
                dist.isend(torch.full((4,), 1.0), 1),
                dist.isend(torch.full((4,), 2.0), 1),
                dist.isend(on_host, 1),
            ]
            assert not any(w.is_completed() for w in works)  # and the calls returned: nobody waited
            dist.send(on_host, 2)  # to another rank, which is not held up
            me.fake.stall(False)
            for work in works:
                work.wait()
        else:
            x = torch.zeros(4)
            for _ in range(3 if me.rank == 1 else 1):
                dist.recv(x, 0)
                values.append(x[0].item())
    return values


def test_messages_do_not_overtake(pools):
    found = pools(3, staged="late", beside=None).run(in_order)
    assert found == [[], [1.0, 2.0, 3.0] * 5, [3.0] * 5]


def nobody_waits(me: Me) -> float:
    """The group's thread posts what has come from the device while nobody waits for it."""
    x = torch.full((100,), float(me.rank + 1))
    y = torch.zeros(100)
    if me.rank == 0:
        work = dist.isend(x, 1)
        dist.recv(y, 1)  # which rank 1 sends only after ours has come
        work.wait()
    else:
        dist.recv(y, 0)
        dist.send(x, 0)
    return y[0].item()


@pytest.mark.parametrize("staged", WAYS)
def test_a_send_that_nobody_waits_for(pools, staged):
    assert pools(2, staged=staged, beside=None).run(nobody_waits) == [2.0, 1.0]


def batched(me: Me) -> list[float]:
    peer = 1 - me.rank
    x, y = torch.full((50,), float(me.rank)), torch.zeros(50)
    ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    z = torch.zeros(50)
    works = [dist.irecv(z, peer), dist.isend(x, peer)]
    future = works[0].get_future()
    future.wait()
    works[1].wait()
    return [y[0].item(), future.value()[0][0].item()]


@pytest.mark.parametrize("staged", WAYS)
def test_batches_and_futures(pools, staged):
    assert pools(2, staged=staged, beside=None).run(batched) == [[1.0, 1.0], [0.0, 0.0]]


def failing(me: Me) -> tuple[Caught, float]:
    """A send whose device fails fails alone."""
    error, y = Caught((), "", 0.0), torch.zeros(3)
    if me.rank == 0:
        me.fake.fail_call(3)  # memory, copy and event go well, the first question does not
        error = caught(lambda: dist.isend(torch.ones(3), 1).wait())
        dist.send(torch.full((3,), 5.0), 1)
    else:
        dist.recv(y, 0)
    return error, y[0].item()


def test_a_device_that_fails(pools):
    (error, _), (_, value) = pools(2, staged="late", beside=None).run(failing)
    assert "made up" in error.text
    assert value == 5.0


def held_up(me: Me) -> Caught:
    if me.rank == 0:
        me.fake.stall(True)
        return caught(dist.send, torch.ones(3), 1)
    return caught(dist.recv, torch.ones(3), 0)


def test_a_stream_that_never_comes_to_it():
    with fresh(2, staged="late", timeout=1.0) as pool:
        for error in pool.run(held_up):
            assert "CollectiveError" in error.kinds, error
            assert "rank 0" in error.text, error


def destroyed(me: Me) -> float:
    if me.rank == 0:
        me.fake.stall(True)
        dist.isend(torch.ones(3), 1)
    start = time.monotonic()
    dist.destroy_process_group()
    return time.monotonic() - start


@pytest.mark.slow
def test_destroyed_with_a_send_under_way():
    with fresh(2, staged="late") as pool:
        assert max(pool.run(destroyed)) < 12.0  # the time of grace, once or twice


PROGRAM = """
import os, pycollect as pc, torch, torch.distributed as dist
from pycollect import _testing
options = pc.distributed.options(**{options})
_testing.emulate(options)
dist.init_process_group("pycollect", store=dist.HashStore(), rank=0, world_size=1,
                        pg_options=options)
for _ in range(2):
    dist.all_reduce(torch.ones(3))
dist.destroy_process_group()
"""


def test_the_rung_is_said_once():
    lines = said(PROGRAM.replace("{options}", "{}"), PYCOLLECT_LOG="info")
    assert lines.count("PYCOLLECT_CUDA_SYNC=host") == 1
    assert "pinned memory" in lines


@pytest.mark.parametrize(
    ("options", "environ", "says"),
    [
        ("{}", "host", ""),
        ("{'cuda_sync': 'host'}", "", ""),
        ("{'cuda_sync': 'ipc'}", "", "cuda_sync is 'ipc'; allowed are best, stream, host"),
        ("{}", "spin", "PYCOLLECT_CUDA_SYNC is 'spin'; allowed are stream, host"),
    ],
)
def test_rungs_by_name(options, environ, says):
    program = PROGRAM.replace("{options}", options)
    caught_too = f"try:\n  exec({program!r})\nexcept ValueError as error:\n  print(error)"
    assert said(caught_too, PYCOLLECT_CUDA_SYNC=environ).strip() == says
