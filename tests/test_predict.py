"""Predicted seconds: small cases computed by hand, and properties of every algorithm."""

from __future__ import annotations

import itertools
import math
from typing import Any

import plan_cases
import pytest
from plan_cases import each_algorithm

import pycollect as pc
from pycollect import _C

# A signal takes 1 s, a port moves 10 bytes a second, a memory 100; there is no bridge.
SLOW = (1.0, 10.0, 100.0, 0.0)


def pull(to: int, source: int) -> _C.StepTuple:
    return (((to, "out", 0, 1),), ((source, "in", 0, 1),), -1)


def seconds(
    world: int, steps: list[Any], model: tuple[float, float, float, float] = SLOW
) -> tuple[float, list[_C.SpanTuple]]:
    total, spans = _C.predict(_C.Program(_C.Plan(world, 1, steps), False), 100, model)
    return total, [span for span in spans if span[1] >= 0]


FOLD = (((2, "out", 0, 1),), ((0, "in", 0, 1), (1, "in", 0, 1)), -1)
PUSH = (((1, "out", 0, 1),), ((0, "in", 0, 1),), 0)
# Name -> (ranks, steps, spans: rank, step, begin and end, seconds until all ranks have left).
BY_HAND: dict[str, tuple[int, list[Any], list[tuple[int, int, float, float]], float]] = {
    # alpha, then 100 bytes through a port; rank 0 then gets the signal that its input was read
    "copy": (2, [pull(1, 0)], [(1, 0, 1.0, 11.0)], 12.0),
    "a push runs at the source": (2, [PUSH], [(0, 0, 1.0, 11.0)], 12.0),
    "one memory reads and writes": (1, [pull(0, 0)], [(0, 0, 0.0, 2.0)], 2.0),
    "two readers queue at one port": (
        *(3, [pull(1, 0), pull(2, 0)]),
        *([(1, 0, 1.0, 11.0), (2, 1, 1.0, 21.0)], 22.0),
    ),
    "a fold queues at its reader's port": (3, [FOLD], [(2, 0, 1.0, 21.0)], 22.0),
    "ports are two-way": (
        *(2, [pull(1, 0), pull(0, 1)]),
        *([(1, 0, 1.0, 11.0), (0, 1, 1.0, 11.0)], 12.0),
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_times_by_hand(name: str) -> None:
    world, steps, spans, total = BY_HAND[name]
    assert seconds(world, steps) == (total, spans)


def test_a_bridge_joins_the_halves() -> None:
    bridged = (1.0, 10.0, 100.0, 5.0)
    assert seconds(4, [pull(1, 0)], bridged)[1][0][3] == 11.0
    assert seconds(4, [pull(2, 0)], bridged)[1][0][3] == 21.0
    both = seconds(4, [pull(2, 0), pull(3, 1), pull(0, 2)], bridged)[1]
    assert [span[3] for span in both] == [21.0, 41.0, 21.0]  # a queue per direction


@pytest.mark.parametrize("model", ["nvlink", "pcie", pc.CostModel(1e-6, 1e9, 5e9, 2e9)])
@each_algorithm
def test_more_bytes_take_longer(algorithm: _C.Algorithm, model: str | pc.CostModel) -> None:
    for world in (2, 5, 8):
        times = [
            pc.plan(algorithm.collective, world, algorithm=algorithm.name, nbytes=n).predict(model)
            for n in (0, 1 << 10, 1 << 20, 1 << 30)
        ]
        assert times == sorted(times)
        assert times[0] > 0  # the latency of waits between ranks
        if algorithm.collective != "barrier":
            assert times[-1] > 100 * times[0]


@each_algorithm
def test_a_rank_runs_one_task_at_a_time(algorithm: _C.Algorithm) -> None:
    plan = pc.plan(algorithm.collective, 6, algorithm=algorithm.name)
    line = [span for span in plan._timeline("nvlink")[1] if span[1] >= 0]
    assert [step for _, step, _, _ in line] == list(range(len(plan.steps)))
    assert all(rank == plan_cases.executor(plan.steps[step]) for rank, step, _, _ in line)
    for rank in range(6):
        own = [(start, end) for mine, _, start, end in line if mine == rank]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(own))
    assert max(end for _, _, _, end in line) <= plan.predict()


def test_nothing_is_faster_than_its_busiest_port() -> None:
    for name, least in (("chain", 1), ("two_shot", 2 * 7 / 8), ("ring", 2 * 7 / 8)):
        plan = pc.plan("all_reduce", 8, algorithm=name, nbytes=1 << 30)
        assert plan.predict() >= least * (1 << 30) / 400e9


def test_pieces_make_a_pipeline() -> None:
    whole, cut = (
        pc.plan("all_reduce", 8, algorithm="chain", nbytes=256 << 20, pieces=p).predict()
        for p in (1, 16)
    )
    assert cut < whole / 4


def test_few_rounds_suit_small_messages_and_few_bytes_large_ones() -> None:
    def time(name: str, nbytes: int) -> float:
        return pc.plan("all_reduce", 8, algorithm=name, nbytes=nbytes).predict()

    assert time("one_shot", 1 << 10) < time("ring", 1 << 10)
    assert time("ring", 1 << 30) < time("one_shot", 1 << 30)


@pytest.mark.parametrize("name", ["alpha", "port", "memory", "bridge"])
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_invalid_models_are_refused(name: str, value: float) -> None:
    figures = {"alpha": 1e-6, "port": 1e9, "memory": 1e9, "bridge": 0.0, name: value}
    with pytest.raises(ValueError, match=f"Model: {name} is {value}; pass .*, finite and"):
        pc.CostModel(**figures)
    raw = tuple(figures.values())
    with pytest.raises(ValueError, match=r"finite|or 0 where there is none"):
        _C.predict(_C.Program(_C.Plan(1, 1, []), False), 1, raw)


def test_zero_is_allowed_for_alpha_and_bridge() -> None:
    pc.CostModel(alpha=0, port=1, memory=1, bridge=0)
    for name in ("port", "memory"):
        with pytest.raises(ValueError, match=f"Model: {name} is 0; pass .* above zero"):
            pc.CostModel(**{"alpha": 0, "port": 1, "memory": 1, name: 0})
    with pytest.raises(TypeError, match="alpha is '1us'; pass a number"):
        pc.CostModel(alpha="1us", port=1, memory=1)  # type: ignore[arg-type]


def test_unknown_models_are_refused() -> None:
    plan = pc.plan("all_reduce", 2)
    with pytest.raises(ValueError, match="no model 'token ring'; pass one of 'nvlink', 'pcie'"):
        plan.predict("token ring")
    with pytest.raises(TypeError, match=r"model is a float; pass a name or a pycollect\.CostModel"):
        plan.predict(3.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("nbytes", [-1.0, math.inf, math.nan])
def test_invalid_byte_counts_are_refused(nbytes: float) -> None:
    with pytest.raises(ValueError, match="bytes must be finite and not negative"):
        _C.predict(_C.Program(_C.Plan(1, 1, []), False), nbytes, SLOW)


def test_a_wait_for_a_later_step_is_refused() -> None:
    program = _C.Program(_C.Plan(2, 1, [pull(1, 0)]), False).with_wait(0, 0, (1, 2))
    with pytest.raises(ValueError, match="which the plan writes later"):
        _C.predict(program, 1, SLOW)
