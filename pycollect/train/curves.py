"""Plots of one training run, or of a comparison's: loss, accuracy, and the parts of a step's time.

Plotting needs matplotlib, which is imported only when a plot is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._command import escaped
from .._files import write_picture
from .records import PARTS, RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(runs: Sequence[RunResult], path: Path | str, caption: str = "") -> None:
    """Write a plot of the runs: PNG, SVG or PDF by the suffix; OutputError if not writable.

    A run without steps has no per-step line and no bar.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context("tableau-colorblind10"):
        figure = Figure(figsize=(12, 3.8), layout="constrained")
        # The name of a folder may have bytes that are no letters, and dollars that are no formula.
        figure.suptitle(escaped(caption, "utf-8"), fontsize="medium", parse_math=False)
        loss, accuracy, bars = figure.subplots(1, 3)
        _curves(loss, accuracy, runs)
        _bars(bars, [run for run in runs if run.steps])
        for axes in figure.axes:  # below the axis, where a legend hides no line
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, fontsize="small")
        write_picture(figure, path)


def _curves(loss: Axes, accuracy: Axes, runs: Sequence[RunResult]) -> None:
    """Draw loss and accuracy of every epoch, and for a single run also the loss of every step."""
    from matplotlib.ticker import MaxNLocator

    for number, run in enumerate(runs):
        if len(runs) == 1 and run.steps:
            last = {step.epoch: step.number for step in run.steps}
            points = [step.epoch - 1 + step.number / last[step.epoch] for step in run.steps]
            loss.plot(points, run.losses, alpha=0.4, linewidth=1, label="every step")
        epochs = [epoch.number for epoch in run.epochs]
        # Lines of runs on the same batches coincide, and the second leaves the first visible.
        line = {"color": f"C{number}", "linestyle": ("-", "--")[number], "marker": "o"}
        looks: dict[str, Any] = {**line, "markersize": 8 / (1 + number)}
        looks["markevery"] = 1 + len(epochs) // 30
        looks["label"] = run.settings.reduce if len(runs) > 1 else "every epoch"
        loss.plot(epochs, [epoch.loss for epoch in run.epochs], **looks)
        accuracy.plot(epochs, [100 * epoch.accuracy for epoch in run.epochs], **looks)
    evaluated = next((epoch.evaluated for run in runs for epoch in run.epochs), "test")
    accuracy.set(title=f"{evaluated} accuracy", ylabel="classified correctly (%)", ylim=(0, 102))
    loss.set(title="training loss", ylabel="cross-entropy per example")
    loss.set_ylim(0, 1.1 * loss.get_ylim()[1])
    for axes in (loss, accuracy):
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)


def _bars(axes: Axes, runs: Sequence[RunResult]) -> None:
    """Draw a bar for each run, its parts in the order in which a step runs them."""
    slow = any(sum(run.parts.values()) >= 1 for run in runs)
    unit, scale = ("s", 1.0) if slow else ("ms", 1e3)
    names = [run.settings.reduce for run in runs]
    ends = [0.0] * len(runs)
    for part in PARTS:
        widths = [scale * run.parts[part] for run in runs]
        label = f"{part} {widths[0]:.2g} {unit}" if len(runs) == 1 else part
        axes.barh(names, widths, height=0.6, left=ends, label=label)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for row, end in enumerate(ends):
        axes.text(end, row, f" {end:.3g} {unit}", va="center")
    axes.set(title="time per step (median)", xlabel=f"time ({unit})")
    axes.set_ylabel("gradients reduced by")
    axes.set_xlim(0, 1.25 * max(ends, default=0) or 1)
    room = (4 - len(runs)) / 2  # a single bar is as thick as one of two
    axes.set_ylim(len(runs) - 1 + room, -room)
