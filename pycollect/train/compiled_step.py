"""A training step of replicas as one graph of torch.compile.

The graph splits the batch, runs forward and backward of all ranks, reduces the gradients and
updates the parameters. It replaces the gradients and the optimizer state of an earlier step in
their memory, so the first step runs without it.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from .reduce import Reduction
from .shares import scatter

Forward = Callable[[int, Tensor, Tensor], Tensor]


@dataclass
class CompiledStep:
    """The step of `ReplicaTrainer`, compiled by a backend of torch.compile at its first call.

    `forward(rank, X, y)` returns a rank's summed loss. Every size of a batch or shard may take one
    more compilation, and so does the first change of a learning rate, which is a tensor from then
    on: updates with it may differ from eager ones in the last bit. Fused optimizers run as
    operations that torch.compile fuses. Hooks of optimizers and parameters are not for graphs:
    calls raise ValueError.
    """

    devices: Sequence[torch.device]
    parameters: Sequence[Sequence[nn.Parameter]]
    optimizers: Sequence[torch.optim.Optimizer]
    forward: Forward
    reduction: Reduction
    backend: str
    _compiled: dict[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict)
    _trained: list[bool] = field(default_factory=list)
    _first_rates: list[Any] = field(default_factory=list)
    _rates: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._refuse_hooks()

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
        # With this option the backward pass is part of the graph.
        with config.patch(trace_autograd_ops=True), self._variable_rates():
            losses: list[Tensor] = self._compiled[step](*arguments)
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
        """Raise ValueError if optimizers or parameters have hooks."""
        if any(map(_has_hooks, self.optimizers)) or _has_global_hooks():
            raise ValueError("a compiled step does not call the optimizer's hooks: remove them")
        if any(
            p._backward_hooks or p._post_accumulate_grad_hooks
            for mine in self.parameters
            for p in mine
        ):
            raise ValueError("a compiled step does not call the hooks of parameters: remove them")

    def _split_and_train(self, X: Tensor, y: Tensor, shares: Sequence[int]) -> list[Tensor]:
        return self._train(*scatter(X, y, self.devices, shares))

    def _train(self, X: Sequence[Tensor], y: Sequence[Tensor]) -> list[Tensor]:
        losses: list[Tensor] = []
        found: list[Sequence[Tensor | None]] = []
        for rank in range(len(self.devices)):
            loss, mine = self._pass(rank, X[rank], y[rank])
            losses.append(loss)
            found.append(mine)
        with torch.no_grad():
            gradients = self._stored(found)
            self.reduction(gradients)
            n = sum(map(len, X))
            for of_rank, optimizer in zip(gradients, self.optimizers, strict=True):
                torch._foreach_div_(of_rank, n)
                _step_of(optimizer)(optimizer)
        return losses

    def _pass(self, rank: int, X: Tensor, y: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Return the summed loss of one rank, and the gradients of what it trains, or None."""
        params = [p for p in self.parameters[rank] if p.requires_grad]
        if len(X) == 0:
            return torch.zeros((), device=self.devices[rank]), [None] * len(params)
        loss = self.forward(rank, X, y)
        return loss.detach(), torch.autograd.grad(loss, params, allow_unused=True)

    def _stored(self, found: Sequence[Sequence[Tensor | None]]) -> list[list[Tensor]]:
        """Replace the parameters' gradients by those found, which may share memory; return them.

        A gradient that other ranks have is zero where there is none.
        """
        stored: list[list[Tensor]] = [[] for _ in found]
        trained = [[p for p in mine if p.requires_grad] for mine in self.parameters]
        for params, same in zip(zip(*trained, strict=True), zip(*found, strict=True), strict=True):
            if (params[0].grad is None) != all(gradient is None for gradient in same):
                raise ValueError(
                    "other parameters have gradients than in the first step: do not compile it"
                )
            for mine, param, gradient in zip(stored, params, same, strict=True):
                if param.grad is not None:
                    param.grad.zero_() if gradient is None else param.grad.copy_(gradient)
                    mine.append(param.grad)
        return stored


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def _has_global_hooks() -> bool:
    return bool(
        torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks
    )


def _step_of(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return the step of the optimizer's class without torch's own wrappers, which break graphs."""
    wrappers = torch_optimizer.__dict__
    step: Any = type(optimizer).step
    own: Callable[..., Any] = inspect.unwrap(step, stop=lambda f: f.__globals__ is not wrappers)
    return own
