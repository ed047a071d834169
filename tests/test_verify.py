"""Symbolic proofs of plans: every algorithm computes its collective in its registered order, and
every dropped step or swapped source is noticed.
"""

from __future__ import annotations

import itertools

import plan_cases
import pytest
from plan_cases import REDUCING, REGISTRY, cases, each_algorithm, each_of, is_identity

from pycollect import _C

ORDERS = ("exact", "native", "other")


@each_algorithm
def test_every_algorithm_is_correct_and_in_its_registered_order(algorithm: _C.Algorithm) -> None:
    for case in cases(algorithm, range(1, 18), pieces=(1, 3, 4, 7)):
        defect, order = case.verify(case.plan)
        assert defect is None, f"{case}: {defect}"
        if case.world >= 4:
            assert order == algorithm.order, case
        # With two ranks most orders are a left fold: an order better than registered is fine.
        assert ORDERS.index(order) <= ORDERS.index(algorithm.order), case


@each_algorithm
def test_every_dropped_step_is_detected(algorithm: _C.Algorithm) -> None:
    for case in cases(algorithm, range(1, 8)):
        plan = case.plan
        for i, step in enumerate(plan.steps):
            mutant = _C.Plan(plan.world, plan.chunks, [*plan.steps[:i], *plan.steps[i + 1 :]])
            detected = case.verify(mutant)[0] is not None
            # Two steps do nothing: a copy of a slice to itself, and the barrier of one rank.
            assert detected == (not is_identity(step, case.in_place)), f"{case} without step {i}"


@each_of([a for a in REGISTRY if a.collective in REDUCING and a.order != "other"])
def test_every_swapped_source_of_an_ordered_plan_is_detected(algorithm: _C.Algorithm) -> None:
    swapped = 0
    for case in cases(algorithm, range(2, 7)):
        plan = case.plan
        for i, (dsts, srcs, by) in enumerate(plan.steps):
            for a, b in itertools.combinations(range(len(srcs)), 2):
                other = list(srcs)
                other[a], other[b] = other[b], other[a]
                steps = [*plan.steps[:i], (dsts, other, by), *plan.steps[i + 1 :]]
                defect, order = case.verify(_C.Plan(plan.world, plan.chunks, steps))
                assert defect is None
                assert order == "other", f"{case}, step {i}: sources {a} and {b} swapped"
                swapped += 1
    assert swapped > 0


# A barrier accepts any source, if every rank is included.
@each_of([a for a in REGISTRY if a.collective != "barrier"])
def test_every_wrong_source_is_detected(algorithm: _C.Algorithm) -> None:
    for case in cases(algorithm, (3, 5)):
        plan = case.plan
        for i, (dsts, srcs, by) in enumerate(plan.steps):
            rank, *rest = srcs[-1]
            wrong = [*srcs[:-1], ((rank + 1) % case.world, *rest)]
            steps = [*plan.steps[:i], (dsts, wrong, by), *plan.steps[i + 1 :]]
            try:
                mutant = _C.Plan(plan.world, plan.chunks, steps)
                defect, order = case.verify(mutant)
            except ValueError:  # it now overlaps a destination
                continue
            worse = ORDERS.index(order) > ORDERS.index(algorithm.order)
            # A neighbour that already has the result is a valid source, too.
            same = plan_cases.run_steps(
                plan, case.in_place, range(len(steps))
            ) == plan_cases.run_steps(mutant, case.in_place, range(len(steps)))
            assert (defect is not None or worse) == (not same), f"{case}, step {i}"


@each_algorithm
def test_exactly_one_fold_finishes_each_result(algorithm: _C.Algorithm) -> None:
    for case in cases(algorithm, range(2, 10)):
        plan = case.plan
        finishes = plan.finishes(case.in_place)
        assert len(finishes) == len(plan.steps)
        folds: dict[plan_cases.Cell, int] = {}  # finishing folds in each cell's history
        for done, (dsts, srcs, _) in zip(finishes, plan.steps, strict=True):
            assert not (done and len(srcs) == 1), f"{case}: a copy adds nothing"
            for i in range(dsts[0][3]):
                sources = [plan_cases.cells([s], case.in_place)[i] for s in srcs]
                count = max(folds.get(s, 0) for s in sources) + done
                for d in dsts:
                    folds[plan_cases.cells([d], case.in_place)[i]] = count
        for rank, chunk in itertools.product(range(plan.world), range(plan.chunks)):
            (cell,) = plan_cases.cells([(rank, "out", chunk, 1)], case.in_place)
            assert folds.get(cell, 0) == _receives_a_sum(case, plan, rank, chunk), case


def _receives_a_sum(case: plan_cases.Case, plan: _C.Plan, rank: int, chunk: int) -> bool:
    collective = case.algorithm.collective
    if collective == "reduce_scatter":
        return chunk // (plan.chunks // plan.world) == rank
    return collective == "all_reduce" or (collective == "reduce" and rank == case.root)


def _sum_of(order: list[int], world: int) -> list[_C.StepTuple]:
    dsts = tuple((r, "out", 0, 1) for r in range(world))
    return [(dsts, tuple((r, "in", 0, 1) for r in order), -1)]


UNWRITTEN = (((0, "out", 0, 1), (1, "out", 0, 1)), ((0, "in", 0, 1), (1, "tmp", 0, 1)), -1)
OVER_INPUT = (((0, "out", 0, 1), (1, "out", 0, 1), (1, "in", 0, 1)), ((0, "in", 0, 1),), -1)
DEFECTS = [  # collective, world, steps, words of the defect
    (
        *("all_reduce", 40, _sum_of(list(range(39)), 40)),
        "got x0[0] + x1[0] + x2[0] + ... + x38[0] (39 terms)",
    ),
    ("all_reduce", 3, _sum_of([0, 1, 1], 3), "got x0[0] + x1[0] + x1[0]"),
    ("all_reduce", 3, _sum_of([0, 1, 2, 2], 3), "a sum of more than 3 terms"),
    ("all_reduce", 2, [UNWRITTEN], "got unwritten memory"),
    ("broadcast", 2, [OVER_INPUT], "rank 1, in[0]: got x0[0], wanted x1[0] unchanged"),
]


def test_the_first_defect_is_described() -> None:
    defect, _ = _C.verify("all_reduce", _C.Plan(3, 1, _sum_of([0, 2], 3)), 0, False)
    assert defect == (
        "rank 0, out[0]: got x0[0] + x2[0], wanted x0[0] + x1[0] + x2[0] "
        "(x0[0] is chunk 0 of rank 0's input)"
    )


@pytest.mark.parametrize(("collective", "world", "steps", "words"), DEFECTS)
def test_defects_are_found_and_described_briefly(
    collective: str, world: int, steps: list[_C.StepTuple], words: str
) -> None:
    defect, _ = _C.verify(collective, _C.Plan(world, 1, steps), 0, False)
    assert defect is not None
    assert words in defect
    assert len(defect) < 250


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("collective", ["reduce", "gather", "scatter", "reduce_scatter"])
def test_outputs_without_a_result_must_be_unchanged(collective: str, in_place: bool) -> None:
    plan = _C.find_algorithm(collective, "direct").plan(3, 1)
    chunk = plan.chunks - 1
    extra = (((0, "out", chunk, 1),), ((2, "in", chunk, 1),), -1)
    defect, _ = _C.verify(collective, _C.Plan(3, plan.chunks, [*plan.steps, extra]), 1, in_place)
    assert defect is not None
    assert f"rank 0, out[{chunk}]: got" in defect


def test_all_to_all_is_wrong_in_place() -> None:
    plan = _C.find_algorithm("all_to_all", "direct").plan(4)
    assert _C.verify("all_to_all", plan, 0, False) == (None, "exact")
    assert _C.verify("all_to_all", plan, 0, True)[0] is not None


def test_blocks_are_divided_into_pieces() -> None:
    copies = [
        (((r, "out", 2 * c + p, 1),), ((c, "in", 2 * r + p, 1),), -1)
        for r, c, p in itertools.product(range(3), range(3), range(2))
    ]
    assert _C.verify("all_to_all", _C.Plan(3, 6, copies), 0, False) == (None, "exact")
    defect, _ = _C.verify("all_to_all", _C.Plan(3, 7, copies), 0, False)
    assert defect is not None
    assert "7 chunks cannot be divided evenly" in defect


def test_a_barrier_needs_a_signal_of_every_rank() -> None:
    def receive(me: int, of: int) -> _C.StepTuple:
        return (((me, "tmp", 0, 1),), ((me, "tmp", 0, 1), (of, "tmp", 0, 1)), -1)

    steps = [receive(0, 1), receive(0, 2), receive(1, 0), receive(2, 0)]
    assert _C.verify("barrier", _C.Plan(3, 1, steps), 0, False)[0] is None
    defect, _ = _C.verify("barrier", _C.Plan(3, 1, [steps[0], *steps[2:]]), 0, False)
    assert defect is not None
    assert "rank 0: can leave the barrier before rank 2 has entered" in defect


@each_of([a for a in REGISTRY if a.collective in REDUCING])
def test_algorithms_in_tree_order(algorithm: _C.Algorithm) -> None:
    """A single fold has any order; of several steps, those of 'tree' are the tree."""
    for case in cases(algorithm, range(1, 18)):
        plan = case.plan
        defect, order = _C.verify(algorithm.collective, plan, case.root, case.in_place, "tree")
        assert defect is None
        if algorithm.order == "exact":
            assert order == "exact"
        elif case.world > 3:
            assert order == ("native" if algorithm.name == "tree" else "other"), case


# The order that is wanted, the folds of ranks (into a rank), and the order that they have.
RANKS_FOLDED = [
    ("rank", [((0, 1, 2, 3), 0)], "exact"),
    ("rank", [((0, 1), 0), ((0, 2, 3), 0)], "native"),
    ("rank", [((0, 1), 0), ((2, 3), 2), ((0, 2), 0)], "other"),
    ("rank", [((1, 0, 2, 3), 0)], "other"),
    ("rank", [((1, 2, 3), 1), ((0, 1), 0)], "other"),
    # A tree of sums is that of all: equal powers of two of ranks, and a last sum of no more.
    ("tree", [((0, 1, 2, 3, 4, 5, 6), 0)], "exact"),
    ("tree", [((0, 1), 0), ((2, 3), 2), ((4, 5, 6), 4), ((0, 2, 4), 0)], "other"),
    ("tree", [((0, 1), 0), ((2, 3), 2), ((4, 5, 6), 4), ((0, 2), 0), ((0, 4), 0)], "native"),
    ("tree", [((0, 1), 0), ((2, 3), 2), ((4, 5), 4), ((0, 2, 4, 6), 0)], "native"),
    ("tree", [((0, 1, 2, 3), 0), ((4, 5, 6), 4), ((0, 4), 0)], "native"),
    ("tree", [((0, 1, 2), 0), ((3, 4, 5), 3), ((0, 3, 6), 0)], "other"),
    ("tree", [((1, 2), 1), ((0, 1, 3, 4, 5, 6), 0)], "other"),
    ("tree", [((0, 1), 0), ((0, 2, 3, 4, 5, 6), 0)], "other"),
]


@pytest.mark.parametrize(("wanted", "folds", "order"), RANKS_FOLDED)
def test_orders_are_classified(
    wanted: str, folds: list[tuple[tuple[int, ...], int]], order: str
) -> None:
    world = 1 + max(max(ranks) for ranks, _ in folds)
    steps = [
        (((to, "in", 0, 1),), tuple((r, "in", 0, 1) for r in ranks), -1) for ranks, to in folds
    ]
    steps.append((tuple((r, "out", 0, 1) for r in range(world)), ((0, "in", 0, 1),), -1))
    assert _C.verify("all_reduce", _C.Plan(world, 1, steps), 0, True, wanted) == (None, order)


def test_verify_refuses_an_invalid_root() -> None:
    with pytest.raises(ValueError, match="root 2 is not a rank of a world of 2"):
        _C.verify("broadcast", _C.find_algorithm("broadcast", "direct").plan(2), 2, False)
