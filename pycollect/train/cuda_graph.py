"""A training step as a CUDA graph: the same bits, and one call in place of hundreds.

It works on the memory it was captured with, so batches are copied into fixed tensors, and all have
one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .replica_trainer import ReplicaTrainer

Run: TypeAlias = Callable[[], object]
Step: TypeAlias = Callable[[Tensor, Tensor], list[Tensor]]
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
