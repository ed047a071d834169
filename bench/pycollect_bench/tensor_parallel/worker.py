"""Program of one rank: makes the variants of each case, runs them in turns, sends the times."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

import pycollect  # noqa: F401  # registers the backend
from pycollect._timing import Timing, interleave, shuffled

from ..processes import worker
from ..processes.worker_pool import HOST
from .case import Case, CaseResult, Job, Row
from .collectives import Stamps, Stays, divided
from .llama import weights
from .variants import ALONE, GLOO, OURS, VARIANTS, Decoder, Parts, Variant


@dataclass
class Turn:
    """The seconds of the prompt and of a token in one turn, and the calls of all its tokens."""

    first: float
    token: float
    calls: list[Stays]


class Candidate:
    """A variant on this rank."""

    def __init__(self, variant: Variant, decoder: Decoder | None, case: Case, job: Job) -> None:
        self.variant, self.turns = variant, list[Turn]()
        self._decoder, self._case, self._job = decoder, case, job
        self._threads = job.alone_threads if variant.name == ALONE else job.threads
        generator = torch.Generator().manual_seed(1)
        shape = case.batch, job.prompt
        self._prompt = torch.randint(case.vocab, shape, generator=generator)

    def logits(self) -> torch.Tensor:
        """Return the logits after the prompt and after one more token, in float32."""
        if self._decoder is None:
            return torch.empty(2, self._case.batch, self._case.vocab)
        ids = self._prompt
        found = self._decoder(ids, 0), self._decoder(ids[:, :1], self._job.prompt)
        return torch.stack(found).float()

    def sample(self, stamps: Stamps) -> Callable[[int], list[float]]:
        """Return a sampler of turns; a sample is the seconds of a token."""

        def one() -> float:
            dist.barrier()  # of gloo, in which the other ranks sleep while one rank is alone
            if self._decoder is None:
                self.turns.append(Turn(0.0, 0.0, []))
            else:
                torch.set_num_threads(self._threads)
                with self.variant.context(stamps, self.variant.backend):
                    self.turns.append(self._turn(self._decoder, stamps))
                torch.set_num_threads(self._job.threads)
            return self.turns[-1].token

        return lambda turns: [one() for _ in range(turns)]

    def _turn(self, decoder: Decoder, stamps: Stamps) -> Turn:
        tokens, prompt = self._job.tokens, self._job.prompt
        begin = perf_counter()
        ids = decoder(self._prompt, 0).argmax(-1, keepdim=True)
        first = perf_counter() - begin
        stamps.taken()
        begin = perf_counter()
        for number in range(tokens):
            ids = decoder(ids, prompt + number).argmax(-1, keepdim=True)
        return Turn(first, (perf_counter() - begin) / tokens, stamps.taken())


def slowest(seconds: float) -> float:
    """Return the seconds of the slowest rank; collective."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def errors(candidates: Sequence[Candidate]) -> dict[str, float]:
    """Return how far each variant's logits are from those of one rank alone; collective.

    That is the norm of the difference divided by the norm, on the rank where it is largest.
    """
    right = candidates[0].logits()
    dist.broadcast(right, 0)
    found = {}
    for candidate in candidates:
        with candidate.variant.context(Stamps(), candidate.variant.backend):
            logits = candidate.logits() if candidate.variant.name != ALONE else right
        error = ((logits - right).norm() / right.norm()).nan_to_num(torch.inf)
        found[candidate.variant.name] = slowest(float(error))
    return found


def measured(case: Case, job: Job, groups: dict[str, Any], seed: int) -> CaseResult | None:
    """Measure a case; rank 0 gets the result."""
    rank, world, stamps = dist.get_rank(), job.world, Stamps()
    own = weights(case.shape(job), case.dtype, rank, world)
    parts = Parts(case.shape(job), case.dtype, case.batch, own, groups, stamps)
    candidates = []
    variants = [v for v in VARIANTS if v.name in job.variants and not (case.moe and v.client)]
    for variant in variants:
        runs = variant.name != ALONE or rank == 0
        decoder = variant.make(parts, variant.backend) if runs else None
        candidates.append(Candidate(variant, decoder, case, job))
    found = errors(candidates)
    samplers = {c.variant.name: c.sample(stamps) for c in candidates}
    timings = interleave(samplers, job.effort, shuffled(seed), slowest)
    mine = {c.variant.name: c.turns[-timings[c.variant.name].count :] for c in candidates}
    everyone: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(mine, everyone)
    if everyone is None:
        return None
    calls = case.shape(job).collectives
    rows = [
        row(v, [turns[v.name] for turns in everyone], job, calls, found[v.name]) for v in variants
    ]
    return CaseResult(case, world, rows)


def row(
    variant: Variant, of_ranks: Sequence[Sequence[Turn]], job: Job, calls: int, error: float
) -> Row:
    """Return the row of a variant from the turns of all ranks.

    Raises:
        RuntimeError: if a token has not this number of calls, so that times are missing.
    """
    turns = list(zip(*of_ranks, strict=True))
    if variant.name == ALONE:
        turns = [turn[:1] for turn in turns]
    found = {len(one.calls) / job.tokens for turn in turns for one in turn}
    if found != {wanted := 0 if variant.name == ALONE else calls + variant.more_calls}:
        raise RuntimeError(f"{variant.name} makes {found} collectives of a token, not {wanted}")
    shares = [divided([one.calls for one in turn]) for turn in turns]

    def timing(seconds: Sequence[float]) -> Timing:
        return Timing(tuple((each,) for each in seconds))

    return Row(
        variant.name,
        variant.against,
        first=timing([max(one.first for one in turn) for turn in turns]),
        token=timing([max(one.token for one in turn) for turn in turns]),
        waiting=timing([waiting / job.tokens for waiting, _ in shares]),
        moving=timing([moving / job.tokens for _, moving in shares]),
        calls=wanted,
        error=error,
    )


def _work(job: Job, rank: int, parent: Connection[Any, Any]) -> None:
    torch.set_num_threads(job.threads)
    store: Any = vars(dist)["TCPStore"](HOST, job.port, is_master=False)
    limit = datetime.timedelta(seconds=job.timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world, timeout=limit)
    groups = {GLOO: dist.group.WORLD, OURS: dist.new_group(backend=OURS)}
    with torch.no_grad():  # in inference mode DTensor finds the sharding of a linear layer anew
        for number, case in enumerate(job.cases):
            result = measured(case, job, groups, number)
            if rank == 0:
                parent.send(result)
    dist.barrier()  # a rank that ends before rank 0 has sent its result counts as failed
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(worker.main(sys.argv[1], _work))
