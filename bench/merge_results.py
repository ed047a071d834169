"""Merge what one command wrote into the record of a GPU, a JSON file that grows run by run.

A run has a name and takes the place of the one that had it: its command, exit status and seconds,
where and with what it ran, and the content of its JSON file if it wrote one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

SCHEMA = 1
# What identifies a measurement; each is an option, with an empty string for "unknown".
ABOUT = ("gpu", "driver", "cuda", "torch", "commit")


def merged(record: dict[str, Any], name: str, run: dict[str, Any]) -> dict[str, Any]:
    """Return the record with this run in it; its head tells of the latest run."""
    about = {key: run[key] for key in ABOUT}
    return {"schema": SCHEMA, **about, "runs": {**record.get("runs", {}), name: run}}


def load_files() -> ModuleType:
    """Load what writes files, without its package: there may be no torch, or no build of ours."""
    path = Path(__file__).resolve().parents[1] / "pycollect" / "_files.py"
    spec = importlib.util.spec_from_file_location("pycollect_files", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


files = load_files()


def read(what: str, path: Path) -> dict[str, Any]:
    """Read a JSON object; ValueError in a sentence for a file that holds none."""
    files.check_input(what, path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"the {what} {path} cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"the {what} {path} holds no JSON object")
    return found


def write(path: Path, record: dict[str, Any]) -> None:
    """Replace the file in one step: whoever is killed half-way leaves the old one or the new."""
    content = (json.dumps(record, indent=1) + "\n").encode()
    with files.writing("record", path):
        files.replace(path, lambda file: file.write(content))


def last_line(log: Path) -> str:
    """Give the last line of a log that says anything."""
    files.check_input("log", log)
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("into", type=Path, nargs="+", help="records to merge into; made where there are none")
    add("--name", required=True, help="of the run")
    add("--content", type=Path, help="the JSON file that the run wrote, if it exists")
    add("--log", type=Path, help="a file whose last line says how it went")
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
            files.check_place("record", path, moved=True)
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
