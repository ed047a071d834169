"""What a run prints and writes: tables, the record, the speed targets, and the machine's load.

Every script writes the same record: an indented header, then one line for each case and row, so
that `git diff` shows changed rows. Numbers are medians, in seconds, bytes and ratios.
"""

from __future__ import annotations

import json
import operator
import os
import sys
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pycollect._machine import read_lines
from pycollect._sizes import binary_size
from pycollect._timing import MOST_SPREAD

if TYPE_CHECKING:
    from .runner import Result, Row


# Version of the records, increased whenever a reader of older files would misread a new one.
SCHEMA = 3
# A run counts as disturbed if other processes use more than this share of all cores. On a quiet
# machine they use less than a tenth of it.
MOST_FOREIGN_CPU = 0.05
# Significant digits of the numbers in a record; the noise is in the third.
_DIGITS = 5
_NOTHING = "-"
_COMPARE = {">=": operator.ge, "<=": operator.le, "<": operator.lt}


@dataclass(frozen=True)
class Column:
    """A column of a table: heading, unit, and text of a row; a negative width aligns left.

    `text` is called with what the result is about and with the row.
    """

    head: str
    unit: str
    width: int
    text: Callable[[dict[str, Any], Row], str]

    def fit(self, text: str) -> str:
        """Pad to the column's width, or to that of the heading."""
        width = max(abs(self.width), len(self.head), len(self.unit))
        return text.ljust(width) if self.width < 0 else text.rjust(width)


@dataclass(frozen=True)
class Table:
    """The legend and the columns of the results that follow; `title` is a comment above them."""

    legend: str
    columns: Sequence[Column]
    title: Callable[[Result], str] = lambda result: ""

    def head(self) -> list[str]:
        """Return the legend and the header lines, as comments."""
        heads, units = (
            [c.fit(t) for c, t in zip(self.columns, row, strict=True)]
            for row in ([c.head for c in self.columns], [c.unit for c in self.columns])
        )
        lines = [f"#{' '.join(heads)}", f"#{' '.join(units)}".rstrip()]
        return [*self.legend.splitlines(), *(line for line in lines if line != "#")]

    def rows(self, result: Result) -> list[str]:
        """Return a line per row."""
        return [
            " " + " ".join(c.fit(c.text(result.about, row)) for c in self.columns).rstrip()
            for row in result.rows
        ]

    def refused(self, result: Result) -> list[str]:
        """Return a comment for each candidate that did not run."""
        return [f"# {name} not run: {why}" for name, why in result.not_run.items()]


def number(value: float | None, digits: int = 2, scale: float = 1.0) -> str:
    """Return a number as text, or a dash for None.

    >>> number(0.256, 1, 100), number(None)
    ('25.6', '-')
    """
    return _NOTHING if value is None else f"{value * scale:.{digits}f}"


def microseconds(seconds: float) -> str:
    """Return seconds in microseconds, as text; whole ones from a millisecond on."""
    us = seconds * 1e6
    return f"{us:.2f}" if us < 1_000 else f"{us:.0f}"


def of_about(head: str, key: str, unit: str = "", width: int = 6) -> Column:
    """Return the column of a value that all rows of a result share."""
    return Column(head, unit, width, lambda about, row: str(about[key]))


def of_row(
    head: str, key: str, unit: str = "", width: int = 8, digits: int = 2, scale: float = 1.0
) -> Column:
    """Return the column of one of the row's own numbers."""
    return Column(head, unit, width, lambda about, row: number(row.numbers.get(key), digits, scale))


def name(head: str = "algorithm", width: int = 16) -> Column:
    """Return the column of the candidates' names."""
    return Column(head, "", -width, lambda about, row: row.name)


def times(unit: str = "us") -> tuple[Column, Column]:
    """Return the columns of the median and of the 99th percentile, in us, ms or s."""

    def cell(percent: int) -> Callable[[dict[str, Any], Row], str]:
        if unit == "us":
            return lambda about, row: microseconds(row.timing.percentile(percent))
        scale, digits = {"ms": (1e3, 2), "s": (1, 4)}[unit]
        return lambda about, row: number(row.timing.percentile(percent), digits, scale)

    return Column("time", f"({unit})", 9, cell(50)), Column("p99", f"({unit})", 9, cell(99))


def faster(peer: str, head: str = "") -> Column:
    """Return the column of how many times faster than the peer a row is."""
    return Column(head or f"x{peer}", "", 6, lambda about, row: number(row.faster_than(peer)))


def limit() -> Column:
    """Return the column of the percentage of the limit's speed."""
    return Column("%limit", "", 6, lambda about, row: number(percent_of_limit(row), 0))


def wrong() -> Column:
    """Return the column of wrong elements."""
    return Column(
        "#wrong", "", 6, lambda about, row: _NOTHING if row.wrong is None else str(row.wrong)
    )


Value = Callable[["Row"], "float | None"]
Where = Mapping[str, Container[object]]


def where(given: Where | None = None, /, **allowed: Container[object]) -> Where:
    """Return the allowed values by key, those given and more: `where(world=(4,))`."""
    return {**(given or {}), **allowed}


@dataclass(frozen=True)
class Outcome:
    """A checked target. `measured` is its worst point, at `where`, or None without any point."""

    target: str
    sign: str
    wanted: float
    unit: str
    measured: float | None
    met: bool | None
    where: str


@dataclass(frozen=True)
class Target:
    """A speed target: the value of a candidate's row is at least, or at most, `wanted`.

    It is for the results whose `about` has one of the values that `where` allows for each key.
    """

    what: str
    wanted: float
    row: str
    value: Value
    where: Where | None = None
    sign: str = ">="
    unit: str = "x"

    def judge(self, results: Iterable[Result]) -> Outcome:
        """Return the outcome: the target's worst point among these results."""
        points = [
            (value, self._place(result))
            for result in results
            if all(result.about.get(key) in allowed for key, allowed in (self.where or {}).items())
            and (row := result.row(self.row))
            and (value := self.value(row)) is not None
        ]
        measured, place = (min if self.sign == ">=" else max)(points, default=(None, ""))
        met = None if measured is None else _COMPARE[self.sign](measured, self.wanted)
        return Outcome(self.what, self.sign, self.wanted, self.unit, measured, met, place)

    def _place(self, result: Result) -> str:
        """Describe a point, a disturbed run, and a limit that excludes the target."""
        notes, limit = [place(result.about)], result.limit
        if limit and limit.timing.spread > MOST_SPREAD:
            notes.append("disturbed")
        # The memory bandwidth of this machine may make the ratio to a peer impossible.
        reach = self.value(limit) if limit and self.unit == "x" else None
        if reach is not None and reach < self.wanted:
            notes.append(f"the limit itself is at {reach:.2f}x")
        return "; ".join(notes)


def place(about: dict[str, Any]) -> str:
    """Describe a case in a few words.

    >>> place({"collective": "all_reduce", "world": 4, "bytes": 65536})
    '4 ranks, 64 KiB'
    """
    forms: dict[str, Callable[[Any], str]] = {
        "what": str,
        "model": str,
        "hidden": "hidden {}".format,
        "dtype": str,
        "batch": "batch {}".format,
        "world": "{} ranks".format,
        "bytes": lambda n: binary_size(n) if n else "barrier",
    }
    return ", ".join(form(about[key]) for key, form in forms.items() if key in about)


# The devices of ranks that share a GPU, as a case names them.
ONE_GPU = tuple(f"cuda:{number}" for number in range(64))


def devices_named(devices: Iterable[object]) -> str | list[str]:
    """Return the names of the ranks' devices, or the one that all share."""
    names = list(dict.fromkeys(map(str, devices)))
    return names if len(names) > 1 else names[0]


def at_least(number: int) -> range:
    """Return all whole numbers from this one on."""
    return range(number, sys.maxsize)


def over(peer: str) -> Value:
    """Return the value of how many times faster a row is than a peer."""
    return lambda row: row.faster_than(peer)


def time_over(peer: str) -> Value:
    """Return the value of a row's time divided by that of a peer."""

    def value(row: Row) -> float | None:
        speedup = row.faster_than(peer)
        return 1 / speedup if speedup else None

    return value


def percent_of_limit(row: Row) -> float | None:
    """Return the percentage of the limit's speed."""
    return None if row.limit_share is None else 100 * row.limit_share


def in_microseconds(row: Row) -> float:
    """Return the median time in microseconds."""
    return row.seconds * 1e6


def target_lines(outcomes: Iterable[Outcome]) -> list[str]:
    """Return the table of targets: wanted value, measured value, and whether it is met."""
    words = {True: "yes", False: "NO", None: "not measured"}
    out = [f"# {'target':<58} {'wanted':>9} {'measured':>9}  met  worst at"]
    for o in outcomes:
        wanted = f"{o.sign} {o.wanted:g}{o.unit}"
        measured = _NOTHING if o.measured is None else f"{o.measured:.2f}{o.unit}"
        out.append(
            f"# {o.target:<58} {wanted:>9} {measured:>9}  {words[o.met]:<3}  {o.where}".rstrip()
        )
    return out


@dataclass(frozen=True)
class Load:
    """CPU time counters of the machine and of this benchmark, in seconds.

    `own` counts this process and its ended children.
    """

    seconds: float
    busy: float
    own: float
    average: float

    @classmethod
    def now(cls) -> Load:
        """Read the counters."""
        ticks = [int(x) for line in read_lines("/proc/stat", "cpu ") for x in line.split()[1:9]]
        # user, nice, system, idle, iowait, irq, softirq, steal: idle and iowait are not busy.
        busy = (sum(ticks) - sum(ticks[3:5])) / os.sysconf("SC_CLK_TCK")
        own = os.times()
        spent = own.user + own.system + own.children_user + own.children_system
        return cls(time.monotonic(), busy, spent, os.getloadavg()[0])


def noise(before: Load, after: Load, results: Iterable[Result]) -> dict[str, Any]:
    """Return the CPU share of other processes between the loads, and the limit's variation."""
    capacity = (after.seconds - before.seconds) * (os.cpu_count() or 1)
    foreign = (after.busy - before.busy) - (after.own - before.own)
    limits = [row.timing for result in results if (row := result.limit)]
    return {
        "load_average_before": before.average,
        "load_average_after": after.average,
        "foreign_cpu_share": max(0.0, foreign / capacity) if capacity else 0.0,
        "limit_rounds_max_over_min": max((t.spread for t in limits), default=None),
        "limit_p99_over_p50": max((t.tail for t in limits), default=None),
    }


def header(about: dict[str, Any]) -> list[str]:
    """Return the header lines of the output, as comments."""
    return [
        f"# pycollect {about['pycollect']}, commit {about['commit']}, torch {about['torch']}, "
        f"python {about['python']}, {about['time']}",
        f"# machine: {about['machine']}, {about['cores']} cores, {about['caches']}; "
        f"threads: {about['threads']}; GPU: {', '.join(about['gpus']) or 'none'}",
        f"# command: {about['command']}",
    ]


def footer(measured: dict[str, Any]) -> list[str]:
    """Return the lines about the load by other processes, with a warning if it was high."""
    share, spread = measured["foreign_cpu_share"], measured["limit_rounds_max_over_min"]
    tail = measured["limit_p99_over_p50"]
    varied = f"; limit: rounds max/min {spread:.2f}, p99/p50 {tail:.2f}" if spread else ""
    out = [
        f"# noise: load average {measured['load_average_before']:.2f} -> "
        f"{measured['load_average_after']:.2f}, other processes {100 * share:.0f} % of all cores"
        + varied
    ]
    if share > MOST_FOREIGN_CPU or (spread or 1) > MOST_SPREAD:
        out.append(
            "# WARNING: the machine was not quiet; rely on ratios rather than times, and run again"
        )
    return out


def case_record(result: Result) -> dict[str, Any]:
    """Return one result with all its rows; numbers that a row has not are left out."""
    limit = {"limit": result.limit.name} if result.limit else {}
    rows = [_row_record(row) for row in result.rows]
    return {**result.about, **limit, "not_run": result.not_run, "rows": rows}


def _row_record(row: Row) -> dict[str, Any]:
    found = {
        "name": row.name,
        "kind": row.kind,
        "clock": row.clock,
        "time": {"p50": row.timing.percentile(50), "p99": row.timing.percentile(99)},
        "limit_share": row.limit_share,
        "speedup": {peer: row.faster_than(peer) for peer in row.speedup},
        "wrong": row.wrong,
        **row.numbers,
    }
    return {key: value for key, value in found.items() if value not in (None, {})}


def text(record: dict[str, Any]) -> str:
    """Return the record as JSON: a line for each object in a list, and for each inner object
    without objects and lists; other objects are indented. Numbers are rounded.

    >>> rows = [{"name": "a", "time": {"p50": 0.5}}, {"name": "b"}]
    >>> print(text({"noise": {"before": 1, "after": 1 / 3}, "rows": rows}), end="")
    {
     "noise": {"before": 1, "after": 0.33333},
     "rows": [
      {"name": "a", "time": {"p50": 0.5}},
      {"name": "b"}]
    }
    """
    return _form(record, "\n", in_row=False) + "\n"


def _form(value: Any, margin: str, in_row: bool) -> str:
    """Return `value` as JSON; `margin` is a line feed and the indentation of the last line."""
    inner = margin + " "
    if isinstance(value, dict) and value:
        plain = not any(isinstance(entry, dict | list) for entry in value.values())
        in_row = in_row or (plain and margin != "\n")
        at = margin if in_row else inner
        entries = [f"{json.dumps(key)}: {_form(entry, at, in_row)}" for key, entry in value.items()]
        if in_row:
            return "{" + ", ".join(entries) + "}"
        return "{" + inner + f",{inner}".join(entries) + margin + "}"
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        rows = [_form(row, inner, in_row=True) for row in value]
        return "[" + inner + f",{inner}".join(rows) + "]"
    if isinstance(value, float):
        value = float(f"{value:.{_DIGITS}g}")
    return json.dumps(value)


def read(what: str, path: Path) -> dict[str, Any]:
    """Read a record; raise ValueError if the file does not contain a JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"the {what} {path} cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"the {what} {path} holds no JSON object")
    return found
