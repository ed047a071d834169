"""Split a batch over the ranks: evenly, by weights, or by throughput that is measured."""

from collections.abc import Sequence

import torch
from torch import Tensor

import pycollect as pc
from pycollect.devices import DeviceSpec

from .auto_shares import AutoShares
from .portions import check_strict, shares_of


def split_batch(
    X: Tensor,
    y: Tensor,
    devices: DeviceSpec,
    weights: Sequence[float] | AutoShares | None = None,
    *,
    strict: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """Split a batch by examples, one shard per rank, in new memory on the rank's device.

    Without weights every rank gets as many; the first ranks get one more when the number does not
    divide, and the last ranks none when there are fewer examples than ranks. `weights` are one
    number per rank, such as 80 and 20, or an AutoShares. Raises ValueError if X and y differ in
    length, for weights that do not fit, and if `strict` and the number does not divide.

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
    if weights is None:
        shares = shares_of(len(X), [1] * world)
    elif isinstance(weights, AutoShares):
        if weights.world != world:
            raise ValueError(f"shares for {weights.world} ranks, and there are {world}")
        shares = weights.shares(len(X))
    elif isinstance(weights, str):
        raise ValueError(f"weights {weights!r} says nothing of these ranks: pass an AutoShares")
    elif len(weights) != world:
        raise ValueError(f"there must be one weight per rank, not {len(weights)} for {world}")
    else:
        shares = shares_of(len(X), weights)
    return scatter(X, y, ranks, shares)


def scatter(
    X: Tensor, y: Tensor, devices: Sequence[torch.device], shares: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Cut a batch into shards of the given sizes, each on its rank's device.

    Raises ValueError unless there is a label for each example and a share for each rank, and the
    shares are the whole batch.
    """
    if len(X) != len(y):
        raise ValueError(f"a batch needs one label per image: {len(X)} images, {len(y)} labels")
    if len(shares) != len(devices):
        raise ValueError(f"there must be one share per rank: {len(shares)} for {len(devices)}")
    if sum(shares) != len(X) or min(shares) < 0:
        raise ValueError(f"the shares {list(shares)} are not a batch of {len(X)} examples")
    X_shards, y_shards = (pc.scatter(part, devices, chunk_sizes=shares) for part in (X, y))
    return X_shards, y_shards
