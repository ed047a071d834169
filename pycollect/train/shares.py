"""Shares of a batch per rank: by given weights, or by measured throughput.

A share is a whole number of examples, and the shares of a batch always add up to its size. Measured
shares are in checkpoints, and a resumed run continues with them; a repeated run measures others,
and has other bits.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

import pycollect as pc
from pycollect.devices import DeviceSpec
from pycollect.errors import shown

Examples: TypeAlias = tuple[list[Tensor], list[Tensor]]  # X and y of each rank here
# Weight of a new measurement in the smoothed throughput: one disturbed step changes the shares
# little, and after ten steps at a new speed the shares contain nine tenths of the change.
_SMOOTHING = 0.2
# Steps between two changes of the shares: new shapes at every step are expensive for allocators and
# autotuners.
_PERIOD = 5
# Least ratio of the current step time to that with the best shares at which the shares change. The
# times of equal ranks differ by less, and shares that follow noise would change the bits in vain.
_MIN_SLOWDOWN = 1.05


def shares_of(n: int, weights: Sequence[float]) -> list[int]:
    """Split n examples in proportion to the weights, one share per rank.

    Examples left after rounding down go to the largest remainders, the first ranks first, so equal
    weights give the sizes of torch.tensor_split. Raises ValueError for weights that are negative,
    not finite, or all 0.

    >>> shares_of(100, [80, 20]), shares_of(5, [1, 1, 1]), shares_of(1, [1, 1])
    ([80, 20], [2, 2, 1], [1, 0])
    """
    total = math.fsum(weights)
    if not (total > 0 and math.isfinite(total) and min(weights) >= 0):
        raise ValueError(
            f"weights must be numbers of at least 0, not all of them 0, and not {list(weights)}"
        )
    wanted = [n * weight / total for weight in weights]
    shares = [math.floor(share) for share in wanted]
    # n * weight / total may be slightly below a whole number; then its remainder is almost 1.
    by_remainder = sorted(range(len(shares)), key=lambda rank: shares[rank] - wanted[rank])
    for rank in by_remainder[: n - sum(shares)]:
        shares[rank] += 1
    return shares


def check_strict(
    n: int, world: int, microbatch: int | None = None, shards: int | None = None
) -> None:
    """Raise ValueError unless batch and microbatch divide evenly, as BatchFlow requires.

    >>> check_strict(5, 2)
    Traceback (most recent call last):
    ValueError: batch size must be divisible by the number of devices: 5 examples on 2 devices
    """
    parts, name = (shards, "shards") if shards else (world, "devices")
    for what, size in (("batch", n), ("microbatch", microbatch)):
        if size is not None and size % parts:
            raise ValueError(
                f"{what} size must be divisible by the number of {name}: "
                f"{size} examples on {parts} {name}"
            )
    if microbatch is not None and n % microbatch:
        raise ValueError(
            "batch size must be divisible by the microbatch size: "
            f"{n} examples in microbatches of {microbatch}"
        )


@lru_cache(maxsize=64)  # few distinct keys: full and last batches, and slowly changing shares
def microbatches(shares: tuple[int, ...], size: int) -> tuple[tuple[int, ...], ...]:
    """Split the shards of a batch into microbatches of `size` examples over all ranks.

    Returns the number of examples of every rank in every microbatch; only the last may be smaller
    than `size`. Each microbatch takes proportionally from every shard, so no rank is idle for long.

    >>> microbatches((4, 4), 4)
    ((2, 2), (2, 2))
    >>> microbatches((3, 1), 2)
    ((2, 0), (1, 1))
    """
    # Sort all examples by their relative position (0 to 1) in their shard; cut into runs of `size`.
    turns = sorted(
        ((2 * i + 1) / (2 * share), rank) for rank, share in enumerate(shares) for i in range(share)
    )
    ranks = [rank for _, rank in turns]
    runs = (ranks[i : i + size] for i in range(0, len(ranks), size))
    return tuple(tuple(run.count(rank) for rank in range(len(shares))) for run in runs)


def parts_of(
    X: Sequence[Tensor], y: Sequence[Tensor], sizes: Sequence[Sequence[int]]
) -> list[Examples]:
    """Cut the examples of this process's ranks into parts of sizes[part][rank] examples.

    >>> parts_of([torch.arange(3)], [torch.zeros(3)], [[2], [1]])[1]
    ([tensor([2])], [tensor([0.])])
    """
    of_ranks = [list(of_rank) for of_rank in zip(*sizes, strict=True)]
    cut = [
        [torch.split(whole, sizes) for whole, sizes in zip(side, of_ranks, strict=True)]
        for side in (X, y)
    ]
    return [([x[i] for x in cut[0]], [x[i] for x in cut[1]]) for i in range(len(sizes))]


class AutoShares:
    """Shares of a batch that follow the measured throughput of every rank, in examples per second.

    `world` is the number of ranks. In every step call `shares(n)`, which returns the number of
    examples of each rank, and then `observe(seconds)` with the times that the ranks needed. All
    shares begin equal, and change after every fifth step at most. Every rank gets an example while
    there are enough, because without one its speed could not be measured. With a `delay`
    (default 0) a change takes effect that many steps after it is decided, and `shares_ahead`
    returns the shares of the steps before, for loaders that prepare batches ahead. Raises
    ValueError for less than one rank or a delay below 0.

    >>> auto = AutoShares(2)
    >>> for _ in range(20):
    ...     fast, slow = auto.shares(100)
    ...     auto.observe([fast * 0.001, slow * 0.004])
    >>> auto.shares(100)
    [80, 20]
    """

    def __init__(self, world: int, delay: int = 0) -> None:
        if world < 1:
            raise ValueError(f"there must be at least one rank, not {world}")
        if delay < 0:
            raise ValueError(f"the delay must be at least 0 steps, not {delay}")
        self.world, self.delay = world, delay
        self._step = 0  # the next step
        self._rates = [0.0] * world  # smoothed examples per second; 0 before measurements
        self._given: list[int] = []
        self._changes: list[tuple[int, list[float]]] = [(0, [1.0] * world)]

    @property
    def weights(self) -> list[float]:
        """The weights of the ranks in the next step, to which their shares are proportional."""
        return self._weights_at(self._step)

    def _weights_at(self, step: int) -> list[float]:
        return list(next(w for since, w in reversed(self._changes) if since <= step))

    def shares(self, n: int) -> list[int]:
        """Return the shares of the next batch, of n examples, one per rank."""
        self._given = self.shares_ahead(n, 0)
        return list(self._given)

    def shares_ahead(self, n: int, steps: int) -> list[int]:
        """Return the shares of a batch of n examples that comes `steps` steps after the next.

        Raises ValueError for more steps than the delay: those shares may still change.
        """
        if not 0 <= steps <= self.delay:
            raise ValueError(f"shares are certain for {self.delay} steps ahead, not for {steps}")
        shares = shares_of(n, self._weights_at(self._step + steps))
        while n >= self.world and not all(shares):
            shares[shares.index(max(shares))] -= 1
            shares[shares.index(0)] += 1
        return shares

    def observe(self, seconds: Sequence[float]) -> None:
        """Record the seconds of every rank for the last returned shares; ends a step.

        The seconds of a rank without examples are ignored. Raises ValueError for another number of
        ranks, and without a preceding `shares`.
        """
        if len(seconds) != self.world or len(self._given) != self.world:
            raise ValueError(
                f"after shares() call observe() once, with {self.world} times, not {len(seconds)}"
            )
        given, self._given = self._given, []
        self._step += 1
        # Ignore the times of the first step, in which libraries choose and load their kernels.
        if self._step == 1:
            return
        for rank, (share, time) in enumerate(zip(given, seconds, strict=True)):
            if share and time > 0:
                rate = self._rates[rank]
                new = (1 - _SMOOTHING) * rate + _SMOOTHING * share / time
                self._rates[rank] = new if rate else share / time
        if self._step % _PERIOD == 0 and all(self._rates) and self._slowdown() > _MIN_SLOWDOWN:
            # Loaders may already have split the batches of the next `delay` steps.
            self._changes.append((self._step + self.delay, list(self._rates)))

    def _slowdown(self) -> float:
        """Return the ratio of the step time with the last decided shares to that with the best."""
        _, weights = self._changes[-1]
        longest = max(w / rate for w, rate in zip(weights, self._rates, strict=True))
        return longest / sum(weights) * sum(self._rates)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that decides the next shares, and all used weights: numbers only."""
        changes = [[step, list(weights)] for step, weights in self._changes]
        return {"step": self._step, "rates": list(self._rates), "changes": changes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`; ValueError if it has another number of ranks."""
        changes = [(int(step), [float(w) for w in weights]) for step, weights in state["changes"]]
        if len(changes[0][1]) != self.world:
            raise ValueError(
                f"the stored shares are for {len(changes[0][1])} ranks, and there are {self.world}"
            )
        self._changes = changes
        self._rates = [float(rate) for rate in state["rates"]] or [0.0] * self.world
        self._step = int(state["step"])
        self._given = []


def split_batch(
    X: Tensor,
    y: Tensor,
    devices: DeviceSpec,
    weights: Sequence[float] | AutoShares | None = None,
    *,
    strict: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """Split a batch by examples; return the shards of X and those of y, one per rank.

    X has shape [n, ...] and y [n], on any device. A rank's shards are new tensors [k, ...] and [k]
    of the same dtypes, on its device; `devices` is an argument of `pycollect.devices`. Without
    weights the shards are even: the first ranks get one example more if the number does not divide,
    and the last ranks none if there are fewer examples than ranks. `weights` are one number per
    rank, such as 80 and 20, or an AutoShares, whose next shares are taken. Raises ValueError if X
    and y differ in length, for weights that do not fit (one per rank, at least 0, not all 0), for a
    device that does not exist, and with `strict` (default: off) if the number of ranks does not
    divide n.

    >>> X, y = torch.zeros(5, 1, 28, 28), torch.arange(5)
    >>> split_batch(X, y, "cpu*2")[1]
    [tensor([0, 1, 2]), tensor([3, 4])]
    >>> split_batch(X, y, "cpu*2", weights=[80, 20])[1]
    [tensor([0, 1, 2, 3]), tensor([4])]
    """
    ranks = pc.devices(devices)
    world = len(ranks)
    if strict:
        check_strict(len(X), world)
    if isinstance(weights, str):
        raise ValueError(f"weights is {shown(weights)}: pass an AutoShares, or one number per rank")
    given = weights.weights if isinstance(weights, AutoShares) else weights
    given = [1.0] * world if given is None else given
    if len(given) != world:
        raise ValueError(f"there must be one weight per rank, not {len(given)} for {world}")
    if isinstance(weights, AutoShares):
        return scatter_batch(X, y, ranks, weights.shares(len(X)))
    return scatter_batch(X, y, ranks, shares_of(len(X), given))


def scatter_batch(
    X: Tensor, y: Tensor, devices: Sequence[torch.device], shares: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Split a batch into shards of the given sizes, each on its rank's device.

    Raises ValueError unless there is a label for each example and a share for each rank, and the
    shares add up to the batch.
    """
    if len(X) != len(y):
        raise ValueError(f"a batch needs one label per image: {len(X)} images, {len(y)} labels")
    if len(shares) != len(devices):
        raise ValueError(f"there must be one share per rank: {len(shares)} for {len(devices)}")
    if sum(shares) != len(X) or min(shares) < 0:
        raise ValueError(f"the shares {list(shares)} must be at least 0 and add up to {len(X)}")
    X_shards, y_shards = (pc.scatter(part, devices, chunk_sizes=shares) for part in (X, y))
    return X_shards, y_shards
