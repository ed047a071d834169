"""torch's profiler shows the operations of a group as it does those of torch's backends.

An event is named `backend:operation`, has the shapes of the inputs, and lasts until the operation
has ended, on whichever thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, RankContext
from freed_memory import changes_of_freed_memory
from torch.profiler import ProfilerActivity, profile, record_function

WORLD = 2
SECONDS = 0.3  # how late a rank is
# Between hosts, the group has another group move its data, whose operations are none of the user's.
BACKENDS = ("pycollect:", "gloo:", "nccl:")
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant")


def x(*shape: int) -> torch.Tensor:
    return torch.ones(shape or (2, 3))


def gathered() -> None:
    dist.all_gather_into_tensor(x(4, 3), x())


def scattered() -> None:
    dist.reduce_scatter(x(), [x(), x()])


def sparse() -> None:
    dist.all_reduce(torch.sparse_coo_tensor([[1]], [1.0], (7,)))


def block() -> None:
    with dist._coalescing_manager():
        dist.all_reduce(x())
        dist.all_reduce(x(5))


def messages() -> None:
    me = dist.get_rank()
    dist.send(x(4), 1) if me == 0 else dist.recv(x(4), 0)
    dist.send(x(5), 1) if me == 0 else dist.recv(x(5))


# The call, and what rank 0 sees, or rank 1 of what it receives.
EVENTS: dict[str, tuple[Callable[[], Any], list[tuple[str, list[list[int]]]]]] = {
    "all_reduce": (lambda: dist.all_reduce(x()), [("all_reduce", [[2, 3]])]),
    "reduce": (lambda: dist.reduce(x(), 0), [("reduce", [[2, 3]])]),
    "broadcast": (lambda: dist.broadcast(x(), 0), [("broadcast", [[2, 3]])]),
    "all_gather": (lambda: dist.all_gather([x(), x()], x()), [("all_gather", [[2, 3]])]),
    "all_to_all": (lambda: dist.all_to_all_single(x(4), x(4)), [("all_to_all_single", [[4]])]),
    "reduce_scatter": (scattered, [("reduce_scatter", [[2, 3], [2, 3]])]),
    "gathered": (gathered, [("all_gather_into_tensor", [[2, 3]])]),
    "barrier": (dist.barrier, [("barrier", [])]),
    "block": (block, [("all_reduce_coalesced", [[2, 3], [5]])]),
    "sparse": (sparse, [("all_reduce", [[7]])]),
    "async": (lambda: dist.all_reduce(x(), async_op=True).wait(), [("all_reduce", [[2, 3]])]),
    "sends": (messages, [("send", [[4]]), ("send", [[5]])]),
    "receives": (messages, [("recv", [[4]]), ("recvAnySource", [[5]])]),
}


def events_of(run: Callable[[], Any], is_profiled: bool) -> list[Any]:
    """The events of a rank: ranks as threads have one profiler of the process."""
    if not is_profiled:
        run()
        return []
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        run()
    return [e for e in recorded.events() if e.name.startswith(BACKENDS)]


def profiled(me: RankContext, name: str) -> list[tuple[str, list, bool]]:
    events = events_of(EVENTS[name][0], me.rank == (name == "receives"))
    dist.barrier()
    return [(e.name, [s for s in e.input_shapes if s], e.is_async) for e in events]


@pytest.mark.skipif(not OURS, reason="the names of single operations are ours")
@pytest.mark.parametrize("name", EVENTS)
def test_events_have_torchs_form(pools, name):
    found = pools(WORLD).run(profiled, name)[name == "receives"]
    assert found == [(f"pycollect:{event}", shapes, True) for event, shapes in EVENTS[name][1]]


def warm_up(me: RankContext) -> None:
    """Begin the first profile of a process, which takes a second."""
    events_of(lambda: None, me.rank == 0)
    dist.barrier()


def late(me: RankContext, async_op: bool) -> list[float]:
    """Seconds of rank 0's events, while the other rank comes late."""
    warm_up(me)

    def run() -> None:
        if me.rank == 1:
            time.sleep(SECONDS)
        work = dist.all_reduce(x(), async_op=async_op)
        if async_op:
            work.wait()

    events = events_of(run, me.rank == 0)
    return [e.time_range.elapsed_us() / 1e6 for e in events]


@pytest.mark.parametrize("async_op", [False, True])
def test_an_event_lasts_until_its_operation_has_ended(pools, async_op):
    (seconds,) = pools(WORLD).run(late, async_op)[0]
    assert SECONDS / 2 < seconds < 20


def refused(me: RankContext) -> list[str]:
    def run() -> None:
        with pytest.raises(ValueError, match="stride"):
            dist.all_reduce(torch.zeros(1).expand(3))

    names = [e.name for e in events_of(run, me.rank == 0)]
    dist.barrier()
    return names


@pytest.mark.skipif(not OURS, reason="gloo accepts the tensor")
def test_a_refused_call_has_no_event(pools):
    assert pools(WORLD).run(refused)[0] == []


def outlived(me: RankContext, kept: bool) -> int:
    """Blocks that events change after their profile has ended, while the other rank comes late."""

    def changes() -> int:
        works: list[Any] = []
        never: Any = torch.futures.Future()
        if me.rank == 0:
            with profile(activities=[ProfilerActivity.CPU]):
                if kept:  # the future holds the profile's state
                    with record_function("begun") as begun:
                        begun._call_end_callbacks_on_future(never)
                works += [dist.all_reduce(x(), async_op=True), dist.irecv(x(), 1)]
        with changes_of_freed_memory() as changed:
            if me.rank == 1:
                time.sleep(SECONDS)
                works += [dist.all_reduce(x(), async_op=True), dist.isend(x(), 0)]
            for work in works:
                work.wait()
            dist.barrier()
            return changed()

    warm_up(me)
    return sum(changes() for _ in range(3))


@pytest.mark.skipif(not OURS, reason="gloo's events write into profiles that have ended")
@pytest.mark.parametrize("kept", [False, True])
def test_an_operation_may_outlive_the_profile(pools, kept):
    assert pools(WORLD).run(outlived, kept)[0] == 0
