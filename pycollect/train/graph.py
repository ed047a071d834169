"""A training step as one graph: on a GPU a CUDA graph, for ranks on the CPU one of torch.compile.

A CUDA graph has the same bits, and one call in place of hundreds. It works on the memory it was
captured with, so batches are copied into fixed tensors, and all have one shape.

A compiled step runs forward and backward of all ranks, reduces the gradients and updates the
parameters. It replaces the gradients and the optimizer state of an earlier step in their memory, so
the first step runs without it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from .reduce import Reduction

if TYPE_CHECKING:
    from .replica_trainer import ReplicaTrainer

Run: TypeAlias = Callable[[], object]
Step: TypeAlias = Callable[[Tensor, Tensor], list[Tensor]]
Forward: TypeAlias = Callable[[int, Tensor, Tensor], Tensor]
# Number of calls before a capture, as torch advises: the lazy initialisation of libraries must not
# be captured.
_WARM_UP = 3


def capture(run: Run) -> Run:
    """Run a function a few times on a side stream, capture it, and return the replay."""
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Other threads, which load the next batches, may allocate pinned memory meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


class GraphedStep:
    """A training step as a CUDA graph, for batches of one shape, with all ranks on one GPU.

    `GraphedStep.of` captures the step of `ReplicaTrainer`; a call `step(X, y)` of the result trains
    on one batch.

    To capture another step, such as `train_batch`, pass it as `step`: a function of X and y that
    returns each rank's summed loss. X and y are a first batch, on any device, whose shapes all
    later batches must have. `state` returns all tensors that the step changes. Capturing runs the
    step several times but does not train: these tensors keep their values, and tensors that `state`
    returns only afterwards are set to zeros, as the momentum of SGD begins. `capturing` (default: a
    CUDA graph) turns a function into its replay, and may call it. Raises ValueError for state on
    several devices or without any tensor, and with the default `capturing` for state on the CPU.
    """

    def __init__(
        self,
        X: Tensor,
        y: Tensor,
        step: Step,
        state: Callable[[], list[Tensor]],
        *,
        capturing: Callable[[Run], Run] = capture,
    ) -> None:
        before = [(t, t.detach().clone()) for t in state()]
        devices = {t.device for t, _ in before}
        if len(devices) != 1 or (capturing is capture and devices == {torch.device("cpu")}):
            names = ", ".join(sorted(map(str, devices))) or "no device"
            raise ValueError(
                f"a step is captured in a CUDA graph on one GPU, and these ranks are on {names}: "
                "compile=True or --compile makes it one graph on the CPU"
            )
        (device,) = devices
        self._X, self._y = X.to(device, copy=True), y.to(device, copy=True)
        self._losses: list[Tensor] = []

        def run() -> None:
            self._losses = step(self._X, self._y)

        # torch captures the current stream of the current device.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self._replay = capturing(run)
        with torch.no_grad():
            for t in state():
                t.zero_()
            for t, value in before:
                t.copy_(value)

    def __call__(self, X: Tensor, y: Tensor) -> Sequence[Tensor]:
        """Train on one batch; return each rank's summed loss, which the next call overwrites.

        X and y are copied to the GPU, from any device. The losses are tensors without dimensions on
        the GPU; the call does not wait for it. Raises ValueError if the shape of X or y differs
        from the first batch's.
        """
        if X.shape != self._X.shape or y.shape != self._y.shape:
            raise ValueError(
                f"the step was captured for batches of shape {tuple(self._X.shape)} and "
                f"{tuple(self._y.shape)}, not {tuple(X.shape)} and {tuple(y.shape)}"
            )
        self._X.copy_(X, non_blocking=True)
        self._y.copy_(y, non_blocking=True)
        self._replay()
        return self._losses

    @classmethod
    def of(
        cls,
        X: Tensor,
        y: Tensor,
        replicas: ReplicaTrainer,
        *,
        shares: Sequence[int] | None = None,
        capturing: Callable[[Run], Run] = capture,
    ) -> GraphedStep:
        """Capture the step of `ReplicaTrainer`, for batches of this shape and these shares.

        `shares` are the numbers of examples per rank, even by default. All gradients are reduced in
        one launch after the backward pass. Raises ValueError for exact times, which wait for the
        host, for shards, for a process of a group, and for ranks on several devices or on the CPU.
        """
        exact = replicas.exact_times
        if exact or replicas.group is not None or replicas.shards:
            what = "exact times" if exact else "shards"
            what = what if replicas.group is None else "processes of a group"
            raise ValueError(f"a step with {what} cannot be captured in a CUDA graph")

        def state() -> list[Tensor]:
            tensors = [t for m in replicas.modules for t in (*m.parameters(), *m.buffers())]
            states = [of_one for o in replicas.optimizers for of_one in o.state.values()]
            return tensors + [t for s in states for t in s.values() if isinstance(t, Tensor)]

        step = partial(replicas.step, shares=shares)
        return cls(X, y, step, state, capturing=capturing)


# --- ranks on the CPU ---------------------------------------------------------------------------


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
