"""Plots of one or several training runs: loss, accuracy, and the parts of a step's time.

Plotting needs matplotlib, which is imported only when a plot is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._command import escaped
from .._files import write_picture
from .records import PARTS, RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Line styles in colours that colour-blind readers can distinguish (Okabe and Ito). Lines of runs on
# the same batches coincide, so later ones are thinner and dashed, and leave the first visible.
STYLES: Sequence[Mapping[str, Any]] = (
    {"color": "#0072b2", "linewidth": 2, "markersize": 8},
    {"color": "#e69f00", "linewidth": 2, "markersize": 5, "linestyle": (0, (4, 4))},
    {"color": "#000000", "linewidth": 1.2, "markersize": 2.5, "linestyle": (0, (1, 3))},
)
COLOURS = {
    "data": "#e69f00",
    "split": "#56b4e9",
    "compute": "#0072b2",
    "reduction": "#d55e00",
    "update": "#999999",
}
_GREY = "#7f7f7f"
_GRID = "#dddddd"
_MOST_POINTS = 2000  # points of a line; more points than pixels only make the file larger


def plot(runs: Sequence[RunResult], path: Path | str, caption: str = "") -> None:
    """Write a plot of the runs: PNG, SVG or PDF by the suffix; OutputError if not writable.

    A run without steps has no per-step line and no bar.
    """
    from matplotlib.figure import Figure

    timed = [run for run in runs if run.steps]
    height = 3.4 + 0.3 * max(0, len(timed) - 3)
    figure = Figure(figsize=(12.0, height), layout="constrained")
    loss, accuracy, bars = figure.subplots(1, 3, width_ratios=(1, 1, 1.25))
    several = len(runs) > 1
    for run, style in zip(runs, STYLES, strict=False):
        _loss(loss, run, style, fine=not several)
        _accuracy(accuracy, run, style, last=not several)
    highest = max((epoch.loss for run in runs for epoch in run.epochs), default=1.0)
    loss.set_ylim(0, 1.1 * highest if 0 < highest < float("inf") else None)
    if several:
        _legend(accuracy, accuracy.get_legend_handles_labels()[0])
    _bars(bars, timed)
    if caption:
        # The name of a folder may have bytes that are no letters, and dollars that are no formula.
        text = escaped(caption, "utf-8")
        figure.suptitle(text, fontsize=9, color=_GREY, parse_math=False)
    write_picture(figure, path)


def _format_axes(axes: Axes, title: str, ylabel: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("epoch")
    axes.set_ylabel(ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))  # one epoch: one tick
    axes.grid(True, color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _loss(axes: Axes, run: RunResult, style: Mapping[str, Any], *, fine: bool) -> None:
    """Draw the loss of every epoch, over a fainter line with the loss of every step."""
    _format_axes(axes, "training loss", "cross-entropy per example")
    if fine and run.steps:
        last = {step.epoch: step.number for step in run.steps}
        every = -(-len(run.steps) // _MOST_POINTS)
        points = [(s.epoch - 1 + s.number / last[s.epoch], s.loss) for s in run.steps[::every]]
        faint = {"color": style["color"], "alpha": 0.3, "linewidth": 1}
        axes.plot(*zip(*points, strict=True), **faint, label="per step")
    _epochs(axes, run, [epoch.loss for epoch in run.epochs], style, "mean of the epoch")
    if fine and run.steps:
        _legend(axes, axes.get_legend_handles_labels()[0])


def _accuracy(axes: Axes, run: RunResult, style: Mapping[str, Any], *, last: bool) -> None:
    values = [100 * epoch.accuracy for epoch in run.epochs]
    title = f"{run.epochs[-1].evaluated if values else 'test'} accuracy"
    title += f": {values[-1]:.1f} % at the end" if last and values else ""
    _format_axes(axes, title, "classified correctly (%)")
    _epochs(axes, run, values, style, run.name)
    axes.set_ylim(0, 102)


def _epochs(
    axes: Axes, run: RunResult, values: list[float], style: Mapping[str, Any], label: str
) -> None:
    numbers = [epoch.number for epoch in run.epochs]
    marker = "o" if len(numbers) <= 30 else ""  # more markers would hide the line
    axes.plot(numbers, values, **style, marker=marker, label=label)


def _bars(axes: Axes, runs: Sequence[RunResult]) -> None:
    """Draw a bar for each run, its parts in the order in which a step runs them."""
    unit, scale = _unit(max((sum(run.parts) for run in runs), default=0.0))
    for row, run in enumerate(runs):
        left = 0.0
        for part, seconds in zip(PARTS, run.parts, strict=True):
            width = scale * seconds
            axes.barh(row, width, left=left, height=0.45, color=COLOURS[part])
            left += width
        whole = f" {left:.3g} {unit}"
        axes.text(left, row, whole, va="center", fontsize=9)
    axes.set_title("time per step (median)", loc="left", fontsize=11)
    axes.set_xlabel(f"time ({unit})")
    axes.set_ylabel("gradients reduced by")
    axes.margins(x=0.14)  # room for the number at the end of the longest bar
    axes.set_xlim(left=0)
    axes.set_yticks(range(len(runs)), [run.name for run in runs])
    room = max(0.6, (3 - len(runs)) / 2)  # a single bar is as thick as one of three
    axes.set_ylim(len(runs) - 1 + room, -room)
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x", color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    _colour_legend(axes, runs, unit, scale)


def _colour_legend(axes: Axes, runs: Sequence[RunResult], unit: str, scale: float) -> None:
    """Draw the legend of the colours, with the seconds if there is only one run."""
    from matplotlib.patches import Patch

    names = list(PARTS)
    if len(runs) == 1:
        values = (scale * seconds for seconds in runs[0].parts)
        names = [f"{part} {v:.2g} {unit}" for part, v in zip(PARTS, values, strict=True)]
    handles = [Patch(color=COLOURS[part], label=n) for part, n in zip(PARTS, names, strict=True)]
    _legend(axes, handles)


def _legend(axes: Axes, handles: Sequence[Any]) -> None:
    """Draw the legend below the axis, where it hides no line."""
    axes.legend(
        handles=handles,
        frameon=False,
        fontsize=9,
        ncols=3,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
    )


def _unit(seconds: float) -> tuple[str, float]:
    """Return a readable unit for this time, and the number of these units in a second."""
    return ("s", 1.0) if seconds >= 1 else ("ms", 1e3)
