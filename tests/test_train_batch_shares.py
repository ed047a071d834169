"""Shares of a batch per rank: even, weighted, or by measured throughput, which are continued."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pycollect.train import AutoShares, split_batch
from pycollect.train.shares import shares_of


@given(st.integers(0, 1000), st.lists(st.floats(0, 1e6), min_size=1, max_size=8).filter(sum))
def test_shares_are_the_batch_in_proportion(n, weights):
    shares = shares_of(n, weights)
    assert sum(shares) == n
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - n * weight / sum(weights)) < 1 + 1e-6
        assert share == 0 or weight > 0
    equal = shares_of(n, [3.7] * len(weights))
    assert equal == [len(part) for part in torch.empty(n).tensor_split(len(weights))]


@pytest.mark.parametrize(
    ("n", "weights", "found"),
    [
        (5, None, [3, 2]),
        (100, [80, 20], [80, 20]),
        (10, (0.3, 0.7), [3, 7]),
        (5, [0, 1], [0, 5]),
        (1, [20, 80], [0, 1]),
        (9, AutoShares(2), [5, 4]),
    ],
)
def test_a_batch_is_split_by_weights(n, weights, found):
    X, y = torch.arange(4.0 * n).reshape(n, 4), torch.arange(n)
    X_shards, y_shards = split_batch(X, y, "cpu*2", weights)
    assert torch.equal(torch.cat(X_shards), X)
    assert torch.equal(torch.cat(y_shards), y)
    assert [len(shard) for shard in X_shards] == [len(shard) for shard in y_shards] == found


def run(auto, steps, rates, n=100, fixed=(0, 0, 0)):
    """The shares of all steps on ranks with these examples per second and seconds per step."""
    used = []
    for _ in range(steps):
        used.append(auto.shares(n))
        ranks = zip(used[-1], rates, fixed, strict=False)
        auto.observe([share / rate + extra for share, rate, extra in ranks])
    return used


EVEN, NOISY = [5.0, 5.0], [(1, [5.0, 5.0 + 0.15 * (-1) ** step]) for step in range(50)]


@pytest.mark.parametrize(
    ("phases", "last"),
    [
        ([(20, [800.0, 200.0])], [80, 20]),
        ([(20, [800.0, 200.0]), (60, [200.0, 600.0])], [26, 74]),
        ([(30, [1e6, 1e6, 1.0])], [49, 50, 1]),  # without an example it could not be measured ...
        ([(30, [1e6, 1e6, 1.0]), (60, [1e6, 1e6, 1e6])], [35, 34, 31]),  # ... when it is as fast
        ([(100, [10.0, 10.0], 100, (0, 1))], [55, 45]),  # both ranks end at the same time
        ([(1, [0.1, 10.0]), (20, EVEN)], [50, 50]),  # the first step loads kernels
        ([(9, [800.0, 200.0], 1), (6, [800.0, 200.0])], [80, 20]),  # a rank without examples first
        (NOISY, [50, 50]),
        *(([(slow, EVEN), (1, [4.2, 5.0]), (10, EVEN)], [50, 50]) for slow in range(1, 16)),
    ],
)
def test_shares_follow_the_throughput_and_no_disturbance(phases, last):
    """They stay as they are while the best would save less than a twentieth of the time."""
    auto = AutoShares(len(last))
    for phase in phases:
        run(auto, *phase)
    assert auto.shares(100) == last
    assert len(auto.state_dict()["changes"]) == 1 or last != [50, 50]
    few = auto.shares(len(last))
    assert few == [1] * len(last), "every rank has an example while there are enough"


@pytest.mark.parametrize("delay", [0, 3, 7])
def test_shares_are_announced_and_continued(delay):
    """A change is decided after five steps, and takes effect `delay` steps later."""
    rates = [1e3, 2e2]
    whole, part, rest = (AutoShares(2, delay) for _ in range(3))
    announced = [whole.shares_ahead(12, steps) for steps in range(delay)]
    wanted = []
    for _ in range(30):
        announced.append(whole.shares_ahead(12, delay))
        wanted += run(whole, 1, rates, 12)
    assert wanted == announced[:30]
    assert wanted[: 5 + delay] == [[6, 6]] * (5 + delay)
    assert wanted[5 + delay] == wanted[-1] == [10, 2]
    used = run(part, 6, rates, 12)
    rest.load_state_dict(json.loads(json.dumps(part.state_dict())))
    assert used + run(rest, 24, rates, 12) == wanted
    assert run(rest, 80, [1.0, 1.0], 12)[-1] == [6, 6], "it measures after the stored steps"


def split(weights=None, n=4, **options):
    return lambda auto: split_batch(torch.zeros(n, 4), torch.zeros(n), "cpu*2", weights, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (split([1]), "one weight per rank, not 1 for 2"),
        (split(AutoShares(3)), "one weight per rank, not 3 for 2"),
        (split([1, -1]), r"at least 0, .* not \[1, -1\]"),
        (split([0, 0]), "not all of them 0"),
        (split([1, float("nan")]), "at least 0"),
        (split([1, float("inf")]), "at least 0"),
        (split("auto"), "pass an AutoShares"),
        (split(n=5, strict=True), "5 examples on 2 dev"),
        (lambda auto: auto.observe([1.0, 1.0]), "after shares"),
        (lambda auto: (auto.shares(4), auto.observe([1.0] * 3)), "with 2 times, not 3"),
        (lambda auto: auto.shares_ahead(12, 4), "certain for 3 steps ahead, not for 4"),
        (lambda auto: auto.shares_ahead(12, -1), "certain for 3 steps ahead, not for -1"),
        (lambda auto: AutoShares(3).load_state_dict(auto.state_dict()), "2 ranks, and there are 3"),
        (lambda auto: AutoShares(0), "at least one rank, not 0"),
        (lambda auto: AutoShares(2, delay=-1), "the delay must be at least 0"),
    ],
)
def test_misuse_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(AutoShares(2, delay=3))
