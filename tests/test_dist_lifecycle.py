"""Life cycle of groups: bootstrap, subgroups, and no leaks.

After 200 groups no descriptor, thread or mapping is left.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from typing import Any

import programs
import pytest
import torch
import torch.distributed as dist
from dist_pool import (
    BACKEND,
    OURS,
    Caught,
    RankContext,
    Spec,
    backend_of,
    caught,
    check_side_by_side,
    free_port,
    fresh,
    open_resources,
)
from sites import THREADS, not_on

import pycollect as pc

CYCLES = int(os.environ.get("PYCOLLECT_TEST_CYCLES", "200"))
ours_only = pytest.mark.skipif(not OURS, reason=f"{BACKEND} lacks this feature")


def assert_all_reduce(world: int, group: dist.ProcessGroup | None = None) -> None:
    x = torch.ones(10_000)
    dist.all_reduce(x, group=group)
    assert x.eq(world).all()


# --- leaks ----------------------------------------------------------------------------------------


def cycles(me: RankContext, count: int) -> tuple[dict[str, int], dict[str, int]]:
    before: dict[str, int] = {}
    for n in range(count):
        if n == 3:  # all one-time resources have been created
            before = open_resources()
        me.init(f"cycle_{n}")
        x = torch.ones(3)
        dist.all_reduce(x, async_op=n % 2 == 1)
        if n % 5 == 0:
            other = dist.irecv(torch.ones(3), 1 - me.rank)
            dist.send(torch.ones(3), 1 - me.rank)
            other.wait()
        dist.barrier()
        dist.destroy_process_group()
    return before, open_resources()


@ours_only
@pytest.mark.slow
@pytest.mark.parametrize("placement", ["", "ab"])
def test_cycles_leave_nothing(placement):
    with fresh(2, group=False, placement=placement) as pool:
        for before, now in pool.run(cycles, CYCLES, seconds=20 + CYCLES / 5):
            assert now == before


def descriptors_of_groups(me: RankContext, count: int) -> list[int]:
    before = open_resources()["descriptors"]
    groups = [dist.new_group(list(range(me.world))) for _ in range(count)]
    assert_all_reduce(me.world, groups[-1])
    among = open_resources()["descriptors"]
    for group in groups:
        dist.destroy_process_group(group)
    return [before, among, open_resources()["descriptors"]]


@ours_only
def test_a_group_takes_one_descriptor():
    """A group costs one descriptor, because processes usually may have only 1024."""
    count = 10
    with fresh(4) as pool:
        for before, among, after in pool.run(descriptors_of_groups, count):
            assert (among - before, after) == (count, before)


# --- bootstrap ------------------------------------------------------------------------------------


def init_group(me: RankContext, how: str, where: str) -> None:
    host, _, port = where.rpartition(":")
    options: dict[str, Any] = {"rank": me.rank, "world_size": me.world}
    if how == "env":
        values = {"MASTER_ADDR": host, "MASTER_PORT": port, "RANK": me.rank, "WORLD_SIZE": me.world}
        os.environ.update({name: str(value) for name, value in values.items()})
        options = {}
    elif how == "store":
        store = dist.TCPStore(host, int(port), me.world, me.rank == 0)
        options["store"] = dist.PrefixStore("deep", dist.PrefixStore("deeper", store))
    else:
        options["init_method"] = f"{how}://{where}"
    dist.init_process_group(me.spec.backend, timeout=datetime.timedelta(seconds=30), **options)
    assert dist.get_backend() == me.spec.backend
    assert_all_reduce(me.world)


def init_and_destroy(me: RankContext, how: str, where: str) -> None:
    init_group(me, how, where)
    dist.destroy_process_group()


def init_again_and_again(me: RankContext, port: int, seconds: float) -> None:
    """Groups one after the other at one port: the store of each ends with rank 0's group."""
    for n in range(me.world + 1):
        init_group(me, "env", f"127.0.0.1:{port}")
        if n % me.world == me.rank:
            time.sleep(seconds)
        dist.destroy_process_group()


@ours_only
@pytest.mark.parametrize("seconds", [0, 0.1], ids=["at once", "late"])
@not_on(THREADS, "threads have no store that ends")
def test_groups_one_after_the_other_at_one_port(seconds, pools):
    with pools.fresh(3, group=False) as pool:
        pool.run(init_again_and_again, free_port(), seconds, seconds=120)


def stores_that_stay(me: RankContext, port: int) -> list[float]:
    """Seconds that destroying takes while the user keeps the store, or something with the group."""
    took = []
    for kept in ("store", "group", "model"):
        store = dist.TCPStore("127.0.0.1", port, me.world, me.rank == 0, multi_tenant=True)
        store = dist.PrefixStore(kept, store)
        dist.init_process_group(me.spec.backend, store=store, rank=me.rank, world_size=me.world)
        held = {"store": store, "group": dist.group.WORLD, "model": None}[kept]
        if kept == "model":
            held = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        del store
        assert_all_reduce(me.world)
        start = time.monotonic()
        dist.destroy_process_group()
        took.append(time.monotonic() - start)
        del held
        time.sleep(0.5)
    return took


@pytest.mark.parametrize("world", [1, 3])
def test_init_methods(tmp_path, world, pools):
    with pools.fresh(world, group=False) as pool:
        for number, how in enumerate(("env", "tcp", "file", "store") * 2):
            file, port = f"{tmp_path}/store_{number}", f"127.0.0.1:{free_port()}"
            pool.run(init_and_destroy, how, file if how == "file" else port)


def init_for_devices(me: RankContext) -> None:
    me.init("devices")
    assert_all_reduce(me.world)
    everybody = [None] * me.world
    dist.all_gather_object(everybody, me.rank)
    assert everybody == list(range(me.world))
    assert_all_reduce(me.world, dist.new_group(list(range(me.world))))
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", [f"cpu:{BACKEND}", f"cpu:{BACKEND},cuda:{BACKEND}"])
def test_backends_by_device(backend, pools):
    with pools.fresh(2, group=False, backend=backend) as pool:
        pool.run(init_for_devices)


# --- subgroups ------------------------------------------------------------------------------------


def subgroups(me: RankContext) -> None:
    ranks = list(range(me.world))
    pairs = [[a, b] for a in ranks for b in ranks if a < b]
    groups = [(pair, dist.new_group(pair)) for pair in pairs]
    for pair, group in groups:
        if me.rank in pair:
            x = torch.tensor([float(me.rank)])
            dist.all_reduce(x, group=group)
            assert x.item() == sum(pair)
            y = torch.tensor([float(me.rank)])
            dist.broadcast(y, src=pair[1], group=group)
            assert y.item() == pair[1]
    backwards = dist.new_group(ranks[::-1])
    out = [torch.zeros(1) for _ in ranks]
    dist.all_gather(out, torch.tensor([float(me.rank)]), group=backwards)
    order = dist.get_process_group_ranks(backwards)
    assert [int(t) for t in out] == order
    halves, _ = dist.new_subgroups(2)
    assert_all_reduce(2, halves)
    mine, _ = dist.new_subgroups_by_enumeration([ranks[::2], ranks[1::2]])
    assert_all_reduce(2, mine)
    own = ranks[me.rank % 2 :: 2]  # torch 2.14 counts them: a rank without one hangs in new_group
    assert_all_reduce(2, dist.new_group(own, use_local_synchronization=True))
    dist.destroy_process_group(groups[0][1])
    assert_all_reduce(me.world)


def split(me: RankContext) -> None:
    """The group's split_group, because dist.split_group requires a device."""
    group = dist.group.WORLD
    assert group._get_backend(torch.device("cpu")).supports_splitting
    mine = [r for r in range(me.world) if r % 2 == me.rank % 2]
    part = group.split_group(mine, datetime.timedelta(seconds=20), group_name=f"part_{mine[0]}")
    x = torch.tensor([float(me.rank)])
    part.allreduce([x]).wait()
    assert x.item() == sum(mine)
    assert (part.rank(), part.size()) == (mine.index(me.rank), len(mine))
    part.shutdown()
    assert_all_reduce(me.world)
    tree = dist.new_group(backend=BACKEND, pg_options=pc.distributed.options(order="tree"))
    all_of_it = tree.split_group(list(range(me.world)), datetime.timedelta(seconds=20))
    for part in (tree, all_of_it):  # ((1e8 + 1) - 1e8) + 1 is 1 in rank order
        x = torch.tensor([(1e8, 1.0, -1e8, 1.0)[me.rank]])
        part.allreduce([x]).wait()
        assert x.item() == 0
    all_of_it.shutdown()
    dist.destroy_process_group(tree)


@pytest.mark.parametrize("job", [subgroups, pytest.param(split, marks=ours_only)])
def test_subgroups(pools, job):
    pools(4).run(job)


# --- errors ---------------------------------------------------------------------------------------


def late_for_monitored_barrier(
    me: RankContext, late: list[int], wait_all: bool, milliseconds: int
) -> Caught | None:
    dist.barrier()
    if me.rank in late:
        time.sleep(1.5)
        return None
    limit = datetime.timedelta(milliseconds=milliseconds)
    return caught(dist.group.WORLD.monitored_barrier, limit, wait_all_ranks=wait_all)


# The late ranks, whether the barrier waits for all, its milliseconds, and the words of rank 0.
MISSING = {
    "one": ([1], False, 400, "Rank 1 failed to pass monitoredBarrier in 400 ms"),
    "the first": ([1, 2], False, 400, "Rank 1 failed to pass monitoredBarrier in 400 ms"),
    "all": ([1, 2, 3], True, 400, "Ranks 1, 2, 3 failed to pass monitoredBarrier in 400 ms"),
    # Rank 0 is not sure which ranks are missing on other hosts, or without time to ask.
    "on hosts": ([3], True, 400, "Rank 0 timed out in monitoredBarrier after 400 ms"),
    "no time": ([1], False, 0, "Rank 0 timed out in monitoredBarrier after 0 ms"),
}


def words_of_timeouts(me: RankContext) -> list[Caught]:
    """Rank 0 waits too briefly, for a work and for the group's timeout."""
    if me.rank == 1:
        time.sleep(1.5)
        return []
    work = dist.barrier(async_op=True)
    brief = caught(work.wait, datetime.timedelta(seconds=0.2))
    return [brief, caught(dist.group.WORLD.barrier(timeout=datetime.timedelta(seconds=0.2)).wait)]


def names_the_missing(case: str, errors: list[Any]) -> None:
    """As torch does."""
    late, _, milliseconds, words = MISSING[case]
    assert words in errors[0].text, errors[0]
    if OURS and milliseconds:
        assert "Timeout" in errors[0].kinds
        assert " Timed out after 0.4 s; rank" in errors[0].text
    if words.startswith("Rank 0"):
        return  # the peers may or may not have been seen
    reached = "Rank {} successfully reached monitoredBarrier, but received errors"
    assert all(reached.format(r) in errors[r].text for r in {1, 2, 3} - {*late}), errors


def has_words_that_people_search_for(_: str, found: list[list[Caught]]) -> None:
    for error in found[0]:
        assert error.kind in ("Timeout", "PeerLost"), error
        assert " timeout " in error.text or " Timed out " in error.text, error


def did_not_wait_for_the_store(_: str, found: list[list[float]]) -> None:
    for took in found:
        assert max(took) < 1, took


def test_limits_of_barriers_waits_and_the_end():
    """Jobs that mostly wait."""
    runs: dict[str, tuple[Any, ...]] = {
        case: (names_the_missing, late_for_monitored_barrier, MISSING[case][:3], {})
        for case in MISSING
        if OURS or case != "on hosts"
    }
    if OURS:
        runs["on hosts"] = (*runs["on hosts"][:3], {"placement": "aabb"})
        for where in ("", "aabb"):
            more = {"timeout": 0.6, "placement": where}
            runs[f"words {where}"] = (has_words_that_people_search_for, words_of_timeouts, (), more)
        alone = (stores_that_stay, (free_port(),), {"group": False})
        runs["stores"] = (did_not_wait_for_the_store, *alone)
    check_side_by_side(
        ((name, Spec(4, **more), job, args) for name, (_, job, args, more) in runs.items()),
        lambda name, pool: runs[name][0](name, pool.results(60)),
    )


def abort_at_once(me: RankContext) -> list[str]:
    """Ranks abort a group as soon as their call has returned; the others' calls return, too."""
    errors = []
    for n in range(36):
        group = dist.new_group()
        backend = backend_of(group)
        count = (100, 100_000, 1_000_000)[n % 3]
        x = torch.full((count,), float(me.rank))
        if n % 2 and ("threads" not in me.spec.ranks_as):  # read in place, without staging
            x = pc.symmetric_empty(count, group=group).fill_(me.rank)
        call = caught(dist.all_reduce, x, group=group)
        backend.abort()
        late = caught(dist.all_reduce, torch.ones(3), group=group)
        if call.kind or late.kind != "PeerLost":
            errors.append(f"{n}: {call} {late}")
        elif not x.eq(sum(range(me.world))).all():
            errors.append(f"{n}: wrong")
        dist.barrier()
    return errors


def abort_after_send(me: RankContext) -> list[str]:
    """A message that has been sent arrives, although its sender aborts the group."""
    errors = []
    for n in range(10):
        group = dist.new_group()
        x = torch.full((100,), float(n if me.rank == 0 else -1))
        work = dist.irecv(x, 0, group=group) if me.rank == 1 else None
        dist.barrier()
        if me.rank == 0:
            dist.send(x, 1, group=group)
            backend_of(group).abort()
        dist.barrier()
        if me.rank == 1:
            error = caught(work.wait)
            if error.kind or not x.eq(n).all():
                errors.append(f"{n}: {error}")
        dist.barrier()
    return errors


@ours_only
@pytest.mark.parametrize("job", [abort_at_once, abort_after_send])
def test_an_abort_spares_what_is_complete(pools, job):
    assert pools(3).run(job, seconds=60) == [[]] * 3


def use_destroyed_group(me: RankContext) -> None:
    group = dist.group.WORLD
    dist.destroy_process_group()
    assert caught(lambda: group.allreduce([torch.ones(2)]).wait()).kind
    assert caught(dist.all_reduce, torch.ones(2)).kind == "ValueError"
    me.init("again")
    assert_all_reduce(me.world)


def use_shut_down_group(me: RankContext) -> None:
    """The backend's shutdown() may be called more than once, and abort() after it."""
    dist.barrier()
    backend = backend_of()
    backend.shutdown()
    backend.shutdown()
    assert caught(dist.all_reduce, torch.ones(3)).kind
    backend.abort()
    dist.destroy_process_group()


@ours_only
@pytest.mark.parametrize("job", [use_destroyed_group, use_shut_down_group])
def test_calls_on_a_group_that_has_ended_raise(pools, job):
    with pools.fresh(2) as pool:
        pool.run(job)


# A FileStore removes its file when the last reference to it goes.
STORE_OF_A_GROUP = """
import os, sys, torch, torch.distributed as dist, pycollect
store = dist.FileStore(sys.argv[1], 1)
dist.init_process_group("pycollect", store=store, rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
dist.destroy_process_group()
del store
print("left", os.path.exists(sys.argv[1]))
"""


@ours_only
def test_a_destroyed_group_lets_go_of_its_store(tmp_path):
    command = [sys.executable, "-c", STORE_OF_A_GROUP, tmp_path / "store"]
    ran = programs.run(command, timeout=60)
    assert ran.stdout == "left False\n", ran.stderr
