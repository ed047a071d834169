"""A training step of ranks on the CPU as one graph of torch.compile.

It runs forward and backward of all ranks, reduces the gradients and updates the parameters. It
replaces the gradients and the optimizer state of an earlier step in their memory, so the first step
runs without it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from .reduce import Reduction

Forward: TypeAlias = Callable[[int, Tensor, Tensor], Tensor]


@dataclass
class CompiledStep:
    """The step of `ReplicaTrainer`, compiled by a backend of torch.compile at its first call.

    `forward(rank, X, y)` returns a rank's summed loss. Every size of a shard may take one more
    compilation, and so does the first change of a learning rate, which is a tensor from then on:
    updates with it may differ from eager ones in the last bit. Fused optimizers run as operations
    that torch.compile fuses. Raises ValueError for ranks on GPUs, and so do calls for hooks of
    optimizers and parameters, which are not for graphs.
    """

    devices: Sequence[torch.device]
    parameters: Sequence[Sequence[nn.Parameter]]
    optimizers: Sequence[torch.optim.Optimizer]
    forward: Forward
    reduction: Reduction
    backend: str
    _trained: list[bool] = field(default_factory=list)
    _first_rates: list[Any] = field(default_factory=list)
    _rates: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        if any(device.type != "cpu" for device in self.devices):
            raise ValueError(
                "a step is compiled for ranks on the CPU, and these are on "
                f"{', '.join(map(str, self.devices))}: GraphedStep or --graph makes it one graph "
                "on a GPU"
            )
        self._compiled = torch.compile(self._train, backend=self.backend, fullgraph=True)

    def prepare(self) -> bool:
        """Prepare the next step; return whether an earlier one has left gradients and state for it.

        It has not if other parameters require grad than in that step.
        """
        self._refuse_hooks()
        for group in self._groups():
            if group.get("fused"):  # again: a loaded state may have set it
                group["fused"] = False
        trained = [param.requires_grad for mine in self.parameters for param in mine]
        before, self._trained = self._trained, trained
        return self._trained == before and all(
            any(p.grad is not None for p in mine) for mine in self.parameters
        )

    def on_shards(self, X: Sequence[Tensor], y: Sequence[Tensor]) -> list[Tensor]:
        """Train on one shard per rank; return each rank's summed loss."""
        from torch._dynamo import config

        # With this option the backward pass is part of the graph.
        with config.patch(trace_autograd_ops=True), self._variable_rates():
            losses: list[Tensor] = self._compiled(X, y)
        return losses

    @contextmanager
    def _variable_rates(self) -> Iterator[None]:
        """Make learning rates tensors, once one has changed: each number would have its own graph.

        Of those torch.compile makes no more than eight.
        """
        # Optimizers take no tensor with foreach=True.
        groups = [group for group in self._groups() if "lr" in group and not group.get("foreach")]
        rates = [group["lr"] for group in groups]
        self._first_rates = self._first_rates or rates
        if not self._rates and rates != self._first_rates:
            self._rates = [torch.empty((), dtype=torch.float64) for _ in rates]
        for group, rate, tensor in zip(groups, rates, self._rates, strict=False):
            group["lr"] = tensor.fill_(rate)
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _refuse_hooks(self) -> None:
        hooks: list[Any] = [torch_optimizer._global_optimizer_pre_hooks]
        hooks += [torch_optimizer._global_optimizer_post_hooks]
        for optimizer in self.optimizers:
            hooks += [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
        for param in (param for mine in self.parameters for param in mine):
            hooks += [param._backward_hooks, param._post_accumulate_grad_hooks]
        if any(hooks):
            raise ValueError(
                "a compiled step does not call the hooks of optimizers and parameters: remove them"
            )

    def _train(self, X: Sequence[Tensor], y: Sequence[Tensor]) -> list[Tensor]:
        losses: list[Tensor] = []
        found: list[list[tuple[Tensor, Tensor | None]]] = []
        for rank, mine in enumerate(self.parameters):
            params = [param for param in mine if param.requires_grad]
            gradients: Sequence[Tensor | None] = [None] * len(params)
            if len(X[rank]) == 0:
                losses.append(torch.zeros(()))
            else:
                loss = self.forward(rank, X[rank], y[rank])
                gradients = torch.autograd.grad(loss, params, allow_unused=True)
                losses.append(loss.detach())
            found.append(list(zip(params, gradients, strict=True)))
        with torch.no_grad():
            stored = _stored(found)
            self.reduction(stored)
            n = sum(map(len, X))
            for of_rank, optimizer in zip(stored, self.optimizers, strict=True):
                torch._foreach_div_(of_rank, n)
                _step_of(optimizer)(optimizer)
        return losses


def _stored(found: Sequence[Sequence[tuple[Tensor, Tensor | None]]]) -> list[list[Tensor]]:
    """Replace each parameter's gradient by that found, which may share memory; return them.

    A gradient that other ranks have is zero where there is none.
    """
    stored: list[list[Tensor]] = [[] for _ in found]
    for same in zip(*found, strict=True):
        if (same[0][0].grad is None) != all(gradient is None for _, gradient in same):
            raise ValueError(
                "other parameters have gradients than in the first step: do not compile it"
            )
        for mine, (param, gradient) in zip(stored, same, strict=True):
            if param.grad is not None:
                param.grad.zero_() if gradient is None else param.grad.copy_(gradient)
                mine.append(param.grad)
    return stored


def _step_of(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return the step of the optimizer's class without torch's own wrappers, which break graphs."""
    wrappers = torch_optimizer.__dict__
    step: Any = type(optimizer).step
    own: Callable[..., Any] = inspect.unwrap(step, stop=lambda f: f.__globals__ is not wrappers)
    return own


def check_graph(microbatch: int | None, sync_batchnorm: bool, compile: bool | str) -> None:
    """Raise ValueError for a step to compile that is not one graph."""
    if compile and (microbatch is not None or sync_batchnorm):
        what = "batch statistics over all ranks" if sync_batchnorm else "microbatches"
        raise ValueError(f"a step with {what} is not one graph: leave out compile")
