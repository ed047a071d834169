"""The table of faults: what a rank does, when, and in which call its peers meet it.

`WHO` says for each fault what the peers raise, and whether their group lives on; `WAITS` has the
calls in which they wait. `meet` is the job of all ranks, `check` compares what they found with the
table. The limits of time are those of docs/distributed.md, with a margin for a loaded machine.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from devices import LARGE
from dist_pool import Caught, Outcome, RankContext, backend_of, caught
from dist_rank import Spec
from sites import is_real
from torch import Tensor

WORLD = 3
FAULTY_RANK = 1
# On several hosts, the faulty rank is not the first one of its host, is alone there, and is the
# first one.
PLACEMENTS = ("aab", "aba", "abb")
NOTICE_SECONDS = 2.0  # within which every rank notices a death
AT_ONCE = 0.5  # limit in seconds for an aborted group to refuse a call
DESTROYED = 5.0  # limit in seconds for destroying an aborted group
GRACE = 5.0  # shutdown timeout: seconds that destroying a group waits for calls in flight
ENDED = GRACE + 2.0  # limit in seconds for a call in flight to end
TIMEOUT = 0.5  # timeout in seconds of a group whose rank is late
GPU_TIMEOUT = 3.0  # the same on a GPU
BEFORE = 4  # successful calls before the fault
ASLEEP = 0.15  # seconds after which a waiting thread no longer spins


def large() -> Tensor:
    return torch.ones(3_000_000)


def ones(count: int = 3) -> Tensor:
    return torch.ones(count)


def seconds(value: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=value)


# --- the calls in which the peers wait ------------------------------------------------------------


def error_of_future(future: Any, limit: float) -> Caught:
    """Wait for a future and return its exception; kind "hangs" if it does not complete in time."""
    end = time.monotonic() + limit
    while not future.done():
        if time.monotonic() > end:
            return Caught(("hangs",), "", end)
        time.sleep(0.01)
    return caught(future.wait)


def future_beside_a_wait(me: RankContext) -> None:
    """A future of one message, while a thread waits for another, whose timeout is long."""
    future, ended = dist.irecv(ones(), FAULTY_RANK).get_future(), []
    backend_of().set_timeout(seconds(60))
    other = next(rank for rank in others(me) if rank != FAULTY_RANK)
    thread = threading.Thread(target=lambda: ended.append(caught(dist.recv, ones(), other)))
    thread.start()
    found = error_of_future(future, ENDED)
    thread.join()
    assert found.kind != "hangs"
    assert "CollectiveError" in ended[0].kinds, ended
    future.wait()


def behind_a_stalled_send(me: RankContext) -> None:
    """A message that is still on its device does not hide failures of other messages."""
    me.site.stall()
    other = next(rank for rank in others(me) if rank != FAULTY_RANK)
    sent = dist.isend(ones(), other)
    received = dist.irecv(ones(), FAULTY_RANK).get_future()
    found = [error_of_future(received, ENDED), caught(sent.wait)]
    found.append(error_of_future(sent.get_future(), ENDED))
    me.site.resume()
    assert all("CollectiveError" in error.kinds for error in found), found
    received.wait()


def block(me: RankContext) -> None:
    with dist._coalescing_manager():
        dist.all_reduce(ones(4))
        dist.all_reduce(ones())


def future_of_a_block() -> None:
    """The future of a work that stands for several calls."""
    backend = backend_of()
    backend._start_coalescing()
    for count in (4, 3):
        backend.allreduce([ones(count)])
    backend._end_coalescing().get_future().wait()


def batch(me: RankContext) -> None:
    receives = [dist.P2POp(dist.irecv, ones(), FAULTY_RANK) for _ in range(2)]
    for work in dist.batch_isend_irecv(receives):
        work.wait()


# Name -> (operation that the error names, the call). The call's tensor holds threes: three of them,
# or LARGE on a device.
WAITS: dict[str, tuple[str, Callable[[RankContext, Tensor], object]]] = {
    "all_reduce": ("all_reduce", lambda me, x: dist.all_reduce(x)),
    "large all_reduce": ("all_reduce", lambda me, x: dist.all_reduce(large())),
    "all_reduce_coalesced": ("all_reduce", lambda me, x: dist.all_reduce_coalesced([x])),
    "async all_reduce": ("all_reduce", lambda me, x: dist.all_reduce(x, async_op=True).wait()),
    "future": ("all_reduce", lambda me, x: dist.all_reduce(x, async_op=True).get_future().wait()),
    "block": ("all_reduce", lambda me, x: block(me)),
    "future of a block": ("all_reduce", lambda me, x: future_of_a_block()),
    "sparse all_reduce": ("all_reduce", lambda me, x: dist.all_reduce(x.to_sparse())),
    "reduce": ("reduce", lambda me, x: dist.reduce(x, 0)),
    "broadcast": ("broadcast", lambda me, x: dist.broadcast(x, FAULTY_RANK)),
    "all_gather": ("all_gather", lambda me, x: dist.all_gather([ones() for _ in range(3)], x)),
    "all_gather_into_tensor": (
        "all_gather",
        lambda me, x: dist.all_gather_into_tensor(ones(9), ones()),
    ),
    "reduce_scatter": (
        "reduce_scatter",
        lambda me, x: dist.reduce_scatter_tensor(ones(), ones(9)),
    ),
    "all_to_all": ("all_to_all", lambda me, x: dist.all_to_all_single(ones(), ones())),
    "scatter": ("scatter", lambda me, x: dist.scatter(ones(), None, FAULTY_RANK)),
    "barrier": ("barrier", lambda me, x: dist.barrier()),
    "recv": ("recv", lambda me, x: dist.recv(x, FAULTY_RANK)),
    "recv from any": ("recv", lambda me, x: dist.group.WORLD.recv_anysource([x], 0).wait()),
    "irecv": ("recv", lambda me, x: dist.irecv(x, FAULTY_RANK).wait()),
    "batch_isend_irecv": ("recv", lambda me, x: batch(me)),
    "send": ("send", lambda me, x: dist.send(large(), FAULTY_RANK)),
    "all_gather_object": ("all_gather", lambda me, x: dist.all_gather_object([None] * 3, "x")),
    "future beside a wait": ("recv", lambda me, x: future_beside_a_wait(me)),
    "behind a stalled send": ("recv", lambda me, x: behind_a_stalled_send(me)),
}
IN_PLACE = ("all_reduce", "all_reduce_coalesced", "async all_reduce", "future", "recv", "irecv")
IN_PLACE += ("recv from any",)
MESSAGES = ("recv", "recv from any", "irecv", "batch_isend_irecv", "send")
MESSAGES += ("future beside a wait", "behind a stalled send")


def in_flight(
    me: RankContext, fault: Fault, sent: Tensor, received: Tensor
) -> list[tuple[str, dist.Work]]:
    """Start messages that nobody answers, and collectives that the faulty rank does not join."""
    peer, group = 0 if me.rank == FAULTY_RANK else FAULTY_RANK, dist.group.WORLD
    works = [
        ("irecv", dist.irecv(torch.zeros(3), peer)),
        ("large irecv", dist.irecv(received, peer, tag=1)),
        ("irecv from any source", group.recv_anysource([torch.zeros(3)], 2)),
        ("strided irecv", dist.irecv(torch.zeros(6)[::2], peer, tag=3)),
        ("isend", dist.isend(sent, peer, tag=4)),
    ]
    if me.rank != FAULTY_RANK and fault.when == "in flight":
        works += [(f"all_reduce {n}", dist.all_reduce(ones(), async_op=True)) for n in range(2)]
    return works


# --- what the faulty rank does --------------------------------------------------------------------


def die_beside_a_child(me: RankContext) -> None:
    """The forked child lives on with all descriptors of the rank."""
    if os.fork() == 0:
        wait_published(me, "ended", others(me))
        os._exit(0)
    die()


def die(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


def be_late(me: RankContext) -> Caught:
    """Make the call after all peers have raised."""
    wait_published(me, "raised", others(me))
    return caught(dist.all_reduce, ones())


def abort(me: RankContext) -> Caught:
    dist.group.WORLD.abort()
    return caught(dist.all_reduce, ones())


@dataclasses.dataclass(frozen=True)
class Who:
    act: Callable[[RankContext], object]
    kinds: tuple[str, ...] = ("PeerLost",)  # what the peers raise: one of these
    dies: bool = False
    times_out: bool = False


WHO = {
    "killed": Who(lambda me: die(), dies=True),
    "crashes": Who(lambda me: die(signal.SIGSEGV), dies=True),
    "exits": Who(lambda me: os._exit(0), dies=True),
    # The process lives on, with its pid, until every rank must have noticed.
    "execs": Who(lambda me: os.execv("/bin/sleep", ["sleep", "5"]), dies=True),
    "dies beside its child": Who(die_beside_a_child, dies=True),
    "leaves": Who(lambda me: dist.destroy_process_group()),
    "aborts": Who(abort),
    "late": Who(be_late, ("Timeout", "PeerLost"), times_out=True),
}


@dataclasses.dataclass(frozen=True)
class Fault:
    who: str
    what: str = "all_reduce"
    # "waiting": the peers sleep in their call. "in calls": all ranks make calls without end. "in
    # flight": all ranks have futures, and no thread waits; "messages in flight": of messages only.
    # "on its device": the faulty rank has made its own call, or sent its message, but its stream
    # does not reach it.
    when: str = "waiting"


@dataclasses.dataclass(frozen=True)
class Found:
    """What a rank found; a peer of the faulty rank, unless said otherwise."""

    called: int  # sequence number of the group before the fault
    begun: float  # when its wait began
    fault: float  # when the rank failed
    error: Caught  # of its call; of the faulty rank: of its next call
    own: list[Caught]  # of the works that the faulty rank had made
    left: list[float]  # what is in the tensor of threes
    futures: dict[str, Caught]
    refusal: Caught  # of the next call
    refused: float  # seconds that it took
    destroyed: float  # seconds that destroying the group took


# --- the job --------------------------------------------------------------------------------------


def meet(me: RankContext, fault: Fault) -> Found:
    called, x = calls_before_failure(me), torch.full((LARGE if me.spec.site else 3,), 3.0)
    # Made before the timeout begins, as a slow machine needs a part of it for their memory.
    messages = [large(), 0 * large()] if "in flight" in fault.when else []
    if WHO[fault.who].times_out:
        gather(me, "here")
        backend_of().set_timeout(seconds(GPU_TIMEOUT if me.site.real else TIMEOUT))
    begun, own = time.monotonic(), []
    works = in_flight(me, fault, *messages) if messages else []
    futures = {name: work.get_future() for name, work in works}
    if fault.when == "on its device" and me.rank == FAULTY_RANK:
        me.site.stall(7.0)
        own = [dist.isend(x, 0) if fault.what == "recv" else dist.all_reduce(x, async_op=True)]
        assert not own[0].is_completed()
    if me.spec.site:
        me.site.run_ahead()
    publish(me, "waiting")
    if me.rank == FAULTY_RANK:
        error = fail(me, fault)
    elif futures:
        error = Caught((), "", begun)
    else:
        error = caught(call_of(me, fault, x))
    ended = {name: error_of_future(future, ENDED) for name, future in futures.items()}
    errors = [caught(work.wait) for work in own]
    publish(me, "raised")
    when = wait_published(me, "fault", [FAULTY_RANK])
    end = after_failure(me)
    me.site.resume()
    me.site.synchronize()  # no stream is left blocked
    publish(me, "ended")
    return Found(called, begun, when, error, errors, x.unique().tolist(), ended, *end)


def gather(me: RankContext, key: str) -> None:
    """Wait for all ranks, without the group. Those that take turns need not."""
    if not me.spec.takes_turns:
        publish(me, key)
        wait_published(me, key, range(me.world))


def call_of(me: RankContext, fault: Fault, x: Tensor) -> Callable[[], object]:
    call = WAITS[fault.what][1]

    def forever() -> None:
        y, out = large() * 0, torch.zeros(WORLD * large().numel())
        while True:
            dist.all_reduce(y)
            dist.all_gather_into_tensor(out, y)

    return forever if fault.when == "in calls" else lambda: call(me, x)


def fail(me: RankContext, fault: Fault) -> Caught:
    """Fail when all peers wait; return the error of the next call, if there is one."""

    def act() -> Caught:
        publish(me, "fault")
        error = WHO[fault.who].act(me)
        return error if isinstance(error, Caught) else Caught((), "", time.monotonic())

    if me.spec.takes_turns:  # they cannot sleep together
        return act()
    wait_published(me, "waiting", others(me))
    time.sleep(ASLEEP)
    if fault.when != "in calls":
        return act()
    threading.Timer(2 * ASLEEP, act).start()
    return caught(call_of(me, fault, ones()))


def calls_before_failure(me: RankContext) -> int:
    for _ in range(BEFORE):
        x = torch.ones(100)
        dist.all_reduce(x)
        assert x[0] == me.world
    me.site.synchronize()
    return backend_of()._get_sequence_number_for_group()


def publish(me: RankContext, key: str) -> None:
    """Publish a key, as a file, for the ranks that wait for it in `wait_published`."""
    path = Path(me.folder, f"{key}_{me.rank}")
    path.with_suffix(".new").write_text(repr(time.monotonic()))
    path.with_suffix(".new").rename(path)


def wait_published(me: RankContext, key: str, ranks: Iterable[int]) -> float:
    """Wait until all ranks have published the key (`publish`); return the time of the last."""
    paths = [Path(me.folder, f"{key}_{rank}") for rank in ranks]
    limit = time.monotonic() + 15
    while not all(path.exists() for path in paths):
        assert time.monotonic() < limit, f"not all of {paths}"
        time.sleep(0.005)
    return max(float(path.read_text()) for path in paths)


def others(me: RankContext) -> list[int]:
    return [rank for rank in range(me.world) if rank != me.rank]


def after_failure(me: RankContext) -> tuple[Caught, float, float]:
    """Return the next call's error, the seconds it took, and the seconds that destroying took."""
    start = time.monotonic()
    refusal = caught(dist.all_reduce, ones()) if dist.is_initialized() else Caught((), "", start)
    refused = time.monotonic() - start
    return refusal, refused, destroyed()


def destroyed() -> float:
    """Destroy the group; return the seconds it took."""
    start = time.monotonic()
    if dist.is_initialized():
        dist.destroy_process_group()
    return time.monotonic() - start


# --- what the ranks must have found ---------------------------------------------------------------


def check(fault: Fault, outcomes: list[Outcome], spec: Spec) -> None:
    """Raise AssertionError unless the outcomes of `meet` are those of the table."""
    who, timeout = WHO[fault.who], GPU_TIMEOUT if is_real(spec.site) else TIMEOUT
    assert [o.died for o in outcomes] == [who.dies and r == FAULTY_RANK for r in range(WORLD)]
    living = [outcome for outcome in outcomes if not outcome.died]
    assert not any(outcome.error for outcome in living), [outcome.error for outcome in living]
    peers = [outcome.value for r, outcome in enumerate(outcomes) if r != FAULTY_RANK]
    for found in peers:
        if found.futures:
            check_futures(fault, found, timeout)
        else:
            check_error(fault, found, timeout)
            check_text(fault, found, spec)
        assert found.left == [3.0] or fault.what not in IN_PLACE, found
    for found in (outcome.value for outcome in living):
        assert found.destroyed < DESTROYED, found
        if fault.who != "leaves" or found in peers:
            assert "CollectiveError" in found.refusal.kinds, found
            assert found.refused < AT_ONCE, found
            assert who.times_out or names(FAULTY_RANK, found.refusal.text), found
    if who.times_out and fault.when == "waiting":
        check_timeout(fault, peers, timeout)
    if not who.dies:
        faulty = outcomes[FAULTY_RANK].value
        assert fault.who == "leaves" or "CollectiveError" in faulty.error.kinds, faulty
        assert all("CollectiveError" in error.kinds for error in faulty.own), faulty
        check_futures(fault, faulty, timeout)


def names(rank: int, text: str) -> bool:
    """Whether an error says that this rank is the cause: it may name the living ranks, too, the
    other end of a message, and all ranks of a host."""
    first = text.split("\n")[0]
    others = r"(from|to) rank \d+ of group|; ranks? [\d, ]+ (is|are) alive|\(ranks? [\d, ]+\)"
    cause = re.sub(others, "", first)
    return bool(re.search(rf"\branks? (\d+, )*{rank}\b", cause))


def check_error(fault: Fault, found: Found, timeout: float) -> None:
    who, error = WHO[fault.who], found.error
    assert error.kind in who.kinds, error
    assert {"CollectiveError", "RuntimeError"} <= set(error.kinds), error
    if who.times_out:
        assert error.when - found.begun < timeout + NOTICE_SECONDS, found
    else:
        assert 0 <= error.when - found.fault < NOTICE_SECONDS, found


def check_text(fault: Fault, found: Found, spec: Spec) -> None:
    text = found.error.text
    assert names(FAULTY_RANK, text), text
    if WHO[fault.who].times_out or fault.when == "in calls":
        return
    assert WAITS[fault.what][0] in text, text
    # Of ranks that take turns, one may make its call only after the fault.
    numbered = fault.what not in MESSAGES and not spec.takes_turns
    assert not numbered or re.search(rf"#({found.called}|{found.called + 1})\b", text), text


def check_timeout(fault: Fault, peers: list[Found], timeout: float) -> None:
    """The first peer has waited for the whole timeout, and says so."""
    timed_out = [found for found in peers if found.error.kind == "Timeout"]
    assert timed_out, peers
    first = min(timed_out, key=lambda found: found.error.when)
    assert WAITS[fault.what][0] in first.error.text, first
    assert first.error.when - first.begun > 0.8 * timeout, first
    told = re.search(r"Timed out after ([\d.]+) s", first.error.text)
    is_message = fault.what in MESSAGES  # the wait of a collective begins later than its call
    assert not told or not is_message or float(told[1]) > 0.8 * timeout, first


def check_futures(fault: Fault, found: Found, timeout: float) -> None:
    """All have ended in time, with an error."""
    who, errors = WHO[fault.who], found.futures.values()
    assert all(error.kind in who.kinds for error in errors), found
    for error in errors:
        if who.times_out:
            assert 0.8 * timeout < error.when - found.begun < timeout + NOTICE_SECONDS, found
        else:
            limit = NOTICE_SECONDS + GRACE * (fault.who == "leaves")
            assert 0 <= error.when - found.fault < limit, found
    if who.times_out and fault.when == "messages in flight":
        assert any(error.kind == "Timeout" for error in errors), found
