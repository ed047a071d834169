"""CUDA tensors of ranks that are threads: in place, ordered by events, on streams of their own.

The tests run on emulated devices, whose streams run as late as CUDA allows, and with `-m cuda` on a
GPU.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_jobs import MOST_SECONDS

import pycollect as pc
from pycollect import _testing, threads


@dataclass
class Site:
    """Where device tensors are, and how tests write and read them on a rank's own stream."""

    device: str
    fake: Any = None
    options: Any = None

    def begin(self) -> None:
        if self.fake:
            self.fake.use_own_stream()
            dist.init_process_group("pycollect", pg_options=self.options)

    def full(self, count: int, value: float) -> torch.Tensor:
        """Return a tensor whose values are written late on the rank's stream."""
        if self.fake:
            made = self.fake.empty([count])
            self.fill_later(made, value)
            return made
        torch.cuda._sleep(2_000_000)
        return torch.full((count,), value, device=self.device)

    def fill_later(self, tensor: torch.Tensor, value: float) -> None:
        if self.fake:
            self.fake.write(tensor, torch.full_like(tensor, value))
        else:
            tensor.fill_(value)

    def empty(self, count: int) -> torch.Tensor:
        return self.full(count, -1.0)

    def values(self, tensor: torch.Tensor) -> list[float]:
        """Return the values that the rank's stream sees now."""
        if self.fake:
            self.fake.finish()
        return sorted(set(tensor.cpu().reshape(-1).tolist()))

    def run(self, fn: Callable[..., Any], world: int, **options: Any) -> list[Any]:
        def program(rank: int, world: int) -> Any:
            self.begin()
            return fn(rank, world, self)

        device = None if self.fake else self.device
        return threads.launch(
            program, world, device=device, timeout=min(60, MOST_SECONDS), **options
        )


@pytest.fixture(params=["late", "eager", pytest.param("gpu", marks=pytest.mark.cuda)])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    if request.param == "gpu":
        yield Site("cuda:0")
        return
    options = pc.distributed.options()
    fake = _testing.emulate(options, request.param == "eager", True)
    yield Site("cpu", fake, options)
    assert not fake.cuda.violations()


def all_reduce(rank: int, world: int, site: Site) -> Any:
    x = site.full(1000, rank + 1.0)
    dist.all_reduce(x)
    return site.values(x)


def all_reduce_later(rank: int, world: int, site: Site) -> Any:
    x, other = site.full(1000, rank + 1.0), site.full(50, 7.0)
    work = dist.all_reduce(x, async_op=True)
    dist.all_reduce(other)
    work.wait()
    return site.values(x) + site.values(other)


def gathers(rank: int, world: int, site: Site) -> Any:
    one, all_of_them = site.full(100, float(rank)), site.empty(100 * world)
    dist.all_gather_into_tensor(all_of_them, one)
    parts = [site.empty(100) for _ in range(world)]
    dist.all_gather(parts, one)
    mine = site.empty(100)
    dist.reduce_scatter_tensor(mine, all_of_them)
    return site.values(all_of_them), [site.values(p) for p in parts], site.values(mine)


def strided(rank: int, world: int, site: Site) -> Any:
    x = site.full(1000, rank + 1.0)
    dist.all_reduce(x[::2])
    return site.values(x[::2]) + site.values(x[1::2])


def messages(rank: int, world: int, site: Site) -> Any:
    found = []
    for count in (10, 100_000):  # eager, and not
        x, y = site.full(count, float(rank)), site.empty(count)
        ops = [dist.P2POp(dist.isend, x, (rank + 1) % world),
               dist.P2POp(dist.irecv, y, (rank - 1) % world)]  # fmt: skip
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        found += site.values(y)
    return found


def reused_send(rank: int, world: int, site: Site) -> Any:
    """The sender overwrites its tensor as soon as the send is done."""
    if rank == 0:
        x = site.full(100, 5.0)
        dist.send(x, 1)
        site.fill_later(x, 9.0)
        return site.values(x)
    y = site.empty(100)
    dist.recv(y, 0)
    return site.values(y)


def polled(rank: int, world: int, site: Site) -> Any:
    """A work is complete when the results are in the tensors, without a wait."""
    found = []
    for count in (10, 100_000):  # eager, and not
        x, y, z = site.full(count, float(rank)), site.empty(count), site.full(count, 1.0)
        sent, received = dist.isend(x, (rank + 1) % world), dist.irecv(y, (rank - 1) % world)
        for works, result in (([sent, received], y), ([dist.all_reduce(z, async_op=True)], z)):
            while not all(work.is_completed() for work in works):
                time.sleep(0.0001)
            found += sorted(set(result.tolist() if site.fake else site.values(result)))
    return found


def coalesced(rank: int, world: int, site: Site) -> Any:
    x, y = site.full(1000, rank + 1.0), site.full(10, 2.0)
    with dist._coalescing_manager(device=x.device):
        dist.all_reduce(x)
        dist.all_reduce(y)
    return site.values(x) + site.values(y)


def future(rank: int, world: int, site: Site) -> Any:
    x = site.full(1000, rank + 1.0)
    dist.all_reduce(x, async_op=True).get_future().wait()
    return site.values(x)


@pytest.mark.parametrize("parallel", [False, True])
def test_values_follow_the_ranks_streams(site: Site, parallel: bool) -> None:
    world, total = 3, 6.0
    run = lambda fn, world=world: site.run(fn, world, parallel=parallel)  # noqa: E731
    assert run(all_reduce) == [[total]] * world
    assert run(all_reduce_later) == [[total, 7.0 * world]] * world
    all_ranks = [float(r) for r in range(world)]
    assert run(gathers) == [
        (all_ranks, [[r] for r in all_ranks], [rank * 3.0]) for rank in all_ranks
    ]
    assert run(strided) == [[total, rank + 1.0] for rank in range(world)]
    assert run(messages) == [[float((r - 1) % world)] * 2 for r in range(world)]
    assert run(reused_send, 2) == [[9.0], [5.0]]
    assert run(polled) == [[float((r - 1) % world), world] * 2 for r in range(world)]
    assert run(coalesced) == [[total, 2.0 * world]] * world
    assert run(future) == [[total]] * world


def test_a_read_that_is_not_joined_sees_the_old_values(site: Site, request: Any) -> None:
    """The tests above would see a missing join: their values are written late."""
    if request.node.callspec.params["site"] == "eager":
        pytest.skip("eager devices do all permitted work at once")

    def read(rank: int, world: int, site: Site) -> list[float]:
        x = site.empty(1000)
        site.values(x)
        if site.fake:
            site.fake.cuda.set_pause(0.3)  # seconds between two pieces of the streams' work
            site.fill_later(site.fake.empty([1]), 0.0)
            time.sleep(0.05)
            site.fill_later(x, 5.0)
            found = sorted(set(x.tolist()))
            site.fake.cuda.set_pause(0.0001)
            return found
        torch.cuda._sleep(200_000_000)
        x.fill_(5.0)
        with torch.cuda.stream(torch.cuda.Stream()):
            return sorted(set(x.tolist()))

    assert site.run(read, 1) == [[-1.0]]


def test_a_call_takes_two_events_for_each_rank(site: Site) -> None:
    if not site.fake:
        pytest.skip("counts the emulator's calls")
    world = 4

    def made_by(calls: int) -> Counter[str]:
        def program(rank: int, world: int, site: Site) -> None:
            x = site.full(1000, 1.0)
            for _ in range(calls):
                dist.all_reduce(x)

        before = len(site.fake.cuda.calls())
        site.run(program, world)
        return Counter(site.fake.cuda.calls()[before:])

    one, six = made_by(1), made_by(6)
    expected = 2 * world * 5
    assert six - one == {"record caller": expected, "wait caller": expected}


class DelayedAbort:
    """Rank 2 fails, and a callback delays the news on its way to the group of ranks 0 and 1."""

    def __init__(self) -> None:
        self.options = pc.distributed.options()
        self.fake = _testing.emulate(self.options, False, False)
        self.fake.cuda.drain_waits(False)
        self.posted, self.sent, self.raised = (threading.Event() for _ in range(3))

    def run(self, rank: int, world: int) -> float | None:
        dist.init_process_group("pycollect", pg_options=self.options)
        group = dist.new_group(pg_options=self.options)
        return (self.receive, self.send, self.fail)[rank](group)

    def receive(self, group: Any) -> float:
        y = torch.full((10,), -1.0)
        self.fake.put_on_host(y)
        work = dist.irecv(y, 1, group=group)
        self.posted.set()
        with pytest.raises(pc.PeerLost):
            work.wait()
        y.fill_(-2.0)
        self.raised.set()
        time.sleep(0.2)
        return y[0].item()

    def send(self, group: Any) -> None:
        self.posted.wait(10)
        x = self.fake.empty([10])
        # Otherwise each look at the arrival runs some of the stream's work.
        self.fake.stall(self.fake.current())
        self.fake.write(x, torch.full((10,), 5.0))
        dist.isend(x, 0, group=group)
        self.sent.set()
        self.raised.wait(10)
        self.fake.resume()
        self.fake.finish()  # the data arrives

    def fail(self, group: Any) -> None:
        def slow(future: Any) -> None:
            self.raised.wait(10)
            time.sleep(0.3)

        self.sent.wait(10)
        dist.all_reduce(torch.ones(3), async_op=True).get_future().then(slow)
        raise ValueError("rank 2 fails")


def test_a_receive_from_a_device_writes_nothing_after_it_has_raised() -> None:
    ranks, found = DelayedAbort(), []

    def program(rank: int, world: int) -> None:
        found.append(ranks.run(rank, world))

    with pytest.raises(ValueError, match="rank 2 fails"):
        threads.launch(program, 3, parallel=True, timeout=20)
    assert -2.0 in found
    assert 5.0 not in found
