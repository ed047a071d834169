"""Bar plots of training steps, a panel per model: computation, and the reduction on top.

A plot is drawn from the record of a run, whether new or read from a file. Plotting needs
matplotlib, which is imported only when a plot is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..bar_plot import BASELINE, GAP, finish
from .comparison import ONE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that the colour-blind can distinguish (Okabe and Ito).
_COMPUTE, _REDUCTION = "#56b4e9", "#d55e00"


def _panel(axes: Axes, cases: Sequence[dict[str, Any]]) -> None:
    labels: list[str] = []
    bars: list[tuple[float, float, float]] = []
    for case in cases:
        for row in case["rows"]:
            labels.append(ONE if row["way"] == ONE else _label(case["world"], row["way"]))
            step = row["time"]["p50"]
            part = min(row["reduction"], step)
            bars.append((step * 1e3, part * 1e3, row["of_one_replica"]["median"]))
    places = range(len(labels))
    steps = [step for step, _, _ in bars]
    computed = [step - part for step, part, _ in bars]
    colours = [BASELINE if label == ONE else _COMPUTE for label in labels]
    axes.barh(places, computed, color=colours)
    parts = [part for _, part, _ in bars]
    axes.barh(places, parts, left=computed, color=_REDUCTION)
    for place, (step, part, slowdown) in zip(places, bars, strict=True):
        text = f"{slowdown:.2f}x, reduction {100 * part / step:.2g} %"
        axes.text(step + GAP * max(steps), place, text, va="center", fontsize=8)
    axes.set_yticks(places, labels)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * max(steps))
    axes.set_xlabel("median step (ms); x: of one replica in the same rounds")
    axes.set_title(f"{cases[0]['model']}, batch {cases[0]['batch']}")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _label(world: int, name: str) -> str:
    return f"{world} ranks: {name}" if world > 1 else f"1 rank: {name}"


def draw(record: dict[str, Any], path: str) -> None:
    """Write the plot of a run to `path` (PNG, SVG or PDF by its suffix).

    Raises:
        ImportError: without matplotlib.
        OutputError: if the file cannot be written.
        ValueError: if there is no case to plot.
    """
    from matplotlib.figure import Figure

    by_model: dict[str, list[dict[str, Any]]] = {}
    for case in record["training"]:
        by_model.setdefault(case["model"], []).append(case)
    if not by_model:
        raise ValueError("nothing to plot: no case was measured")
    bars = max(sum(len(case["rows"]) for case in group) for group in by_model.values())
    figure = Figure(figsize=(7.0 * len(by_model), 1.6 + 0.34 * bars), layout="constrained")
    panels = figure.subplots(1, len(by_model), squeeze=False)[0]
    for axes, group in zip(panels, by_model.values(), strict=True):
        _panel(axes, group)
    colours = {ONE: BASELINE, "forward, backward, update": _COMPUTE, "reduction": _REDUCTION}
    about = record["environment"]
    finish(figure, colours, f"{about['machine']}, torch {about['torch']}", path)
