"""Where a run goes besides standard output: the JSON file and the plot."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from .._command import Interruption
from .._files import check_picture, check_place, write
from .contest import CaseResult


def check_files(args: argparse.Namespace) -> None:
    """Refuse before the measuring files that could not be written after it.

    Raises:
        ValueError: in a sentence.
    """
    if args.json:
        check_place("JSON file", args.json)
    if getattr(args, "plot", None):
        check_picture(args.plot)


def check(args: argparse.Namespace, any_sizes: bool) -> None:
    """Refuse before the measuring what would fail after it.

    Raises:
        ValueError: if a file cannot be written, or there will be nothing to draw.
    """
    check_files(args)
    if args.plot and not any_sizes:
        raise ValueError("--plot draws speed against size, and no sizes are measured")


def write_json(path: str | None, content: dict[str, Any], interruption: Interruption) -> None:
    """Write the file, if one was asked for; it says whether the run was interrupted.

    Raises:
        OutputError: if it cannot be written.
    """
    if path:
        whole = {**content, "interrupted": bool(interruption)}
        write("JSON file", path, json.dumps(whole, indent=1) + "\n")


def write_all(
    args: argparse.Namespace,
    content: dict[str, Any],
    results: Sequence[CaseResult],
    interruption: Interruption,
) -> None:
    """Write what was asked for. The plot has the cases with one tensor a rank and some bytes.

    A run that was ended before the first of these leaves no plot.
    """
    write_json(args.json, content, interruption)
    sized = [r for r in results if len(r.case.shapes) == 1 and r.case.count]
    if args.plot and sized:
        from .plot import plot

        about = content["environment"]
        caption = f"{about['machine']}, threads: {about['threads']}; torch {about['torch']}"
        plot(sized, args.plot, caption)
    interruption.reraise(args.json)
