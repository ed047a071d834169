"""Parts of the benchmark: sizes, turns, inputs with known results, cases, targets, noise.

Tests of whole runs are in test_bench.py.
"""

import time
from functools import partial

import pytest
import torch

import pycollect
from pycollect import _sizes, _timing
from pycollect_bench import (
    baselines,
    cases,
    comparison,
    environment,
    options,
    pattern,
    targets,
)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def cpus(world):
    return (torch.device("cpu"),) * world


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        *(("4K", 4096), ("1m", 1 << 20), ("2G", 2 << 30), ("12", 12), (" 8k ", 8192)),
        *(("1 GiB", 1 << 30), ("2MiB", 2 << 20), ("4 kib", 4096), ("1000 B", 1000), ("7b", 7)),
    ],
)
def test_size_is_read(text, nbytes):
    assert _sizes.parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "0", "-4K", "4KB", "1.5M", "4iB", "9" * 31, "\u00b2"])
def test_size_is_refused(text):
    with pytest.raises(ValueError, match="is not a size"):
        _sizes.parse_size(text)


def test_sizes_grow_up_to_the_end_and_no_further():
    assert _sizes.size_range(4, 64, 4) == [4, 16, 64]
    assert _sizes.size_range(4, 63, 4) == [4, 16]
    with pytest.raises(ValueError, match="past their end"):
        _sizes.size_range(8, 4, 2)
    with pytest.raises(ValueError, match="2 or more"):
        _sizes.size_range(4, 8, 1)


def test_iterations_are_distributed_exactly():
    for n in (1, 6, 7, 20):
        _, calls, _ = _timing.Effort(iterations=n).calls([1.0] * 3)
        assert sum(calls) == n
        assert len(calls) <= _timing.ROUNDS


def test_time_budget_gives_slow_candidates_fewer_calls():
    slow, fast = _timing.Effort(seconds=1.0).calls([10.0, 1e-3])
    assert set(slow) == {1}
    assert min(fast) > 10


def test_long_calls_take_turns_one_by_one():
    effort = _timing.Effort(seconds=1.0, single_calls=True)
    assert effort.calls([0.02, 0.08]) == [[1] * 11] * 2
    assert [len(effort.calls([s])[0]) for s in (10.0, 1e-6)] == [_timing.ROUNDS, 301]


def test_candidates_take_turns():
    order = []

    def sampler(name, n):
        order.append(name)
        return [1.0] * n

    samplers = {name: partial(sampler, name) for name in "abc"}
    timings = _timing.interleave(samplers, _timing.Effort(iterations=3, warmup=1))
    assert "".join(order) == "abc" + "abcbcacab"  # after one warm-up of each
    assert timings["b"].count == 3


def test_a_batch_is_timed_as_one(monkeypatch):
    calls: list[int] = []
    monkeypatch.setattr(time, "perf_counter", lambda: 7.0 * len(calls))  # a call takes 7 s
    assert _timing.batched(lambda: calls.append(1), 3)(2) == [7.0, 7.0]
    assert len(calls) == 6


def test_ranks_agree_on_the_number_of_calls_and_on_the_order():
    taken = []
    for _ in range(2):  # two ranks
        order = []

        def sampler(name, n, order=order):
            order.append(name)
            return [1.0] * n

        samplers = {name: partial(sampler, name) for name in "abc"}
        effort = _timing.Effort(seconds=7e-3)
        timings = _timing.interleave(samplers, effort, _timing.shuffled(5), lambda mine: 1e-4)
        assert timings["a"].count == 7 * 3
        taken.append(order[6:])
    assert taken[0] == taken[1]
    assert sorted(taken[0]) == sorted("abc" * 7)
    assert taken[0] != list("abcbcacab" * 2 + "abc")  # a new order every round


def test_percentiles_are_times_that_were_measured():
    timing = _timing.Timing((tuple(range(1, 101)),))
    assert [timing.percentile(p) for p in (0, 50, 99, 100)] == [1, 50, 99, 100]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [2, 8, 17])
def test_pattern_is_exact_in_any_order(dtype, world):
    made = pattern.Pattern(dtype, "sum", world)
    total = torch.zeros(pattern.PERIOD, dtype=dtype)
    for rank in reversed(range(world)):
        wide = total.to(torch.float64) if dtype.is_floating_point else total
        total = (wide + made.rank(rank, pattern.PERIOD).to(wide.dtype)).to(dtype)
    assert pattern.count_wrong(total, made.reduced(pattern.PERIOD)) == 0


@pytest.mark.parametrize("op", pattern.OPS)
def test_pattern_notices_a_missing_rank(op):
    dtype = torch.int64
    whole, part = pattern.Pattern(dtype, op, 4), pattern.Pattern(dtype, op, 3)
    assert pattern.count_wrong(part.reduced(10_000), whole.reduced(10_000)) > 500


def test_pattern_notices_a_shift_by_whole_chunks():
    made = pattern.Pattern(torch.float32, "sum", 4)
    for shift in (1, 16, 1024, 65_536):
        assert pattern.count_wrong(made.reduced(4096, shift), made.reduced(4096)) > 2_000


def test_a_wrong_type_or_length_is_wrong_everywhere():
    wanted = torch.ones(5)
    assert pattern.count_wrong(torch.ones(5, dtype=torch.float64), wanted) == 5
    assert pattern.count_wrong(torch.ones(4), wanted) == 5


@pytest.mark.parametrize("collective", cases.COLLECTIVES)
@pytest.mark.parametrize("world", [1, 2, 5])
def test_all_candidates_compute_the_same(collective, world):
    case = cases.sized_case(collective, 4_100, torch.float32, "sum", cpus(world))
    result = comparison.run_case(case, comparison.Candidates(), _timing.Effort(iterations=1))
    wrong = {row.name: row.wrong for row in result.rows if row.kind in ("pycollect", "peer")}
    assert set(wrong.values()) == {0}
    assert comparison.DEFAULT in wrong
    assert "naive" in wrong


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_measured_and_right(dtype):
    case = cases.sized_case("all_reduce", 999, dtype, "sum", cpus(3))
    result = comparison.run_case(case, comparison.Candidates(), _timing.Effort(iterations=1))
    assert result.row(comparison.DEFAULT).wrong == 0
    if dtype.itemsize == 1 and dtype.is_floating_point:
        assert "not implemented" in result.not_run["naive"]  # torch cannot add them


@pytest.mark.parametrize("op", ["avg", "prod", "min", "max"])
def test_other_ops_have_no_peers_but_are_checked(op):
    case = cases.sized_case("all_reduce", 4_096, torch.float32, op, cpus(3))
    result = comparison.run_case(case, comparison.Candidates(), _timing.Effort(iterations=1))
    assert result.row(comparison.DEFAULT).wrong == 0
    assert result.not_run["naive"] == f"is measured only for sums, not {op}"


def test_lenet_has_eight_gradients():
    case = cases.Case("all_reduce_coalesced", torch.float32, "sum", cpus(4), cases.LENET)
    assert len(case.shapes) == 8
    assert case.count == 129_068
    assert case.minimum_bytes == 2 * 4 * case.nbytes


def test_minimum_bytes_and_bus_factors():
    def facts(name):
        case = cases.sized_case(name, 4096, torch.float32, "sum", cpus(4))
        return case.minimum_bytes / 4096, case.bus_factor

    assert facts("all_reduce") == (8, 1.5)
    assert facts("reduce_scatter") == (5, 0.75)
    assert facts("all_gather") == (5, 0.75)
    assert facts("broadcast") == (4, 1)


@pytest.mark.parametrize("collective", cases.COLLECTIVES)
def test_the_limit_moves_the_minimum(collective):
    case = cases.sized_case(collective, 4096, torch.float64, "sum", cpus(4))
    workspace = cases.Workspace(case)
    each, flat = (call for call, _ in baselines.limits(workspace).values())
    assert 2 * sum(t.nbytes for t in each.args[0]) == case.minimum_bytes
    assert 2 * flat.func.__self__.nbytes == case.minimum_bytes


def test_a_size_without_an_element_is_refused():
    with pytest.raises(ValueError, match="at least 32 bytes"):
        cases.sized_case("all_gather", 31, torch.float64, "sum", cpus(4))


def test_a_collective_that_does_nothing_is_wrong(monkeypatch):
    monkeypatch.setattr(pycollect, "all_gather", lambda tensors, *, out, **how: out)
    case = cases.sized_case("all_gather", 4096, torch.float32, "sum", cpus(2))
    result = comparison.run_case(case, comparison.Candidates(), _timing.Effort(iterations=1))
    assert result.row(comparison.DEFAULT).wrong == 2 * case.count


def test_the_naive_loop_sums_into_every_rank():
    data = [torch.full((3,), float(i)) for i in range(1, 5)]
    baselines.naive_all_reduce(data)
    assert all(t.tolist() == [10.0] * 3 for t in data)


def result_of(world, nbytes, ours, naive, limit):
    """A measured case with the given times in seconds."""
    case = cases.sized_case("all_reduce", nbytes, torch.float32, "sum", cpus(world))
    timing = _timing.Timing(((ours,),))
    row = comparison.Row(
        comparison.DEFAULT, "pycollect", timing, 0, limit / ours, {"naive": [naive / ours]}
    )
    return comparison.CaseResult(case, [row], {})


def test_targets_take_the_worst_point():
    results = [result_of(4, 1 << 20, 1.0, 2.5, 0.95), result_of(4, 1 << 24, 1.0, 2.9, 0.8)]
    calls = {targets.CALL: _timing.Timing(((2.5e-6,),))}
    outcomes = {o.what: o for o in targets.judge(results, calls)}
    limit = outcomes["limit, from 1 MiB"]
    assert (limit.measured, limit.met) == (pytest.approx(80), False)
    assert limit.where == "4 ranks, 16 MiB"
    assert outcomes["naive loop, 4 ranks, at 1 MiB"].met is True
    assert outcomes["naive loop, 4 ranks, from 16 MiB"].met is False
    assert outcomes["naive loop, 8 ranks, at 1 MiB"].met is None
    assert outcomes["cost of a call, 4 ranks x 4 elements"].met is True


def test_the_outcome_notes_disturbance_and_an_unreachable_target():
    case = result_of(2, 1 << 26, 1.0, 1.4, 1.0)
    timing = _timing.Timing(((1.0,), (2.0,)))
    limit = comparison.Row("memory", "limit", timing, speedup={"naive": [1.41, 1.41]})
    disturbed = comparison.CaseResult(case.case, [*case.rows, limit], {})
    outcomes = {o.what: o for o in targets.judge([disturbed], {})}
    where = outcomes["naive loop, 2 ranks, every size"].where
    assert where == "2 ranks, 64 MiB; disturbed; the limit itself is at 1.41x"


def test_peers_can_be_left_out():
    assert options._peers("none") == []
    assert options._peers("stack") == ["stack"]


def test_noise_is_reported_with_a_warning():
    before = environment.Load(0.0, 0.0, 0.0, 0.1)
    after = environment.Load(10.0, 10.0, 1.0, 2.0)
    measured = environment.noise(before, after, [])
    assert measured["foreign_cpu_share"] > 0
    quiet = {**measured, "foreign_cpu_share": 0.0}
    loud = {**measured, "foreign_cpu_share": 0.9}
    assert not any("WARNING" in line for line in environment.footer(quiet))
    assert any("WARNING" in line for line in environment.footer(loud))
