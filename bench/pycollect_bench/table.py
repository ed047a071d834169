"""The printed tables: nccl-tests' columns, each defined once for header and rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pycollect._timing import Timing

from .cases import Case
from .comparison import NAIVE, CaseResult, Row
from .targets import Outcome

Format = Callable[[Case, Row], str]
_NOTHING = "-"


@dataclass(frozen=True)
class Column:
    """A column: heading, unit, and text of a row; a negative width aligns left."""

    head: str
    unit: str
    width: int
    text: Format

    def fit(self, text: str) -> str:
        """Pad to the column's width."""
        return text.ljust(-self.width) if self.width < 0 else text.rjust(self.width)


def _number(value: float | None, digits: int = 2) -> str:
    return _NOTHING if value is None else f"{value:.{digits}f}"


def _microseconds(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.2f}" if us < 1_000 else f"{us:.0f}"


def gigabytes_per_second(nbytes: float, timing: Timing) -> float:
    """Return the median speed in 1e9 bytes per second."""
    return nbytes / timing.percentile(50) / 1e9


def _count(wrong: int | None) -> str:
    return _NOTHING if wrong is None else str(wrong)


def columns(one_memory: bool, against: Sequence[str] = (NAIVE,)) -> list[Column]:
    """Return the columns; for ranks on one memory `moved` replaces `busbw`.

    For each peer in `against` there is a column with the ratio to it.
    """
    if one_memory:
        speed = Column("moved", "(GB/s)", 8, _moved)
    else:
        speed = Column("busbw", "(GB/s)", 8, _busbw)
    return [
        Column("world", "", 6, lambda case, row: str(case.world)),
        Column("size", "(B)", 11, lambda case, row: str(case.nbytes)),
        Column("count", "", 10, lambda case, row: str(case.count)),
        Column("type", "", 13, lambda case, row: str(case.dtype).removeprefix("torch.")),
        Column("redop", "", 5, lambda case, row: case.op),
        Column("algorithm", "", -16, lambda case, row: row.name),
        Column("time", "(us)", 9, lambda case, row: _microseconds(row.timing.percentile(50))),
        Column("p99", "(us)", 9, lambda case, row: _microseconds(row.timing.percentile(99))),
        Column("algbw", "(GB/s)", 8, _algbw),
        speed,
        Column("%limit", "", 6, _limit),
        *map(_ratio, against),
        Column("#wrong", "", 6, lambda case, row: _count(row.wrong)),
    ]


def _ratio(peer: str) -> Column:
    head = f"x{peer}"
    width = max(6, len(head))
    return Column(head, "", width, lambda case, row: _number(row.times_faster_than(peer)))


def _algbw(case: Case, row: Row) -> str:
    return _number(gigabytes_per_second(case.nbytes, row.timing))


def _moved(case: Case, row: Row) -> str:
    return _number(gigabytes_per_second(case.minimum_bytes, row.timing))


def _busbw(case: Case, row: Row) -> str:
    return _number(gigabytes_per_second(case.nbytes * case.bus_factor, row.timing))


def _limit(case: Case, row: Row) -> str:
    return _number(None if row.limit_share is None else 100 * row.limit_share, 0)


def head(of: Sequence[Column]) -> list[str]:
    """Return the two header lines of the table, as comments."""
    return [
        "#" + " ".join(c.fit(c.head) for c in of)[1:],
        "#" + " ".join(c.fit(c.unit) for c in of)[1:],
    ]


def lines(result: CaseResult, of: Sequence[Column]) -> list[str]:
    """Return a line per candidate, and a comment for each candidate that could not run."""
    rows = [" ".join(c.fit(c.text(result.case, row)) for c in of) for row in result.rows]
    return rows + [f"# {name} not run: {why}" for name, why in result.not_run.items()]


def call_lines(calls: dict[str, Timing]) -> list[str]:
    """Return the table of call costs: microseconds per call, over batches."""
    out = [f"#{'call':<35} {'p50 (us)':>9} {'p99 (us)':>9} {'best (us)':>9}"]
    for name, timing in calls.items():
        cells = (_microseconds(timing.percentile(p)).rjust(9) for p in (50, 99, 0))
        out.append(" ".join([f" {name:<35}", *cells]))
    return out


def target_lines(outcomes: Iterable[Outcome]) -> list[str]:
    """Return the table of targets: wanted value, measured value, and whether it is met."""
    words = {True: "yes", False: "NO", None: "not measured"}
    out = [f"# {'target':<58} {'wanted':>9} {'measured':>9}  met  worst at"]
    for o in outcomes:
        wanted = f"{o.sign} {o.wanted:g}{o.unit}"
        measured = _NOTHING if o.measured is None else f"{o.measured:.2f}{o.unit}"
        out.append(
            f"# {o.what:<58} {wanted:>9} {measured:>9}  {words[o.met]:<3}  {o.where}".rstrip()
        )
    return out
