"""Keep the record of a GPU, a JSON file with many named runs.

`add` adds one run: the command, its exit status and seconds, GPU and software versions, and the
content of the command's JSON file if there is one. A run replaces the earlier run of its name.
`folders` merges the records that several commands of bench/gpu_report.sh left, each in a folder.
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
# Those in which all runs of a record should be equal.
SAME = ("gpu", "torch", "commit")


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


def last_line(log: Path, begin: str = "") -> str:
    """Return the last line of a log that is not blank, "" if no line starts with `begin`."""
    files.check_input("log", log)
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    if not any(line.startswith(begin) for line in lines):
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def add_run(args: argparse.Namespace) -> None:
    """Add the run of the arguments to all records."""
    run = {key: getattr(args, key) for key in (*ABOUT, "command", "status", "seconds")}
    run["time"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    for path in args.into:
        files.check_output_path("record", path, moved=True)
    if args.log:
        run["last_line"] = last_line(args.log)
    if args.content and args.content.exists():
        run["content"] = read("content", args.content)
    old = [read("record", path) if path.exists() else {} for path in args.into]
    for path, record in zip(args.into, old, strict=True):
        write(path, merged(record, args.name, run))


def runs_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the runs of a folder by the file name of their record.

    A run that was killed with its command has no status. Its results so far are in the file of its
    name, and its log ends with its output.
    """
    found = {path: read("record", path) for path in sorted(folder.glob("*.json"))}
    records = {path.name: record["runs"] for path, record in found.items() if "runs" in record}
    contents = {path.stem: record for path, record in found.items() if "runs" not in record}
    if not records:
        raise ValueError(f"the folder {folder} has no record of bench/gpu_report.sh")
    for name, run in ((name, run) for runs in records.values() for name, run in runs.items()):
        if run["status"] is None:
            logs = (last_line(log, f"== {name} [") for log in sorted(folder.glob("*.log")))
            run["last_line"] = next(filter(None, logs), "")
            if name in contents:
                run["content"] = contents[name]
    return records


def merge_folders(args: argparse.Namespace) -> None:
    """Merge the folders in order; a run that ended is not replaced by one that was killed."""
    records: dict[str, dict[str, Any]] = {}
    for folder in args.folders:
        for file, runs in runs_of(folder).items():
            path = args.results / file
            files.check_output_path("record", path, moved=True)
            if file not in records:
                records[file] = read("record", path) if path.exists() else {}
            for name, run in runs.items():
                if run["status"] is not None or name not in records[file].get("runs", {}):
                    records[file] = merged(records[file], name, run)
    kinds = {
        tuple(run[key] for key in SAME)
        for record in records.values()
        for run in record["runs"].values()
    }
    if len(kinds) > 1 and not args.mixed:
        found = "; ".join(sorted(", ".join(kind) for kind in kinds))
        raise ValueError(f"the runs differ in {', '.join(SAME)}: {found}; --mixed keeps them all")
    for file, record in records.items():
        write(args.results / file, record)
        print(f"{args.results / file}: {len(record['runs'])} runs")


def parser_of_commands() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("add", help="add one run to records")
    add = one.add_argument
    add("into", type=Path, nargs="+", help="records to add it to; missing ones are created")
    add("--name", required=True, help="name of the run")
    add("--content", type=Path, help="the JSON file that the run wrote, if it exists")
    add("--log", type=Path, help="a file whose last line describes the outcome")
    add("--command", required=True)
    add("--status", type=int, help="exit status; a run without one has not ended")
    add("--seconds", type=int, required=True)
    for key in ABOUT:
        add(f"--{key}", default="")
    one.set_defaults(work=add_run)
    many = commands.add_parser("folders", help="merge the records of several commands")
    add = many.add_argument
    add("folders", type=Path, nargs="+", help="what the commands left in OUT, oldest first")
    results = Path(__file__).resolve().parent / "results"
    add("--results", type=Path, default=results, help="folder to merge into (bench/results)")
    add("--mixed", action="store_true", help=f"allow runs that differ in {', '.join(SAME)}")
    many.set_defaults(work=merge_folders)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of_commands()
    args = parser.parse_args(argv)
    try:
        args.work(args)
    except (OSError, ValueError, files.OutputError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
