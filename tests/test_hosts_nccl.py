"""Groups with `options(between_hosts="nccl")`, on an emulation of NCCL: transfers between two ranks
have no numbers and run one after the other, and works of an aborted group count as complete.
"""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Pools, RankContext, caught, fresh, pools_of_a_module
from dist_sites import Emulated
from dist_waits import others, publish, wait_published

import pycollect as pc
from pycollect.distributed import options

pytestmark = pytest.mark.skipif(not OURS, reason="the option is pycollect's")

PLACEMENTS = ("ab", "aabb", "aab", "abab", "abcd", "aabbcc")
QUICK = ("aabb", "aab")
BUFFER = 1 << 16  # bytes of a staging buffer: the larger calls take several runs
COUNTS = (5, 30_000)  # elements per rank: along with the agreement, and through staging buffers
ONE_RUN = 10_000  # elements that the staging buffers hold


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    yield from pools_of_a_module()


class NcclSite(Emulated):
    """Emulated devices, whose groups use the emulated NCCL between hosts."""

    def __init__(self, **given: Any) -> None:
        from pycollect import _testing

        super().__init__("eager", between_hosts="nccl", buffer_bytes=BUFFER, **given)
        self.groups: list[Any] = []

        def nccl(*args: Any) -> Any:
            self.groups.append(_testing.EmulatedNccl(pc.distributed._gloo(*args)))
            return self.groups[-1]

        self.options._nccl = nccl

    def transfers(self) -> int:
        return sum(group.transfers() for group in self.groups)


def calls(me: RankContext, count: int, group: Any) -> list[torch.Tensor]:
    """Return this rank's results of all collectives."""
    n, w = count, me.world
    x = torch.randn(n * w, generator=torch.Generator().manual_seed(me.rank))
    results = [x[:n].clone() for _ in range(3)]
    dist.all_reduce(results[0], group=group)
    dist.reduce(results[1], w - 1, dist.ReduceOp.AVG, group)
    dist.broadcast(results[2], 1, group)
    gathered, part, exchanged = torch.empty(n * w), torch.empty(n), torch.empty(n * w)
    dist.all_gather_into_tensor(gathered, x[:n], group)
    dist.reduce_scatter_tensor(part, x, group=group)
    dist.all_to_all_single(exchanged, x, group=group)
    rows = list(torch.empty(w, n)) if me.rank == 0 else None
    dist.gather(x[:n].clone(), rows, 0, group)
    mine = torch.empty(n)
    dist.scatter(mine, list(x.clone().chunk(w)) if me.rank == 1 else None, 1, group)
    dist.barrier(group)
    return [*results, gathered, part, exchanged, *(rows or []), mine]


def same_as_gloo(me: RankContext, hosts: str) -> tuple[list[int], int, dict[str, int]]:
    """Return the numbers of wrong results, of transfers by NCCL, and of resources not released."""
    plain = dist.new_group(pg_options=options(hosts=hosts, buffer_bytes=BUFFER))
    site = NcclSite(hosts=hosts)
    group = dist.new_group(pg_options=site.options)
    wrong = []
    for count in COUNTS:
        for _ in range(2):
            pairs = zip(calls(me, count, plain), calls(me, count, group), strict=True)
            wrong += [i for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    transfers = site.transfers()
    for made in (group, plain):
        dist.destroy_process_group(made)
    return wrong, transfers, site.unreleased()


@pytest.mark.parametrize("hosts", ["exact", "fast"])
@pytest.mark.parametrize(
    "placement", [pytest.param(p, marks=[] if p in QUICK else pytest.mark.slow) for p in PLACEMENTS]
)
def test_results_are_those_over_gloo(pools, placement, hosts):
    per_host = {host: placement.count(host) for host in placement}
    seen: dict[str, int] = {}
    for place, (wrong, transfers, unreleased) in zip(
        placement, pools(len(placement), placement=placement).run(same_as_gloo, hosts), strict=True
    ):
        assert wrong == []
        assert unreleased == {}
        seen[place] = seen.get(place, -1) + 1
        if seen[place] < min(per_host.values()):
            assert transfers > 8  # more than the bytes with which a column connects
        else:
            assert transfers == 0  # no rank of another host has this number


def one_dies(me: RankContext, in_a_transfer: bool) -> Any:
    site = NcclSite()
    group = dist.new_group(pg_options=site.options)
    x = torch.ones(ONE_RUN)
    dist.broadcast(x, me.world - 1, group)
    publish(me, "ready")
    if me.rank == me.world - 1:
        wait_published(me, "ready", others(me))
        if in_a_transfer:
            for made in site.groups:
                made.hold()
            dist.broadcast(x, me.world - 1, group, async_op=True)
            time.sleep(0.5)
        publish(me, "death")
        os.kill(os.getpid(), signal.SIGKILL)
    x.fill_(2)
    error = caught(dist.broadcast, x, me.world - 1, group)
    seconds = error.when - wait_published(me, "death", [me.world - 1])
    return error, seconds, x.unique().tolist()


@pytest.mark.parametrize(
    ("placement", "in_a_transfer"), [("aabb", False), ("ab", False), ("ab", True)]
)
def test_all_ranks_raise_when_one_dies(placement, in_a_transfer):
    with fresh(len(placement), placement=placement) as pool:
        *outcomes, last = pool.outcomes(one_dies, in_a_transfer, seconds=40)
    assert last.died
    for outcome in outcomes:
        error, seconds, values = outcome.value
        assert error.kind == "PeerLost", error
        assert seconds < 4
        assert values == [2.0]


def one_fails(me: RankContext) -> Any:
    site = NcclSite()
    group = dist.new_group(pg_options=site.options)
    x = torch.ones(ONE_RUN)
    dist.broadcast(x, 1, group)
    for made in site.groups:
        if me.rank == 1:
            made.hold()
        else:
            threading.Timer(1.0, made.break_transfers).start()
    errors = [caught(dist.broadcast, x.fill_(me.rank), 1, group) for _ in range(2)]
    dist.destroy_process_group(group)
    return errors, x.unique().tolist()


def test_all_ranks_raise_when_a_transfer_fails():
    with fresh(2, placement="ab") as pool:
        for rank, (errors, values) in enumerate(pool.run(one_fails, seconds=40)):
            assert [error.kind for error in errors] == ["PeerLost"] * 2, errors
            assert "NCCL has failed" in errors[0].text
            assert values == [float(rank)]


def one_is_late(me: RankContext) -> Any:
    site = NcclSite()
    group = dist.new_group(timeout=datetime.timedelta(seconds=2), pg_options=site.options)
    x = torch.ones(COUNTS[1])
    dist.all_reduce(x, group=group)
    if me.rank == 0:
        time.sleep(5)
    before = x.clone()
    error = caught(dist.all_reduce, x, group=group)
    dist.destroy_process_group(group)
    return error, torch.equal(x, before)


def test_all_ranks_raise_when_one_is_late():
    with fresh(4, placement="aabb") as pool:
        for error, unchanged in pool.run(one_is_late, seconds=40):
            assert error.kind in ("Timeout", "PeerLost"), error
            assert unchanged


def refusals(me: RankContext) -> list[str]:
    mixed = options(between_hosts="nccl" if me.rank == 0 else "gloo")
    errors = [caught(dist.new_group, pg_options=mixed)]
    if not dist.is_nccl_available():
        wanted = NcclSite().options
        wanted._nccl = pc.distributed._nccl
        errors.append(caught(dist.new_group, pg_options=wanted))
    return [f"{error.kind}: {error.text}" for error in errors]


def test_what_cannot_work_is_refused(pools):
    for mixed, *unavailable in pools(2, placement="ab").run(refusals):
        assert "between_hosts=nccl" in mixed
        assert "between_hosts=gloo" in mixed
        for why in unavailable:
            assert "needs NCCL, which this torch does not have" in why


@pytest.mark.parametrize(("value", "error"), [("mpi", ValueError), (None, TypeError)])
def test_other_values_are_refused(value, error):
    with pytest.raises(error, match=r"between_hosts .*'gloo', 'nccl'"):
        options(between_hosts=value)
