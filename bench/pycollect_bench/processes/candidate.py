"""A candidate on one rank: the timed call, the preceding rewrite, and the check of the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..cases import Call


@dataclass(frozen=True)
class Candidate:
    """A candidate; `checked` runs one call and returns this rank's number of wrong elements."""

    name: str
    kind: str
    call: Call
    rewrite: Callable[[int], None]
    checked: Callable[[], int] | None
    always_rewritten: bool = False
