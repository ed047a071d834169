"""One who takes part, on one rank: what is timed, what comes before, and who checks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..cases import Call


@dataclass(frozen=True)
class Contestant:
    """`checked` returns the number of this rank's wrong elements after one call."""

    name: str
    kind: str
    call: Call
    rewrite: Callable[[int], None]
    checked: Callable[[], int] | None
    always_rewritten: bool = False
