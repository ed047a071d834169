"""Random states of torch: those of this process, and one for each rank.

Each rank draws from states of its own, seeded by its number. So ranks have different dropout masks,
and the same ones whether they are replicas of one process or a process each.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .results import is_captured

States = Mapping[str, Tensor]  # by the kind of device, "cpu" or "cuda"
# Difference of the seeds of two neighbouring ranks; odd, so that the seeds of all ranks and of
# neighbouring runs differ.
_SEED_STRIDE = 0x9E3779B97F4A7C15


def mixed_seed(seed: int, number: int) -> int:
    """Return one of many seeds that a seed stands for.

    >>> mixed_seed(5, 0)
    5
    """
    return (seed + _SEED_STRIDE * number) % 2**63


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's random generators: the CPU's, and that of a GPU `device`.

    >>> list(random_states(torch.device("cpu")))
    ['cpu']
    """
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: States, device: torch.device) -> None:
    """Restore torch's random generators from the states that `random_states` returned."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


class RankRandomStates:
    """The random states of the ranks of this process.

    `ranks` are the ranks' numbers and `devices` their devices. `states` has the states of each, for
    a checkpoint.

    >>> own = RankRandomStates([torch.device("cpu")] * 2, range(2), seed=0)
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
            own = mixed_seed(seed, rank)
            places = {"cpu": torch.device("cpu"), device.type: device}
            self.states.append(
                {
                    k: torch.Generator(place).manual_seed(own).get_state()
                    for k, place in places.items()
                }
            )

    @contextmanager
    def of(self, i: int) -> Iterator[None]:
        """Draw from the states of this process's i-th rank, except in a graph capture."""
        device = self._devices[i]
        if is_captured(device):
            yield
            return
        before = random_states(device)
        set_random_states(self.states[i], device)
        try:
            yield
        finally:
            self.states[i] = random_states(device)
            set_random_states(before, device)
