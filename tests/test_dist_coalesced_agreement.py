"""Requests that form one call: all ranks compare all of them before the first runs.

The several dtypes of one call, and coalesced calls: if one differs, none runs on any rank. If none
does, they run in the order of their issue, and of the caller's streams. Some inputs are copied in
when a call is issued, but not those that an earlier coalesced call still has to write.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, RankContext, assert_in_step, backend_of, caught
from sites import HOSTS, THREADS, not_on, sites

import pycollect as pc

pytestmark = pytest.mark.skipif(not OURS, reason="tests promises of pycollect alone")
CPU = torch.device("cpu")


def ones(n: int = 5) -> torch.Tensor:
    return torch.ones(n)


def coalesced_jobs(me: RankContext, jobs: list) -> tuple[Caught, list[list[float]]]:
    """Coalesced all_reduces of this rank's jobs: one block per job, a list of sizes and dtypes."""
    tensors = [[torch.ones(n, dtype=t) for n, t in job] for job in jobs[me.rank]]

    def body() -> None:
        for job in tensors:
            with dist._coalescing_manager():
                for t in job:
                    dist.all_reduce(t)

    raised = caught(body)
    assert_in_step(me)
    return raised, [t.tolist() for job in tensors for t in job]


F, D, L = torch.float32, torch.float64, torch.int64
# The jobs of either rank, and words of the error of both.
MISMATCHED = {
    "one dtype of two": ([[(4, F), (4, D)]], [[(4, F)], [(4, D)]], "part 1 of 2"),
    "the second dtype's size": ([[(4, F), (4, D)]], [[(4, F), (5, D)]], "of 5 float64"),
    "the second of three": ([[(4, F), (4, D), (1, L)]], [[(4, F), (4, F), (1, L)]], "part 1 of 3"),
    "more dtypes": ([[(4, F), (4, D)]], [[(4, F), (4, D), (4, L)]], "part 1 of 2"),
    "the other way round": ([[(3, F), (5, F)]], [[(5, F), (3, F)]], "different sizes"),
}
DEVICES = ("late", "eager")
STAGED = ("", *DEVICES)  # host memory, and emulated devices


@pytest.mark.parametrize("case", MISMATCHED)
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("site", sites(*STAGED))
def test_mismatched_coalesced_calls_raise_and_write_nothing(pools, case, swapped, site):
    one, two, words = MISMATCHED[case]
    results = pools(2, site=site).run(coalesced_jobs, [two, one] if swapped else [one, two])
    for raised, values in results:
        assert raised.kind == "ValueError", (raised, values)
        assert all(v == 1 for tensor in values for v in tensor), "an output was written"
    assert results[0][0].text == results[1][0].text
    assert words in results[0][0].text


@not_on(HOSTS, "names a rank of the first host whose ranks differ")
def test_the_rank_with_another_number_of_requests_is_named(pools):
    jobs = [[[(4, F), (4, D)]], [[(4, F), (4, L)]], [[(4, F)]]]
    for raised, _ in pools(3).run(coalesced_jobs, jobs):
        assert "rank 2 called all_reduce of 4 float32, op sum, by itself" in raised.text


# What differs in the third of three coalesced calls: its words, and the call.
THIRD: dict[str, Callable[[int], object]] = {
    "room for": lambda rank: dist.all_to_all_single(ones(4), ones(3 + rank), [2, 2], [1, 2 + rank]),
    "part 3 of 3": lambda rank: dist.broadcast(ones(3 + rank), 0),
}


def mismatched_batch(me: RankContext, words: str) -> tuple[Caught, float]:
    x = ones()

    def body() -> None:
        with dist._coalescing_manager(device=CPU):
            dist.broadcast(x * (2 + me.rank), 0)
            dist.reduce(x, 0)
            THIRD[words](me.rank)

    raised = caught(body)
    assert_in_step(me)
    return raised, x[0].item()


@pytest.mark.parametrize("words", THIRD)
@pytest.mark.parametrize("site", sites(*STAGED))
def test_coalesced_calls_are_agreed_on_before_the_first_runs(pools, words, site):
    for raised, value in pools(2, site=site).run(mismatched_batch, words):
        assert raised.kind == "ValueError", raised
        assert words in raised.text
        assert value == 1


# --- messages and collectives ---------------------------------------------------------------------


def mixed(me: RankContext) -> list[str]:
    """A coalesced message is sent only after all ranks agree on the collectives beside it, because
    otherwise its receive might never be posted."""
    got, raised = torch.zeros(3), []
    for step in range(4):
        bad = {0: torch.zeros(1).expand(3), 1: torch.zeros(4)}.get(step)

        def body(step: int = step, bad: torch.Tensor | None = bad) -> None:
            with dist._coalescing_manager(device=CPU):
                if me.rank == 1:
                    dist.isend(torch.full((3,), float(step)), 0)
                elif step != 1:
                    dist.irecv(got, 1)
                dist.broadcast(torch.zeros(3) if bad is None or me.rank == 1 else bad, 1)

        raised.append(caught(body).text)
        assert raised[-1] or me.rank == 1 or got.tolist() == [step] * 3
    assert_in_step(me)
    return raised


@pytest.mark.parametrize("site", sites(*STAGED))
def test_coalesced_messages_and_collectives_are_all_or_nothing(pools, site):
    for refused, differ, *right in pools(2, site=site).run(mixed):
        assert "refused coalesced broadcast" in refused
        assert "must make the same call" in differ
        assert right == ["", ""]


def message_of_results(me: RankContext) -> float:
    """A message issued between coalesced collectives sends the result of all of them."""
    x, y = torch.ones(4), torch.ones(1 << 20)
    got = torch.zeros(4)
    backend_of()._start_coalescing()
    dist.all_reduce(x)
    dist.all_reduce(y)
    if me.rank == 0:
        dist.isend(y[:4], 1)
    else:
        dist.irecv(got, 0)
    for _ in range(15):
        dist.all_reduce(y)
    backend_of()._end_coalescing().wait()
    assert_in_step(me)
    return got[0].item()


@pytest.mark.parametrize("site", sites(*STAGED))
def test_coalesced_messages_are_sent_after_the_collectives(pools, site):
    assert pools(2, site=site).run(message_of_results) == [0.0, 2.0**16]


def divided_differently(me: RankContext) -> list[list[float]]:
    """Each list of tensors is one call, but on rank 1 each tensor is a call of its own."""
    a, b, c = (torch.full((5,), me.rank + 1, dtype=dtype) for dtype in (F, D, L))
    strided = torch.full((4, 2), me.rank + 10.0)[:, 0]  # its copy is written back at the call's end
    backend_of()._start_coalescing()
    for tensors in ([a, b], [strided, c], [a]):
        for part in [[t] for t in tensors] if me.rank == 1 else [tensors]:
            backend_of().allreduce_coalesced(part)
    backend_of()._end_coalescing().wait()
    return [t.tolist() for t in (a, b, c, strided)]


def test_ranks_may_divide_the_same_tensors_into_calls_differently(pools):
    for a, b, c, strided in pools(3).run(divided_differently):
        assert a == [18.0] * 5  # the third call sums the results of the first
        assert b == c == [6] * 5
        assert strided == [33.0] * 4


def sequence_numbers(me: RankContext) -> int:
    backend = backend_of()
    before = backend._get_sequence_number_for_group()
    for device in (None, CPU):

        def body(device: torch.device | None = device) -> None:
            with dist._coalescing_manager(device=device):
                dist.reduce(ones(), 0)
                dist.reduce(ones(4 + me.rank).to(torch.uint16 if me.rank else torch.int8), 0)

        caught(body)
        caught(dist.broadcast, torch.zeros(1).expand(4), 1 - me.rank)
        dist.all_reduce(ones())
    return backend._get_sequence_number_for_group() - before


def test_calls_are_numbered_also_if_refused(pools):
    assert pools(2).run(sequence_numbers) == [8, 8]


# --- order ----------------------------------------------------------------------------------------


def filled(n: int, value: float, layout: str) -> torch.Tensor:
    if layout == "transposed":
        return torch.full((2, n), value).t()
    return torch.full((n, 2), value)[:, 0] if layout == "strided" else torch.full((n,), value)


def dependent(me: RankContext, layout: str) -> None:
    """Each call reads the result of the previous one; the third scales a part of it."""
    for turn in (1.0, 2.0):  # the second turn reuses memory of the first
        total = turn * me.world * (me.world + 1) / 2
        x = filled(6, turn * (me.rank + 1), layout)
        whole = [torch.zeros_like(x) for _ in range(me.world)]
        half, root = whole[-1][:3], torch.zeros_like(whole[-1][:3])
        backend_of()._start_coalescing()
        dist.all_reduce(x)
        dist.all_gather(whole, x)
        dist.all_reduce(half, dist._make_nccl_premul_sum(0.5))
        dist.reduce(half, 0)
        dist.barrier()
        dist.broadcast(half, 0)
        dist.scatter(root, [half] * me.world if me.rank == 0 else None, 0)
        backend_of()._end_coalescing().wait()
        assert x.unique().tolist() == [total]
        assert all(w.unique().tolist() == [total] for w in whole[:-1])
        assert whole[-1][3:].unique().tolist() == [total]
        scaled = total * me.world / 2
        assert half.unique().tolist() == root.unique().tolist() == [scaled * me.world]
    assert_in_step(me)


@pytest.mark.parametrize("layout", ["dense", "transposed", "strided"])
@pytest.mark.parametrize("site", sites(*STAGED))
@pytest.mark.parametrize("world", [1, 3])
def test_coalesced_calls_read_results_of_earlier_ones(pools, world, site, layout):
    pools(world, site=site).run(dependent, layout)


def blocked_stream(me: RankContext, layout: str) -> tuple[list[float], list[float], list[str]]:
    """Part of the second call's input is filled late, on a stream that is blocked meanwhile.

    The call's tensors must still be allocated when it runs.
    """
    both = filled(8, 1.0, layout)
    seen = torch.empty(8 * me.world)
    dist.all_reduce(
        filled(8, 1.0, layout)
    )  # pinned memory, for which CUDA may wait for all streams
    dist.all_gather(list(torch.empty(8 * me.world).chunk(me.world)), filled(8, 1.0, layout))
    me.fake.cuda.drain_waits(False)
    backend_of()._start_coalescing()
    dist.all_reduce(both[:4])
    me.fake.cuda.finish(me.site.stream)
    me.fake.stall(me.site.stream)
    me.site.fill_later(both[4:], 3.0)
    dist.all_gather(list(seen.chunk(me.world)), both)
    dist.all_reduce(both, dist._make_nccl_premul_sum(2.0))
    work = backend_of()._end_coalescing()
    time.sleep(0.05)  # time for work that is wrongly not ordered behind the blocked stream
    assert not work.is_completed()
    me.fake.resume()
    me.fake.cuda.drain_waits(True)
    work.wait()
    assert_in_step(me)
    violations = me.fake.cuda.violations()
    return seen.view(me.world, 2, 4)[:, :, 0].flatten().tolist(), both[::4].tolist(), violations


@not_on(THREADS, "the streams of all ranks are stalled")
@pytest.mark.parametrize("layout", ["dense", "strided"])
@pytest.mark.parametrize("site", sites(*DEVICES))
def test_coalesced_calls_are_ordered_behind_earlier_stream_work(pools, site, layout):
    for seen, both, violations in pools(2, site=site).run(blocked_stream, layout):
        assert both == [8.0, 12.0]
        assert seen == [2.0, 3.0] * 2
        assert violations == []


def device_fails(me: RankContext, most: int) -> list[tuple[Caught, float]]:
    """Rank 0's device fails in one CUDA call of the block, each time one call later."""
    found = []
    for calls in range(most):
        x, y = ones(), ones()
        backend_of()._start_coalescing()
        dist.all_reduce(x)
        dist.all_reduce(x)
        dist.broadcast(y, 1)
        if me.rank == 0:
            me.fake.cuda.inject("fail", after=calls)
        raised = caught(lambda: backend_of()._end_coalescing().wait())
        me.fake.cuda.heal()
        assert_in_step(me)
        found.append((raised, x[0].item()))
    return found


def test_a_device_failure_at_any_time(pools):
    """Early failures refuse the whole block, later ones only the second call. All ranks get the
    reason, and stay in step."""
    why = "" if pools.ranks_as == THREADS else "rank 0 refused all_reduce: "
    most = 20 if pools.ranks_as == THREADS else 12  # threads use more events
    first, second = pools(2, site="eager").run(device_fails, most)
    failures = [(raised.text, value) for raised, value in second if raised.kind]
    assert any(value == 2 for _, value in failures), "no failure hit the second call"
    early = [value for of_rank in (first, second) for _, value in of_rank[:2]]
    assert early == [1.0] * 4, "a call of a refused block ran"
    assert all(f"{why}CUDA error: injected failure" in text for text, _ in failures)
    assert all(raised.kind for raised, _ in first)


def under_another_stream(me: RankContext) -> list[float]:
    """The block ends on another current stream than the one on which its messages were issued."""
    x, found = torch.zeros(4), []
    for step in (1.0, 2.0, 3.0):
        me.site.fill_later(x, step if me.rank == 0 else -1.0)  # filled late, on the first stream
        backend_of()._start_coalescing()
        if me.rank == 0:
            dist.isend(x, 1)
        else:
            dist.irecv(x, 0)
        with me.site.second_stream():
            backend_of()._end_coalescing().wait()
            me.fake.cuda.finish(me.site.stream)
            found += x.tolist()
        dist.barrier()
    return found


@pytest.mark.parametrize("site", sites(*DEVICES))
def test_coalesced_messages_are_ordered_behind_earlier_stream_work(pools, site):
    assert pools(2, site=site).run(under_another_stream) == [[1.0] * 4 + [2.0] * 4 + [3.0] * 4] * 2


# --- forked children ------------------------------------------------------------------------------


def error_in_child(call: Callable[[], object]) -> str:
    """The error of a call in a forked child, "nothing" without error; a child that hangs makes the
    job hang, which its time limit ends."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            error = caught(call)
            os.write(writer, (f"{error.kind}: {error.text}" if error.kind else "nothing").encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader) as file:
        return file.read()


def in_children(me: RankContext) -> dict[str, str]:
    peer, backend = 1 - me.rank, backend_of()

    def whole(device: torch.device | None) -> None:
        with dist._coalescing_manager(device=device):
            dist.all_reduce(ones())
            dist.all_reduce(ones())

    batch = [dist.P2POp(dist.isend, ones(), peer), dist.P2POp(dist.irecv, ones(), peer)]
    texts = {
        "all_reduce": error_in_child(lambda: dist.all_reduce(ones())),
        "send": error_in_child(lambda: dist.send(ones(), peer)),
        "start": error_in_child(backend._start_coalescing),
        "the group's list": error_in_child(lambda: whole(CPU)),
        "torch's list": error_in_child(lambda: whole(None)),
        "messages": error_in_child(lambda: dist.batch_isend_irecv(batch)),
    }
    x = torch.full((4,), 1.0 + me.rank)
    with dist._coalescing_manager(device=CPU):  # the block belongs to the parent, also in a child
        dist.broadcast(x, 1)
        texts["call"] = error_in_child(lambda: dist.broadcast(x, 0))
        texts["message"] = error_in_child(lambda: dist.isend(x, peer))
        texts["end"] = error_in_child(backend._end_coalescing)
        abandoned = error_in_child(lambda: pc._C.abandon_coalescing(backend, "a child", True))
        assert abandoned == "nothing"
        dist.reduce(x, 0)
    assert x.tolist() == [4.0 if me.rank == 0 else 2.0] * 4
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    for _ in range(20):
        dist.all_reduce(torch.ones(100_000))
    assert_in_step(me)
    return texts


@not_on(THREADS, "a rank that is a thread cannot be forked alone")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_children(pools):
    """Calls of forked children are refused at once and have no effect on the parent."""
    for texts in pools(2).run(in_children, seconds=60):
        for call, text in texts.items():
            kind, _, words = text.partition(": ")
            assert kind in ("CollectiveError", "RuntimeError", "ValueError"), (call, text)
            assert "this process was forked from the one that the group belongs to" in words, call
