"""The forward and backward passes of all ranks over a microbatch: in turn, or joint.

In turn, each rank is done before the next begins, so that only one has activations in memory.
Joint, all go forward, and one backward pass takes them all back, which batch statistics over all
ranks demand.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from .buckets import Buckets
from .lockstep import lockstep
from .losses import Loss, check_scalar
from .single_values import refusal
from .step_clock import StepClock


class Passes:
    """The passes of these modules, one on every device."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        devices: Sequence[torch.device],
        loss: Loss,
        clock: StepClock,
        meeting: bool = False,
    ) -> None:
        self._modules, self._devices, self._loss, self._clock = modules, devices, loss, clock
        self._meeting = meeting  # do modules meet those of the other ranks on the way?
        # Several GPUs have a thread each for one backward pass, and wait for each other in many.
        self.joint = meeting or len({d for d in devices if d.type == "cuda"}) > 1
        # The calls of a GPU return at once, and those of the CPU do not: GPUs work meanwhile.
        self._order = sorted(range(len(devices)), key=lambda rank: devices[rank].type == "cpu")

    def run(
        self, X: Sequence[Tensor], y: Sequence[Tensor], buckets: Buckets | None = None
    ) -> dict[int, Tensor]:
        """Add the gradients of all ranks; give the summed losses of those that took part.

        `buckets` come with the last microbatch of a step: they reduce beside its last pass.
        """
        losses: dict[int, Tensor] = {}
        groups = self._groups(X)
        for group in groups:
            with self._clock.ranks(group):
                runs = [partial(self._forward, rank, X[rank], y[rank]) for rank in group]
                found = lockstep(runs) if self._meeting else [run() for run in runs]
                last = buckets.during(group) if buckets and group is groups[-1] else nullcontext()
                with last:
                    torch.autograd.backward(found)
            losses |= {rank: loss.detach() for rank, loss in zip(group, found, strict=True)}
        return losses

    def _groups(self, X: Sequence[Tensor]) -> list[list[int]]:
        """Give the ranks that go forward and backward together, one group after the other."""
        if self._meeting:  # without examples too: the others wait for it
            return [list(range(len(X)))]
        busy = [rank for rank in self._order if len(X[rank])]
        return [busy] if self.joint else [[rank] for rank in busy]

    def _forward(self, rank: int, X: Tensor, y: Tensor) -> Tensor:
        """Give the summed loss of one rank's examples."""
        # Over all ranks the layers say what is missing, and the size of a shard is no matter.
        advice = nullcontext() if self._meeting else _single_values(rank, len(X))
        with _on(self._devices[rank]), advice:
            return check_scalar(self._loss(self._modules[rank](X), y))


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one, which kernels that people write by hand rely on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def _single_values(rank: int, examples: int) -> Iterator[None]:
    """Say what to do where torch says that there is only one value to normalise."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise refusal(rank, examples) from error
