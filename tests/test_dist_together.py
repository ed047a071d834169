"""Several requests that are one to their caller: agreed on by all ranks before the first runs.

The dtypes of one call, and calls that were coalesced: where one differs, none runs on any rank.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, Me, caught, pools_of_a_module
from dist_step import CPU, is_in_step, ones

pytestmark = pytest.mark.skipif(not OURS, reason="what only this backend promises")


@pytest.fixture(scope="module")
def pools():
    yield from pools_of_a_module(beside=None)


def several(me: Me, jobs: list) -> tuple[Caught, list[list[float]]]:
    """One all_reduce of these sizes and dtypes, or one after the other where they are in lists."""
    tensors = [[torch.ones(n, dtype=t) for n, t in job] for job in jobs[me.rank]]
    raised = Caught((), "", 0.0)

    def body(job: list[torch.Tensor]) -> None:
        with dist._coalescing_manager():
            for t in job:
                dist.all_reduce(t)

    for job in tensors:
        raised = caught(body, job)
        if raised.kind:
            break
    is_in_step(me)
    return raised, [t.tolist() for job in tensors for t in job]


F, D, L = torch.float32, torch.float64, torch.int64
UNLIKE = {
    "one dtype of two": ([[(4, F), (4, D)]], [[(4, F)], [(4, D)]], "part 1 of 2"),
    "the second dtype's size": ([[(4, F), (4, D)]], [[(4, F), (5, D)]], "of 5 float64"),
    "the second of three": (
        [[(4, F), (4, D), (1, L)]],
        [[(4, F), (4, F), (1, L)]],
        "part 1 of 3",
    ),
    "more dtypes": ([[(4, F), (4, D)]], [[(4, F), (4, D), (4, L)]], "part 1 of 2"),
    "the other way round": ([[(3, F), (5, F)]], [[(5, F), (3, F)]], "different sizes"),
}


STAGED = ["", "late", "eager:stream", "eager:wait"]  # the host's tensors, and those on devices


@pytest.mark.parametrize("case", UNLIKE)
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("staged", STAGED)
def test_lists_that_are_not_alike_are_refused_and_nothing_is_written(pools, case, swapped, staged):
    one, two, words = UNLIKE[case]
    results = pools(2, staged=staged).run(several, [two, one] if swapped else [one, two])
    for raised, values in results:
        assert raised.kind == "ValueError", (raised, values)
        assert all(v == 1 for tensor in values for v in tensor), "an output was written"
    assert results[0][0].text == results[1][0].text
    assert words in results[0][0].text


def unlike_batch(me: Me, what: str) -> tuple[Caught, float]:
    x = ones()
    sent = {"counts": [1, 2 + me.rank], "sizes": [1, 1]}[what]

    def body() -> None:
        with dist._coalescing_manager(device=CPU):
            dist.broadcast(x * (2 + me.rank), 0)
            dist.reduce(x, 0)
            if what == "counts":
                dist.all_to_all_single(ones(4), ones(sum(sent)), [2, 2], sent)
            else:
                dist.broadcast(ones(3 + me.rank), 0)

    raised = caught(body)
    is_in_step(me)
    return raised, x[0].item()


@pytest.mark.parametrize("what", ["counts", "sizes"])
@pytest.mark.parametrize("staged", STAGED)
def test_coalesced_calls_are_agreed_on_before_the_first_runs(pools, what, staged):
    for raised, value in pools(2, staged=staged).run(unlike_batch, what):
        assert raised.kind == "ValueError", raised
        assert ("room for" if what == "counts" else "part 3 of 3") in raised.text
        assert value == 1


def right_batch(me: Me) -> None:
    """In order: each finds what the one before has written."""
    last = me.world - 1.0
    x, part, whole = (torch.full((n,), float(me.rank)) for n in (4, 2, 4 * me.world))
    with dist._coalescing_manager(device=CPU, async_ops=True) as manager:
        dist.broadcast(x, me.world - 1)
        dist.barrier()
        dist.all_gather(list(whole.chunk(me.world)), x)
        dist.reduce(whole, 0)
        dist.scatter(part, list(whole.split(2))[: me.world] if me.rank == 0 else None, 0)
    assert len(manager.works) == 1
    manager.wait()
    assert x.tolist() == [last] * 4
    assert whole.tolist() == [last * (me.world if me.rank == 0 else 1)] * 4 * me.world
    assert part.tolist() == [last * me.world] * 2
    is_in_step(me)


@pytest.mark.parametrize("world", [1, 2, 3])
# Not "late": what goes through the host is copied there when it is asked for.
@pytest.mark.parametrize("staged", ["", "eager:stream", "eager:wait"])
def test_coalesced_calls_run_in_order(pools, world, staged):
    pools(world, staged=staged).run(right_batch)
