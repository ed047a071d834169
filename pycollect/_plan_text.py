"""Prints a plan: one line per step, under its level, short enough to read for any world size.

Consecutive ranks are shown as a range, and long lists are cut, with a count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pycollect._C import SliceTuple, StepTuple
    from pycollect.plans import Plan

# A plan of up to this number of steps is shown in full (eight ranks that copy from all others have
# 56), a larger one only with the first steps of each level.
_WHOLE_STEPS = 64
_LEVEL_STEPS = 8
_SHOWN_LEVELS = 24
_SHOWN_RUNS = 6
_ROOTED = ("reduce", "broadcast", "scatter", "gather")


def describe(plan: Plan) -> str:
    """Return the header and the steps by level."""
    return "\n".join([*_header(plan), *_body(plan)])


def bytes_text(count: float) -> str:
    """Return a size in readable units.

    >>> [bytes_text(n) for n in (0, 1000, 1536, 1 << 20, 5e9)]
    ['0 B', '1000 B', '1.5 KiB', '1 MiB', '4.66 GiB']
    """
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:.0f} {unit}" if count >= 100 else f"{count:.3g} {unit}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks in their order, with runs of consecutive ranks as ranges.

    >>> ranks_text([0, 1, 2, 3]), ranks_text([2, 0, 1]), ranks_text(range(0, 40, 4))
    ('0..3', '2,0,1', '0,4,8,12,16,20,... (10)')
    """
    runs: list[str] = []
    # In a run of consecutive ranks the difference between rank and list index is constant.
    for _, group in groupby(enumerate(ranks), lambda at: at[1] - at[0]):
        run = [rank for _, rank in group]
        runs += [f"{run[0]}..{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    if len(runs) > _SHOWN_RUNS:
        runs = [*runs[:_SHOWN_RUNS], f"... ({len(ranks)})"]
    return ",".join(runs)


def step_text(step: StepTuple) -> str:
    """Return one step in words.

    >>> step_text((((1, "out", 0, 1),), ((0, "out", 0, 1), (1, "in", 0, 1)), -1))
    'out[0] on 1 <- sum of out[0] from 0 and in[0] from 1'
    """
    dsts, srcs, _ = step
    fold = "sum of " if len(srcs) > 1 else ""
    to = " and ".join(f"{what} on {ranks}" for what, ranks in _grouped(dsts))
    return to + " <- " + fold + " and ".join(f"{what} from {r}" for what, r in _grouped(srcs))


def executor(step: StepTuple) -> int:
    """Return the rank that executes a step."""
    dsts, _, by = step
    return dsts[0][0] if by < 0 else by


def _grouped(side: Sequence[SliceTuple]) -> Iterator[tuple[str, str]]:
    for (buffer, first, count), group in groupby(side, lambda s: s[1:]):
        chunks = f"{first}" if count == 1 else f"{first}:{first + count}"
        yield f"{buffer}[{chunks}]", ranks_text([s[0] for s in group])


def _header(plan: Plan) -> Iterator[str]:
    root = f", root {plan.root}" if plan.collective in _ROOTED else ""
    ranks = f"{plan.world} rank{'s' * (plan.world != 1)}"
    chunks = f"{plan.chunks} chunks of" if plan.chunks != 1 else "1 chunk of"
    where = "in place" if plan.in_place else "out of place"
    size = bytes_text(plan.nbytes / plan.chunks)
    yield f"{plan.collective} by '{plan.algorithm}', {ranks}{root}, {chunks} {size}, {where}"
    count = len(plan.levels)
    levels = f"{count} level{'s' * (count != 1)}"
    yield f"order {plan.order}, {levels}; {_traffic(plan)}"


def _traffic(plan: Plan) -> str:
    chunk = plan.nbytes / plan.chunks
    reads, writes = [0.0] * plan.world, [0.0] * plan.world
    for step in plan.steps:
        dsts, srcs, _ = step
        me = executor(step)
        reads[me] += chunk * sum(s[3] for s in srcs)
        writes[me] += chunk * sum(d[3] for d in dsts)
    if len(set(zip(reads, writes, strict=True))) == 1:
        return f"each rank reads {bytes_text(reads[0])} and writes {bytes_text(writes[0])}"
    return f"a rank reads {_span(reads)} and writes {_span(writes)}"


def _span(counts: list[float]) -> str:
    least, most = bytes_text(min(counts)), bytes_text(max(counts))
    if least == most:
        return least
    busiest = [rank for rank, count in enumerate(counts) if count == max(counts)]
    return f"{least} to {most} (rank{'s' * (len(busiest) != 1)} {ranks_text(busiest)})"


def _body(plan: Plan) -> Iterator[str]:
    steps, levels = plan.steps, plan.levels
    width = len(f"level {len(levels)}  ")
    for number, level in enumerate(levels, 1):
        if number > _SHOWN_LEVELS:
            yield f"... and {len(levels) - _SHOWN_LEVELS} more levels"
            return
        shown = len(level) if len(steps) <= _WHOLE_STEPS else _LEVEL_STEPS
        for place, step in enumerate(level[:shown]):
            head = f"level {number}" if place == 0 else ""
            yield f"{head:<{width}}rank {executor(steps[step])}: {step_text(steps[step])}"
        if len(level) > shown:
            yield f"{'':<{width}}... and {len(level) - shown} more steps"
