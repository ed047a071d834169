"""Waits and levels: enough of both and no superfluous wait, for every algorithm and random plans.

Removing any single wait must be noticed. Levels are compared with conflicts that the test computes
itself. Every order that waits or levels allow must compute the plan as written.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict

import plan_cases
import pytest
from plan_cases import cases, cells, each_algorithm, everything, executor, random_plan, run_steps

from pycollect import _C

RANDOM = range(300)


def waits_of(program: _C.Program) -> list[tuple[int, int, int]]:
    return [
        (rank, index, k)
        for rank, tasks in enumerate(program.tasks)
        for index, (_, _, waits) in enumerate(tasks)
        for k in range(len(waits))
    ]


def assert_every_wait_is_needed(program: _C.Program, what: object) -> None:
    for wait in waits_of(program):
        assert _C.find_races(program.without_wait(*wait)).races > 0, f"{what} without wait {wait}"


@each_algorithm
def test_no_algorithm_races_or_hangs(algorithm: _C.Algorithm) -> None:
    for case in cases(algorithm, range(1, 18), pieces=(1, 4)):
        found = _C.find_races(case.program)
        assert found.defect is None, f"{case}: {found.defect}"
        assert (found.races, found.deadlock) == (0, False)
        if algorithm.collective == "barrier":
            assert found.is_barrier, case


@each_algorithm
def test_every_wait_of_an_algorithm_is_needed(algorithm: _C.Algorithm) -> None:
    for case in cases(algorithm, range(2, 7)):
        assert_every_wait_is_needed(case.program, case)


def test_random_plans_do_not_race_and_need_every_wait() -> None:
    waits = 0
    for seed in RANDOM:
        program = _C.Program(*random_plan(seed))
        found = _C.find_races(program)
        assert found.defect is None, f"seed {seed}: {found.defect}"
        assert_every_wait_is_needed(program, f"seed {seed}")
        waits += found.waits
    assert waits > 1000


def test_beyond_64_ranks_no_wait_is_missing() -> None:
    for name in ("two_shot", "chain", "ring", "halving_doubling", "fused"):
        plan = _C.find_algorithm("all_reduce", name).plan(70)
        assert _C.find_races(_C.Program(plan, True)).defect is None


def accesses(
    plan: _C.Plan, task: _C.TaskTuple, rank: int
) -> tuple[list[_C.SliceTuple], list[_C.SliceTuple]]:
    if task[0] < 0:
        return [], everything(rank, plan.chunks)
    return list(plan.steps[task[0]][1]), list(plan.steps[task[0]][0])


def assert_levels_hold(plan: _C.Plan, in_place: bool, level_policy: str) -> None:
    """Conflicting tasks are in the order of levels as written, and never in the same level."""
    program = _C.Program(plan, in_place, level_policy)
    tasks = program.tasks
    at = {task[0]: (rank, task) for rank, own in enumerate(tasks) for task in own[1:-1]}
    written = [(rank, own[0]) for rank, own in enumerate(tasks)]
    written += [at[step] for step in range(len(plan.steps))]
    written += [(rank, own[-1]) for rank, own in enumerate(tasks)]
    assert all(at[i][0] == executor(step) for i, step in enumerate(plan.steps))
    last_write: dict[plan_cases.Cell, int] = {}
    last_access: dict[plan_cases.Cell, int] = defaultdict(lambda: -1)
    for rank, task in written:
        reads, writes = (cells(side, in_place) for side in accesses(plan, task, rank))
        level = task[1]
        assert all(level > last_write.get(cell, -1) for cell in reads)
        assert all(level > last_access[cell] for cell in writes)
        for cell in [*reads, *writes]:
            last_access[cell] = max(last_access[cell], level)
        for cell in writes:
            last_write[cell] = level
    step = 1 if level_policy == "one_task" else 0
    for own in tasks:
        assert all(a[1] + step <= b[1] for a, b in itertools.pairwise(own))
    assert len({own[-1][1] for own in tasks}) == 1  # all ranks leave in one level
    by_level = [(rank, i) for level in program.levels for rank, i in level]
    assert sorted(by_level) == [(r, i) for r, own in enumerate(tasks) for i in range(len(own))]
    assert all(
        tasks[rank][i][1] == number
        for number, level in enumerate(program.levels)
        for rank, i in level
    )


@pytest.mark.parametrize("level_policy", ["any", "one_task"])
@each_algorithm
def test_tasks_of_a_level_do_not_conflict(algorithm: _C.Algorithm, level_policy: str) -> None:
    for case in cases(algorithm, (1, 2, 3, 5, 8)):
        assert_levels_hold(case.plan, case.in_place, level_policy)


@pytest.mark.parametrize("level_policy", ["any", "one_task"])
def test_levels_of_random_plans_hold(level_policy: str) -> None:
    for seed in RANDOM:
        assert_levels_hold(*random_plan(seed), level_policy)


def any_order(program: _C.Program, pick: random.Random) -> list[int]:
    """A random order in which ranks, each at its own speed, may run the steps."""
    tasks, done, order = program.tasks, [0] * program.plan.world, []
    while True:
        ready = [
            rank
            for rank, own in enumerate(tasks)
            if done[rank] < len(own) and all(done[r] >= n for r, n in own[done[rank]][2])
        ]
        if not ready:
            return order
        rank = pick.choice(ready)
        order.append(tasks[rank][done[rank]][0])
        done[rank] += 1


@pytest.mark.parametrize("seed", RANDOM[:100])
def test_any_order_that_waits_allow_computes_the_same(seed: int) -> None:
    plan, in_place = random_plan(seed)
    steps = range(len(plan.steps))
    program, want = _C.Program(plan, in_place), run_steps(plan, in_place, steps)
    for attempt in range(5):
        order = [step for step in any_order(program, random.Random(attempt)) if step >= 0]
        assert sorted(order) == list(steps)
        assert run_steps(plan, in_place, order) == want


@pytest.mark.parametrize("level_policy", ["any", "one_task"])
def test_any_order_within_levels_computes_the_same(level_policy: str) -> None:
    pick = random.Random(0)
    for seed in RANDOM:
        plan, in_place = random_plan(seed)
        program = _C.Program(plan, in_place, level_policy)
        tasks, order = program.tasks, []
        for level in program.levels:
            order += [tasks[r][i][0] for r, i in pick.sample(level, len(level))]
        order = [step for step in order if step >= 0]
        want = run_steps(plan, in_place, range(len(plan.steps)))
        assert run_steps(plan, in_place, order) == want, f"seed {seed}"


@pytest.mark.parametrize(
    ("name", "level_policy", "levels"),
    [
        ("leader", "any", 1),
        ("two_shot", "any", 2),
        ("two_shot", "one_task", 8),
        ("chain", "any", 14),
    ],
)
def test_levels_are_few(name: str, level_policy: str, levels: int) -> None:
    plan = _C.find_algorithm("all_reduce", name).plan(8)
    assert len(_C.Program(plan, True, level_policy).levels) - 2 == levels


def test_a_race_is_described() -> None:
    plan = _C.Plan(2, 1, [(((1, "out", 0, 1),), ((0, "in", 0, 1),), -1)])
    program = _C.Program(plan, False)
    assert program.tasks == [
        [(-1, 0, []), (-1, 2, [(1, 2)])],
        [(-1, 0, []), (0, 1, [(0, 1)]), (-1, 2, [])],
    ]
    assert _C.find_races(program.without_wait(1, 1, 0)).defect == (
        "the entry of rank 0 and step 0 by rank 1 both access in[0] of rank 0, one of them writes, "
        "and nothing orders them"
    )


def test_a_deadlock_is_described() -> None:
    program = _C.find_algorithm("all_reduce", "chain").plan(2, 0, 1)
    waiting = _C.Program(program, True).with_wait(1, 0, (0, 2))  # rank 0 in turn waits for rank 1
    found = _C.find_races(waiting)
    assert found.deadlock
    assert found.defect == "deadlock: step 1 by rank 0 waits for task 2 of rank 1, which never ends"


def test_ranks_without_mutual_waits_form_no_barrier() -> None:
    scatter = _C.find_algorithm("scatter", "direct").plan(3)
    assert not _C.find_races(_C.Program(scatter, False)).is_barrier


def test_programs_with_invalid_waits_are_refused() -> None:
    program = _C.Program(_C.find_algorithm("all_reduce", "chain").plan(3), True)
    for wait in [(3, 1), (-1, 1), (0, 0), (0, 99)]:
        with pytest.raises(ValueError, match="which does not exist"):
            _C.find_races(program.with_wait(1, 1, wait))
    with pytest.raises(ValueError, match="no task 99 of rank 0"):
        program.without_wait(0, 99, 0)
    with pytest.raises(ValueError, match="has 0 waits and no wait 0"):
        program.without_wait(0, 0, 0)
    with pytest.raises(ValueError, match="no level_policy 'slow'"):
        _C.Program(program.plan, True, "slow")
