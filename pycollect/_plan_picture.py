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
_MOST_LABELS = 128  # with more, most bars have no room for a number
_BAR = 0.72  # height of a bar as a fraction of its lane
# Okabe and Ito's blue and orange: distinct for colour-blind readers, and in grey too.
_COLOURS = {"reduce": "#56B4E9", "copy": "#E69F00"}


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
    figure = Figure(figsize=(10.0, min(14.0, 1.5 + 0.34 * world)), layout="constrained")
    axes: Any = figure.add_subplot()
    axes.set(xlabel="time (µs)", ylabel="rank", ylim=(world - 0.5, -0.5))  # rank 0 on top
    axes.set_yticks(range(0, world, -(-world // 32)))  # at most 32
    axes.grid(axis="x", color="0.85")
    axes.set_axisbelow(True)
    times = [(rank, step, start * 1e6, end * 1e6) for rank, step, start, end in spans]
    _bars(axes, world, steps, [s for s in times if s[1] >= 0])
    leaving = {rank: end for rank, step, _, end in times if step < 0}  # a rank's exit comes last
    axes.plot(leaving.values(), leaving.keys(), "|", ms=9, color="0.25", label="rank has left")
    axes.set_xlim(left=0)
    axes.set_title(titles[0], loc="left")
    axes.set_title(titles[1], loc="right", fontsize="medium")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    write_picture(figure, os.fspath(path))


def check(world: int, path: str | PathLike[str]) -> None:
    """Raise ValueError unless a plan of `world` ranks can be drawn into the file."""
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise ValueError(f"plot: {str(path)!r} ends in {suffix!r}; choose '.png' or '.svg'")
    if world > _MOST_LANES:
        raise ValueError(f"plot: world is {world}; at most {_MOST_LANES} ranks can be drawn")
    check_output_path("picture", os.fspath(path))


def _bars(axes: Any, world: int, steps: Sequence[StepTuple], spans: Sequence[SpanTuple]) -> None:
    for kind, colour in _COLOURS.items():
        drawn = [s for s in spans if (len(steps[s[1]][1]) > 1) == (kind == "reduce")]
        label = f"{kind} (label: chunk)" if len(spans) <= _MOST_LABELS else kind
        for rank in range(world):  # one object for all bars of a rank: each takes milliseconds
            bars = [(start, end - start) for at, _, start, end in drawn if at == rank]
            if bars:
                # The edge shows a step that moves nothing, as a barrier's, whose bar has no width.
                look = {"facecolors": colour, "edgecolors": "0.25", "linewidths": 0.5}
                axes.broken_barh(bars, (rank - _BAR / 2, _BAR), label=label, **look)
                label = "_"  # not in the legend again
    for rank, step, start, end in spans if len(spans) <= _MOST_LABELS else ():
        _, _, first, count = steps[step][0][0]
        text = str(first) if count == 1 else f"{first}-{first + count - 1}"
        axes.text((start + end) / 2, rank, text, ha="center", va="center", fontsize=8, clip_on=True)
