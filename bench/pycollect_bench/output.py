"""Output files of a benchmark run: the JSON file and the plot."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from pycollect._command import Interruption
from pycollect._files import check_output_path, check_picture, replace, write, writing

from . import result_format
from .plot import drawn, plot


def check_files(args: argparse.Namespace) -> None:
    """Check before the measurement that the output files can be written.

    Raises:
        ValueError: if a file cannot be written.
    """
    if args.json:
        check_output_path("JSON file", args.json)
    if getattr(args, "plot", None):
        check_picture(args.plot)


def check(args: argparse.Namespace, any_sizes: bool) -> None:
    """Check before the measurement that its output can be written, and plotted.

    Raises:
        ValueError: if a file cannot be written, or --plot would have no sizes.
    """
    check_files(args)
    if args.plot and not any_sizes:
        raise ValueError("--plot draws speed against size, and no sizes are measured")


def write_json(path: str | None, content: dict[str, Any], interruption: Interruption) -> None:
    """Write the JSON file if `path` is given, with the schema and whether the run was interrupted.

    Raises:
        OutputError: if it cannot be written.
    """
    if path:
        whole = {"schema": result_format.SCHEMA, **content, "interrupted": bool(interruption)}
        write("JSON file", path, result_format.text(whole))


def keep_json(path: str | None, content: Callable[[], dict[str, Any]]) -> None:
    """Write the results so far, after every case: a benchmark that is killed loses only one case.

    The file is marked as interrupted until the run has ended.

    Raises:
        OutputError: if it cannot be written.
    """
    if path:
        whole = {"schema": result_format.SCHEMA, **content(), "interrupted": True}
        text = result_format.text(whole).encode()
        with writing("JSON file", path):
            replace(path, lambda file: file.write(text))


def write_all(
    args: argparse.Namespace, content: dict[str, Any], interruption: Interruption
) -> None:
    """Write the requested files.

    An interrupted run without any case to plot writes no plot.
    """
    write_json(args.json, content, interruption)
    if args.plot and drawn(content):
        plot(content, args.plot)
    interruption.reraise(args.json)
