"""Merge what one command wrote into the record of a GPU, a JSON file that grows run by run.

A run has a name and takes the place of the one that had it: its command, exit status and seconds,
where and with what it ran, and the content of its JSON file if it wrote one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCHEMA = 1
# What identifies a measurement; each is an option, with an empty string for "unknown".
ABOUT = ("gpu", "driver", "cuda", "torch", "commit")


def merged(record: dict[str, Any], name: str, run: dict[str, Any]) -> dict[str, Any]:
    """Return the record with this run in it; its head tells of the latest run."""
    about = {key: run[key] for key in ABOUT}
    return {"schema": SCHEMA, **about, "runs": {**record.get("runs", {}), name: run}}


def write(path: Path, record: dict[str, Any]) -> None:
    """Replace the file in one step: whoever is killed half-way leaves the old one or the new."""
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
    ) as file:
        json.dump(record, file, indent=1)
        file.write("\n")
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


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
    if args.log:
        lines = args.log.read_text(encoding="utf-8", errors="replace").split("\n")
        run["last_line"] = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if args.content and args.content.exists():
        run["content"] = json.loads(args.content.read_text(encoding="utf-8"))
    for path in args.into:
        old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        write(path, merged(old, args.name, run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
