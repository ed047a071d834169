"""Draws a plan: ranks against predicted time, with one lane per rank and one bar per step.

Uses matplotlib's figures without pyplot, so it needs no display and leaves no global state.
"""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pycollect._files import check_output_path, write_picture
from pycollect._plan_text import bytes_text

if TYPE_CHECKING:
    from pycollect._C import SpanTuple, StepTuple
    from pycollect.plans import Plan

_SUFFIXES = (".png", ".svg")
_MOST_LANES = 256  # with more, a lane is thinner than a line
_LANE_INCHES = 0.34
_WIDTH_INCHES = 10.0
_MOST_INCHES = 14.0
_DPI = 150
_BAR = 0.72  # height of a bar as a fraction of its lane
_EDGED_INCHES = 0.05  # a narrower bar gets no edge, which would cover it
_LABELLED_INCHES = 0.16  # a lower lane has no room for digits
_DIGIT_INCHES = 0.075  # the width of a digit at the size of a label
# Okabe and Ito's blue and orange: distinct for colour-blind readers, and in grey too.
_COLOURS = {"reduce": "#0072B2", "copy": "#E69F00"}
_TEXT = {"reduce": "white", "copy": "black"}


def draw(
    plan: Plan, path: str | PathLike[str], model: str, seconds: float, spans: list[SpanTuple]
) -> None:
    """Write the picture of a predicted run into path."""
    check(plan.world, path)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install 'pycollect[train]'") from error
    height = min(_MOST_INCHES, 1.5 + _LANE_INCHES * plan.world)
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    end = _microseconds(seconds)
    _lanes(axes, plan.world, end)
    _bars(axes, plan, spans, end, (height - 1.5) / plan.world)
    _leaving(axes, spans)
    size = "" if plan.collective == "barrier" else f", {bytes_text(plan.nbytes)}"
    ranks = f"{plan.world} rank{'s' * (plan.world != 1)}"
    axes.set_title(f"{plan.collective} by {plan.algorithm}, {ranks}{size}", loc="left")
    axes.set_title(f"{end:.4g} µs predicted on {model}", loc="right", fontsize="medium")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    write_picture(figure, os.fspath(path))


def check(world: int, path: str | PathLike[str]) -> None:
    """Raise ValueError unless a plan of `world` ranks can be drawn into the file."""
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise ValueError(f"plot: {str(path)!r} ends in {suffix!r}; choose '.png' or '.svg'")
    if world > _MOST_LANES:
        raise ValueError(f"plot: world is {world}; at most {_MOST_LANES} ranks can be drawn")
    check_output_path("picture", os.fspath(path))


def _microseconds(seconds: float) -> float:
    return seconds * 1e6


def _lanes(axes: Any, world: int, end: float) -> None:
    axes.set_ylim(world - 0.5, -0.5)  # rank 0 on top
    axes.set_xlim(0, end * 1.02 or 1.0)
    axes.set_xlabel("time (µs)")
    axes.set_ylabel("rank")
    step = -(-world // 32)  # at most 32 ticks
    axes.set_yticks(range(0, world, step))
    axes.tick_params(axis="y", length=0)
    for rank in range(0, world, 2):
        axes.axhspan(rank - 0.5, rank + 0.5, color="0.96", zorder=0, linewidth=0)
    axes.grid(axis="x", color="0.85", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _bars(axes: Any, plan: Plan, spans: list[SpanTuple], end: float, lane: float) -> None:
    from matplotlib.collections import PolyCollection

    steps = plan.steps
    kinds = ["reduce" if len(step[1]) > 1 else "copy" for step in steps]
    # One object for all bars of a kind: thousands of patches would take minutes.
    inches = (_WIDTH_INCHES - 1.0) / (end or 1.0)  # per microsecond
    for kind, colour in _COLOURS.items():
        drawn = [s for s in spans if s[1] >= 0 and s[3] > s[2] and kinds[s[1]] == kind]
        if not drawn:
            continue
        wide = [_microseconds(s[3] - s[2]) * inches for s in drawn]
        bars = PolyCollection(
            [_corners(s) for s in drawn],
            facecolors=colour,
            edgecolors=["white" if w > _EDGED_INCHES and lane > 0.1 else colour for w in wide],
            linewidths=0.5,
            label=f"{kind} (label: chunk)",
            zorder=2,
        )
        axes.add_collection(bars)
        for span, width in zip(drawn, wide, strict=True):
            label = _chunks(steps[span[1]])
            if width > _DIGIT_INCHES * (len(label) + 1) and lane > _LABELLED_INCHES:
                middle = _microseconds(span[2] + span[3]) / 2
                text = {"ha": "center", "va": "center_baseline", "fontsize": 8}
                axes.text(middle, span[0], label, color=_TEXT[kind], **text)
    # A step that moves nothing, as a barrier's, has no duration, so a bar would have no width.
    instants = [s for s in spans if s[1] >= 0 and s[3] == s[2]]
    if instants:
        axes.plot(
            [_microseconds(s[2]) for s in instants],
            [s[0] for s in instants],
            "D",
            color="0.25",
            markerfacecolor="none",
            markersize=9,
            label="step that moves nothing",
        )


def _corners(span: SpanTuple) -> list[tuple[float, float]]:
    rank, _, start, end = span
    left, right, half = _microseconds(start), _microseconds(end), _BAR / 2
    low, high = rank - half, rank + half
    return [(left, low), (right, low), (right, high), (left, high)]


def _leaving(axes: Any, spans: list[SpanTuple]) -> None:
    last: dict[int, float] = {s[0]: s[3] for s in spans if s[1] < 0}  # a rank's exit comes last
    axes.plot(
        [_microseconds(at) for at in last.values()],
        list(last),
        linestyle="none",
        marker="|",
        markersize=9,
        markeredgewidth=1.4,
        color="0.25",
        clip_on=False,
        label="rank has left",
    )


def _chunks(step: StepTuple) -> str:
    _, _, first, count = step[0][0]
    return str(first) if count == 1 else f"{first}-{first + count - 1}"
