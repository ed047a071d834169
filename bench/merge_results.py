"""Merge the results of one command into the record of a GPU, a JSON file with many named runs.

A run replaces the earlier run of its name. It has the command, its exit status and seconds, GPU and
software versions, and the content of the command's JSON file if there is one.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

# Fields that identify a measurement; each is a command-line option, "" if unknown.
ABOUT = ("gpu", "driver", "cuda", "torch", "commit")


def merged(record: dict[str, Any], name: str, run: dict[str, Any]) -> dict[str, Any]:
    """Return the record with this run added; the fields of ABOUT are those of the latest run."""
    about = {key: run[key] for key in ABOUT}
    return {"schema": result_format.SCHEMA, **about, "runs": {**record.get("runs", {}), name: run}}


def load(file: str) -> ModuleType:
    """Load a module of this repository without its package, which needs torch and a build."""
    path = Path(__file__).resolve().parents[1] / file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


files = load("pycollect/_files.py")
result_format = load("bench/pycollect_bench/result_format.py")


def read(what: str, path: Path) -> dict[str, Any]:
    """Read a JSON object; raise ValueError if the file has none."""
    files.check_input(what, path)
    found: dict[str, Any] = result_format.read(what, path)
    return found


def write(path: Path, record: dict[str, Any]) -> None:
    """Replace the file atomically: after an interruption, it has the old or the new content."""
    content = result_format.text(record).encode()
    with files.writing("record", path):
        files.replace(path, lambda file: file.write(content))


def last_line(log: Path) -> str:
    """Return the last line of a log that is not blank."""
    files.check_input("log", log)
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("into", type=Path, nargs="+", help="records to merge into; missing ones are created")
    add("--name", required=True, help="name of the run")
    add("--content", type=Path, help="the JSON file that the run wrote, if it exists")
    add("--log", type=Path, help="a file whose last line describes the outcome")
    add("--command", required=True)
    add("--status", type=int, required=True)
    add("--seconds", type=int, required=True)
    for key in ABOUT:
        add(f"--{key}", default="")
    args = parser.parse_args(argv)
    run = {key: getattr(args, key) for key in (*ABOUT, "command", "status", "seconds")}
    run["time"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    try:
        for path in args.into:
            files.check_output_path("record", path, moved=True)
        if args.log:
            run["last_line"] = last_line(args.log)
        if args.content and args.content.exists():
            run["content"] = read("content", args.content)
        old = [read("record", path) if path.exists() else {} for path in args.into]
        for path, record in zip(args.into, old, strict=True):
            write(path, merged(record, args.name, run))
    except (OSError, ValueError, files.OutputError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
