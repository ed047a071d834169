"""Gluon's Trainer: holds the replicas and one optimizer per rank, and sums the gradients.

The training step is the lecture's: forward and backward on every device, then
``trainer.step(batch_size)``. Gluon's backward overwrites gradients and torch's adds to them, so an
update clears them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pycollect import _C
from pycollect.errors import shown

from .losses import check_step
from .module_replication import memory_blocks
from .reduce import matching_gradients, reduce_gradients_coalesced

MakeOptimizer: TypeAlias = Callable[..., Optimizer]
_NAMES = {"learning_rate": "lr", "wd": "weight_decay"}  # Gluon's option names to torch's


class GluonTrainer:
    """Update replicas of a model by gradients that it sums over their devices.

    ``replicas`` has a module or a list of parameters for every rank, all of this process and alike
    in number, shape, dtype and requires_grad. ``optimizer`` is the name of a torch.optim class
    ("sgd", "adam") or a callable that makes an optimizer from parameters, and ``optimizer_params``
    are its arguments, with torch's names and defaults; learning_rate and wd stand for lr and
    weight_decay, as in Gluon. Each rank has its own optimizer, so equal replicas stay equal to the
    bit. Gradients that parameters already have, as after a step of ``ReplicaTrainer``, are part of
    the first sum unless they are cleared before.

    Raises ValueError for replicas that differ, share a parameter or have none, for an unknown name,
    and for an optimizer whose step needs a closure; TypeError for replicas that are no list, for an
    argument that the optimizer does not have, and for an optimizer that has been made, which only
    one rank could have.

    >>> nets = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    >>> for net in nets: _ = nn.init.ones_(net.weight)
    >>> trainer = GluonTrainer(nets, "sgd", {"learning_rate": 0.5})
    >>> for net in nets: net(torch.ones(2, 1)).sum().backward()
    >>> trainer.step(batch_size=4); nets[1].weight.item()
    0.5
    """

    def __init__(
        self,
        replicas: Sequence[nn.Module | Iterable[Tensor]],
        optimizer: str | MakeOptimizer,
        optimizer_params: Mapping[str, Any] | None = None,
    ) -> None:
        one = isinstance(replicas, nn.Module) and not isinstance(replicas, nn.ModuleList)
        if one or not isinstance(replicas, Iterable):
            raise TypeError(
                f"GluonTrainer: replicas is a {type(replicas).__name__}; pass a list with a module "
                "or its parameters for every rank, such as the modules of a ReplicaTrainer"
            )
        parameters = [list(r.parameters() if isinstance(r, nn.Module) else r) for r in replicas]
        _check_replicas(parameters)
        make, options = _optimizer(optimizer), _options(optimizer_params or {})
        self.optimizers = [check_step(make(rank, **options)) for rank in parameters]
        self._replicas = [[p for p in rank if p.requires_grad] for rank in parameters]
        self._reduced = False  # whether the gradients are already summed over the ranks

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of all ranks, a number of at least 0 and finite in float32.

        Raises ValueError for another number, TypeError for anything else.
        """
        what = "GluonTrainer: the learning rate is"
        if isinstance(lr, bool) or not isinstance(lr, Real):
            raise TypeError(f"{what} a {type(lr).__name__}; pass a number")
        if not 0 <= lr <= torch.finfo(torch.float32).max:
            raise ValueError(f"{what} {lr}; it must be finite, at least 0")
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = float(lr)

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Sum the gradients over all ranks, divide by ``batch_size``, update, and clear them.

        ``batch_size`` is the number of examples of all ranks if the losses are sums; pass 1 if the
        gradients already add up to those of the mean. Call ``step`` after every rank's backward
        pass. Raises ValueError for a parameter without a gradient on any rank;
        ``ignore_stale_grad`` leaves it unchanged instead. Gluon requires a gradient on every
        device; here a missing one on some ranks counts as zeros. Raises RuntimeError after
        ``allreduce_grads``, because the sums would be added up again.
        """
        self._check(batch_size, ignore_stale_grad)
        if self._reduced:
            raise RuntimeError(
                "GluonTrainer: allreduce_grads() has summed these gradients already; call "
                "update(), which is the rest of a step"
            )
        self.allreduce_grads()
        self.update(batch_size, ignore_stale_grad)

    @torch.no_grad()
    def allreduce_grads(self) -> None:
        """Sum the gradients over all ranks in place, to clip or inspect them before ``update``.

        A missing gradient on some ranks counts as zeros; afterwards every rank has the sum.
        """
        reduce_gradients_coalesced(matching_gradients(self._replicas))
        self._reduced = True

    @torch.no_grad()
    def update(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Divide the gradients by ``batch_size``, update each rank, and clear the gradients.

        Raises RuntimeError with several ranks unless ``allreduce_grads`` was called before, because
        the replicas would diverge. The arguments and other errors are those of ``step``.
        """
        count = self._check(batch_size, ignore_stale_grad)
        if not self._reduced and len(self._replicas) > 1:
            raise RuntimeError(
                "GluonTrainer: update() comes after allreduce_grads(), or the replicas diverge; "
                "step() does both"
            )
        self._reduced = False
        for parameters, optimizer in zip(self._replicas, self.optimizers, strict=True):
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(count)
            optimizer.step()
            optimizer.zero_grad()

    def _check(self, batch_size: int, ignore_stale_grad: bool) -> int:
        """Return the batch size; ValueError for one below 1 and for a parameter not to update."""
        count = _C.int_from(batch_size, "GluonTrainer", "batch_size")
        if count <= 0:
            raise ValueError(
                f"GluonTrainer: batch_size is {count}; pass the examples of a step, at least 1"
            )
        stale = [all(p.grad is None for p in same) for same in zip(*self._replicas, strict=True)]
        if not _C.flag_from(ignore_stale_grad, "GluonTrainer", "ignore_stale_grad") and any(stale):
            i = stale.index(True)
            raise ValueError(
                f"GluonTrainer: parameter {i} of shape {list(self._replicas[0][i].shape)} has no "
                "gradient since the last step; call backward() on every rank first, or pass "
                "ignore_stale_grad=True"
            )
        return count


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments under torch's names; TypeError for one under both names."""
    options = {_NAMES.get(name, name): value for name, value in given.items()}
    if len(options) < len(given):
        raise TypeError(f"GluonTrainer: an argument is given twice in {shown(list(given))}")
    return options


def _optimizer(asked: str | MakeOptimizer) -> MakeOptimizer:
    if isinstance(asked, str):
        of_torch = {name.lower(): k for name, k in vars(torch.optim).items() if isinstance(k, type)}
        if asked.lower() not in of_torch:
            raise ValueError(
                f"GluonTrainer: optimizer {shown(asked)} is unknown; pass the name of a class of "
                "torch.optim"
            )
        return of_torch[asked.lower()]
    if not callable(asked):
        raise TypeError(
            f"GluonTrainer: optimizer is a {type(asked).__name__}; pass a name or a class of "
            "torch.optim, so that every rank can have its own"
        )
    return asked


def _check_replicas(replicas: Sequence[Sequence[Tensor]]) -> None:
    if not replicas or not replicas[0]:
        raise ValueError(
            "GluonTrainer: there is nothing to train; pass a module or parameters per rank"
        )
    expected = [(p.shape, p.dtype, p.requires_grad) for p in replicas[0]]
    for rank, parameters in enumerate(replicas):
        if [(p.shape, p.dtype, p.requires_grad) for p in parameters] != expected:
            raise ValueError(
                f"GluonTrainer: the parameters of rank {rank} are not like those of rank 0 in "
                "number, shape, dtype or requires_grad; pass replicas of one model"
            )
    every = [p for rank in replicas for p in rank]
    if any(len({i // len(expected) for i in block}) > 1 for _, block in memory_blocks(every)):
        raise ValueError(
            "GluonTrainer: a parameter or its memory is shared by several ranks; pass a copy per "
            "rank"
        )
