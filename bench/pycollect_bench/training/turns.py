"""Turns of single calls for long calls, so that no disturbance affects only one candidate."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from pycollect._timing import ROUNDS, Effort, Sampler, Timing, interleave

# Largest number of turns; more add time, not certainty.
_MOST_TURNS = 301


@dataclass(frozen=True)
class _CallByCall(Effort):
    """Effort whose rounds have one call of each candidate."""

    def calls(self, seconds_each: float, candidates: int) -> list[int]:
        """Return one call for every round."""
        return [1] * (self.iterations or ROUNDS)


def in_turns(samplers: Mapping[str, Sampler], effort: Effort) -> dict[str, Timing]:
    """Measure all samplers in turns, for about `effort.seconds` in all and at least seven turns.

    >>> in_turns({"a": lambda n: [1.0] * n}, Effort(iterations=3))["a"].rounds
    [1.0, 1.0, 1.0]
    """
    turns = effort.iterations
    if turns is None:
        begin = time.perf_counter()
        for sampler in samplers.values():  # warms up as well
            sampler(1)
        one = time.perf_counter() - begin
        turns = min(_MOST_TURNS, max(ROUNDS, int(effort.seconds / one) | 1))
    return interleave(samplers, _CallByCall(effort.seconds, turns, effort.warmup))
