"""The end of a host that nobody waits for, and the leaving of one, in groups over several hosts."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import (
    OURS,
    Caught,
    ForwardingStore,
    JobPool,
    RankContext,
    Spec,
    backend_of,
    caught,
    check_side_by_side,
    free_port,
    fresh,
)
from faults import (
    AT_ONCE,
    NOTICE_SECONDS,
    after_failure,
    calls_before_failure,
    names,
    others,
    publish,
    seconds,
    wait_published,
)

pytestmark = pytest.mark.skipif(not OURS, reason="PYCOLLECT_HOST is pycollect's")

LATE = 4.0  # seconds: longer than a death may remain unnoticed


def one_dies(
    me: RankContext, dead: int, late: list[int], call: str, port: int
) -> tuple[Caught, float]:
    """Return the error and how many seconds after the death it came. Rank 0 serves the store."""
    where, world = f"tcp://127.0.0.1:{port}", {"rank": me.rank, "world_size": me.world}
    dist.init_process_group("pycollect", init_method=where, **world)
    x = torch.ones(3)
    calls_before_failure(me)
    publish(me, "ready")
    if me.rank == dead:
        wait_published(me, "ready", others(me))
        publish(me, "death")
        os.kill(os.getpid(), signal.SIGKILL)
    if me.rank in late:
        time.sleep(LATE)
    if call == "recv":
        error = caught(dist.recv, x, 2 if me.rank == 1 else 1)
    else:
        error = caught(dist.all_reduce, x)
    seconds = error.when - wait_published(me, "death", [dead])
    after_failure(me)
    return error, seconds


# (placement, dead rank, late ranks, call of the others)
DEATHS = [
    ("abc", 2, [1], "all_reduce"),
    ("abc", 1, [2], "all_reduce"),
    ("aabbc", 4, [2], "all_reduce"),
    ("abbcd", 2, [4], "all_reduce"),
    ("abcdefgh", 0, [1], "recv"),
    ("aabb", 0, [], "recv"),
    ("aabb", 0, [], "all_reduce"),
    ("abc", 0, [], "all_reduce"),
    ("aabc", 0, [1, 2, 3], "all_reduce"),
]


def test_the_end_of_a_host_is_noticed_by_all():
    """Torch logs nothing: each access to a store that has ended would print a stack trace."""

    def check(row: Any, pool: JobPool) -> None:
        placement, dead, late, _ = row
        outcomes = pool.collect_outcomes(30)
        logs = [(pool.folder / f"rank_{rank}.log").read_text() for rank in range(len(placement))]
        assert logs == [""] * len(placement)
        for rank, outcome in enumerate(outcomes):
            if rank == dead:
                assert outcome.died
                continue
            assert not outcome.error, outcome.error
            error, seconds = outcome.value
            assert error.kinds[0] == "PeerLost", error
            assert [r for r in range(len(placement)) if names(r, error.text)] == [dead], error
            assert rank in late or seconds < NOTICE_SECONDS, error

    jobs = ((row, placed(row[0], group=False), one_dies, (*row[1:], free_port())) for row in DEATHS)
    check_side_by_side(jobs, check)


def one_does_not_call(me: RankContext, missing: int) -> str:
    x = torch.ones(3)
    dist.all_reduce(x)
    publish(me, "ready")
    wait_published(me, "ready", range(me.world))
    if me.rank == missing:
        wait_published(me, "waited", others(me))
        return ""
    error = caught(dist.all_reduce(x, async_op=True).wait, seconds(1))
    publish(me, "waited")
    return error.text


def test_a_wait_that_times_out_names_nobody_who_has_begun():
    def check(key: Any, pool: JobPool) -> None:
        placement, missing = key
        for rank, text in enumerate(pool.results()):
            if rank == missing:
                continue
            named = f"which rank {missing} has not begun"
            assert ("has not begun" in text) == (named in text), text
            assert (named in text) == (placement[rank] == placement[missing]), text

    keys = [("aab", 2), ("aabb", 3), ("abb", 0), ("abab", 2)]
    check_side_by_side(((key, placed(key[0]), one_does_not_call, key[1:]) for key in keys), check)


def placed(placement: str, **spec: Any) -> Spec:
    return Spec(len(placement), placement=placement, **spec)


def one_leaves(me: RankContext, leaver: int, refuses: bool) -> float:
    """The other ranks of a host go on with messages after a host has left, also if it has refused
    a call that they do not make. Return the seconds that destroying the group took."""
    dist.all_reduce(torch.ones(3))
    publish(me, "ready")
    wait_published(me, "ready", others(me))
    if me.rank == leaver and refuses:
        assert "expanded" in caught(dist.all_reduce, torch.ones(1).expand(3)).text
    if me.rank != leaver:  # longer than a closed connection, or an expected call, may be missed
        time.sleep(LATE if refuses else 1.0)
        x = torch.full((5,), float(me.rank))
        if me.rank < 2:
            dist.send(x, 1) if me.rank == 0 else dist.recv(x, 0)
            assert x.tolist() == [0.0] * 5
    begin = time.monotonic()
    dist.destroy_process_group()
    return time.monotonic() - begin


def test_a_host_that_leaves_is_no_failure():
    def check(key: tuple[str, int, bool], pool: JobPool) -> None:
        for rank, took in enumerate(pool.results(30)):
            # Half of it, if the host that watches this one has left.
            assert took < 2 * AT_ONCE or (key[2] and rank == key[1])

    leavers = [("aab", 2, False), ("aabc", 2, False), ("aabc", 3, False), ("aab", 2, True)]
    check_side_by_side(((key, placed(key[0]), one_leaves, key[1:]) for key in leavers), check)


def groups_that_end_at_once(me: RankContext) -> None:
    for n in range(60):
        me.init(f"group {n}")
        if n % 3 == 1:
            dist.all_reduce(torch.ones(3))
        if n % 3 == 2:
            backend_of(dist.group.WORLD).abort()
        if n % me.world == me.rank:
            time.sleep(0.005)
        dist.destroy_process_group()


def test_groups_may_end_when_their_hosts_have_connected():
    """Gloo ended the process when a connection came about after it had been closed."""
    with fresh(4, placement="abcd", group=False) as pool:
        pool.run(groups_that_end_at_once, seconds=60)


# Timeout of the groups whose ranks do not connect. If that is rank 0, with the store, they need not
# wait; but torch looks up the name of its address before it raises: 5 s more if a query is lost.
CONNECT_SECONDS, LONG_SECONDS, LOOKUP_SECONDS = 5, 40, 12
# When a rank tells that it is there, and connects to the first and second rank of another host.
MOMENTS = ("comes", "connects to one", "connects to another")


def send_self(number: signal.Signals, after: float = 0.0) -> None:
    time.sleep(after)
    os.kill(os.getpid(), number)
    time.sleep(0.5)  # a busy machine may take as long to stop all threads


EVENTS = {
    "dies": lambda: send_self(signal.SIGKILL),
    "dies late": lambda: send_self(signal.SIGKILL, after=0.3),
    "stops": lambda: send_self(signal.SIGSTOP),
    "stops late": lambda: send_self(signal.SIGSTOP, after=1.4),  # when it has told who is late
    "is interrupted": lambda: threading.Timer(0.3, send_self, [signal.SIGINT]).start(),
    "is late": lambda: time.sleep(0.6),
    "loses the store": lambda: dist.TCPStore("127.0.0.1", 1, timeout=seconds(0.001)),
}


class EventStore(ForwardingStore):
    """A store that lets something happen to its process at one of the moments, when the ranks of
    its host "meet", or when it "looks" into the store while it connects."""

    moment, event, connects, happened = "", "", 0, False

    def before(self, call: str, key: str) -> None:
        parts = {"set": ("comes", "/hosts/here"), "get": ("meet", "/host ")}
        looks = "looks" if call == "check" and self.connects > 0 else ""
        moment, part = parts.get(call, (looks, ""))
        if call == "wait" and "/gloo/" in key:
            self.connects += 1
            moment = MOMENTS[min(self.connects, 2)]
            time.sleep(0.2 if self.moment == "looks" and self.connects == 1 else 0)
        if moment == self.moment and part in key and not self.happened:
            self.happened = True
            EVENTS[self.event]()


def connect_with_event(me: RankContext, who: int, moment: str, event: str, port: int) -> Any:
    """Return the error, the seconds that making the group took, and whether the store did it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if me.rank > 0:
        wait_published(me, "serves", [0])
    store: Any = dist.TCPStore("127.0.0.1", port, me.world, me.rank == 0, wait_for_workers=False)
    publish(me, "serves")
    wait_published(me, "serves", range(me.world))  # one that starts late would be named
    if event == "has no network" and me.rank == who:
        os.environ["GLOO_SOCKET_IFNAME"] = "none"
    late = {"leaves": 1, "dies late": 1, "is interrupted": (who + 1) % me.world}.get(event)
    if me.rank == late or (me.rank == who and event in EVENTS):
        store = EventStore(store)
        store.moment, store.event = moment, "is late" if me.rank == late else event
    Path(me.folder, f"pid_{me.rank}").write_text(str(os.getpid()))
    begin, timeout = time.monotonic(), seconds(CONNECT_SECONDS if who > 0 else LONG_SECONDS)
    options = {"store": store, "rank": me.rank, "world_size": me.world, "timeout": timeout}
    error = caught(dist.init_process_group, "pycollect", **options)
    publish(me, "returned")
    if "stops" in event and me.rank == (who == 0):
        wait_published(me, "returned", [r for r in range(me.world) if r != who])
        os.kill(int(Path(me.folder, f"pid_{who}").read_text()), signal.SIGCONT)
    if event == "leaves":
        dist.destroy_process_group()
        if me.rank == 0:
            os._exit(0)
    return error, error.when - begin, getattr(store, "happened", False)


def connect_events() -> Iterator[tuple[str, int, str, str]]:
    for place, who in [("ab", 1), ("aabb", 2), ("abb", 0), ("abcd", 0), ("abcd", 2), ("abab", 3)]:
        for moment in MOMENTS[: len(place)]:
            yield place, who, moment, "dies"
            if who > 0:  # a store that is stopped blocks all
                yield place, who, moment, "stops"
        yield place, who, "comes", "is interrupted"
        yield place, who, "", "has no network"
    yield "ab", 1, "connects to one", "stops late"
    yield "ab", 1, "comes", "loses the store"
    yield "abb", 0, "meet", "dies late"  # rank 2 knows that its host is there, rank 1 does not
    for place in ("ab", "aabb", "abcd"):
        yield from ((place, 0, at, "leaves") for at in ("looks", *MOMENTS[1 : len(place)]))


@pytest.mark.parametrize("event", sorted({event for *_, event in connect_events()}))
def test_a_rank_that_does_not_connect_is_named_in_time(event):
    """At once, if it tells so, if a rank of its host or one to which it has connected notices its
    death, or if the store ends with it. With the store, it may leave when all are connected."""

    def check(key: tuple[str, int, str, str], pool: JobPool) -> None:
        placement, faulty, moment, _ = key
        for rank, outcome in enumerate(pool.collect_outcomes(20)):
            assert outcome.died == (event in ("dies", "dies late", "leaves") and rank == faulty)
            if rank == faulty:
                assert event != "is interrupted" or "KeyboardInterrupt" in outcome.error
                assert event != "loses the store" or outcome.value[0].kind == "PeerLost"
                continue
            assert not outcome.error, outcome.error
            error, took, happened = outcome.value
            if event == "leaves":
                assert (happened, error.kind) == (rank == 1, ""), error
                continue
            assert error.kind in ("PeerLost", "Timeout"), (rank, took, error)
            assert "group '0'" in error.text, error
            assert [r for r in range(pool.spec.world) if names(r, error.text)] == [faulty], error
            alone = faulty > 0 and placement.count(placement[faulty]) == 1 and moment != MOMENTS[2]
            slow = "stops" in event or event == "loses the store" or (event == "dies" and alone)
            early = LOOKUP_SECONDS if faulty == 0 else 0.9 * CONNECT_SECONDS
            assert took < (CONNECT_SECONDS + NOTICE_SECONDS if slow else early), error

    check_side_by_side(
        (
            (key, placed(key[0], group=False), connect_with_event, (*key[1:], free_port()))
            for key in connect_events()
            if key[3] == event
        ),
        check,
    )


def many_sends(me: RankContext, count: int) -> float:
    """Send without waiting; return the mebibytes by which the sender has grown."""
    x = torch.zeros(4000)
    dist.all_reduce(x)
    if me.rank == 1:
        for i in range(count):
            dist.recv(x, 0)
            assert x[0] == i
            if i % 50 == 49:
                dist.send(x, 0)
        return 0.0
    before = 0
    for i in range(count):
        if i == count // 10:
            before = rss()
        dist.isend(torch.full((4000,), float(i)), 1)
        if i % 50 == 49:
            dist.recv(x, 1)  # the receiver has got as far
    return (rss() - before) / 2**20


def rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_sends_that_nobody_awaits_release_their_memory():
    with fresh(2, placement="ab") as pool:
        grown, _ = pool.run(many_sends, 4000, seconds=60)
    assert grown < 16  # 3,600 messages have 58 MB


def one_lacks_memory(me: RankContext) -> tuple[Caught, Caught]:
    x, unlimited = torch.ones(2**24), resource.getrlimit(resource.RLIMIT_AS)
    out = torch.zeros_like(x)
    dist.all_reduce(x)
    taken = []
    if me.rank == 2:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), unlimited[1]))
        for size in (2**24, 2**20):  # the memory that the allocator keeps
            while not caught(lambda n=size: taken.append(torch.empty(n))).kind:
                pass
    error = caught(dist.all_to_all_single, out, x)
    resource.setrlimit(resource.RLIMIT_AS, unlimited)
    return error, caught(dist.all_reduce, torch.ones(3))


def test_lack_of_memory_on_one_host_is_an_error_on_all():
    """Within a host such a call is refused; between hosts other ranks may have begun with it."""
    with fresh(4, placement="aabc") as pool:
        for errors in pool.run(one_lacks_memory, seconds=30):
            for error in errors:
                assert "std::bad_alloc" in error.text, error
                assert "rank 2" in error.text or error.kind == "MemoryError", error


def aborts_after_a_gather(me: RankContext) -> tuple[float, Caught]:
    """Rank 1 aborts the group when it has finished, while its peers send and receive."""
    import pycollect

    options = pycollect.distributed.options(buffer_bytes=2**29)
    group = dist.new_group(pg_options=options, timeout=seconds(20))
    x = torch.full((24 * 2**20,), float(me.rank))
    of_all = [torch.empty_like(x) for _ in range(me.world)] if me.rank == 2 else None
    dist.barrier()
    start = time.monotonic()
    error = caught(dist.gather, x, of_all, 2, group=group)
    if me.rank == 1:
        backend_of(group).abort()
    publish(me, "done")
    wait_published(me, "done", range(me.world))
    return error.when - start, error


@pytest.mark.slow
def test_large_transfers_end_with_the_group():
    """Also those that wait for a connection which has broken before."""
    with fresh(4, placement="abbb") as pool:
        for seconds, error in pool.run(aborts_after_a_gather, seconds=60):
            assert error.kind in ("", "PeerLost"), error
            assert seconds < 10, error
