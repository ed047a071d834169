"""Plans in the public API: listed, written, printed, proved and drawn; invalid ones are refused."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import plan_cases
import pytest
from plan_cases import REGISTRY, each_algorithm

import pycollect as pc
from pycollect import _C

ROOT = Path(__file__).resolve().parent.parent
REGISTERS = re.compile(r"\bRegisterAlgorithm \w+\s*[{(]")

COPY = (((1, "out", 0, 1),), ((0, "in", 0, 1),), -1)


def documented() -> dict[tuple[str, str], str]:
    """Return the orders of the algorithms in docs/algorithms.md, by collective and name."""
    found, collectives = {}, ""
    for line in (ROOT / "docs/algorithms.md").read_text().splitlines():
        row = re.fullmatch(r"\| ([\w, ]*)\| `(\w+)`.*\| (\w*) ?\|", line)
        if row:
            collectives = row[1].strip() or collectives
            for collective in collectives.split(", "):
                found[collective, row[2]] = row[3] or "exact"
    return found


def test_documented_algorithms_keep_their_names_collectives_and_orders() -> None:
    rows = documented()
    assert {collective for collective, _ in rows} == set(_C.COLLECTIVES)
    wrong = rows.items() - {(a.collective, a.name): a.order for a in REGISTRY}.items()
    assert not wrong


def test_every_algorithm_of_the_sources_is_listed() -> None:
    sources = (ROOT / "csrc/algorithms").glob("*.cpp")
    registered = [c for s in sources for c in REGISTERS.findall(s.read_text())]
    assert len(registered) == len(REGISTRY)
    assert [n for c in _C.COLLECTIVES for n in pc.algorithms(c)] == [a.name for a in REGISTRY]
    assert pc.algorithms() == pc.algorithms("all_reduce")


@pytest.mark.parametrize("collective", _C.COLLECTIVES)
def test_names_are_sorted_and_unique(collective: str) -> None:
    listed = _C.algorithms(collective)
    orders = ("exact", "native", "other")
    keys = [(orders.index(a.order), a.name) for a in listed]
    assert keys == sorted(keys)
    assert len({a.name for a in listed}) == len(listed)
    assert all(a.collective == collective and a.cost for a in listed)
    assert all(_C.find_algorithm(collective, a.name).name == a.name for a in listed)


@pytest.mark.parametrize(
    ("name", "dtype", "keeps_contract"),
    [
        ("leader", "float16", True),
        ("leader", "complex64", True),
        ("chain", "float32", True),
        ("chain", "int8", True),
        ("chain", "bfloat16", False),
        ("chain", "float8_e5m2", False),
        ("tree", "float32", False),
    ],
)
def test_the_contract_depends_on_the_dtype(name: str, dtype: str, keeps_contract: bool) -> None:
    assert _C.find_algorithm("all_reduce", name).keeps_contract(dtype) == keeps_contract


def test_an_unknown_dtype_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="no dtype 'float7'"):
        _C.find_algorithm("all_reduce", "chain").keeps_contract("float7")


@each_algorithm
def test_every_plan_verifies_prints_and_predicts(algorithm: _C.Algorithm) -> None:
    for world in (1, 2, 8):
        plan = pc.plan(algorithm.collective, world, algorithm=algorithm.name)
        assert plan.verify() is None
        assert plan.predict() >= 0
        assert str(plan).startswith(f"{algorithm.collective} by '{algorithm.name}', {world} rank")
        assert sorted(step for level in plan.levels for step in level) == list(
            range(len(plan.steps))
        )
        assert len(str(plan).splitlines()) == 2 + min(len(plan.steps), 8 * 14)


def test_a_plan_as_text() -> None:
    assert str(pc.plan("reduce", 3, root=2, algorithm="chain", pieces=2, nbytes=3000)) == (
        "reduce by 'chain', 3 ranks, root 2, 2 chunks of 1.46 KiB, in place\n"
        "order native, 2 levels; a rank reads 0 B to 5.86 KiB (ranks 1,2) "
        "and writes 0 B to 2.93 KiB (ranks 1,2)\n"
        "level 1  rank 1: tmp[0] on 1 <- sum of in[0] from 0,1\n"
        "         rank 1: tmp[1] on 1 <- sum of in[1] from 0,1\n"
        "level 2  rank 2: out[0] on 2 <- sum of tmp[0] from 1 and in[0] from 2\n"
        "         rank 2: out[1] on 2 <- sum of tmp[1] from 1 and in[1] from 2"
    )


def test_the_text_of_a_large_plan_is_abbreviated() -> None:
    for name in pc.algorithms():
        text = str(pc.plan("all_reduce", 100, algorithm=name))
        assert len(text.splitlines()) <= 2 + 24 * 9 + 1
        assert max(map(len, text.splitlines())) < 160
    assert "... and 92 more steps" in str(pc.plan("all_reduce", 100, algorithm="fused"))


def test_defaults_are_those_for_one_memory() -> None:
    assert pc.plan("all_reduce", 4).algorithm == "leader"
    assert pc.plan("barrier", 4).algorithm == "barrier"
    assert pc.plan("gather", 4).algorithm == "direct"
    assert pc.plan("all_reduce", 4).in_place
    assert not pc.plan("all_to_all", 4).in_place


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world": 0}, "world is 0; pass at least one rank"),
        ({"world": 5000}, "at most 1024"),
        ({"world": 4, "nbytes": -1}, "cannot be negative"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pc.plan("broadcast", **options)


def test_in_place_is_refused_where_it_would_be_wrong() -> None:
    with pytest.raises(ValueError, match="all_to_all by 'direct' cannot run in place"):
        pc.plan("all_to_all", 4, in_place=True)


def test_verify_reports_wrong_steps_orders_and_waits() -> None:
    right = pc.plan("all_reduce", 4, algorithm="two_shot")
    raw = right._plan
    cut = _C.Plan(raw.world, raw.chunks, raw.steps[:-1])
    wrong = dataclasses.replace(right, _plan=cut, _program=_C.Program(cut, True))
    assert "rank 3, out[2]: got x3[2], wanted x0[2] + x1[2] + x2[2] + x3[2]" in str(wrong.verify())
    tree = pc.plan("all_reduce", 4, algorithm="tree")
    assert dataclasses.replace(tree, order="exact").verify() == (
        "sums are in the order 'other', and 'exact' is promised"
    )
    assert tree.verify(order="tree") is None
    chain = pc.plan("all_reduce", 4, algorithm="chain")
    assert chain.verify(order="tree") == "sums are not the balanced tree over the ranks"
    hasty = dataclasses.replace(right, _program=right._program.without_wait(0, 1, 0))
    assert "nothing orders them" in str(hasty.verify())
    stuck = dataclasses.replace(right, _program=right._program.with_wait(0, 0, (1, 2)))
    assert str(stuck.verify()).startswith("deadlock: ")


@each_algorithm
def test_every_plan_can_be_drawn(algorithm: _C.Algorithm, tmp_path: Path) -> None:
    suffix = ".png" if algorithm.name == "ring" else ".svg"
    path = tmp_path / f"plan{suffix}"
    pc.plan(algorithm.collective, 5, algorithm=algorithm.name).plot(path, "pcie")
    drawn = path.read_bytes()
    assert drawn.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    assert len(drawn) > 4000


def test_impossible_plots_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    plan = pc.plan("all_reduce", 2)
    with pytest.raises(ValueError, match=r"choose '.png' or '.svg'"):
        plan.plot(tmp_path / "plan.pdf")
    with pytest.raises(ValueError, match="at most 256"):
        pc.plan("all_reduce", 300).plot(tmp_path / "plan.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'pycollect\[train\]'"):
        plan.plot(tmp_path / "plan.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("world", "chunks", "steps", "message"),
    [
        (0, 1, [], "at least one rank, not 0"),
        (2, 0, [], "at least one chunk, not 0"),
        (1 << 20, 1 << 20, [], "more cells than can be counted"),
        (2, 1, [((), COPY[1], -1)], "step 0 needs at least one source and one destination"),
        (2, 1, [COPY, (COPY[0], (), -1)], "step 1 needs at least one source"),
        (2, 1, [(*COPY[:2], 2)], "executed by rank 2, which a world of 2 does not have"),
        (2, 1, [(*COPY[:2], -2)], "executed by rank -2"),
        (2, 1, [(((2, "out", 0, 1),), COPY[1], -1)], r"out\[0\] of rank 2, but the world has 2"),
        (2, 1, [(((-1, "out", 0, 1),), COPY[1], -1)], "of rank -1, but the world has 2"),
        (2, 1, [(COPY[0], ((0, "in", 1, 1),), -1)], r"in\[1\] of rank 0, but a buffer has 1"),
        (2, 1, [(COPY[0], ((0, "in", -1, 1),), -1)], "but a buffer has 1"),
        (2, 2, [(((0, "out", 1, 2),), ((1, "in", 0, 2),), -1)], r"out\[1:3\] of rank 0"),
        (2, 2, [(COPY[0], ((0, "in", 0, 0),), -1)], "but a buffer has 2"),
        (2, 2, [(COPY[0], ((0, "in", 0, 2),), -1)], r"moves 1 chunks, but in\[0:2\] .* has 2"),
        (2, 1, [((COPY[0][0], COPY[0][0]), COPY[1], -1)], r"writes out\[0\] of rank 1 twice"),
        (2, 3, [(((0, "in", 0, 2),), ((0, "in", 1, 2),), -1)], "overlaps one of its destinations"),
        (2, 1, [(((0, "output", 0, 1),), COPY[1], -1)], "no buffer 'output'; choose"),
    ],
)
def test_invalid_plans_are_refused(world: int, chunks: int, steps: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C.Plan(world, chunks, steps)


def test_overlaps_that_exist_only_in_place_are_refused_only_in_place() -> None:
    shifted = _C.Plan(1, 3, [(((0, "out", 0, 2),), ((0, "in", 1, 2),), -1)])
    twice = _C.Plan(1, 1, [(((0, "out", 0, 1), (0, "in", 0, 1)), ((0, "tmp", 0, 1),), -1)])
    same = _C.Plan(1, 2, [(((0, "out", 0, 2),), ((0, "in", 0, 2),), -1)])
    for plan in (shifted, twice):
        plan.check(False)
        with pytest.raises(ValueError, match="step 0"):
            plan.check(True)
        with pytest.raises(ValueError, match="step 0"):
            _C.Program(plan, True)
    same.check(True)


def test_steps_survive_a_round_trip() -> None:
    for seed in range(50):
        plan, _ = plan_cases.random_plan(seed)
        assert _C.Plan(plan.world, plan.chunks, plan.steps).steps == plan.steps
