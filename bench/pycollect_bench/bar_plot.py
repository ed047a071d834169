"""What bar plots of results have in common: a colour, a distance, and the end of the figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pycollect._files import write_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINE = "#bdbdbd"  # colour of what the other bars are compared with
GAP = 0.015  # between a bar and its label, as a fraction of the longest bar


def finish(figure: Figure, colours: Mapping[str, str], caption: str, path: str) -> None:
    """Write the figure to a file, with a legend of the colours by their labels, and a caption."""
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=label) for label, colour in colours.items()]
    n = len(handles)
    figure.legend(handles=handles, loc="outside upper center", ncols=n, frameon=False, fontsize=9)
    figure.supxlabel(caption, fontsize=8, color="#7f7f7f")
    write_picture(figure, path)
