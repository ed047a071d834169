"""Plots of speed against size on logarithmic axes, a panel per world: library, peers and limit.

A plot is drawn from a record. matplotlib is imported only when a plot is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pycollect._files import write_picture
from pycollect._sizes import binary_size

from .runner import OURS, PEER, WALL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that the colour-blind can distinguish (Okabe and Ito); the library has the strong ones.
_OURS = ("#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#d55e00")
_PEERS = {
    "naive": "#d55e00",
    "stack": "#e69f00",
    "comm": "#cc79a7",
    "cupy": "#56b4e9",
    "gloo": "#d55e00",
    "mpi": "#e69f00",
    "deepspeed": "#cc79a7",
}
_GREY = "#7f7f7f"

_Case = dict[str, Any]  # as report.case_record returns it
_Key = tuple[str, str, str]


def drawn(record: dict[str, Any]) -> list[_Case]:
    """Return the cases of a run that its plot shows: those of the requested sizes.

    Cases that only the targets need have too few sizes.
    """
    about = record["environment"]
    return [
        case
        for case in record["cases"]
        if about["ranks"] in ("list", "processes")
        and case["collective"] == about["collective"]
        and case["dtype"] in about["dtypes"]
        and case["tensors"] == 1
        and case["count"]
    ]


def _points(cases: Sequence[_Case], name: str | None = None) -> list[tuple[int, float]]:
    """Return bytes and GB/s of the rows of this name, or of the limits without a name."""
    return [
        (case["bytes"], row.get("moved", row.get("busbw", 0)) / 1e9)
        for case in cases
        for row in case["rows"]
        if row["name"] == (name or case.get("limit"))
    ]


def _line(axes: Axes, cases: Sequence[_Case], name: str, **style: Any) -> None:
    points = _points(cases, name)
    if points:
        axes.plot(*zip(*points, strict=True), label=name, **style)


def _limit_area(axes: Axes, cases: Sequence[_Case]) -> None:
    """Draw the limit as a wide grey line, behind the other lines."""
    points = _points(cases)
    if not points:
        return
    sizes, speeds = zip(*points, strict=True)
    axes.plot(sizes, speeds, color=_GREY, linewidth=5, alpha=0.45, label="memory limit", zorder=1)


def _panel(axes: Axes, cases: Sequence[_Case]) -> None:
    cases = sorted(cases, key=lambda case: int(case["bytes"]))
    rows = [row for case in cases for row in case["rows"]]
    kinds = {row["name"]: row["kind"] for row in rows if row["clock"] == WALL}
    _limit_area(axes, cases)
    ours = [name for name, kind in kinds.items() if kind == OURS]
    clocked = [row["name"] for row in rows if ours and row["name"].startswith(f"{ours[0]}:")]
    for i, name in enumerate(ours):
        colour = _OURS[i % len(_OURS)]
        # The library's own choice is a thick line, visible behind the algorithm that it selects.
        width, size = (3.5, 6) if i == 0 else (1.2, 3)
        _line(axes, cases, name, color=colour, marker="o", markersize=size, linewidth=width)
    for name, kind in kinds.items():
        if kind == "inside":
            _line(axes, cases, name, color=_OURS[0], linestyle=":", linewidth=1.6)
        elif kind == PEER:
            _line(axes, cases, name, color=_PEERS[name], marker="s", markersize=3.5, ls="--")
    for name, style in zip(dict.fromkeys(clocked), (":", "-."), strict=False):
        _line(axes, cases, name, color=_OURS[0], linestyle=style, linewidth=1.6)
    world = cases[0]["world"]
    axes.set_title(f"{world} ranks" if world > 1 else "1 rank")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = [case["bytes"] for case in cases]
    step = -(-len(sizes) // 5)
    axes.set_xticks(sizes[::step], [binary_size(s) for s in sizes[::step]])
    axes.minorticks_off()
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.set_xlabel("bytes per rank")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend(figure: Figure) -> None:
    """Draw one legend for all panels, beside them, so that it hides no line."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(
        list(found.values()), list(found), loc="outside right center", frameon=False, fontsize=9
    )


def plot(record: dict[str, Any], path: str) -> None:
    """Write the plot of a run to `path` (PNG, SVG or PDF by its suffix).

    There is a row of panels for each collective, dtype and op, and a panel for each world.

    Raises:
        ImportError: without matplotlib.
        OutputError: if the file cannot be written.
        ValueError: if there is no case to plot.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    groups: dict[_Key, dict[int, list[_Case]]] = {}
    for case in drawn(record):
        key = case["collective"], case["dtype"], case["op"]
        groups.setdefault(key, {}).setdefault(case["world"], []).append(case)
    if not groups:
        raise ValueError("nothing to plot: no case was measured")
    across = max(len(worlds) for worlds in groups.values())
    figure = Figure(figsize=(2.4 + 4.0 * across, 1.1 + 3.9 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), across, squeeze=False, sharey="row")
    for row, (key, worlds) in zip(panels, groups.items(), strict=True):
        for axes in row[len(worlds) :]:
            axes.set_visible(False)
        for axes, (_, group) in zip(row, sorted(worlds.items()), strict=False):
            _panel(axes, group)
        rows = [row for group in worlds.values() for case in group for row in case["rows"]]
        one_memory = all("moved" in row for row in rows)
        speed = "bytes moved per second" if one_memory else "bus bandwidth"
        row[0].set_ylabel(f"{' '.join(key)}\n{speed} (GB/s)")
        low, high = row[0].get_ylim()
        # For many powers of ten, labels also at 2 and 5 times each would be too dense.
        steps = (1, 2, 5) if high < 1e4 * low else (1,)
        row[0].yaxis.set_major_locator(LogLocator(subs=steps, numticks=20))
        row[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    _legend(figure)
    about = record["environment"]
    caption = f"{about['machine']}, threads: {about['threads']}; torch {about['torch']}"
    figure.supxlabel(caption, fontsize=8, color=_GREY)
    write_picture(figure, path)
