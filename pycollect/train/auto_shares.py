"""Shares in proportion to measured throughput, which they follow while training goes on.

What was used is written down, because the same shares give the same bits: a run that is continued
goes on from it, and a run that is repeated can use it again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .portions import shares_of

# Of a new measurement in the smoothed throughput: a disturbed step moves the shares by little, and
# after ten steps of another speed nine tenths of it are in them.
_NEW = 0.2
# Steps between two changes: shapes that change at every step cost allocators and autotuners dear.
_PERIOD = 5
# How many times as long a step must take as with the best shares before they change: the times of
# equal ranks differ by less, and shares that follow noise change the bits for nothing.
_WORTH = 1.05


class AutoShares:
    """Shares that follow measured throughput, one rank's in examples a second.

    `shares(n)` gives those of the next step, and `observe(seconds)` takes what each rank then
    needed. All begin alike, and no rank is left without an example while there are enough: nobody
    would notice that it has become fast. With a `delay` a change takes effect so many steps after
    it is decided, and `shares_ahead` tells until then what is certain, for who prepares batches
    ahead. Raises ValueError for less than one rank.

    >>> auto = AutoShares(2)
    >>> for _ in range(20):
    ...     fast, slow = auto.shares(100)
    ...     auto.observe([fast * 0.001, slow * 0.004])
    >>> auto.shares(100)
    [80, 20]
    """

    def __init__(self, world: int, delay: int = 0) -> None:
        if world < 1:
            raise ValueError(f"shares are for at least one rank, not {world}")
        if delay < 0:
            raise ValueError(f"the delay must be at least 0 steps, not {delay}")
        self.world, self.delay = world, delay
        self._step = self._known = 0  # the next step, and the first that is not decided already
        self._rates: list[float] = []  # smoothed; none before the first measurement
        self._given: list[int] = []
        self._changes: list[tuple[int, list[float]]] = [(0, [1.0] * world)]

    @property
    def weights(self) -> list[float]:
        """The weights of the next step."""
        return self._weights_at(self._step)

    def _weights_at(self, step: int) -> list[float]:
        return list(next(w for since, w in reversed(self._changes) if since <= step))

    def shares(self, n: int) -> list[int]:
        """Give the shares of the next batch, of n examples, one per rank."""
        self._given = self.shares_ahead(n, 0)
        return list(self._given)

    def shares_ahead(self, n: int, steps: int) -> list[int]:
        """Give the shares of a batch of n examples that comes so many steps after the next.

        Raises ValueError for more steps than the delay: what comes then may still change.
        """
        if not 0 <= steps <= self.delay:
            raise ValueError(f"shares are certain for {self.delay} steps ahead, not for {steps}")
        shares = shares_of(n, self._weights_at(self._step + steps))
        while n >= self.world and not all(shares):
            shares[shares.index(max(shares))] -= 1
            shares[shares.index(0)] += 1
        return shares

    def observe(self, seconds: Sequence[float]) -> None:
        """Take the seconds of every rank for the shares that were given last; a step is over.

        Those of a rank without examples are ignored. Raises ValueError for another number of ranks
        and without shares that were given.
        """
        if len(seconds) != self.world or len(self._given) != self.world:
            raise ValueError(
                f"after shares() comes one observe() with {self.world} times, not {len(seconds)}"
            )
        given, self._given = self._given, []
        self._step += 1
        # The first step is no measure: libraries choose and load their kernels in it.
        if self._step <= self._known or self._step == 1:
            return
        known = self._rates or [0.0] * self.world
        self._rates = [
            _smoothed(rate, share, time)
            for rate, share, time in zip(known, given, seconds, strict=True)
        ]
        if self._step % _PERIOD == 0 and all(self._rates) and self._slow_down() > _WORTH:
            # The batches of the next `delay` steps may have been shared out already.
            self._changes.append((self._step + self.delay, list(self._rates)))

    def _slow_down(self) -> float:
        """How many times as long a step takes, when all is in effect, as with the best shares."""
        _, weights = self._changes[-1]
        longest = max(w / rate for w, rate in zip(weights, self._rates, strict=True))
        return longest / sum(weights) * sum(self._rates)

    def state_dict(self) -> dict[str, Any]:
        """Give everything that decides the next shares, and all that were used: numbers only."""
        changes = [[step, list(weights)] for step, weights in self._changes]
        return {"step": self._step, "rates": list(self._rates), "changes": changes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken; ValueError if it is of another number of ranks."""
        changes = [(int(step), [float(w) for w in weights]) for step, weights in state["changes"]]
        if len(changes[0][1]) != self.world:
            raise ValueError(
                f"the stored shares are for {len(changes[0][1])} ranks, and there are {self.world}"
            )
        self._changes, self._rates = changes, [float(rate) for rate in state["rates"]]
        self._step = self._known = int(state["step"])
        self._given = []

    def replay(self, state: Mapping[str, Any], step: int = 0) -> None:
        """Use the shares of a stored run again, from the given step on; measure after its end.

        Raises ValueError for a step that the stored run has not come to.

        >>> auto = AutoShares(2)
        >>> auto.replay({"step": 9, "rates": [3.0, 1.0], "changes": [[0, [1, 1]], [5, [3, 1]]]})
        >>> auto.shares(8)
        [4, 4]
        """
        if not 0 <= step <= int(state["step"]):
            raise ValueError(f"the stored run has {state['step']} steps; there is no step {step}")
        self.load_state_dict(state)
        self._step = step


def _smoothed(rate: float, share: int, seconds: float) -> float:
    if share == 0 or seconds <= 0:
        return rate
    return share / seconds if rate == 0 else (1 - _NEW) * rate + _NEW * share / seconds
