"""Runs a collective between producers and consumers on streams with random delays.

Every rank writes its input on its own stream after a delay. After the collective it counts wrong
elements on the same stream and overwrites the memory, so a missing event shows as wrong elements.
Rounds are not synchronized with each other. CPU ranks have no stream and no delays.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from reference import IN_PLACE, expected, randoms
from torch import Tensor

# Longest delay in GPU cycles: 0.5 to 1 ms at 1 to 2 GHz. The host issues a round in less time, so
# that a kernel that misses an event is launched while a delay still runs.
MAX_CYCLES = 1_000_000
POISON = -77


class Rank:
    """A rank's stream and tensors. Input k is `base + k`, so results are affine in the round k."""

    def __init__(self, device: torch.device, base: Tensor, results: Sequence[Tensor]) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.base = base.to(device)
        self.input = torch.full_like(self.base, POISON)
        first, second = (r.to(device) for r in results)
        self.wanted, self.slope = first, second - first
        self.result = torch.full_like(self.wanted, POISON)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Make the rank's stream and its device the current ones."""
        with contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            yield

    def delay(self, rng: random.Random) -> None:
        """Keep the rank's stream busy, half of the time."""
        if self.stream is not None and rng.random() < 0.5:
            torch.cuda._sleep(rng.randrange(MAX_CYCLES))

    def produce(self, k: int, rng: random.Random) -> None:
        """Write the input of round k on the rank's stream, after a random delay."""
        with self.on_stream():
            self.delay(rng)
            torch.add(self.base, k, out=self.input)

    def consume(self, k: int, rng: random.Random) -> None:
        """Count wrong elements and overwrite input and result, after a random delay."""
        with self.on_stream():
            self.delay(rng)
            self.wrong += (self.result != self.wanted + self.slope * k).sum()
            self.result.fill_(POISON)
            self.input.fill_(POISON)


# Issues the collective, given the inputs, the results and the streams of all ranks.
Issue = Callable[[list[Tensor], list[Tensor], Any], object]


def wrong_elements(
    collective: str,
    devices: Sequence[torch.device],
    issue: Issue,
    count: int = 5_003,
    rounds: int = 30,
    seed: int = 0,
) -> int:
    """Run all rounds and return the total number of wrong elements."""
    values = randoms(len(devices), (count,), torch.int32, seed=seed)
    results = [expected(collective, [v + k for v in values]) for k in (0, 1)]
    rng = random.Random(seed)
    pairs = list(zip(*results, strict=True))
    ranks = [Rank(d, v, r) for d, v, r in zip(devices, values, pairs, strict=True)]
    if collective in IN_PLACE:
        for rank in ranks:
            rank.result = rank.input
    streams = [rank.stream for rank in ranks]
    synchronize(devices)
    for k in range(rounds):
        for rank in rng.sample(ranks, len(ranks)):
            rank.produce(k, rng)
        given = streams if any(s is not None for s in streams) else None
        issue([rank.input for rank in ranks], [rank.result for rank in ranks], given)
        for rank in rng.sample(ranks, len(ranks)):
            rank.consume(k, rng)
    synchronize(devices)
    return sum(int(rank.wrong) for rank in ranks)


def synchronize(devices: Sequence[torch.device]) -> None:
    """Synchronize every GPU among the devices."""
    for device in {d for d in devices if d.type == "cuda"}:
        torch.cuda.synchronize(device)
