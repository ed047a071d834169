"""Where a run goes besides standard output: the JSON file and the plot."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .contest import CaseResult


def check(args: argparse.Namespace, any_sizes: bool) -> None:
    """Refuse before the measuring what would fail after it.

    Raises:
        ValueError: if a file cannot be written, or there will be nothing to draw.
    """
    for path in filter(None, (args.json, args.plot)):
        if not Path(path).resolve().parent.is_dir():
            raise ValueError(f"{path}: there is no such folder to write to")
    if args.plot and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib; install pycollect[train]")
    if args.plot and not any_sizes:
        raise ValueError("--plot draws speed against size, and no sizes are measured")


def write(args: argparse.Namespace, content: dict[str, Any], results: Sequence[CaseResult]) -> None:
    """Write what was asked for. The plot has the cases with one tensor a rank and some bytes.

    A run that was ended before the first of these leaves no plot.
    """
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
    sized = [r for r in results if len(r.case.shapes) == 1 and r.case.count]
    if args.plot and sized:
        from .plot import plot

        about = content["environment"]
        caption = f"{about['machine']}, threads: {about['threads']}; torch {about['torch']}"
        plot(sized, args.plot, caption)
