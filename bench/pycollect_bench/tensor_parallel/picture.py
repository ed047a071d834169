"""Bar plots of a token's time: computing, waiting for other ranks, moving; a panel per model.

A plot is drawn from the record of a run, whether new or read from a file. Plotting needs
matplotlib, which is imported only when a plot is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..bar_plot import BASELINE, GAP, finish
from .variants import ALONE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that the colour-blind can distinguish (Okabe and Ito).
_PARTS = {"computing": "#56b4e9", "waiting": "#e69f00", "moving": "#d55e00"}

_Case = dict[str, Any]  # as report.case_record returns it


def _panel(axes: Axes, cases: Sequence[_Case]) -> None:
    """Draw the cases of one model and world, which differ in their dtypes."""
    labels: list[str] = []
    longest = max(row["token"] for case in cases for row in case["variants"].values()) * 1e3
    for case in cases:
        for name, row in case["variants"].items():
            place, token = len(labels), row["token"] * 1e3
            labels.append(f"{name}, {case['dtype']}")
            waiting, moving = row["waiting"] * 1e3, row["moving"] * 1e3
            begin = 0.0
            lengths = (token - waiting - moving, waiting, moving)
            for length, colour in zip(lengths, _PARTS.values(), strict=True):
                colour = BASELINE if name == ALONE else colour
                axes.barh(place, length, left=begin, color=colour)
                begin += length
            text = f"{case['batch'] * 1e3 / token:.3g}/s"
            if "xgloo" in row and "gloo" not in name:
                text += f", {row['xgloo']['median']:.2g}x gloo"
            axes.text(token + GAP * longest, place, text, va="center", fontsize=8)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * longest)
    axes.set_xlabel("ms per token")
    model = f"{cases[0]['model']} {cases[0]['hidden']}, batch {cases[0]['batch']}"
    axes.set_title(f"{model}, {cases[0]['world']} ranks", fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def drawn(record: dict[str, Any]) -> dict[int, list[list[_Case]]]:
    """Return the panels of each world: each model's cases with its smallest batch."""
    found: dict[int, dict[tuple[str, int], list[_Case]]] = {}
    for case in record["tensor_parallel"]:
        panels = found.setdefault(case["world"], {})
        panels.setdefault((case["model"], case["hidden"]), []).append(case)
    return {
        world: [
            [c for c in group if c["batch"] == min(x["batch"] for x in group)]
            for group in panels.values()
        ]
        for world, panels in found.items()
    }


def draw(record: dict[str, Any], path: str) -> None:
    """Write the plot of a run to `path` (PNG, SVG or PDF by its suffix).

    Raises:
        ImportError: without matplotlib.
        OutputError: if the file cannot be written.
        ValueError: if there is no case to plot.
    """
    from matplotlib.figure import Figure

    worlds = drawn(record)
    if not worlds:
        raise ValueError("nothing to plot: no case was measured")
    across = max(map(len, worlds.values()))
    bars = max(sum(len(c["variants"]) for c in p) for panels in worlds.values() for p in panels)
    size = 5.2 * across, 0.6 + (0.9 + 0.2 * bars) * len(worlds)
    figure = Figure(figsize=size, layout="constrained")
    rows = figure.subplots(len(worlds), across, squeeze=False)
    for row, panels in zip(rows, worlds.values(), strict=True):
        for axes in row[len(panels) :]:
            axes.set_visible(False)
        for axes, cases in zip(row, panels, strict=False):
            _panel(axes, cases)
    colours = {ALONE: BASELINE, **_PARTS}
    about = record["environment"]
    caption = f"{about['machine']}, {about['cores']} cores; torch {about['torch']}"
    finish(figure, colours, caption, path)
