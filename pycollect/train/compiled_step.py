"""A training step of replicas as one graph of torch.compile.

The graph splits the batch, runs forward and backward of all ranks, reduces the gradients and
updates the parameters. It replaces the gradients and the optimizer state of an earlier step in
their memory, so the first step runs without it.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .reduce import Reduction
from .shares import scatter

Forward = Callable[[int, Tensor, Tensor], Tensor]


@dataclass
class CompiledStep:
    """The step of `ReplicaTrainer`, compiled by a backend of torch.compile at its first call.

    `forward(rank, X, y)` returns a rank's summed loss. Every size of a batch or shard may take one
    more compilation. The hooks of optimizers and fused optimizers are not for graphs: the former
    raise ValueError, the latter run as graphs that torch.compile fuses.
    """

    devices: Sequence[torch.device]
    parameters: Sequence[Sequence[nn.Parameter]]
    optimizers: Sequence[torch.optim.Optimizer]
    forward: Forward
    reduction: Reduction
    backend: str
    _compiled: dict[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for optimizer in self.optimizers:
            if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
                raise ValueError("a compiled step does not call the optimizer's hooks: remove them")
            for group in optimizer.param_groups:
                if group.get("fused"):
                    group["fused"] = False

    @property
    def ready(self) -> bool:
        """Whether an earlier step has left gradients and optimizer state."""
        return all(any(p.grad is not None for p in mine) for mine in self.parameters)

    def on_batch(self, X: Tensor, y: Tensor, shares: Sequence[int]) -> list[Tensor]:
        """Train on one batch; return each rank's summed loss."""
        return self._call(self._split_and_train, X, y, shares)

    def on_shards(self, X: Sequence[Tensor], y: Sequence[Tensor]) -> list[Tensor]:
        """Train on one shard per rank; return each rank's summed loss."""
        return self._call(self._train, X, y)

    def _call(self, step: Callable[..., list[Tensor]], *arguments: Any) -> list[Tensor]:
        from torch._dynamo import config

        if step not in self._compiled:
            self._compiled[step] = torch.compile(step, backend=self.backend, fullgraph=True)
        with config.patch(trace_autograd_ops=True):  # the backward pass is part of the graph
            losses: list[Tensor] = self._compiled[step](*arguments)
        return losses

    def _split_and_train(self, X: Tensor, y: Tensor, shares: Sequence[int]) -> list[Tensor]:
        return self._train(*scatter(X, y, self.devices, shares))

    def _train(self, X: Sequence[Tensor], y: Sequence[Tensor]) -> list[Tensor]:
        losses: list[Tensor] = []
        gradients: list[list[Tensor]] = []
        for rank in range(len(self.devices)):
            loss, found = self._pass(rank, X[rank], y[rank])
            losses.append(loss)
            gradients.append(found)
        with torch.no_grad():
            self.reduction(gradients)
            n = sum(map(len, X))
            for params, mine, optimizer in zip(
                self.parameters, gradients, self.optimizers, strict=True
            ):
                torch._foreach_div_(mine, n)
                torch._foreach_copy_([p.grad for p in params if p.grad is not None], mine)
                # torch breaks graphs around `step`; the function that it wraps is part of this one.
                inspect.unwrap(type(optimizer).step)(optimizer)
        return losses

    def _pass(self, rank: int, X: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the summed loss of one rank, and its gradients in new memory."""
        params = [p for p in self.parameters[rank] if p.requires_grad]
        if len(X) == 0:
            loss = torch.zeros((), device=self.devices[rank])
            return loss, [torch.zeros_like(p) for p in params if p.grad is not None]
        loss = self.forward(rank, X, y)
        found = torch.autograd.grad(loss, params, allow_unused=True)
        gradients: list[Tensor] = []
        for param, gradient in zip(params, found, strict=True):
            if param.grad is not None:
                gradients.append(torch.zeros_like(param) if gradient is None else gradient)
            elif gradient is not None:
                raise ValueError("a parameter had no gradient in the first step: do not compile it")
        return loss.detach(), gradients
