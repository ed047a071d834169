"""Bar plots of a token's time: computing, waiting for other ranks, moving; a panel per model.

A plot is drawn from the record of a run, whether new or read from a file. Plotting needs
matplotlib, which is imported only when a plot is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from ..bar_plot import BASELINE, GAP, finish
from ..runner import PEER
from .variants import ALONE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that the colour-blind can distinguish (Okabe and Ito).
_PARTS = {"computing": "#56b4e9", "waiting": "#e69f00", "moving": "#d55e00"}


def _panel(axes: Axes, cases: Sequence[dict[str, Any]]) -> None:
    """Draw the cases of one model and world, which differ in their dtypes."""
    rows = [(case, row) for case in cases for row in case["rows"]]
    longest = max(row["time"]["p50"] for _, row in rows) * 1e3
    for place, (case, row) in enumerate(rows):
        token, waiting, moving = row["time"]["p50"] * 1e3, row["waiting"] * 1e3, row["moving"] * 1e3
        begin = 0.0
        lengths = (token - waiting - moving, waiting, moving)
        for length, colour in zip(lengths, _PARTS.values(), strict=True):
            alone = row["name"] == ALONE
            axes.barh(place, length, left=begin, color=BASELINE if alone else colour)
            begin += length
        text = f"{case['batch'] * 1e3 / token:.3g}/s"
        if "speedup" in row and row["kind"] != PEER:
            text += f", {row['speedup']['gloo']:.2g}x gloo"
        axes.text(token + GAP * longest, place, text, va="center", fontsize=8)
    labels = [f"{row['name']}, {case['dtype']}" for case, row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * longest)
    axes.set_xlabel("ms per token")
    title = "{model} {hidden}, batch {batch}, {world} ranks"
    axes.set_title(title.format_map(cases[0]), fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def draw(record: dict[str, Any], path: str) -> None:
    """Write the plot of a run to `path`; a world's panels are models with their smallest batch."""
    from matplotlib.figure import Figure

    worlds: dict[int, dict[tuple[str, int], list[dict[str, Any]]]] = {}
    for case in sorted(record["cases"], key=lambda case: int(case["batch"])):
        panels = worlds.setdefault(case["world"], {})
        cases = panels.setdefault((case["model"], case["hidden"]), [case])
        if case is not cases[0] and case["batch"] == cases[0]["batch"]:
            cases.append(case)
    across = max(map(len, worlds.values()))
    bars = max(sum(len(c["rows"]) for c in p) for w in worlds.values() for p in w.values())
    size = 5.2 * across, 0.6 + (0.9 + 0.2 * bars) * len(worlds)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(worlds), across, squeeze=False)
    for row, panels in zip(grid, worlds.values(), strict=True):
        for axes, cases in zip_longest(row, panels.values()):
            _panel(axes, cases) if cases else axes.set_visible(False)
    about = record["environment"]
    caption = f"{about['machine']}, {about['cores']} cores; torch {about['torch']}"
    finish(figure, {ALONE: BASELINE, **_PARTS}, caption, path)
