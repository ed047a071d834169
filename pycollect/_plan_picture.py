"""Draws a plan: ranks against predicted time, with one lane per rank and one bar per step.

Uses matplotlib's figures without pyplot, so it needs no display and leaves no global state.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._files import check_output_path, write_picture

if TYPE_CHECKING:
    from ._C import SpanTuple, StepTuple

_SUFFIXES = (".png", ".svg")
_MOST_LANES = 256  # with more, a lane is thinner than a line
_LANE_INCHES = 0.34
_WIDTH_INCHES = 10.0
_MOST_INCHES = 14.0
_BAR = 0.72  # height of a bar as a fraction of its lane
_EDGED_INCHES = 0.05  # a narrower bar gets no edge, which would cover it
_LABELLED_INCHES = 0.16  # a lower lane has no room for digits
_DIGIT_INCHES = 0.075  # the width of a digit at the size of a label
# Colours of bars and of their labels. Okabe and Ito's blue and orange: distinct for colour-blind
# readers, and in grey too.
_COLOURS = {"reduce": ("#0072B2", "white"), "copy": ("#E69F00", "black")}
_MARK = {"linestyle": "none", "markersize": 9, "color": "0.25"}


def draw(
    path: str | PathLike[str],
    titles: tuple[str, str],
    world: int,
    steps: Sequence[StepTuple],
    spans: list[SpanTuple],
) -> None:
    """Write the picture of a predicted run into path, with titles on the left and on the right."""
    check(world, path)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install 'pycollect[train]'") from error
    height = min(_MOST_INCHES, 1.5 + _LANE_INCHES * world)
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
    axes: Any = figure.add_subplot()
    times = [(rank, step, start * 1e6, end * 1e6) for rank, step, start, end in spans]
    leaving = {s[0]: s[3] for s in times if s[1] < 0}  # a rank's exit comes last
    _lanes(axes, world, max(leaving.values()))
    _bars(axes, steps, [s for s in times if s[1] >= 0], (height - 1.5) / world)
    mark = {**_MARK, "marker": "|", "markeredgewidth": 1.4, "clip_on": False}
    axes.plot(leaving.values(), leaving.keys(), label="rank has left", **mark)
    axes.set_title(titles[0], loc="left")
    axes.set_title(titles[1], loc="right", fontsize="medium")
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


def _bars(axes: Any, steps: Sequence[StepTuple], spans: Sequence[SpanTuple], lane: float) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    inches = (_WIDTH_INCHES - 1.0) / axes.get_xlim()[1]  # per microsecond
    for kind, (colour, text_colour) in _COLOURS.items():
        is_kind = [len(sources) > 1 for _, sources, _ in steps]
        drawn = [s for s in spans if s[3] > s[2] and is_kind[s[1]] == (kind == "reduce")]
        wide = [(end - start) * inches for _, _, start, end in drawn]
        # One object for all bars of a kind: thousands of patches would take minutes.
        bars = PatchCollection(
            [Rectangle((s[2], s[0] - _BAR / 2), s[3] - s[2], _BAR) for s in drawn],
            facecolors=colour,
            edgecolors=["white" if w > _EDGED_INCHES and lane > 0.1 else colour for w in wide],
            linewidths=0.5,
            label=f"{kind} (label: chunk)" if drawn else None,
            zorder=2,
        )
        axes.add_collection(bars)
        for (rank, step, start, end), width in zip(drawn, wide, strict=True):
            label = _chunks(steps[step])
            if width > _DIGIT_INCHES * (len(label) + 1) and lane > _LABELLED_INCHES:
                text = {"ha": "center", "va": "center_baseline", "fontsize": 8}
                axes.text((start + end) / 2, rank, label, color=text_colour, **text)
    # A step that moves nothing, as a barrier's, has no duration, so a bar would have no width.
    instants = [s for s in spans if s[3] == s[2]]
    if instants:
        mark = {**_MARK, "marker": "D", "markerfacecolor": "none"}
        ranks, _, starts, _ = zip(*instants, strict=True)
        axes.plot(starts, ranks, label="step that moves nothing", **mark)


def _chunks(step: StepTuple) -> str:
    _, _, first, count = step[0][0]
    return str(first) if count == 1 else f"{first}-{first + count - 1}"
