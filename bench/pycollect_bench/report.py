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

from pycollect._files import check_input
from pycollect._sizes import bytes_text
from pycollect._timing import MOST_SPREAD
from pycollect.info import read_lines

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
    """A column of a table: heading, value, unit, width, and the digits and scale of a number.

    `value` is a key of `values`, that of the heading if it is empty, or a function of what the
    result is about and of the row. A negative width aligns left.
    """

    head: str
    value: str | Callable[[dict[str, Any], Row], object] = ""
    unit: str = ""
    width: int = 6
    digits: int = 2
    scale: float = 1.0

    def text(self, about: dict[str, Any], row: Row) -> str:
        """Return the text of a row: a dash for None, no digits after the point from 1000 on."""
        key = self.value or self.head
        found = values(about, row).get(key) if isinstance(key, str) else key(about, row)
        if not isinstance(found, float):
            return _NOTHING if found is None else str(found)
        found *= self.scale
        return f"{found:.{self.digits if found < 1000 else 0}f}"

    def fit(self, text: str) -> str:
        """Pad to the column's width, or to that of the heading."""
        width = max(abs(self.width), len(self.head), len(self.unit))
        return text.ljust(width) if self.width < 0 else text.rjust(width)


def values(about: dict[str, Any], row: Row) -> dict[str, Any]:
    """Return what columns show of a row, in seconds, bytes per second and ratios."""
    times = {"time": row.seconds, "p99": row.timing.percentile(99)}
    algbw = {"algbw": about["bytes"] / row.seconds} if "bytes" in about else {}
    known = {"name": row.name, "%limit": percent_of_limit(row), "#wrong": row.wrong}
    speedup = {f"x{peer}": ratio for peer, ratio in row.speedup.items()}
    return {**about, **row.numbers, **times, **algbw, **known, **speedup}


@dataclass(frozen=True)
class Table:
    """The legend and the columns of the results that follow; `title` is a comment above them."""

    legend: str
    columns: Sequence[Column]
    title: Callable[[Result], str] = lambda result: ""

    def head(self) -> list[str]:
        """Return the legend and the header lines, as comments."""
        heads = " ".join(c.fit(c.head) for c in self.columns)
        units = " ".join(c.fit(c.unit) for c in self.columns).rstrip()
        return [*self.legend.splitlines(), f"#{heads}", *[f"#{units}"] * bool(units)]

    def rows(self, result: Result) -> list[str]:
        """Return a line per row."""
        return [
            " " + " ".join(c.fit(c.text(result.about, row)) for c in self.columns).rstrip()
            for row in result.rows
        ]


def times(unit: str = "us") -> tuple[Column, Column]:
    """Return the columns of the median and of the 99th percentile, in us, ms or s."""
    scale, digits = {"us": (1e6, 2), "ms": (1e3, 2), "s": (1, 4)}[unit]
    p50, p99 = (Column(head, head, f"({unit})", 9, digits, scale) for head in ("time", "p99"))
    return p50, p99


LIMIT, WRONG = Column("%limit", digits=0), Column("#wrong")


Value = Callable[["Row"], "float | None"]
# Allowed values of a result's `about` by key. `where(LARGE, world=(4,))` has those of LARGE, too.
where = dict[str, Container[object]]


@dataclass(frozen=True)
class Target:
    """A speed target: the value of a candidate's row is at least, or at most, `wanted`.

    It is for the results whose `about` has one of the values that `where` allows for each key.
    """

    what: str
    wanted: float
    row: str
    value: Value
    where: Mapping[str, Container[object]] | None = None
    sign: str = ">="
    unit: str = "x"

    def judge(self, results: Iterable[Result]) -> dict[str, Any]:
        """Return the target with its worst point among these results, for the record.

        `measured` and `met` are None without any point.
        """
        points = [
            (value, self._place(result))
            for result in results
            if all(result.about.get(key) in allowed for key, allowed in (self.where or {}).items())
            and (row := result.row(self.row))
            and (value := self.value(row)) is not None
        ]
        measured, place = (min if self.sign == ">=" else max)(points, default=(None, ""))
        return {
            "target": self.what,
            "sign": self.sign,
            "wanted": self.wanted,
            "unit": self.unit,
            "measured": measured,
            "met": None if measured is None else _COMPARE[self.sign](measured, self.wanted),
            "where": place,
        }

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
        "world": lambda n: f"{n} rank{'s' * (n > 1)}",
        "bytes": lambda n: bytes_text(n) if n else "barrier",
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
    return lambda row: row.speedup.get(peer)


def time_over(peer: str) -> Value:
    """Return the value of a row's time divided by that of a peer."""
    return lambda row: (speedup := row.speedup.get(peer)) and 1 / speedup


def percent_of_limit(row: Row) -> float | None:
    """Return the percentage of the limit's speed."""
    return None if row.limit_share is None else 100 * row.limit_share


def target_lines(targets: Iterable[dict[str, Any]]) -> list[str]:
    """Return the table of judged targets: wanted and measured value, and whether it is met."""
    words = {True: "yes", False: "NO", None: "not measured"}
    out = [f"# {'target':<58} {'wanted':>9} {'measured':>9}  met  worst at"]
    for t in targets:
        wanted = f"{t['sign']} {t['wanted']:g}{t['unit']}"
        measured = _NOTHING if t["met"] is None else f"{t['measured']:.2f}{t['unit']}"
        line = f"# {t['target']:<58} {wanted:>9} {measured:>9}  {words[t['met']]:<3}  {t['where']}"
        out.append(line.rstrip())
    return out


def load() -> tuple[float, float, float]:
    """Return the time and the CPU time of other processes so far, in seconds, and the load average.

    This process and its ended children are not among the others.
    """
    ticks = [int(x) for line in read_lines("/proc/stat", "cpu ") for x in line.split()[1:9]]
    # user, nice, system, idle, iowait, irq, softirq, steal: idle and iowait are not busy.
    busy = (sum(ticks) - sum(ticks[3:5])) / os.sysconf("SC_CLK_TCK")
    return time.monotonic(), busy - sum(os.times()[:4]), os.getloadavg()[0]


def noise(before: tuple[float, float, float], results: Iterable[Result]) -> dict[str, Any]:
    """Return the CPU share of other processes since this load, and the limit's variation."""
    (begun, foreign, average), (now, foreign_now, average_now) = before, load()
    share = (foreign_now - foreign) / (now - begun) / (os.cpu_count() or 1)
    limits = [row.timing for result in results if (row := result.limit)]
    return {
        "load_average_before": average,
        "load_average_after": average_now,
        "foreign_cpu_share": max(0.0, share),
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
    noise = (
        f"# noise: load average {measured['load_average_before']:.2f} -> "
        f"{measured['load_average_after']:.2f}, other processes {100 * share:.0f} % of all cores"
        + varied
    )
    warning = (
        "# WARNING: the machine was not quiet; rely on ratios rather than times, and run again"
    )
    return [noise, *[warning] * (share > MOST_FOREIGN_CPU or (spread or 1) > MOST_SPREAD)]


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
        "speedup": row.speedup,
        "wrong": row.wrong,
        **row.numbers,
    }
    return {key: value for key, value in found.items() if value not in (None, {})}


def text(record: dict[str, Any]) -> str:
    """Return the record as JSON: a line for each entry, for each one of `environment`, and for each
    object in a list. Numbers are rounded.

    >>> rows = [{"name": "a", "time": {"p50": 0.5}}, {"name": "b"}]
    >>> print(text({"noise": {"before": 1, "after": 1 / 3}, "rows": rows}), end="")
    {
     "noise": {"before": 1, "after": 0.33333},
     "rows": [
      {"name": "a", "time": {"p50": 0.5}},
      {"name": "b"}]
    }
    """
    lines = {key: _line(value) for key, value in record.items()}
    if "environment" in record:
        entries = {key: _line(value) for key, value in record["environment"].items()}
        lines["environment"] = _object(entries, "\n ")
    return _object(lines, "\n") + "\n"


def _object(texts: Mapping[str, str], margin: str) -> str:
    """Return a JSON object of these texts, each on a line; `margin` is that of its last line."""
    entries = [f"{margin} {json.dumps(key)}: {text}" for key, text in texts.items()]
    return "{" + ",".join(entries) + margin + "}"


def _line(value: Any, margin: str = "\n  ") -> str:
    """Return `value` as JSON on one line, except that each object in a list begins a line."""
    if isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {_line(entry, margin)}" for key, entry in value.items()]
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, list) and any(isinstance(row, dict) for row in value):
        return "[" + ",".join(margin + _line(row, margin + " ") for row in value) + "]"
    return json.dumps(float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value)


def read(path: Path) -> dict[str, Any]:
    """Read a record; raise ValueError if the file does not contain a JSON object."""
    check_input("record", path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"the record {path} cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"the record {path} holds no JSON object")
    return found
