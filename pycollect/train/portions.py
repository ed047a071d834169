"""How many examples go where: the arithmetic of shares and microbatches, without tensors.

A share is a whole number of examples, and the shares of a batch are its size, whatever divides.
"""

import math
from collections.abc import Sequence
from functools import lru_cache


def shares_of(n: int, weights: Sequence[float]) -> list[int]:
    """Share out n examples in proportion to the weights, one share per rank.

    What is left after rounding down goes to the largest remainders, the first ranks first: equal
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
    # n * weight / total may be a hair below a whole number; what it lacks is its remainder.
    by_remainder = sorted(range(len(shares)), key=lambda rank: shares[rank] - wanted[rank])
    for rank in by_remainder[: n - sum(shares)]:
        shares[rank] += 1
    return shares


def check_strict(n: int, world: int, microbatch: int | None = None) -> None:
    """Raise ValueError unless everything divides, as BatchFlow demands it.

    >>> check_strict(5, 2)
    Traceback (most recent call last):
    ValueError: batch size must be divisible by the number of devices: 5 examples on 2 devices
    """
    if n % world:
        raise ValueError(
            "batch size must be divisible by the number of devices: "
            f"{n} examples on {world} devices"
        )
    if microbatch is None:
        return
    if microbatch % world:
        raise ValueError(
            "microbatch size must be divisible by the number of devices: "
            f"{microbatch} examples on {world} devices"
        )
    if n % microbatch:
        raise ValueError(
            "batch size must be divisible by the microbatch size: "
            f"{n} examples in microbatches of {microbatch}"
        )


@lru_cache(maxsize=64)  # full batches of steady shares, the last batch, and what shares drift by
def microbatches(shares: tuple[int, ...], size: int) -> tuple[tuple[int, ...], ...]:
    """Cut the shards of a batch into microbatches of `size` examples over all ranks.

    Gives the examples of every rank in every microbatch; only the last may be smaller than `size`.
    Each takes of every shard in proportion, so that no rank is idle for long.

    >>> microbatches((4, 4), 4)
    ((2, 2), (2, 2))
    >>> microbatches((3, 1), 2)
    ((2, 0), (1, 1))
    """
    # Every example at its place between 0 and 1 within its shard; then runs of `size`.
    turns = sorted(
        ((2 * i + 1) / (2 * share), rank) for rank, share in enumerate(shares) for i in range(share)
    )
    ranks = [rank for _, rank in turns]
    runs = (ranks[i : i + size] for i in range(0, len(ranks), size))
    return tuple(tuple(run.count(rank) for rank in range(len(shares))) for run in runs)
