"""Destroying groups on emulated devices: while device work is pending that ends late or never,
while another thread captures a graph, and after errors of the device.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, RankContext, caught, fresh
from dist_ranks import NO_TRANSPORTS, between_processes
from dist_sites import sites, until
from test_cuda_dist_faults import FAULTY_RANK, warm
from test_cuda_dist_lifecycle import memory_of_groups
from test_cuda_dist_p2p import LARGE
from test_cuda_dist_p2p_faults import receive, send

pytestmark = pytest.mark.skipif(not OURS, reason="tests how pycollect moves CUDA tensors")
LIMIT = 25.0  # seconds within which a group is destroyed, whatever its devices do


def destroyed_with_a_stuck_stream(
    me: RankContext, zero_copy: bool
) -> tuple[float, Caught, int, list[float], list[str]]:
    """One rank's stream waits for work of another library, which ends after the group.

    An earlier call that has ended is waited for only then.
    """
    x = warm(me, zero_copy)
    earlier = dist.all_reduce(torch.ones(1000), async_op=True)
    until(earlier.is_completed)
    if me.rank == FAULTY_RANK:
        me.site.stall()
    me.site.run_ahead()
    work = dist.all_reduce(x, async_op=True)
    del x
    begin = time.monotonic()
    error = caught(dist.destroy_process_group)
    took = time.monotonic() - begin
    earlier.wait()
    del work, earlier
    mappings = memory_of_groups()
    y = torch.full((1000,), 7.0)
    me.site.resume()
    me.site.synchronize()
    time.sleep(0.3)
    return took, error, mappings, y.unique().tolist(), me.site.violations()


@pytest.mark.slow  # waits for the limits of the device's work
@pytest.mark.parametrize("zero_copy", [False, True], ids=["staged", "zero-copy"])
def test_a_stream_that_does_not_end(zero_copy):
    with fresh(3, site="eager:cuda_ipc") as pool:
        found = pool.run(destroyed_with_a_stuck_stream, zero_copy, seconds=2 * LIMIT)
    for rank, (took, error, mappings, values, violations) in enumerate(found):
        assert took < LIMIT
        assert "CollectiveError" in error.kinds, error
        assert (mappings > 0) == (rank == FAULTY_RANK)  # the stream accesses its counters later
        assert values == [7.0]
        assert violations == []


def foreign_memory(me: RankContext, call: str) -> list[float]:
    """Memory of another library is released, and its owner uses it again, after the group's end."""
    dist.all_reduce(torch.ones(3))
    dist.barrier()
    me.site.run_ahead(0.002)
    y = me.fake.empty_foreign(64).fill_(1.0 + me.rank)
    if call == "all_reduce":
        dist.all_reduce(y, async_op=True).wait()
    elif me.rank == 0:
        dist.send(y, 1)
    elif me.rank == 1:
        dist.irecv(y, 0).wait()
    del y
    dist.destroy_process_group()
    z = me.fake.empty_foreign(64).fill_(-1.0)
    me.site.resume()
    me.site.synchronize()
    time.sleep(0.2)
    return z.unique().tolist()


@pytest.mark.parametrize("call", ["all_reduce", "recv"])
@pytest.mark.parametrize("site", ["late", "late:cuda_ipc"])
def test_foreign_memory_is_held_until_the_device_is_done(site, call):
    with fresh(3, site=site) as pool:
        assert pool.run(foreign_memory, call) == [[-1.0]] * 3


def beside_a_capture(me: RankContext) -> tuple[Caught, dict[str, int], list[str]]:
    """Another thread captures meanwhile, as the emulator does for all threads."""
    x = warm(me, zero_copy=True)
    dist.all_reduce(x)
    me.site.synchronize()
    del x
    errors: list[Caught] = []
    with me.site.capturing():
        thread = threading.Thread(target=lambda: errors.append(caught(dist.destroy_process_group)))
        thread.start()
        thread.join()
    time.sleep(0.3)
    return errors[0], me.site.unreleased(), me.site.violations()


@pytest.mark.parametrize("site", sites("eager:cuda_ipc", "cuda:cuda_ipc", stands_in=False))
def test_a_group_ends_beside_a_capture(site):
    """Nothing is left, and nothing waits for the whole device, which would end the capture."""
    with fresh(3, site=site) as pool:
        for error, left, violations in pool.run(beside_a_capture):
            assert (error.kind, left, violations) == ("", {}, []), error


def failing_unregister(me: RankContext) -> tuple[Caught, int]:
    warm(me)
    me.fake.gpu.fail("unregister_host", 0)
    return caught(dist.destroy_process_group), memory_of_groups()


def test_memory_that_stays_registered_stays_mapped():
    """Other memory must not get its addresses."""
    with fresh(3, site="eager:cuda_ipc") as pool:
        for error, mappings in pool.run(failing_unregister):
            assert error.kind == ""
            assert mappings > 0


def destroyed(me: RankContext, how: str) -> tuple[float, Caught, bool]:
    """Destroy the group without waiting for the send: rank 0 gives its peer some time."""
    y, work = torch.zeros(LARGE), None
    if me.rank == 0:
        if how == "small":
            me.fake.stall(True)
        work = send(me, how == "meanwhile", 3 if how == "small" else LARGE)
    elif how == "received":
        time.sleep(0.5)
        dist.recv(y, 0)
    elif how == "meanwhile":
        work = receive(me, True)
    start = time.monotonic()
    dist.destroy_process_group()
    took = time.monotonic() - start
    return took, caught(work.wait) if work else caught(print), bool(y.any())


# Limits in seconds for destroying the group: up to one or two shutdown timeouts.
DESTROY_LIMITS = {"received": 3.0, "unmatched": 12.0, "small": 12.0, "meanwhile": 24.0}


@between_processes(NO_TRANSPORTS)
@pytest.mark.parametrize(
    "how",
    ["received", *(pytest.param(how, marks=pytest.mark.slow) for how in list(DESTROY_LIMITS)[1:])],
)
def test_destroy_with_messages_in_flight(how, ranks_as):
    with fresh(2, site="late", ranks_as=ranks_as) as pool:
        (first, sender, _), (second, receiver, right) = pool.run(destroyed, how, seconds=60.0)
    assert max(first, second if how != "received" else 0) < DESTROY_LIMITS[how]
    assert right == (how == "received")
    if how == "meanwhile":  # a device copy is still in flight
        assert "CollectiveError" in sender.kinds
        assert "CollectiveError" in receiver.kinds
