"""Program of one rank: makes the variants of each case, and runs them in turns."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from pycollect._timing import Effort, interleave, shuffled

from ..ranks import Rank
from .llama import weights
from .stamps import Stamps, Stays, dist
from .variants import ALONE, CLIENT, GLOO, OURS, VARIANTS, Parts


@dataclass(frozen=True)
class Turn:
    """The seconds of the prompt and of a token in one turn, and the calls of all its tokens."""

    first: float = 0.0
    token: float = 0.0
    calls: list[Stays] = field(default_factory=list)


# A variant's turns on one rank, and the error of its logits: the norm of the difference from those
# of one rank alone, divided by their norm.
Measured = tuple[list[Turn], float]


class Candidate:
    """A variant on this rank; one rank alone has no decoder on the other ranks."""

    def __init__(self, name: str, parts: Parts, threads: int) -> None:
        self.turns: list[Turn] = []
        self._case, self._stamps = parts.case, parts.stamps
        make, self._backend = VARIANTS[name]
        self._threads = threads if name != ALONE else len(os.sched_getaffinity(0))
        runs = name != ALONE or dist.get_rank() == 0
        self._decoder = make(parts, self._backend) if runs else None
        generator, shape = torch.Generator().manual_seed(1), (parts.case.batch, parts.case.prompt)
        self._prompt = torch.randint(parts.case.vocab, shape, generator=generator)

    def logits(self) -> Tensor:
        """Return the logits after the prompt and after one more token, in float32."""
        case, ids = self._case, self._prompt
        if not self._decoder:
            return torch.empty(2, case.batch, case.vocab)
        self._stamps.start(self._backend)
        found = self._decoder(ids, 0), self._decoder(ids[:, :1], case.prompt)
        logits = torch.stack(found).float()  # which awaits the last collective
        self._stamps.taken()
        return logits

    def sample(self, turns: int) -> list[float]:
        """Return the seconds of a token in each of some turns; a sampler."""
        for _ in range(turns):
            torch.set_num_threads(self._threads)
            self.turns.append(self._turn())
            dist.barrier()  # of gloo, in which the other ranks sleep while one rank is alone
        return [turn.token for turn in self.turns[-turns:]]

    def _turn(self) -> Turn:
        if not self._decoder:
            return Turn()
        stamps, tokens, prompt = self._stamps, self._case.tokens, self._case.prompt
        stamps.start(self._backend)
        begin = perf_counter()
        ids = self._decoder(self._prompt, 0).argmax(-1, keepdim=True)
        first = perf_counter() - begin
        stamps.taken()
        begin = perf_counter()
        for number in range(tokens):
            ids = self._decoder(ids, prompt + number).argmax(-1, keepdim=True)
        return Turn(first, (perf_counter() - begin) / tokens, stamps.taken())


def measured(
    names: Sequence[str], parts: Parts, effort: Effort, seed: int, rank: Rank
) -> dict[str, Measured]:
    """Measure the variants of these names in turns, and check their logits."""
    made = {name: Candidate(name, parts, rank.threads) for name in (ALONE, *names)}
    right = made[ALONE].logits()
    dist.broadcast(right, 0)
    errors = {ALONE: 0.0}
    for name in filter(ALONE.__ne__, names):
        error = (made[name].logits() - right).norm() / right.norm()
        errors[name] = float(error.nan_to_num(torch.inf))
    samplers = {name: made[name].sample for name in names}
    timings = interleave(samplers, effort, shuffled(seed), rank.slowest)
    return {name: (made[name].turns[-timings[name].count :], errors[name]) for name in names}


def work(rank: Rank, task: tuple[Sequence[str], Effort]) -> None:
    """Measure the variants in each case that is requested."""
    rank.init_process_group()
    groups, stamps = {GLOO: dist.group.WORLD, OURS: dist.new_group(backend=OURS)}, Stamps()
    variants, effort = task
    with torch.no_grad():  # in inference mode DTensor finds the sharding of a linear layer anew
        for seed, case in enumerate(rank.requests()):
            # The experts are none of transformers' models.
            names = [n for n in variants if not (case.moe and n.startswith(CLIENT))]
            stamps.start("")  # while models are made
            parts = Parts(case, weights(case, rank.number, rank.world), groups, stamps)
            rank.send(measured(names, parts, effort, seed, rank))
