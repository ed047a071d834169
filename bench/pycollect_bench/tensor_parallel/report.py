"""The printed table, the record and the targets of a run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ..record import rounds_record
from ..targets import Outcome
from .case import CaseResult, Row
from .variants import OURS

LEGEND = """\
# A Llama-shaped model with random weights decodes; each rank is a process. alone: undivided on one
# rank with all cores; dtensor: divided by parallelize_module; plain: by a model that calls
# dist.all_reduce itself; zero-copy: on tensors of pycollect.symmetric_empty. All take turns; a turn
# is a prompt and some tokens of each sequence; medians over turns, ratios within rounds.
# tokens/s: of all sequences of the batch together. xgloo: the time of a token over gloo, divided
# the same way, by this time. first: ms until the token after the prompt. token: ms for each other.
# %wait: of the token, in collectives until the last rank has called them: other ranks compute.
# %move: the rest of the collectives, in the mean of the ranks; us/call: the same for each call.
# error: of the logits: norm of the difference from one rank alone, divided by the norm."""
_PLAIN, _DTENSOR = f"plain:{OURS}", f"dtensor:{OURS}"
# Aims at one sequence: how much faster a token is than over gloo, by the hidden size.
_AIMS = {1024: 2.0, 512: 5.0}
_MOST_MOVING = 1.0  # percent of a token


def head() -> str:
    """Return the header of the table of a case."""
    return (
        f"#{'variant':<24} {'tokens/s':>9} {'xgloo':>6} {'first':>8} {'token':>8} {'%wait':>6} "
        f"{'%move':>6} {'us/call':>8} {'error':>8}"
    )


def lines(result: CaseResult) -> list[str]:
    """Return the table of a case, and what DTensor itself costs."""
    case = result.case
    batch = f"batch {case.batch}, {result.world} ranks"
    out = [f"# {case.name}, {batch}", head(), *(_line(result, row) for row in result.rows)]
    by_dtensor, plain = result.row(_DTENSOR), result.row(_PLAIN)
    if by_dtensor and plain:
        own = by_dtensor.computing - plain.computing
        share = 100 * own / by_dtensor.token.percentile(50)
        out.append(f"# DTensor itself computes {own * 1e3:.2f} ms of a token, {share:.0f} %")
    return out + [f"# WRONG: {name}" for name in result.wrong]


def _line(result: CaseResult, row: Row) -> str:
    token, first = row.token.percentile(50), row.first.percentile(50)
    speedup = result.speedup(row)
    ratio = f"{statistics.median(speedup):.2f}" if speedup else "-"
    wait, move, call = "-", "-", "-"
    if row.calls:
        wait, move = (f"{100 * row.share(part):.1f}" for part in (row.waiting, row.moving))
        call = f"{row.moving.percentile(50) / row.calls * 1e6:.1f}"
    return (
        f" {row.name:<24} {result.case.batch / token:>9.1f} {ratio:>6} {first * 1e3:>8.1f} "
        f"{token * 1e3:>8.2f} {wait:>6} {move:>6} {call:>8} {row.error:>8.1e}"
    )


def case_record(result: CaseResult) -> dict[str, Any]:
    """Return a case for the JSON file, in one line: its variants are an object by name."""
    case = result.case
    return {
        "model": "moe" if case.moe else "llama",
        "hidden": case.hidden,
        "dtype": str(case.dtype).removeprefix("torch."),
        "batch": case.batch,
        "world": result.world,
        "variants": {row.name: _row_record(result, row) for row in result.rows},
    }


def _row_record(result: CaseResult, row: Row) -> dict[str, Any]:
    parts = {"first": row.first, "token": row.token, "waiting": row.waiting, "moving": row.moving}
    found: dict[str, Any] = {name: _rounded(part.percentile(50)) for name, part in parts.items()}
    found |= {"calls": row.calls, "error": _rounded(row.error)}
    if speedup := result.speedup(row):
        found["xgloo"] = {name: _rounded(x) for name, x in rounds_record(speedup).items()}
    return found


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")


def judge(results: Sequence[CaseResult]) -> list[Outcome]:
    """Return the outcomes of the targets, each with its worst point."""
    by_dtensor = [
        (result, row)
        for result in results
        if result.case.batch == 1 and not result.case.moe and (row := result.row(_DTENSOR))
    ]

    def worst(
        what: str, wanted: float, points: list[tuple[float, str]], sign: str, unit: str
    ) -> Outcome:
        choose = min if sign == ">=" else max
        value, where = choose(points, default=(None, ""))
        return Outcome(what, wanted, value, sign, unit, where)

    def where(result: CaseResult) -> str:
        return f"{result.case.name}, {result.world} ranks"

    out = []
    for hidden, wanted in _AIMS.items():
        points = [
            (statistics.median(speedup), where(result))
            for result, row in by_dtensor
            if result.case.hidden == hidden and (speedup := result.speedup(row))
        ]
        what = f"a token of hidden {hidden} through DTensor, over gloo"
        out.append(worst(what, wanted, points, ">=", "x"))
    points = [(100 * row.share(row.moving), where(result)) for result, row in by_dtensor]
    out.append(worst("moving, of a token through DTensor", _MOST_MOVING, points, "<=", "%"))
    return out
