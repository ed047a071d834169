"""Pictures of records: lines of speed against size, and bars of what a time is spent on.

matplotlib is imported only when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pycollect._files import write_picture
from pycollect._sizes import bytes_text

from .runner import OURS, PEER, WALL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that the colour-blind can distinguish (Okabe and Ito); the library has the strong ones.
_OURS = ("#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#d55e00")
_PEERS = dict.fromkeys(("naive", "gloo"), "#d55e00") | dict.fromkeys(("stack", "mpi"), "#e69f00")
_PEERS |= {"comm": "#cc79a7", "deepspeed": "#000000", "cupy": "#56b4e9"}
# What the legend calls rows that have shorter names in tables.
_LABELS = {
    "default": "pycollect",
    "inside": "pycollect without Python",
    "operator": "pycollect's operator",
    "naive": "naive loop",
    "stack": "torch's stack and sum",
    "mpi": "Open MPI",
    "deepspeed": "DeepSpeed's operator",
}
_GREY = "#7f7f7f"
# Colours of bars: of what the others are compared with, and of the parts of a time.
BASELINE, COMPUTING, WAITING, MOVING = "#bdbdbd", "#56b4e9", "#e69f00", "#d55e00"

_Case = dict[str, Any]  # as report.case_record returns it
_Key = tuple[str, str, str]
# A bar's label, the lengths of its parts by the names of their colours, and the text at its end.
Bar = tuple[str, Mapping[str, float], str]


def _drawn(record: dict[str, Any]) -> list[_Case]:
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


def _line(axes: Axes, cases: Sequence[_Case], name: str | None, **style: Any) -> None:
    """Draw bytes and bytes per second of the rows of this name, or of the limits without a name."""
    points = [
        (case["bytes"], row.get("moved", row.get("busbw", 0)))
        for case in cases
        for row in case["rows"]
        if row["name"] == (name or case.get("limit"))
    ]
    if points:
        axes.plot(*zip(*points, strict=True), **{"label": _LABELS.get(name or "", name), **style})


def _panel(axes: Axes, cases: Sequence[_Case]) -> None:
    cases = sorted(cases, key=lambda case: int(case["bytes"]))
    rows = [row for case in cases for row in case["rows"]]
    kinds = {row["name"]: row["kind"] for row in rows if row["clock"] == WALL}
    # The limit is a wide grey line, behind the other lines.
    limit = {"label": "memory limit", "color": _GREY, "linewidth": 5, "alpha": 0.45, "zorder": 1}
    _line(axes, cases, None, **limit)
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
    axes.set_xticks(sizes[::step], [bytes_text(s) for s in sizes[::step]])
    axes.minorticks_off()
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.set_xlabel("bytes per rank")
    axes.spines[["top", "right"]].set_visible(False)


def _finish(figure: Figure, colours: Mapping[str, Any], record: dict[str, Any], path: str) -> None:
    """Write the figure to a file, with one legend above its panels, and below what was measured."""
    options: Any = {"loc": "outside upper center", "ncols": 7, "frameon": False, "fontsize": 9}
    figure.legend(list(colours.values()), list(colours), **options)
    text = "{machine}, {cores} cores, threads: {threads}; torch {torch}; commit {commit}"
    figure.supxlabel(text.format_map(record["environment"]), fontsize=8, color=_GREY)
    write_picture(figure, path)


def plot(record: dict[str, Any], path: str) -> None:
    """Write the plot of a run to `path` (PNG, SVG or PDF by its suffix).

    There is a row of panels for each collective, dtype and op, and a panel for each world.

    Raises:
        ImportError: without matplotlib.
        OutputError: if the file cannot be written.
        ValueError: if there is no case to plot.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogLocator

    groups: dict[_Key, dict[int, list[_Case]]] = {}
    for case in _drawn(record):
        key = case["collective"], case["dtype"], case["op"]
        groups.setdefault(key, {}).setdefault(case["world"], []).append(case)
    if not groups:
        raise ValueError("nothing to plot: no case was measured")
    across = max(len(worlds) for worlds in groups.values())
    figure = Figure(figsize=(1.0 + 3.2 * across, 0.9 + 3.6 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), across, squeeze=False, sharey="row")
    for row, (key, worlds) in zip(panels, groups.items(), strict=True):
        for axes in row[len(worlds) :]:
            axes.set_visible(False)
        for axes, (_, group) in zip(row, sorted(worlds.items()), strict=False):
            _panel(axes, group)
        rows = [row for group in worlds.values() for case in group for row in case["rows"]]
        one_memory = all("moved" in row for row in rows)
        speed = "bytes moved per second" if one_memory else "bus bandwidth"
        row[0].set_ylabel(f"{' '.join(key)}\n{speed} (higher is better)")
        low, high = row[0].get_ylim()
        # For many powers of ten, labels also at 2 and 5 times each would be too dense.
        steps = (1, 2, 5) if high < 1e4 * low else (1,)
        row[0].yaxis.set_major_locator(LogLocator(subs=steps, numticks=20))
        row[0].yaxis.set_major_formatter(EngFormatter(unit="B/s"))
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    _finish(figure, handles, record, path)


def _draw_bars(axes: Axes, bars: Sequence[Bar], colours: Mapping[str, str]) -> None:
    longest = max(sum(parts.values()) for _, parts, _ in bars)
    for place, (_, parts, text) in enumerate(bars):
        end = 0.0
        for name, length in parts.items():
            axes.barh(place, length, left=end, color=colours[name])
            end += length
        axes.text(end + 0.015 * longest, place, text, va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [label for label, _, _ in bars], fontsize=8)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * longest)
    axes.spines[["top", "right"]].set_visible(False)


def plot_bars(
    rows: Sequence[Mapping[str, Sequence[Bar]]],
    colours: Mapping[str, str],
    what: str,
    record: dict[str, Any],
    path: str,
) -> None:
    """Write rows of panels to `path`, each with a title and bars of what the x axis measures.

    Raises:
        ImportError: without matplotlib.
        OutputError: if the file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    across = max(map(len, rows))
    heights = [0.7 + 0.2 * max(map(len, row.values())) for row in rows]
    figure = Figure(figsize=(4.9 * across, 0.6 + sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(rows), across, height_ratios=heights)
    for number, row in enumerate(rows):
        for place, (title, bars) in enumerate(row.items()):
            axes = figure.add_subplot(grid[number, place])
            _draw_bars(axes, bars, colours)
            axes.set_title(title, fontsize=10)
            axes.set_xlabel(f"{what} (lower is better)")
    patches = {name: Patch(color=colour) for name, colour in colours.items()}
    _finish(figure, patches, record, path)
