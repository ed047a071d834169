"""Streams: work is ordered after the ranks' streams and before what follows on them.

Every algorithm runs between producers and consumers on streams with random delays. Every rank
writes its input on its own stream after a delay. After the collective it counts wrong elements on
the same stream and overwrites the memory, so a missing event shows as wrong elements; other tests
check that it does. Rounds are not synchronized with each other. CPU ranks have no stream and no
delays.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from reference import IN_PLACE, assert_same, expected, randoms
from sites import GPU, PLACEMENTS, STANDS_IN, VIRTUAL, several_gpus
from test_threads import run_concurrently
from torch import Tensor

import pycollect as pc

# Longest delay in GPU cycles: 0.5 to 1 ms at 1 to 2 GHz. The host issues a round in less time, so
# that a kernel that misses an event is launched while a delay still runs.
MAX_CYCLES = 1_000_000
POISON = -77


class Rank:
    """A rank's stream and tensors. Input k is `base + k`, so results are affine in the round k."""

    def __init__(
        self, device: torch.device, stream: Any, base: Tensor, results: Sequence[Tensor]
    ) -> None:
        self.stream = stream
        self.base = base.to(device)
        self.input = torch.full_like(self.base, POISON)
        first, second = (r.to(device) for r in results)
        self.wanted, self.slope = first, second - first
        self.result = torch.full_like(self.wanted, POISON)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Make the rank's stream and its device the current ones."""
        with contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            yield

    def delay(self, rng: random.Random) -> None:
        """Keep the rank's stream busy, half of the time."""
        if self.stream is not None and rng.random() < 0.5:
            torch.cuda._sleep(rng.randrange(MAX_CYCLES))

    def produce(self, k: int, rng: random.Random) -> None:
        """Write the input of round k on the rank's stream, after a random delay."""
        with self.on_stream():
            self.delay(rng)
            torch.add(self.base, k, out=self.input)

    def consume(self, k: int, rng: random.Random) -> None:
        """Count wrong elements and overwrite input and result, after a random delay."""
        with self.on_stream():
            self.delay(rng)
            self.wrong += (self.result != self.wanted + self.slope * k).sum()
            self.result.fill_(POISON)
            self.input.fill_(POISON)


# Issues the collective, given the inputs, the results and the streams of all ranks.
Issue = Callable[[list[Tensor], list[Tensor], Any], object]


def wrong_elements(
    collective: str,
    devices: Sequence[torch.device],
    issue: Issue,
    count: int = 5_003,
    rounds: int = 30,
    seed: int = 0,
    named: bool = True,
) -> int:
    """Run all rounds and return the total number of wrong elements. The call gets the ranks'
    streams; or, if they are not named, they are the current ones, one for each device."""
    values = randoms(len(devices), (count,), torch.int32, seed=seed)
    results = [expected(collective, [v + k for v in values]) for k in (0, 1)]
    rng = random.Random(seed)
    pairs = list(zip(*results, strict=True))
    streams = [new_stream(device) for device in devices]
    if not named:
        shared = dict(zip(devices, streams, strict=True))
        streams = [shared[device] for device in devices]
    of_ranks = zip(devices, streams, values, pairs, strict=True)
    ranks = [Rank(*of_rank) for of_rank in of_ranks]
    if collective in IN_PLACE:
        for rank in ranks:
            rank.result = rank.input
    given = streams if named and any(s is not None for s in streams) else None
    synchronize(devices)
    for k in range(rounds):
        for rank in rng.sample(ranks, len(ranks)):
            rank.produce(k, rng)
        with contextlib.ExitStack() as current:
            for stream in [] if named else shared.values():
                current.enter_context(torch.cuda.stream(stream))
            issue([rank.input for rank in ranks], [rank.result for rank in ranks], given)
        for rank in rng.sample(ranks, len(ranks)):
            rank.consume(k, rng)
    synchronize(devices)
    return sum(int(rank.wrong) for rank in ranks)


def new_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def synchronize(devices: Sequence[torch.device]) -> None:
    """Synchronize every GPU among the devices."""
    for device in {d for d in devices if d.type == "cuda"}:
        torch.cuda.synchronize(device)


CALLS = [
    (collective, algorithm)
    for collective in ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")
    for algorithm in (None, *pc.algorithms(collective))
] + [("all_to_all", None)]
# Many small rounds can expose a missing event, few large ones a missing event between pieces.
EFFORTS = [
    pytest.param(5_003, 3 if STANDS_IN else 30, id="short"),
    pytest.param(1_500_007, 1 if STANDS_IN else 10, id="large"),
    pytest.param(5_003, 1_000, id="1000", marks=pytest.mark.slow),
    pytest.param(1_500_007, 100, id="100-large", marks=pytest.mark.slow),
]


def issue(api, collective, algorithm, inputs, results, streams, async_op=False):
    options = {"streams": streams, "async_op": async_op}
    if algorithm is not None:
        options["algorithm"] = algorithm
    if collective not in IN_PLACE:
        options["out"] = results
    work = getattr(api, collective)(inputs, **options)
    if async_op:
        work.wait()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("collective", "algorithm"), CALLS)
@pytest.mark.parametrize(("count", "rounds"), EFFORTS)
def test_late_streams_change_nothing(placement, collective, algorithm, count, rounds):
    for world in (2, 5):
        call = functools.partial(issue, placement.api(world), collective, algorithm)
        wrong = wrong_elements(
            collective, placement.devices(world), call, count, rounds, seed=world
        )
        assert wrong == 0, f"world {world}"


# --- the delays must expose missing events --------------------------------------------------------


def without_entry(stream, inputs, results, streams):
    with torch.cuda.stream(stream):
        total = torch.stack(inputs).sum(0, dtype=torch.int32)
        for t in inputs:
            t.copy_(total)
    for other in streams:
        other.wait_stream(stream)


def without_exit(stream, inputs, results, streams):
    for other in streams:
        stream.wait_stream(other)
    with torch.cuda.stream(stream):
        total = torch.stack(inputs).sum(0, dtype=torch.int32)
        for t in inputs:
            t.copy_(total)


def without_one_entry(stream, inputs, results, streams):
    for other in streams[1:]:
        stream.wait_stream(other)
    without_entry(stream, inputs, results, streams)


@pytest.mark.cuda
@pytest.mark.parametrize("broken", [without_entry, without_exit, without_one_entry])
def test_the_delays_expose_a_missing_event(broken):
    devices = VIRTUAL.devices(4)
    call = functools.partial(broken, torch.cuda.Stream())
    assert wrong_elements("all_reduce", devices, call, rounds=100) > 0


# --- the current stream ---------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("collective", "algorithm"), [c for c in CALLS if c[0] == "all_reduce" or c[1] is None]
)
@pytest.mark.parametrize("async_op", [False, True])
def test_the_current_streams_are_the_ranks_streams(placement, collective, algorithm, async_op):
    """Also in wait(), after which the results of an asynchronous call may be used."""
    count, rounds = (5_003, 3) if STANDS_IN else (200_003, 30)
    for world in (1, 4):
        api = placement.api(world)
        call = functools.partial(issue, api, collective, algorithm, async_op=async_op)
        devices = placement.devices(world)
        assert wrong_elements(collective, devices, call, count, rounds, named=False) == 0


@pytest.mark.cuda
def test_a_call_returns_before_its_gpu_work_ends():
    tensors = [torch.ones(1000, device=GPU) for _ in range(4)]
    pc.all_reduce(tensors)
    for algorithm in (None, *pc.algorithms()):
        pc.all_reduce(tensors, "max", algorithm=algorithm)  # one-time allocations happen here
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)  # at least 0.5 s
        done = torch.cuda.Event()
        pc.all_reduce(tensors, "max", algorithm=algorithm)
        done.record()
        assert not done.query(), f"{algorithm} waited for the GPU"
        torch.cuda.synchronize()


@pytest.mark.cuda
def test_the_current_device_and_stream_are_unchanged():
    device, side = torch.cuda.current_device(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        for algorithm in (None, *pc.algorithms()):
            pc.all_reduce([torch.ones(9, device=GPU) for _ in range(3)], algorithm=algorithm)
            assert torch.cuda.current_device() == device
            assert torch.cuda.current_stream() == side


# --- invalid streams= -----------------------------------------------------------------------------


BAD_STREAMS = [[], [None], "stream", 0, [1, 2, 3], [None, None, "side"]]


@pytest.mark.parametrize("bad", BAD_STREAMS, ids=str)
def test_bad_streams_are_refused(bad):
    tensors = [torch.full((5,), float(r)) for r in range(3)]
    with pytest.raises((TypeError, ValueError), match="streams"):
        pc.all_reduce(tensors, streams=bad)
    assert [t.tolist() for t in tensors] == [[float(r)] * 5 for r in range(3)]


def test_lists_without_tensors_accept_streams():
    assert pc.all_reduce_coalesced([[], []], streams=[None, None]) is None
    assert (
        pc.all_gather([torch.ones(1), torch.ones(2)], streams=[None, None])[0].tolist() == [1] * 3
    )


@pytest.mark.cuda
def test_a_stream_for_a_rank_on_the_cpu_is_refused():
    tensors = [torch.ones(5, device=GPU), torch.ones(5)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    with pytest.raises(ValueError, match="streams"):
        pc.all_reduce(tensors, streams=streams)


@pytest.mark.cuda
def test_a_stream_of_another_gpu_is_refused():
    first, second = several_gpus()[:2]
    tensors = [torch.ones(5, device=first) for _ in range(2)]
    streams = [torch.cuda.Stream(first), torch.cuda.Stream(second)]
    with pytest.raises(ValueError, match=r"streams\[1\]"):
        pc.all_reduce(tensors, streams=streams)


# --- threads with streams of their own, or with shared ones; CPU ranks have none ------------------

PLACES = [pytest.param("cpu", id="cpu"), pytest.param("cuda:0", marks=pytest.mark.cuda, id="gpu")]


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("peer_access", [None, False])
@pytest.mark.parametrize("shared", [False, True])
def test_threads_with_streams_and_communicators(device, peer_access, shared):
    communicator, stream = pc.Communicator([device] * 3, peer_access=peer_access), None
    if shared and device != "cpu":
        stream = torch.cuda.Stream()

    def task(i):
        mine = communicator
        if not shared:
            mine = pc.Communicator([device] * 3, peer_access=peer_access)
        values = randoms(3, (30_000 + i,), torch.int32, seed=i)
        with torch.cuda.stream(stream or new_stream(torch.device(device))):  # None: as it is
            tensors = [v.to(device, copy=True) for v in values]
            for algorithm in [None, *pc.algorithms("reduce_scatter")] * 3:
                got = mine.reduce_scatter(tensors, algorithm=algorithm)
                wanted = expected("reduce_scatter", values)
                assert_same([g.cpu() for g in got], wanted, f"thread {i}, {algorithm}")
            mine.all_reduce(tensors, async_op=True).wait()
            wanted = expected("all_reduce", values)
            assert_same([t.cpu() for t in tensors], wanted, f"thread {i}")

    run_concurrently(task)
