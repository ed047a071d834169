"""Shares of a batch per rank: even, weighted, or by measured throughput; stored and replayed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train_cases import CPU, batches, perceptron, replicas_of, same_bits

from pycollect.train import AutoShares, split_batch
from pycollect.train.shares import shares_of


@given(st.integers(0, 1000), st.lists(st.floats(0, 1e6), min_size=1, max_size=8))
def test_shares_are_the_batch_in_proportion(n: int, weights: list[float]) -> None:
    if not sum(weights):
        return
    shares = shares_of(n, weights)
    assert sum(shares) == n
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - n * weight / sum(weights)) < 1 + 1e-6
        assert share == 0 or weight > 0


@given(st.integers(0, 100), st.integers(1, 9))
def test_equal_weights_split_as_torch_does(n: int, world: int) -> None:
    assert shares_of(n, [3.7] * world) == [len(t) for t in torch.empty(n).tensor_split(world)]


def sizes(n: int, weights: Any, world: int = 2, **how: Any) -> list[int]:
    X, y = torch.arange(4.0 * n).reshape(n, 4), torch.arange(n)
    X_shards, y_shards = split_batch(X, y, [CPU] * world, weights, **how)
    assert torch.equal(torch.cat(X_shards), X)
    assert torch.equal(torch.cat(y_shards), y)
    return [len(shard) for shard in y_shards]


def test_a_batch_is_split_by_weights() -> None:
    assert sizes(100, [80, 20]) == [80, 20]
    assert sizes(10, (0.3, 0.7)) == [3, 7]
    assert sizes(5, [0, 1]) == [0, 5]
    assert sizes(1, [20, 80]) == [0, 1]
    assert sizes(9, AutoShares(3), world=3) == [3, 3, 3]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1], r"one weight per rank, not 1 for 2"),
        ([1, -1], r"at least 0, .* not \[1, -1\]"),
        ([0, 0], r"not all of them 0"),
        ([1, float("nan")], "at least 0"),
        ([1, float("inf")], "at least 0"),
        ("auto", "pass an AutoShares"),
        (AutoShares(3), "shares for 3 ranks, and there are 2"),
    ],
)
def test_bad_weights_are_refused(weights: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sizes(4, weights)


def test_the_strict_rule() -> None:
    assert sizes(4, None, strict=True) == [2, 2]
    with pytest.raises(
        ValueError, match=r"batch size must be divisible by the number of devices: 5 .* 2"
    ):
        sizes(5, None, strict=True)


def run(auto: AutoShares, steps: int, rates: list[float], n: int = 100) -> list[list[int]]:
    """The shares of all steps on ranks with the given rates, in examples per second."""
    used = []
    for _ in range(steps):
        used.append(auto.shares(n))
        auto.observe([share / rate for share, rate in zip(used[-1], rates, strict=True)])
    return used


def test_shares_follow_the_throughput() -> None:
    auto = AutoShares(2)
    used = run(auto, 20, [800.0, 200.0])
    assert used[0] == [50, 50]
    assert used[-1] == [80, 20]
    assert run(auto, 60, [200.0, 600.0])[-1] == pytest.approx([25, 75], abs=2)


def test_noise_does_not_change_shares() -> None:
    auto = AutoShares(2)
    for step in range(50):
        auto.shares(64)
        auto.observe([1.0, 1.0 + 0.03 * (-1) ** step])
    assert auto.shares(64) == [32, 32]
    assert len(auto.state_dict()["changes"]) == 1


def test_a_fixed_cost_per_step_is_balanced() -> None:
    """One rank needs an extra second per step: in the end both ranks finish at the same time."""
    auto = AutoShares(2)
    for _ in range(100):
        a, b = auto.shares(100)
        seconds = [a * 0.1, 1 + b * 0.1]
        auto.observe(seconds)
    assert seconds[0] == pytest.approx(seconds[1], rel=0.06)


def test_the_times_of_the_first_step_are_ignored() -> None:
    auto = AutoShares(2)
    auto.shares(10)
    auto.observe([100.0, 1.0])
    run(auto, 20, [5.0, 5.0], 10)
    assert len(auto.state_dict()["changes"]) == 1


def test_a_single_slow_step_does_not_change_shares() -> None:
    """One rank takes a fifth longer in a single step, at each step that may change the shares."""
    for disturbed in range(1, 16):
        auto = AutoShares(2)
        run(auto, disturbed, [5.0, 5.0])
        auto.shares(100)
        auto.observe([12.0, 10.0])
        run(auto, 10, [5.0, 5.0])
        assert len(auto.state_dict()["changes"]) == 1


def test_every_rank_keeps_an_example_while_there_are_enough() -> None:
    auto = AutoShares(3)
    run(auto, 30, [1e6, 1e6, 1.0])
    assert sorted(auto.shares(100)) == [1, 49, 50]
    assert auto.shares(3) == [1, 1, 1]
    assert sum(auto.shares(2)) == 2
    assert run(auto, 60, [1e6, 1e6, 1e6])[-1] == pytest.approx([33, 33, 33], abs=2)


def test_a_restored_state_continues_with_the_same_shares() -> None:
    whole, first, second = (AutoShares(2) for _ in range(3))
    rates = [700.0, 300.0]
    wanted = run(whole, 40, rates)
    used = run(first, 17, rates)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert used + run(second, 23, rates) == wanted
    with pytest.raises(ValueError, match="stored shares are for 2 ranks, and there are 3"):
        AutoShares(3).load_state_dict(first.state_dict())


def test_a_replay_uses_the_stored_shares_and_ignores_times() -> None:
    stored = AutoShares(2)
    wanted = run(stored, 30, [900.0, 100.0])
    again, later = AutoShares(2), AutoShares(2)
    again.replay(stored.state_dict())
    assert run(again, 30, [1.0, 1.0]) == wanted
    later.replay(stored.state_dict(), step=12)
    assert run(later, 18, [1.0, 1.0]) == wanted[12:]
    with pytest.raises(ValueError, match="has 30 steps; there is no step 31"):
        later.replay(stored.state_dict(), step=31)
    assert run(again, 80, [1.0, 1.0])[-1] == pytest.approx([50, 50], abs=2), "then it measures"


def test_the_same_shares_give_the_same_bits() -> None:
    trained = []
    for again in (False, True):
        auto, replicas = AutoShares(2), replicas_of(perceptron(), 2)
        if again:
            auto.replay(state)  # noqa: F821  # from the first round
        for X, y in batches([16] * 12):
            replicas.step(X, y, shares=auto.shares(16))
            auto.observe(replicas.rank_seconds() if again else [1.0, 3.0])
        trained.append(replicas.modules[0])
        state = auto.state_dict()
    assert len(state["changes"]) > 1
    assert same_bits(*trained)
    even = replicas_of(perceptron(), 2)
    for X, y in batches([16] * 12):
        even.step(X, y)
    assert not same_bits(even.modules[0], trained[0])


def test_misuse_is_refused() -> None:
    auto = AutoShares(2)
    with pytest.raises(ValueError, match="after shares"):
        auto.observe([1.0, 1.0])
    auto.shares(4)
    with pytest.raises(ValueError, match="with 2 times, not 3"):
        auto.observe([1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="at least one rank, not 0"):
        AutoShares(0)


def test_a_delay_fixes_the_shares_of_the_next_steps() -> None:
    """The shares announced while a batch is prepared are those of its step."""
    auto = AutoShares(2, delay=3)
    announced = [auto.shares_ahead(12, steps) for steps in range(3)]
    given = []
    for _ in range(30):
        announced.append(auto.shares_ahead(12, 3))
        given.append(auto.shares(12))
        auto.observe([share * slow for share, slow in zip(given[-1], (1e-3, 5e-3), strict=True)])
    assert given == announced[:30]
    changed = next(step for step, shares in enumerate(given) if shares != [6, 6])
    assert (changed, given[-1]) == (5 + 3, [10, 2])  # decided after five steps
    for steps in (-1, 4):
        with pytest.raises(ValueError, match="certain for 3 steps ahead, not for"):
            auto.shares_ahead(12, steps)
    with pytest.raises(ValueError, match="the delay must be at least 0"):
        AutoShares(2, delay=-1)


@pytest.mark.parametrize("delay", [0, 3, 7])
def test_a_delay_is_continued_and_replayed(delay: int) -> None:
    def shares_of_steps(auto: AutoShares, steps: int) -> list[list[int]]:
        given = []
        for _ in range(steps):
            given.append(auto.shares(12))
            auto.observe([share * slow for share, slow in zip(given[-1], (1, 5), strict=True)])
        return given

    whole, part, rest = (AutoShares(2, delay) for _ in range(3))
    unbroken = shares_of_steps(whole, 30)
    given = shares_of_steps(part, 6)  # the first change is decided, but not in effect with a delay
    rest.load_state_dict(part.state_dict())
    assert given + shares_of_steps(rest, 24) == unbroken
    again = AutoShares(2)
    again.replay(whole.state_dict())
    assert shares_of_steps(again, 30) == unbroken
