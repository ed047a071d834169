"""Predicted seconds over several hosts: small cases computed by hand, and bounds of all sizes."""

from __future__ import annotations

import dataclasses

import pytest

import pycollect as pc
from pycollect import _C

# A network of 1000 bytes a second, besides which everything else takes no time.
ONLY_NETWORK = pc.CostModel(alpha=0, port=1e30, memory=1e30, network=1000, latency=0)
AGREEMENT = 0.256  # seconds in which one host describes its call to another on that network
GIGABIT = 1e9 / 8


def seconds(collective: str, hosts: tuple[int, ...], model: pc.CostModel, **options: int) -> float:
    return pc.plan(collective, hosts=hosts, **options).predict(model)


SLOW = dataclasses.replace(ONLY_NETWORK, latency=5.0)
# Name -> (collective, hosts, bytes, model, seconds).
BY_HAND: dict[str, tuple[str, tuple[int, ...], int, pc.CostModel, float]] = {
    "a message's bytes": ("broadcast", (1, 1), 100_000, ONLY_NETWORK, 100 + AGREEMENT),
    "and latency": ("broadcast", (1, 1), 100_000, SLOW, 100 + AGREEMENT + 2 * 5.0),
    "little data goes along with the agreement": ("broadcast", (1, 1), 100, SLOW, 5.1),
    "a barrier": ("barrier", (1, 1), 1 << 20, SLOW, 10 + AGREEMENT),
    # Each of four ranks sends a quarter of its tensor to each rank of the other host.
    "ranks share a link": ("all_to_all", (2, 2), 40_000, ONLY_NETWORK, 2 * 20 + 2 * AGREEMENT),
    "gathered blocks, too": ("all_gather", (4, 4), 80_000, ONLY_NETWORK, 40 + AGREEMENT),
    "one way": ("broadcast", (1, 1), 40_000, ONLY_NETWORK, 40 + AGREEMENT),
    "both ways at once": ("all_gather", (1, 1), 80_000, ONLY_NETWORK, 40 + AGREEMENT),
    "the root sends to every host": (
        *("broadcast", (2, 2, 2, 2), 40_000),
        *(ONLY_NETWORK, 3 * 40 + 3 * AGREEMENT),
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_times_by_hand(name: str) -> None:
    collective, hosts, nbytes, model, wanted = BY_HAND[name]
    assert seconds(collective, hosts, model, nbytes=nbytes) == pytest.approx(wanted)


def test_hosts_compare_the_sizes_of_irregular_calls() -> None:
    all_gather, all_to_all = (
        seconds(name, (1, 1), SLOW, nbytes=40_000) for name in ("all_gather", "all_to_all")
    )
    assert all_to_all - all_gather == pytest.approx(5.0 + AGREEMENT)


def test_ranks_of_a_host_share_its_memory() -> None:
    # A rank reads and writes 100 bytes a second, and the memory has 300, for reads and writes.
    model = pc.CostModel(alpha=0, port=100, memory=300, network=1e30, latency=0)
    # The root copies to its staging buffer and to each host's network, and other ranks copy out.
    alone, four = (pc.plan("broadcast", hosts=(1, n), nbytes=30_000).predict(model) for n in (1, 4))
    assert four - alone == pytest.approx(4 * 200 - 300)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("mebibytes", [1, 4, 16, 64, 1000])
def test_an_all_reduce_of_two_hosts_approaches_the_links(ranks: int, mebibytes: int) -> None:
    # S bytes pass in each direction, and the pipeline begins and ends with a piece of each rail.
    plan = pc.plan("all_reduce", hosts=(ranks, ranks), nbytes=mebibytes << 20)
    model = dataclasses.replace(ONLY_NETWORK, network=GIGABIT)
    least = plan.nbytes / GIGABIT
    assert least <= plan.predict(model) <= least * (1 + 1 / plan.pieces) * 1.02
    assert plan.predict(dataclasses.replace(model, latency=50e-6)) >= plan.predict(model)


def test_a_host_between_others_sends_and_receives_twice() -> None:
    plan = pc.plan("all_reduce", hosts=(4, 4, 4), nbytes=16 << 20)
    assert plan.predict(ONLY_NETWORK) >= 2 * plan.nbytes / 1000


@pytest.mark.parametrize("collective", [c for c in _C.COLLECTIVES if c != "barrier"])
def test_more_bytes_take_longer_over_hosts(collective: str) -> None:
    times = [
        pc.plan(collective, hosts=(2, 3), nbytes=1 << n).predict() for n in (0, 10, 20, 26, 30, 34)
    ]
    assert times == sorted(times)
    assert times[-1] / times[-2] == pytest.approx(16, rel=0.05)  # runs that are not simulated


def test_large_data_passes_the_staging_buffers_in_runs() -> None:
    plan = pc.plan("broadcast", hosts=(1, 1), nbytes=40 << 20)
    assert plan._world_view is not None
    assert plan._world_view.runs(plan.nbytes, 16 << 20) == 3
    assert plan._world_view.runs(0, 16 << 20) == 1
    line = plan.timeline()
    assert [span.step for span in line] == 3 * list(range(len(plan.steps)))
    assert max(span.end for span in line) <= plan.predict()


def test_the_model_of_hosts() -> None:
    plan = pc.plan("all_reduce", hosts=(4, 4), nbytes=1 << 20)
    assert plan.predict() == plan.predict("ethernet")
    ethernet = pc.CostModel(alpha=5e-7, port=8e9, memory=60e9)
    assert plan.predict() == plan.predict(ethernet)
    for name in ("network", "latency"):
        for value in (-1.0, float("inf"), float("nan")):
            with pytest.raises(ValueError, match=f"Model: {name} is {value}; pass .*, finite and"):
                dataclasses.replace(ethernet, **{name: value})
    with pytest.raises(ValueError, match="network is 0; pass bytes per second, finite and above"):
        pc.CostModel(alpha=0, port=1, memory=1, network=0)
    assert plan._world_view is not None
    for at, why in ((4, "network is in bytes per second"), (5, "latency is in seconds")):
        figures = [1e-6, 1e9, 1e9, 0.0, 1e9, 1e-6]
        figures[at] = -1.0
        with pytest.raises(ValueError, match=why):
            plan._world_view.predict(1, 1, tuple(figures))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a staging buffer has more than 0 bytes"):
        plan._world_view.predict(1, 0, (1e-6, 1e9, 1e9, 0.0, 1e9, 1e-6))
