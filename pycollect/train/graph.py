"""A training step captured in a CUDA graph: the same bits, and one call in place of hundreds.

A graph works on the memory it was captured with, so batches are copied into tensors that stay, and
all of them have one shape. All ranks are on one GPU.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .reduce import Reduction, collective
from .step import Model, ParameterLists, gradients, train_batch

Run: TypeAlias = Callable[[], object]
# torch's own advice: what libraries set up at their first calls must not be captured.
_WARM_UP = 3


def capture(run: Run) -> Run:
    """Run a function a few times beside the current stream, capture it, and return the replay."""
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class GraphedStep:
    """`train_batch` on these replicas, captured with the shape of a first batch.

    Capturing trains nothing: parameters and gradients are afterwards what they were. `capturing`
    makes a replay of a function, and may call it. Raises ValueError for ranks on several devices.
    """

    def __init__(
        self,
        X: Tensor,
        y: Tensor,
        replicas: ParameterLists,
        lr: float,
        *,
        model: Model,
        reduction: Reduction = collective,
        capturing: Callable[[Run], Run] = capture,
    ) -> None:
        devices = {p.device for replica in replicas for p in replica}
        if len(devices) != 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"a step is captured on one GPU, and these ranks are on {names}")
        (device,) = devices
        self._X, self._y = X.to(device, copy=True), y.to(device, copy=True)
        self._losses: list[Tensor] = []

        def step() -> None:
            self._losses = train_batch(
                self._X, self._y, replicas, lr, model=model, reduction=reduction
            )

        kept = [t.detach() for replica in replicas for t in (*replica, *gradients(replica))]
        before = [t.clone() for t in kept]
        # What is captured is the current device's current stream.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self._replay = capturing(step)
        for t, value in zip(kept, before, strict=True):
            t.copy_(value)

    def __call__(self, X: Tensor, y: Tensor) -> Sequence[Tensor]:
        """Train on one batch; give each rank's summed loss, which the next step overwrites.

        Raises ValueError for a batch of another shape than the first.
        """
        if X.shape != self._X.shape or y.shape != self._y.shape:
            raise ValueError(
                f"the step was captured for batches of shape {tuple(self._X.shape)} and "
                f"{tuple(self._y.shape)}, not {tuple(X.shape)} and {tuple(y.shape)}"
            )
        self._X.copy_(X)
        self._y.copy_(y)
        self._replay()
        return self._losses
