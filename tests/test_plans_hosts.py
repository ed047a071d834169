"""Plans over several hosts in the public API: made, printed, proved, predicted and drawn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import plan_cases
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import REGISTRY, each_algorithm

import pycollect as pc
from pycollect import _C, cli

HOSTS = ((8, 8, 4), (2, 2), (1, 1), (1, 3), (3, 1, 2), (1, 1, 1, 1, 1))
# A network of 1000 bytes a second, besides which everything else takes no time.
ONLY_NETWORK = pc.CostModel(alpha=0, port=1e30, memory=1e30, network=1000, latency=0)


def bytes_of_hosts(plan: pc.plans.Plan) -> tuple[list[float], list[float]]:
    """The bytes that each host sends, and those that it receives, counted from the steps."""
    sent, received = [0.0] * len(plan.hosts), [0.0] * len(plan.hosts)
    for step in plan.steps:
        dsts, srcs, _ = step
        here, there = plan.host_of[plan_cases.executor(step)], plan.host_of[srcs[0][0]]
        if here != there:
            sent[there] += plan.nbytes / plan.chunks * dsts[0][3]
            received[here] += plan.nbytes / plan.chunks * dsts[0][3]
    return sent, received


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@each_algorithm
def test_every_algorithm_can_be_planned_over_hosts(algorithm: _C.Algorithm, hosts: Any) -> None:
    rooted = algorithm.collective in plan_cases.ROOTED
    for nbytes, root in ((64, 0), (1 << 20, sum(hosts) - 1 if rooted else 0)):
        plan = pc.plan(
            algorithm.collective, hosts=hosts, algorithm=algorithm.name, nbytes=nbytes, root=root
        )
        assert plan.verify() is None
        assert (plan.world, plan.hosts) == (sum(hosts), hosts)
        assert plan.predict() > 0


@each_algorithm
def test_between_hosts_are_only_copies_to_the_rank_that_runs_them(algorithm: _C.Algorithm) -> None:
    plan = pc.plan(algorithm.collective, hosts=(3, 1, 2), algorithm=algorithm.name)
    assert any(bytes_of_hosts(plan)[0]) or algorithm.collective == "barrier"
    for dsts, srcs, by in plan.steps:
        me = plan.host_of[plan_cases.executor((dsts, srcs, by))]
        assert {plan.host_of[d[0]] for d in dsts} == {me}
        if {plan.host_of[s[0]] for s in srcs} != {me}:
            assert len(dsts) == len(srcs) == 1
    assert _C.find_fold_between_hosts(plan._plan, plan.hosts) == ""


FOLD = (((1, "tmp", 0, 1),), ((0, "in", 0, 1), (1, "in", 0, 1)), -1)
PUSH = (((1, "tmp", 0, 1),), ((0, "in", 0, 1),), 0)
SPREAD = (((1, "tmp", 0, 1), (1, "out", 0, 1)), ((0, "in", 0, 1),), 1)
PULL = (((1, "tmp", 0, 1),), ((0, "in", 0, 1),), 1)


@pytest.mark.parametrize("step", [FOLD, PUSH, SPREAD], ids=["fold", "push", "two destinations"])
def test_other_steps_between_hosts_are_found(step: Any) -> None:
    plan = _C.Plan(2, 1, [PULL, step])
    found = _C.find_fold_between_hosts(plan, (1, 1))
    assert found.startswith("step 1 by rank ")
    assert "between hosts a step may only copy" in found
    assert _C.find_fold_between_hosts(plan, (2,)) == ""


@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.sampled_from(_C.COLLECTIVES),
    st.sampled_from((0, 1, 100, 32 << 10, 200 << 10, 1 << 20, 64 << 20)),
    st.booleans(),
    st.data(),
)
def test_defaults_over_any_hosts(
    hosts: list[int], collective: str, nbytes: int, out_of_place: bool, data: st.DataObject
) -> None:
    rooted = collective in plan_cases.ROOTED
    root = data.draw(st.integers(0, sum(hosts) - 1)) if rooted else 0
    in_place = False if out_of_place else None
    plan = pc.plan(collective, hosts=hosts, nbytes=nbytes, root=root, in_place=in_place)
    assert plan.verify() is None
    sent, received = bytes_of_hosts(plan)
    assert math.isclose(sum(sent), sum(received))
    assert plan.predict(ONLY_NETWORK) >= max(sent + received) / 1000 * (1 - 1e-9)


@given(st.integers(1, 9), st.sampled_from(REGISTRY))
def test_one_host_is_the_plain_plan(world: int, a: _C.Algorithm) -> None:
    for algorithm in (None, a.name):
        plain = pc.plan(a.collective, world, algorithm=algorithm)
        for plan in (
            pc.plan(a.collective, hosts=(world,), algorithm=algorithm),
            pc.plan(a.collective, world, hosts=[world], algorithm=algorithm),
        ):
            assert plan == plain
            assert plan.steps == plain.steps
            assert plan.predict() == plain.predict()
            assert str(plan) == str(plain)


def test_algorithms_are_those_of_groups_over_hosts() -> None:
    def name(collective: str, nbytes: int, hosts: Any = (4, 4)) -> str:
        return pc.plan(collective, hosts=hosts, nbytes=nbytes).algorithm

    assert name("all_reduce", 8 << 10) == "one_shot"  # 32 KiB of a host's ranks in one message
    assert name("all_reduce", 9 << 10) == "host_chain"
    assert name("all_reduce", 8 << 10, (4, 5)) == "host_chain"
    assert name("reduce", 1 << 10) == "direct"
    assert name("reduce_scatter", 1 << 20) == "host_chain"
    assert name("broadcast", 1 << 20) == "direct"
    assert pc.plan("all_reduce", hosts=(4, 4), nbytes=1 << 20).pieces == 2
    assert pc.plan("all_reduce", hosts=(4, 4), nbytes=1 << 30).pieces == 16
    assert pc.plan("all_reduce", hosts=(4, 4), nbytes=1 << 20, pieces=7).pieces == 7


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((), {"hosts": (2, 0, 1)}, ValueError, "host 1 has 0 ranks; every host needs at least one"),
        ((), {"hosts": (2, -3)}, ValueError, "host 1 has -3 ranks"),
        ((), {"hosts": ()}, ValueError, "hosts is empty; pass the number of ranks on each host"),
        ((5,), {"hosts": (2, 2)}, ValueError, "world is 5, and the hosts have 4 ranks together"),
        ((), {}, TypeError, "pass world, the number of ranks, or hosts, those of each host"),
        ((), {"hosts": 4}, TypeError, r"hosts is a int; pass .* such as \(8, 8\)"),
        ((), {"hosts": "22"}, TypeError, "hosts is a str; pass"),
        ((), {"hosts": (2, 2.0)}, TypeError, r"hosts\[1\] is a float; pass an int"),
        ((), {"hosts": (1024, 1)}, ValueError, "world is 1025; at most 1024"),
        ((), {"hosts": (64,) * 65}, ValueError, "world is 4160; at most 4096"),
        ((), {"hosts": (2, 2), "root": 4}, ValueError, "root 4 is not a rank of a world of 4"),
        ((), {"hosts": (2, 2), "pieces": 0}, ValueError, "pieces is 0; pass at least one piece"),
        ((), {"hosts": (2, 2), "algorithm": "x"}, ValueError, "no broadcast algorithm 'x'"),
    ],
)
def test_invalid_hosts_are_refused(
    arguments: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pc.plan("broadcast", *arguments, **options)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "broadcast"])
def test_the_steps_of_a_host_do_not_grow_with_the_hosts(collective: str) -> None:
    def slices_of_hosts(count: int) -> set[int]:
        plan = pc.plan(collective, hosts=(2,) * count, nbytes=1 << 20)
        slices = [0] * count
        for step in plan.steps:
            slices[plan.host_of[plan_cases.executor(step)]] += len(step[0]) + len(step[1])
        return set(slices)

    assert slices_of_hosts(8) == slices_of_hosts(64)


def test_thousands_of_ranks_over_hosts() -> None:
    plan = pc.plan("all_reduce", hosts=(8,) * 512)
    assert len(plan.steps) < 40 * plan.world * plan.chunks / 8  # a few for each rank and piece
    assert plan.predict() > 2 * 511 * 50e-6  # a message up and a message down for each host
    for collective in ("scatter", "gather"):
        assert pc.plan(collective, hosts=(8,) * 512).predict() > 50e-6


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_to_all"])
def test_plans_that_do_not_fit_into_memory_are_refused(collective: str) -> None:
    with pytest.raises(
        ValueError, match=f"{collective} by .* slices and copies for 4096 ranks, more than"
    ):
        pc.plan(collective, hosts=(8,) * 512)


def test_a_plan_over_hosts_as_text() -> None:
    plan = pc.plan("all_reduce", hosts=(2, 1), algorithm="host_chain", pieces=1, nbytes=3000)
    assert str(plan) == (
        "all_reduce by 'host_chain', 3 ranks on 2 hosts, 1 chunk of 2.93 KiB, in place\n"
        "host 0: ranks 0,1; host 1: rank 2\n"
        "a host sends 2.93 KiB and receives 2.93 KiB\n"
        "order exact, 6 levels; a rank reads 5.86 KiB to 11.7 KiB (rank 0) "
        "and writes 5.86 KiB to 8.79 KiB (ranks 0,2)\n"
        "level 1  rank 1: host[0] on 1 <- in[0] from 1\n"
        "level 2  rank 0: acc[0] on 0 <- sum of in[0] from 0 and host[0] from 1\n"
        "level 3  rank 2: acc[1] on 2 <- acc[0] from 0, from host 0 to host 1\n"
        "level 4  rank 2: out[0] on 2 and tmp[0] on 2 <- sum of acc[1] from 2 and in[0] from 2\n"
        "level 5  rank 0: tmp[0] on 0 <- tmp[0] from 2, from host 1 to host 0\n"
        "level 6  rank 0: out[0] on 0 <- tmp[0] from 0\n"
        "         rank 1: out[0] on 1 <- tmp[0] from 0"
    )
    assert "... host 31: ranks 124..127" in str(pc.plan("broadcast", hosts=(4,) * 32))


@pytest.mark.parametrize("suffix", [".png", ".svg"])
@pytest.mark.parametrize("collective", _C.COLLECTIVES)
def test_plans_over_hosts_can_be_drawn(collective: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"plan{suffix}"
    pc.plan(collective, hosts=(3, 1, 2)).plot(path)
    assert path.stat().st_size > 4000
    if suffix == ".svg":
        assert "copy between hosts" in path.read_text() or collective == "barrier"


def test_the_command_plans_over_hosts(capsys: Any) -> None:
    assert cli.main(["plan", "all_reduce", "-b", "1M", "2,2,1"]) == 0
    printed = capsys.readouterr().out
    assert "5 ranks on 3 hosts" in printed
    assert "us on ethernet, one process per rank" in printed
    for wrong, why in (("2,x", "invalid int value: 'x'"), ("2,0", "host 1 has 0 ranks")):
        with pytest.raises(SystemExit):
            cli.main(["plan", "all_reduce", wrong])
        assert why in capsys.readouterr().err


@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter"])
@pytest.mark.parametrize(
    ("algorithm", "order"), [("host_chain", "exact"), ("host_direct", "other")]
)
def test_the_order_of_additions_over_hosts(collective: str, algorithm: str, order: str) -> None:
    plan = pc.plan(collective, hosts=(2, 3, 2), algorithm=algorithm)
    assert plan._world_view is not None
    assert plan._world_view.verify(collective, 0) == (None, order)
