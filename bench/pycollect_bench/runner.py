"""Runs a script of bench/: results as they arrive, files, targets, time limits and Ctrl-C.

A script is a generator of results. Candidates take turns in rounds (`pycollect._timing`), and a
ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pycollect import _command
from pycollect._command import Interruption
from pycollect._files import check_output_path, check_picture, writing
from pycollect._files import replace as replace_file
from pycollect._timing import Effort, Order, Sampler, Timing, interleave, median_ratio, rotated
from pycollect.info import machine

from . import report
from .options import add_effort
from .ranks import RanksFailed
from .report import Table, Target

# The clocks: the host's until the device is done, the GPU's, the GPU's for a call in a graph, and
# the host's until the call returns. Names of rows end with the clock, such as default:gpu, unless
# it is the first.
WALL, GPU, GRAPH, RETURN = "wall", "gpu", "graph", "return"
# Kinds of rows; LIMIT is what no candidate can exceed, INSIDE a call that leaves Python out.
OURS, INSIDE, PEER, LIMIT = "pycollect", "inside", "peer", "limit"


@dataclass(frozen=True)
class Row:
    """The result of one candidate. `limit_share` is 1.0 at the limit, `wrong` counts elements.

    `speedup[peer]` has the peer's time divided by this candidate's, the median over the rounds.
    `numbers` has what only this benchmark measures, for its columns and the record.
    """

    name: str
    timing: Timing
    kind: str = OURS
    clock: str = WALL
    wrong: int | None = None
    limit_share: float | None = None
    speedup: dict[str, float] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The median of all calls."""
        return self.timing.percentile(50)


@dataclass(frozen=True)
class Way:
    """How a row is timed; `check`, after all turns, returns its number of wrong elements."""

    sampler: Sampler
    kind: str = OURS
    clock: str = WALL
    check: Callable[[], int] | None = None


def in_turns(
    ways: Mapping[str, Way],
    effort: Effort,
    order: Order = rotated,
    agreed: Callable[[float], float] = float,
    numbers: Callable[[Row], dict[str, Any]] = lambda row: {},
) -> list[Row]:
    """Measure the ways of all rows in turns, check their results, and return the compared rows.

    `numbers` returns what else is known of a row. For the other arguments see `interleave`.
    """
    timings = interleave({name: way.sampler for name, way in ways.items()}, effort, order, agreed)
    rows = []
    for name, timing in timings.items():
        way = ways[name]
        row = Row(name, timing, way.kind, way.clock, way.check and way.check())
        rows.append(replace(row, numbers=numbers(row)))
    return compared(rows)


def compared(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their ratios to each peer and to the fastest limit, by the same clock.

    The clock of peers and limits is the GPU's for a call in a graph.
    """

    def ratios(row: Row) -> Row:
        clock, mine = GPU if row.clock == GRAPH else row.clock, row.timing.rounds
        speedup = {
            other.name.removesuffix(f":{clock}"): median_ratio(other.timing.rounds, mine)
            for other in rows
            if other.clock == clock and other.kind == PEER
        }
        limit = fastest_limit(rows, clock)
        if limit is None or row.kind == INSIDE:  # which rewrites nothing
            return replace(row, speedup=speedup)
        share = median_ratio(limit.timing.rounds, mine)
        return replace(row, speedup=speedup, limit_share=share)

    return list(map(ratios, rows))


def fastest_limit(rows: Iterable[Row], clock: str = WALL) -> Row | None:
    """Return the row of the fastest limit by this clock, or None."""
    limits = [row for row in rows if row.kind == LIMIT and row.clock == clock]
    return min(limits, key=lambda row: row.seconds, default=None)


def reason(error: Exception) -> str:
    """Return one line with the reason why a candidate does not run: of a rank's traceback the last.

    >>> reason(RuntimeError("no connection\\nat a.cpp:1")), reason(KeyError())
    ('no connection', 'KeyError')
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-("Traceback" in str(error))] if lines else type(error).__name__


@dataclass(frozen=True)
class Result:
    """All rows of a case. `not_run` has the reason for each candidate that did not run.

    `about` is the case in the record, the table and the targets. `failed`: something that must run
    did not.
    """

    about: dict[str, Any]
    rows: Sequence[Row]
    not_run: dict[str, str] = field(default_factory=dict)
    failed: bool = False

    def row(self, name: str) -> Row | None:
        """Return the row of that name, if it was measured."""
        return next((row for row in self.rows if row.name == name), None)

    @property
    def limit(self) -> Row | None:
        """The row of the fastest limit by the host's clock, or None."""
        return fastest_limit(self.rows)


def clocked(name: str, clock: str) -> str:
    """Return the name of a candidate's row for a clock.

    >>> clocked("naive", "wall"), clocked("naive", "gpu")
    ('naive', 'naive:gpu')
    """
    return name if clock == WALL else f"{name}:{clock}"


Item = Result | Table | str  # a string is a comment


@dataclass(frozen=True)
class Script:
    """A script of bench/.

    `measure` yields a table before the results that it is for. `check` raises ValueError before
    anything is measured. `targets` makes the option --targets, `draw` the option --plot. `about` is
    added to the record's environment.
    """

    name: str
    doc: str | None
    add_arguments: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace], Iterator[Item]]
    seconds: float | None = 1.0  # usual time for a case; None: only a number of runs is chosen
    warmup: int = 3  # usual calls before the first timed one
    check: Callable[[argparse.Namespace], object] = lambda args: None
    targets: Callable[[argparse.Namespace], Iterable[Target]] | None = None
    draw: Callable[[dict[str, Any], str], None] | None = None
    about: Callable[[argparse.Namespace], dict[str, Any]] = lambda args: {}

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add all options to a parser."""
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        self.add_arguments(parser)
        add_effort(parser, self.seconds, self.warmup)
        out = parser.add_argument_group("where results go besides standard output")
        if self.targets:
            out.add_argument("--targets", action="store_true", help="check the speed targets")
        out.add_argument("--json", metavar="FILE", help="all results, in medians")
        if self.draw:
            out.add_argument("--plot", metavar="FILE", help="a picture (.png, .svg or .pdf)")
            what = "draw the picture of this file of --json, and measure nothing"
            out.add_argument("--redraw", metavar="FILE", type=Path, help=what)

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run with these arguments, or those of the process; return the exit status."""
        program = f"bench/{self.name}.py"
        parser = argparse.ArgumentParser(prog=program, description=self.doc)
        self.add_to(parser)

        def work() -> int:
            args = parser.parse_args(argv)
            command = sys.orig_argv if argv is None else [program, *argv]
            try:
                return self.run(args, shlex.join(command))
            except ValueError as error:
                _command.print_error(f"{program}: error: {error}")
                return _command.BAD_INPUT

        return _command.run(program, work)

    def run(self, args: argparse.Namespace, command: str) -> int:
        """Measure, print and write; return 0, 1 after a failure or wrong element, 3 if a target is
        missed.

        Raises:
            KeyboardInterrupt: after an interruption, once the results are written.
            OutputError: if a file cannot be written.
            ValueError: if the options are invalid together.
        """
        if args.json:
            check_output_path("JSON file", args.json, moved=True)
        if self.draw and args.plot:
            check_picture(args.plot)
        if self.draw and args.redraw:
            return self._redraw(args)
        self.check(args)
        return Run(self, args, command).finished()

    def _redraw(self, args: argparse.Namespace) -> int:
        if not args.plot:
            raise ValueError("--redraw needs --plot, the picture to write")
        record = report.read(args.redraw)
        ours = (record.get("schema"), record.get("script")) == (report.SCHEMA, self.name)
        if not ours or not record["cases"]:
            raise ValueError(f"the record {args.redraw} has no results of {self.name} to draw")
        assert self.draw
        self.draw(record, args.plot)
        return 0


def without_folders(command: str) -> str:
    """Return the command without the folders of absolute paths, which differ between machines.

    >>> without_folders("/usr/bin/python bench/run.py --json=/tmp/a.json -e 1M")
    'python bench/run.py --json=a.json -e 1M'
    """
    return shlex.join(re.sub(r"(^|=)/(.*/)?", r"\1", word) for word in shlex.split(command))


class Run:
    """One run of a script, and its record so far."""

    def __init__(self, script: Script, args: argparse.Namespace, command: str) -> None:
        self._script, self._args = script, args
        self._results: list[Result] = []
        self._table: Table | None = None
        self._title = ""  # of the last result
        self._printed: set[str] = set()  # lines
        self._record: dict[str, Any] = {
            "schema": report.SCHEMA,
            "script": script.name,
            "environment": {"command": without_folders(command), **machine(), **script.about(args)},
            "noise": {},
            "cases": [],
            "targets": [],
            "failure": None,
            "interrupted": True,  # until the run has ended
        }
        self._before = report.load()
        self._print(report.header(self._record["environment"]))

    def finished(self) -> int:
        """Measure to the end, write the files, and return the exit status."""
        script, args, record, interruption = self._script, self._args, self._record, Interruption()
        try:
            with interruption, closing(script.measure(args)) as items:  # type: ignore[type-var]
                for item in items:
                    self._take(item)
        except RanksFailed as error:  # the times up to then are right
            record["failure"] = str(error)
            self._print([f"# FAILED: {error}"])
        if script.targets and args.targets:
            record["targets"] = [target.judge(self._results) for target in script.targets(args)]
            self._print(report.target_lines(record["targets"]))
        record["interrupted"] = bool(interruption)
        self._keep()
        self._print(report.footer(record["noise"]))
        if script.draw and args.plot and record["cases"]:
            script.draw(json.loads(report.text(record)), args.plot)  # as it is redrawn later
        interruption.reraise(args.json)
        if record["failure"] or any(
            r.failed or any(w.wrong for w in r.rows) for r in self._results
        ):
            return 1
        return 3 * any(target["met"] is False for target in record["targets"])

    def _take(self, item: Item) -> None:
        if isinstance(item, str):
            self._print([item])
        elif isinstance(item, Table):
            self._table = item
            self._print(item.head(), once=True)
        else:
            assert self._table is not None
            # First, because an interruption while lines are printed must not lose it.
            self._results.append(item)
            self._record["cases"].append(report.case_record(item))
            title, self._title = self._title, self._table.title(item)
            self._print([self._title] * (self._title != title))
            self._print(self._table.rows(item))
            self._print(
                [f"# {name} not run: {why}" for name, why in item.not_run.items()], once=True
            )
            self._keep()

    def _print(self, lines: Sequence[str], once: bool = False) -> None:
        """Print lines; with `once` those that were not printed before."""
        for line in lines:
            if not (once and line in self._printed):
                print(line, flush=True)
        self._printed.update(lines)

    def _keep(self) -> None:
        """Write the results so far: a benchmark that is killed loses only one case."""
        self._record["noise"] = report.noise(self._before, self._results)
        if self._args.json:
            found = report.text(self._record).encode()
            with writing("JSON file", self._args.json):
                replace_file(self._args.json, lambda file: file.write(found))
