"""Plots of one or several training runs: loss, accuracy, and the parts of a step's time.

Plotting needs matplotlib, which is imported only when a plot is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._files import write_picture
from .history import PARTS, Epoch, Step, typical

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Line styles with colours that stay apart for the colour-blind (Okabe and Ito). Runs on the same
# batches coincide, so later lines are thinner and dashed with smaller marks, and show the first.
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
_MOST_POINTS = 2000  # of a line; more points than pixels only make the file larger


@dataclass(frozen=True)
class Curve:
    """The records of one run to draw."""

    name: str
    epochs: Sequence[Epoch]
    steps: Sequence[Step] = ()  # if empty, no per-step line and no bar is drawn

    @property
    def parts(self) -> list[float]:
        """The median seconds of each part of a step, in the order of PARTS."""
        return [typical(self.steps)[part] for part in PARTS]


def plot(curves: Sequence[Curve], path: Path | str, caption: str = "") -> None:
    """Write a plot of the curves: PNG, SVG or PDF by the suffix; OutputError if not writable."""
    from matplotlib.figure import Figure

    times = [curve for curve in curves if curve.steps]
    height = 3.4 + 0.3 * max(0, len(times) - 3)
    figure = Figure(figsize=(12.0, height), layout="constrained")
    loss, accuracy, bars = figure.subplots(1, 3, width_ratios=(1, 1, 1.25))
    several = len(curves) > 1
    for curve, style in zip(curves, STYLES, strict=False):
        _loss(loss, curve, style, fine=not several)
        _accuracy(accuracy, curve, style, last=not several)
    highest = max((epoch.loss for curve in curves for epoch in curve.epochs), default=1.0)
    loss.set_ylim(0, 1.1 * highest if 0 < highest < float("inf") else None)
    if several:
        _legend(accuracy, accuracy.get_legend_handles_labels()[0])
    _bars(bars, times)
    if caption:
        figure.suptitle(caption, fontsize=9, color=_GREY)
    write_picture(figure, path)


def _tidy(axes: Axes, title: str, ylabel: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("epoch")
    axes.set_ylabel(ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))  # one epoch: one tick
    axes.grid(True, color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _loss(axes: Axes, curve: Curve, style: Mapping[str, Any], *, fine: bool) -> None:
    """Draw the loss of every epoch, over a fainter line with the loss of every step."""
    _tidy(axes, "training loss", "mean cross-entropy per example")
    if fine and curve.steps:
        last = {step.epoch: step.number for step in curve.steps}
        every = -(-len(curve.steps) // _MOST_POINTS)
        points = [(s.epoch - 1 + s.number / last[s.epoch], s.loss) for s in curve.steps[::every]]
        faint = {"color": style["color"], "alpha": 0.3, "linewidth": 1}
        axes.plot(*zip(*points, strict=True), **faint, label="per step")
    _epochs(axes, curve, [epoch.loss for epoch in curve.epochs], style, "mean of the epoch")
    if fine and curve.steps:
        _legend(axes, axes.get_legend_handles_labels()[0])


def _accuracy(axes: Axes, curve: Curve, style: Mapping[str, Any], *, last: bool) -> None:
    values = [100 * epoch.accuracy for epoch in curve.epochs]
    title = f"test accuracy: {values[-1]:.1f} % at the end" if last and values else "test accuracy"
    _tidy(axes, title, "share classified right (%)")
    _epochs(axes, curve, values, style, curve.name)
    axes.set_ylim(0, 102)


def _epochs(
    axes: Axes, curve: Curve, values: list[float], style: Mapping[str, Any], label: str
) -> None:
    numbers = [epoch.number for epoch in curve.epochs]
    marker = "o" if len(numbers) <= 30 else ""  # more markers would hide the line
    axes.plot(numbers, values, **style, marker=marker, label=label)


def _bars(axes: Axes, curves: Sequence[Curve]) -> None:
    """Draw a bar for each run, its parts in the order in which a step runs them."""
    unit, scale = _unit(max((sum(curve.parts) for curve in curves), default=0.0))
    for row, curve in enumerate(curves):
        left = 0.0
        for part, seconds in zip(PARTS, curve.parts, strict=True):
            width = scale * seconds
            axes.barh(row, width, left=left, height=0.45, color=COLOURS[part])
            left += width
        whole = f" {left:.3g} {unit}"
        axes.text(left, row, whole, va="center", fontsize=9)
    axes.set_title("time per step (median)", loc="left", fontsize=11)
    axes.set_xlabel(f"time ({unit})")
    axes.margins(x=0.14)  # room for the number at the end of the longest bar
    axes.set_xlim(left=0)
    axes.set_yticks(range(len(curves)), [curve.name for curve in curves])
    room = max(0.6, (3 - len(curves)) / 2)  # a single bar is as thick as one of three
    axes.set_ylim(len(curves) - 1 + room, -room)
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x", color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    _key(axes, curves, unit, scale)


def _key(axes: Axes, curves: Sequence[Curve], unit: str, scale: float) -> None:
    """Draw the legend of the colours, with the seconds if there is only one run."""
    from matplotlib.patches import Patch

    names = list(PARTS)
    if len(curves) == 1:
        values = (scale * seconds for seconds in curves[0].parts)
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
