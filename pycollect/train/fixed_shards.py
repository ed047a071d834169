"""Shards: the fixed number of parts of every batch, whatever the number of ranks.

A rank has consecutive shards, trains on one after the other, and adds their gradients by a balanced
tree; the ranks add theirs by the upper part of the same tree (`order="tree"` of the collectives).
So the sum of all has the same bits on any number of ranks. A shard has random states and buffers,
as those of batch normalisation, of its own.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pycollect as pc

from .reduce import SPARSE, BucketSum, Gradients
from .shares import Examples

Losses: TypeAlias = dict[int, Tensor]  # of each rank here that has examples
_NARROW = (torch.float16, torch.bfloat16)  # whose sums are added in float32


def check_shards(shards: int, world: int, *, alone: bool = False) -> None:
    """Raise ValueError unless each rank has equally many shards, a power of two, or one `alone`.

    >>> check_shards(8, 7)
    Traceback (most recent call last):
    ValueError: 8 shards cannot be divided among 7 ranks, a power of two for each: 1, 2, 4, 8 can
    """
    if shards < 1:
        raise ValueError(f"there must be at least 1 shard, not {shards}")
    each, rest = divmod(shards, world)
    if rest or (world > 1 and each & (each - 1)):
        fitting = {1} | {shards >> k for k in range(64) if shards % 2**k == 0}
        raise ValueError(
            f"{shards} shards cannot be divided among {world} ranks, a power of two for each: "
            f"{', '.join(map(str, sorted(fitting)))} can"
        )
    if alone and shards != world:
        raise ValueError(
            f"batch statistics over all shards need a rank for each of the {shards} shards: there "
            f"are {world} ranks"
        )


def of_ranks(shares: Sequence[int], world: int) -> list[int]:
    """Return the examples of every rank, from those of every shard.

    >>> of_ranks([3, 3, 2, 2], 2)
    [6, 4]
    """
    each = len(shares) // world
    return [sum(shares[rank * each : (rank + 1) * each]) for rank in range(world)]


def reduce_gradients_in_tree_order(gradients: Gradients) -> None:
    """Sum `gradients[rank][i]` over the ranks in place, by a balanced tree over the ranks."""
    pc.all_reduce_coalesced(gradients, order="tree")


_IN_TREE_ORDER: MutableMapping[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def in_tree_order(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the same ranks whose sums are a balanced tree; collective."""
    if group not in _IN_TREE_ORDER:
        options = pc.distributed.options(order="tree", symmetric_heap_bytes=0)
        local = group is not dist.group.WORLD  # ranks that are not in the group do not call this
        ranks = dist.get_process_group_ranks(group)
        made: Any = dist.new_group(
            ranks, backend="pycollect", pg_options=options, use_local_synchronization=local
        )
        _IN_TREE_ORDER[group] = made
    return _IN_TREE_ORDER[group]


class ShardBuffers:
    """The buffers of the shards of one rank, of which its module has one shard's at a time.

    A buffer that shares memory with a parameter belongs to the rank.
    """

    def __init__(self, module: nn.Module, shards: int) -> None:
        self._module = module
        self._own = dict(module.named_buffers())  # into which values are copied while it has them
        self._of = [self._values() for _ in range(shards)]

    def save(self, shard: int) -> None:
        """Save the module's buffers as those of a shard."""
        self._of[shard] = self._values()

    @torch.no_grad()
    def load(self, shard: int) -> None:
        """Load the buffers of a shard into the module; what the shard lacks becomes None."""
        values, shared = self._of[shard], _memory(self._module)
        for name, buffer in list(self._module.named_buffers()):
            if name not in values and _address(buffer) not in shared:
                self._assign(name, None)
        for name, value in values.items():
            own = self._own.get(name)
            if own is None or (own.shape, own.dtype) != (value.shape, value.dtype):
                self._assign(name, value.clone())
            elif _address(own) not in shared:
                self._assign(name, own.copy_(value))

    def saved(self) -> list[dict[str, Tensor]]:
        """Return the buffers of all shards; the first are now the module's."""
        self.save(0)
        return self._of

    def set(self, others: Sequence[Mapping[str, Tensor]]) -> None:
        """Set the buffers of all shards but the first, which are the module's."""
        self.save(0)
        for shard, values in enumerate(others, 1):
            self._of[shard] = {
                name: values[name].to(buffer.device, copy=True)
                for name, buffer in self._of[0].items()
            }

    def _values(self) -> dict[str, Tensor]:
        shared = _memory(self._module)
        named = self._module.named_buffers()
        return {name: b.detach().clone() for name, b in named if _address(b) not in shared}

    def _assign(self, name: str, value: Tensor | None) -> None:
        owner, _, leaf = name.rpartition(".")
        self._module.get_submodule(owner)._buffers[leaf] = value


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _memory(module: nn.Module) -> set[int]:
    return {_address(param) for param in module.parameters() if param.numel()}


class OwnShards:
    """The shards of this process's ranks; without a number of shards each rank is a shard.

    `ranks` are the numbers of `modules`, of a world of ranks. A gradient that some shards lack
    counts as zeros there, and one that all lack stays None. Between steps the modules have the
    buffers of their first shards.
    """

    def __init__(
        self, shards: int | None, world: int, ranks: Sequence[int], modules: Sequence[nn.Module]
    ) -> None:
        self.count = shards or world  # of all ranks
        self.each = self.count // world  # of a rank
        self.numbers = [rank * self.each + i for rank in ranks for i in range(self.each)]
        self._world, self._ranks, self._modules = world, ranks, modules
        self._parameters = [list(module.parameters()) for module in modules]
        self._sums: list[list[list[Tensor | None]]] = []  # that wait for one of as many shards
        self._buffers = [ShardBuffers(module, self.each) for module in modules if self.each > 1]
        self._current = 0  # the shard of each rank that is computed

    def index(self, i: int) -> int:
        """Return the index in `numbers` of the shard that this process's i-th rank computes."""
        return i * self.each + self._current

    def shares(self, shares: Sequence[int]) -> list[int]:
        """Return the examples of this process's ranks, from those of all shards."""
        if len(shares) != self.count:
            what = "rank" if self.count == self._world else "shard"
            raise ValueError(f"there must be one share per {what}: {len(shares)} for {self.count}")
        found = of_ranks(shares, self._world)
        return [found[rank] for rank in self._ranks]

    def sizes(self, shares: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the examples of each rank's first shard, of each rank's second, and so on."""
        return tuple(tuple(shares[i :: self.each]) for i in range(self.each))

    def train(
        self, parts: Iterable[Examples], run: Callable[..., Losses], devices: Sequence[torch.device]
    ) -> Losses:
        """Run forward and backward on all shards; return the summed loss of each rank here.

        `run(X, y)` does so on a shard of each rank, of the `parts`, and returns their losses.
        """
        self._sums, found = [], []
        for own in self._buffers:
            own.save(0)  # what the module's may have become since the last step
        try:
            for number, (X, y) in enumerate(parts):
                self._current = number
                for own in self._buffers:
                    own.load(number)
                # Copies are aligned alike wherever a shard begins: a kernel may add otherwise.
                found.append(run([part.clone() for part in X], [part.clone() for part in y]))
                for own in self._buffers:
                    own.save(number)
                with torch.no_grad():
                    self._take_gradients(number)
        finally:
            for own in self._buffers:
                own.load(0)
        zero = torch.zeros(())
        return {
            i: total_loss([losses.get(i, zero) for losses in found], device)
            for i, device in enumerate(devices)
        }

    def finish(self, bucket_sum: BucketSum) -> None:
        """Set the gradients of all parameters to the sums over all ranks' shards."""
        while len(self._sums) > 1:
            self._add_last_two()
        (sums,) = self._sums
        self._sums = []
        summed = [[_stand_in(param) for param in mine] for mine in self._parameters]
        for stand_ins, mine in zip(summed, sums, strict=True):
            for stand_in, total in zip(stand_ins, mine, strict=True):
                stand_in.grad = total
        if pending := bucket_sum.start(summed, async_op=False):
            pending.wait()
        for stand_ins, params in zip(summed, self._parameters, strict=True):
            for stand_in, param in zip(stand_ins, params, strict=True):
                if stand_in is not param and stand_in.grad is not None:
                    param.grad = stand_in.grad.to(param.dtype)

    @property
    def buffers(self) -> list[dict[str, Tensor]]:
        """The buffers of this process's shards."""
        if self.each == 1:
            return [dict(module.named_buffers()) for module in self._modules]
        return [of_shard for own in self._buffers for of_shard in own.saved()]

    def set_buffers(self, buffers: Sequence[Mapping[str, Tensor]]) -> None:
        """Set the buffers of this process's shards."""
        for i, module in enumerate(self._modules):
            first, *others = buffers[i * self.each : (i + 1) * self.each]
            with torch.no_grad():
                for name, buffer in module.named_buffers():
                    buffer.copy_(first[name])
            if self._buffers:
                self._buffers[i].set(others)

    def _take_gradients(self, shard: int) -> None:
        self._sums.append([[_taken(p) for p in mine] for mine in self._parameters])
        while shard % 2:  # two sums of equally many shards are added at once
            self._add_last_two()
            shard //= 2

    def _add_last_two(self) -> None:
        right = self._sums.pop()
        for mine, others in zip(self._sums[-1], right, strict=True):
            lefts, rights = [], []
            for i, (left, other) in enumerate(zip(mine, others, strict=True)):
                if left is not None and other is not None:
                    lefts.append(left)
                    rights.append(other)
                elif (only := other if left is None else left) is not None:
                    mine[i] = only.add_(0.0)  # with zeros: -0.0 becomes +0.0
            if lefts:
                torch._foreach_add_(lefts, rights)


def _stand_in(param: nn.Parameter) -> Tensor:
    """Return what has the sum as its gradient: that of a narrow parameter would round."""
    if param.dtype not in _NARROW:
        return param
    return torch.empty_like(param, dtype=torch.float32, requires_grad=param.requires_grad)


def _taken(param: nn.Parameter) -> Tensor | None:
    """Take the gradient from a parameter, as its accumulator."""
    gradient, param.grad = param.grad, None
    if gradient is None:
        return None
    if gradient.layout != torch.strided:
        raise ValueError(SPARSE)
    return gradient.float() if param.dtype in _NARROW else gradient


def total_loss(losses: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of losses in tree order, in float64, on a device."""
    return pc.tree_sum([loss.to(device, torch.float64) for loss in losses])
