"""Ranks that are threads, with CUDA tensors, beside the jobs that all ranks run: ranks that run at
once instead of in turns, the number of CUDA calls, and news of a failure that comes late.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from typing import Any

import pytest
import test_cuda_dist_p2p as p2p
import test_cuda_dist_streams as streams
import test_cuda_dist_training as training
import torch
import torch.distributed as dist
from dist_pool import OLD_TORCH, OURS, RankContext, fresh
from sites import EMULATED, REAL, sites

import pycollect as pc
from pycollect import _testing, threads

pytestmark = pytest.mark.skipif(not OURS, reason="tests how pycollect moves CUDA tensors")
JOBS = (streams.earlier_stream_work, streams.on_a_side_stream, p2p.around_a_ring, p2p.completed)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks of pools run at once instead of in turns."""
    monkeypatch.setattr(threads, "launch", functools.partial(threads.launch, parallel=True))


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
@pytest.mark.parametrize("site", sites(*EMULATED, *REAL, stands_in=False))
def test_ranks_that_run_at_once_follow_their_streams(site, job):
    with fresh(3, site=site, ranks_as="threads") as pool:
        assert not any(pool.run(job))


@pytest.mark.usefixtures("at_once")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("site", ["", *sites(*REAL, stands_in=False)])
@pytest.mark.parametrize(
    ("wrap", "how"),
    [
        (training.in_ddp, 0.01),
        pytest.param(
            *(training.in_fsdp2, True),
            marks=pytest.mark.skipif(OLD_TORCH, reason="FSDP2 of this torch mixes dtypes"),
        ),
    ],
)
def test_ranks_that_run_at_once_train_as_one_process(site, wrap, how):
    with fresh(4, site=site, ranks_as="threads") as pool:
        wanted = pool.run(training.train_alone)[0]
        for found in pool.run(training.train_together, wrap, how, seconds=100):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def cuda_calls(me: RankContext, all_reduces: int) -> Counter[str]:
    x = torch.ones(1000)
    for _ in range(all_reduces):
        dist.all_reduce(x)
    dist.barrier()
    return Counter(me.fake.cuda.calls())


@pytest.mark.parametrize("site", EMULATED)
def test_a_call_takes_two_events_for_each_rank(site):
    with fresh(4, site=site, ranks_as="threads") as pool:
        one, six = pool.run(cuda_calls, 1)[0], pool.run(cuda_calls, 6)[0]
        expected = 2 * 4 * 5
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
