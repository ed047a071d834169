"""Long calls take turns one by one, so that no disturbance hits one contestant alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from ..measure import ROUNDS, Effort, Sampler, Timing, interleave

# More turns than this add time, not certainty.
_MOST_TURNS = 301


@dataclass(frozen=True)
class _CallByCall(Effort):
    """Rounds of one call of each."""

    def calls(self, seconds_each: float, contestants: int) -> list[int]:
        """Return one call for every round."""
        return [1] * (self.iterations or ROUNDS)


def in_turns(samplers: Mapping[str, Sampler], effort: Effort) -> dict[str, Timing]:
    """Measure all samplers for about `effort.seconds` in all, and for seven turns at least.

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
