"""Plans between ranks without peer access: correct, in the same order, and with few copies."""

from __future__ import annotations

import pytest
from plan_calls import PlanCall, all_reduce
from plan_cases import REGISTRY, cases, cells, each_algorithm, executor, random_plan

from pycollect import _C, _testing


def staged(
    plan: _C.Plan,
    in_place: bool,
    access_groups: list[int],
    on_host: list[int] | None = None,
    pieces: int = 1,
) -> _C.Plan:
    """Stage the plan; ranks reach each other if they are in the same access group."""
    directly = [[a == b for b in access_groups] for a in access_groups]
    hosts = [rank in (on_host or []) for rank in range(plan.world)]
    reach = _testing.MemoryReach(hosts, directly)
    return _testing.CompiledPlan(plan, in_place, "one_task", reach, pieces).plan


def assert_accesses_are_reachable(
    plan: _C.Plan, access_groups: list[int], hosts: list[int]
) -> None:
    for step in plan.steps:
        me = executor(step)
        assert me not in hosts
        for at in (*step[0], *step[1]):
            on_host = at[1] == "host" or at[0] in hosts
            assert on_host or access_groups[at[0]] == access_groups[me], step


@each_algorithm
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_staged_plan_is_correct_and_in_the_same_order(
    algorithm: _C.Algorithm, pieces: int
) -> None:
    for case in cases(algorithm, range(2, 9)):
        plan, order = case.plan, case.verify(case.plan)[1]
        for groups in range(2, case.world + 1):
            access_groups = [rank % groups for rank in range(case.world)]
            for hosts in ([], [0], list(range(1, case.world))):
                made = staged(plan, case.in_place, access_groups, hosts, pieces)
                assert case.verify(made) == (None, order), (
                    f"{case} on {access_groups}, host {hosts}"
                )
                assert_accesses_are_reachable(made, access_groups, hosts)
                assert _C.find_races(_C.Program(made, case.in_place)).defect is None


def test_random_plans_access_only_reachable_memory() -> None:
    for seed in range(300):
        plan, in_place = random_plan(seed)
        access_groups = [rank % 2 for rank in range(plan.world)]
        hosts = [] if seed % 3 else [0]
        assert_accesses_are_reachable(
            staged(plan, in_place, access_groups, hosts, 8), access_groups, hosts
        )


def test_staging_changes_nothing_between_ranks_with_access() -> None:
    for algorithm in REGISTRY:
        plan = algorithm.plan(6)
        same = [(dsts, srcs, executor((dsts, srcs, by))) for dsts, srcs, by in plan.steps]
        assert list(staged(plan, False, [0] * 6).steps) == same


def test_staging_keeps_the_chunk_sizes() -> None:
    for algorithm in REGISTRY:
        for world in (2, 5):
            plan, devices = algorithm.plan(world), list(range(world))
            wanted = "each" if algorithm.collective == "all_to_all" else "uneven"
            for peers in (True, False):
                with PlanCall(plan, False, devices, peers=peers, pieces=3) as call:
                    assert call.chunk_sizes == wanted


def copies_out(plan: _C.Plan) -> list[_C.StepTuple]:
    return [step for step in plan.steps if step[0][0][1] == "host"]


@pytest.mark.parametrize(
    ("collective", "name", "out"),
    [
        # A rank's host memory has the size of its tensor; content there is not copied out again.
        ("all_reduce", "chain", 4 * 8),  # 8 ranks pass on 4 pieces; the sum is copied out once
        ("all_reduce", "leader", 8),
        ("all_reduce", "two_shot", 8 * 7 + 8),
        ("all_reduce", "one_shot", 8),
        ("broadcast", "direct", 1),
        ("broadcast", "chain", 4),
        ("all_gather", "ring", 8),
        ("all_to_all", "direct", 8 * 7),
    ],
)
def test_nothing_is_copied_out_twice(collective: str, name: str, out: int) -> None:
    plan = staged(_C.find_algorithm(collective, name).plan(8), False, list(range(8)))
    assert len(copies_out(plan)) == out
    touched = {c for step in plan.steps for c in cells(step[0], False) if c[1] == "host"}
    assert len(touched) <= 8 * plan.chunks


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("collective", "name"),
    [("all_reduce", "chain"), ("all_reduce", "ring"), ("reduce", "chain")],
)
def test_a_fold_with_one_remote_source_reads_no_host_memory(
    collective: str, name: str, in_place: bool
) -> None:
    plan = staged(_C.find_algorithm(collective, name).plan(8), in_place, list(range(8)))
    folds = [step for step in plan.steps if len(step[1]) > 1]
    assert folds
    assert not any(at[1] == "host" for step in folds for at in (*step[0], *step[1]))


def test_pieces_of_a_staged_plan_overlap() -> None:
    """Copies out, copies in and folds run in separate streams, and pieces overlap."""

    def seconds(pieces: int, copy_streams: bool) -> float:
        plan = staged(all_reduce("chain", 4, pieces), True, [0, 1, 2, 3])
        compiled = _testing.CompiledPlan(plan, True, "one_task")
        stream_ids = [(r, 4 + r, 8 + r) if copy_streams else (r, r, r) for r in range(4)]
        model = (3e-6, 24e9, 800e9, 0.0, 2.5e-6)
        return _testing.predict_streams(compiled, stream_ids, 12, [0, 1, 2, 3], 64 << 20, model)

    assert seconds(16, True) < 0.75 * seconds(16, False)
    assert seconds(16, True) < 0.5 * seconds(1, True)
    # A hop is a copy out and a copy in: 3 hops up, then every rank copies the sum in.
    least = (64 << 20) / 24e9
    assert 2 * least < seconds(16, True) < 4 * least


def test_invalid_access_tables_are_refused() -> None:
    plan, alone = all_reduce("leader", 2), [[True, False], [False, True]]
    for on_host, directly, pieces, why in [
        ([False], alone, 1, "on_host has 1 and directly has 2 entries"),
        ([False, False], [[True, False]], 1, "on_host has 2 and directly has 1 entries"),
        ([False, False], [[True], [True]], 1, "a row of directly has 1 entries; pass one"),
        ([True, True], alone, 1, "all ranks are in host memory"),
        ([False, False], alone, 0, "at least one piece, not 0"),
    ]:
        reach = _testing.MemoryReach(on_host, directly)
        with pytest.raises(ValueError, match=why):
            _testing.CompiledPlan(plan, True, "one_task", reach, pieces)
    with pytest.raises(ValueError, match="the plan has been staged already"):
        staged(staged(plan, True, [0, 1]), True, [0, 1])


def test_a_step_that_needs_two_buffers_of_a_rank_in_one_place_is_refused() -> None:
    both = (((0, "out", 0, 1),), ((1, "in", 0, 1), (1, "tmp", 0, 1)), -1)
    plan = _C.Plan(2, 1, [both])
    with pytest.raises(ValueError, match="cut the chunks into more pieces"):
        staged(plan, False, [0, 1])
    assert len(copies_out(staged(plan, False, [0, 1], pieces=2))) == 4
