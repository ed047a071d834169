"""Random states of torch: those of this process, and one for each rank.

Each rank draws from states of its own, seeded by its number. So ranks have different dropout masks,
and the same ones whether they are replicas of one process or a process each.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .records import is_captured

States = Mapping[str, Tensor]  # by device: "cpu", "cuda:0"
# Difference of the seeds of two neighbouring ranks; odd, so that the seeds of all ranks and of
# neighbouring runs differ.
_SEED_STRIDE = 0x9E3779B97F4A7C15


def generators(devices: Sequence[torch.device]) -> dict[str, Tensor]:
    """Return the states of torch's random generators: the CPU's, and one per GPU in `devices`.

    >>> list(generators([torch.device("cpu")]))
    ['cpu']
    """
    gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
    states = {str(gpu): torch.cuda.get_rng_state(gpu) for gpu in gpus}
    return {"cpu": torch.get_rng_state(), **states}


def set_generators(states: States) -> None:
    """Restore torch's random generators from the states that `generators` returned."""
    for name, state in states.items():
        if name == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, name)


class RankGenerators:
    """The random states of the ranks of this process.

    `ranks` are the ranks' numbers and `devices` their devices. `states` has the states of each, for
    a checkpoint.

    >>> own = RankGenerators([torch.device("cpu")] * 2, range(2), seed=0)
    >>> def draw(i):
    ...     with own.of(i):
    ...         return float(torch.rand(()))
    >>> first, other, second = draw(0), draw(1), draw(0)
    >>> len({first, other, second})
    3
    """

    def __init__(self, devices: Sequence[torch.device], ranks: Sequence[int], seed: int) -> None:
        self._devices = list(devices)
        self.states: list[States] = []
        for device, rank in zip(devices, ranks, strict=True):
            mixed = (seed + _SEED_STRIDE * rank) % 2**63
            names = dict.fromkeys(("cpu", str(device)))
            states = {name: torch.Generator(name).manual_seed(mixed).get_state() for name in names}
            self.states.append(states)

    @contextmanager
    def of(self, i: int) -> Iterator[None]:
        """Draw from the states of this process's i-th rank, except in a graph capture."""
        devices = [self._devices[i]]
        if is_captured(devices[0]):
            yield
            return
        before = generators(devices)
        set_generators(self.states[i])
        try:
            yield
        finally:
            self.states[i] = generators(devices)
            set_generators(before)
