"""Test cases from all algorithms, random plans, and a reference plan interpreter in plain Python.

Deliberately independent of the C++ code: cells, conflicts and values are computed here again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from pycollect import _C

BUFFERS = ("in", "out", "tmp")
ROOTED = ("reduce", "broadcast", "scatter", "gather")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")

Cell = tuple[int, str, int]


@dataclass(frozen=True)
class Case:
    algorithm: _C.Algorithm
    world: int
    root: int
    pieces: int
    in_place: bool

    @property
    def plan(self) -> _C.Plan:
        return self.algorithm.plan(self.world, self.root, self.pieces)

    @property
    def program(self) -> _C.Program:
        return _C.Program(self.plan, self.in_place)

    def verify(self, plan: _C.Plan) -> tuple[str | None, str]:
        return _C.verify(self.algorithm.collective, plan, self.root, self.in_place)

    def __str__(self) -> str:
        a, where = self.algorithm, "in place" if self.in_place else "out of place"
        return (
            f"{a.collective}/{a.name} W={self.world} root={self.root} pieces={self.pieces} {where}"
        )


REGISTRY = [a for collective in _C.COLLECTIVES for a in _C.algorithms(collective)]


def each_of(algorithms: Sequence[_C.Algorithm]) -> pytest.MarkDecorator:
    """Run a test with each of the algorithms as its argument `algorithm`."""
    ids = [f"{a.collective}-{a.name}" for a in algorithms]
    return pytest.mark.parametrize("algorithm", algorithms, ids=ids)


each_algorithm = each_of(REGISTRY)


def cases(
    algorithm: _C.Algorithm, worlds: Sequence[int], pieces: Sequence[int] = (3,)
) -> Iterator[Case]:
    for world in worlds:
        roots = {0, world // 2, world - 1} if algorithm.collective in ROOTED else {0}
        for root in sorted(roots):
            for piece in pieces:
                for in_place in (False, True) if algorithm.in_place else (False,):
                    yield Case(algorithm, world, root, piece, in_place)


def random_plan(seed: int) -> tuple[_C.Plan, bool]:
    """A random plan, and whether to run it in place: any list of steps on any ranks is a plan."""
    pick = random.Random(seed)
    world, chunks = pick.randint(2, 5), pick.randint(1, 4)

    def side(first: int, count: int) -> list[_C.SliceTuple]:  # distinct ranks: disjoint slices
        ranks = pick.sample(range(world), pick.randint(1, world))
        return [(rank, pick.choice(BUFFERS), first, count) for rank in ranks]

    steps = []
    for _ in range(pick.randint(1, 25)):
        count = pick.randint(1, chunks)
        first = pick.randint(0, chunks - count)
        by = pick.choice((-1, pick.randrange(world)))
        steps.append((side(first, count), side(first, count), by))
    return _C.Plan(world, chunks, steps), pick.random() < 0.5


def executor(step: _C.StepTuple) -> int:
    return step[2] if step[2] >= 0 else step[0][0][0]


def cells(slices: Sequence[_C.SliceTuple], in_place: bool) -> list[Cell]:
    return [
        (rank, "in" if in_place and buffer == "out" else buffer, first + i)
        for rank, buffer, first, count in slices
        for i in range(count)
    ]


def is_identity(step: _C.StepTuple, in_place: bool) -> bool:
    """Whether a step writes every cell with its own value: its source is every destination."""
    dsts, srcs, _ = step
    source = cells(srcs, in_place)
    return len(srcs) == 1 and all(cells([d], in_place) == source for d in dsts)


def run_steps(plan: _C.Plan, in_place: bool, order: Sequence[int]) -> dict[Cell, int]:
    """Run steps in this order on symbolic values (hashes); a missing cell holds its own name."""
    memory: dict[Cell, int] = {}
    for number in order:
        dsts, srcs, _ = plan.steps[number]
        count = dsts[0][3]
        sources = [cells([s], in_place) for s in srcs]
        values = [[memory.get(s[i], hash(s[i])) for s in sources] for i in range(count)]
        for d in dsts:
            for i, cell in enumerate(cells([d], in_place)):
                memory[cell] = values[i][0] if len(srcs) == 1 else hash(tuple(values[i]))
    return memory


def everything(rank: int, chunks: int) -> list[_C.SliceTuple]:
    return [(rank, buffer, 0, chunks) for buffer in BUFFERS]
