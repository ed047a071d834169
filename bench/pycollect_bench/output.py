"""Output files of a benchmark run: the JSON file and the plot."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from pycollect._command import Interruption
from pycollect._files import check_output_path, check_picture, write

from .comparison import CaseResult


def check_files(args: argparse.Namespace) -> None:
    """Check before the measurement that the output files can be written.

    Raises:
        ValueError: with one sentence, if a file cannot be written.
    """
    if args.json:
        check_output_path("JSON file", args.json)
    if getattr(args, "plot", None):
        check_picture(args.plot)


def check(args: argparse.Namespace, any_sizes: bool) -> None:
    """Check before the measurement that its output can be written.

    Raises:
        ValueError: if a file cannot be written, or there will be nothing to plot.
    """
    check_files(args)
    if args.plot and not any_sizes:
        raise ValueError("--plot draws speed against size, and no sizes are measured")


def write_json(path: str | None, content: dict[str, Any], interruption: Interruption) -> None:
    """Write the JSON file if `path` is given; it records whether the run was interrupted.

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
    """Write the requested files. The plot shows the cases with one tensor per rank and some bytes.

    No plot is written if the run was interrupted before the first of these cases.
    """
    write_json(args.json, content, interruption)
    sized = [r for r in results if len(r.case.shapes) == 1 and r.case.count]
    if args.plot and sized:
        from .plot import plot

        about = content["environment"]
        caption = f"{about['machine']}, threads: {about['threads']}; torch {about['torch']}"
        plot(sized, args.plot, caption)
    interruption.reraise(args.json)
