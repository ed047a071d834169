"""Plans: the steps of an algorithm, to print, verify, predict and draw without running them.

A plan is data, so this works for any world on any machine and uses no tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import groupby
from numbers import Real
from os import PathLike

from . import _C
from ._plan_picture import draw
from ._sizes import bytes_text, runs
from .collectives import Order, check_order
from .errors import shown

# Limits that keep the largest plans in memory. A plan has its steps for every rank and piece: a
# chain of W ranks and P pieces has 2 W P steps, half a million at most.
_MOST_RANKS = 1024
_MOST_PIECES = 1 << 18  # of all ranks together
# As text, a plan of up to this number of steps is shown in full (eight ranks that copy from all
# others have 56), a larger one only with the first steps of each level.
_WHOLE_STEPS = 64
_LEVEL_STEPS = 8
_SHOWN_LEVELS = 24
_SHOWN_RUNS = 6


@dataclass(frozen=True)
class CostModel:
    """Describe the speed of a machine for ``Plan.predict``.

    alpha: seconds until a rank sees another rank's signal. port: bytes per second into a device,
    and as many out of it. memory: bytes per second of a device's memory, reads and writes
    together. bridge: bytes per second between the two halves of the world, each way; 0 (default)
    for no such limit. The machine has one device per rank.

    Raises TypeError for a value that is not a number, and ValueError for one that is infinite, NaN
    or negative, and for a port or memory of zero.

    The named models are "nvlink", CostModel(1.5e-6, 400e9, 3000e9), for eight GPUs behind a switch,
    and "pcie", CostModel(3e-6, 24e9, 800e9, 20e9), for two sockets with four GPUs each. Of another
    machine, port is the rate of a copy between two GPUs, and memory twice that within a GPU, as a
    copy reads and writes.

    >>> import pycollect as pc
    >>> model = pc.CostModel(alpha=5e-6, port=12e9, memory=40e9)
    >>> pc.plan("all_reduce", 4, algorithm="chain").predict(model) > 0
    True
    """

    alpha: float
    port: float
    memory: float
    bridge: float = 0.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not is_number:
                raise TypeError(f"CostModel: {item.name} is {shown(value)}; pass a number")
            may_be_zero = item.name in ("alpha", "bridge")
            in_range = value >= 0 if may_be_zero else value > 0
            if not (in_range and value <= sys.float_info.max):
                least = "not negative" if may_be_zero else "above zero"
                unit = "seconds" if item.name == "alpha" else "bytes per second"
                raise ValueError(
                    f"CostModel: {item.name} is {value}; pass {unit}, finite and {least}"
                )


def figures_of(model: str | CostModel) -> _C.ModelTuple:
    if isinstance(model, str):
        known = _C.models()
        if model not in known:
            names = ", ".join(f"'{name}'" for name in known)
            raise ValueError(f"there is no model '{model}'; pass one of {names}, or a CostModel")
        return known[model]
    if not isinstance(model, CostModel):
        raise TypeError(f"model is a {type(model).__name__}; pass a name or a pycollect.CostModel")
    return (float(model.alpha), float(model.port), float(model.memory), float(model.bridge))


@dataclass(frozen=True)
class Plan:
    """Hold an algorithm's steps for one world; made by ``pycollect.plan``.

    ``collective`` and ``algorithm`` are names, and ``world`` is the number of ranks. ``nbytes``:
    bytes of a rank's largest buffer, 0 for a barrier. ``root``: the root rank, 0 for collectives
    without one, unless another was passed. ``pieces``: the pieces of a pipeline; only pipelined
    algorithms use them. ``in_place``: whether a rank's output is its input. ``order``: the order of
    additions, "exact" (the left fold in rank order, rounded once), "native" (the same, but rounded
    at every hop) or "other". ``cost``: the algorithm's rounds and bytes, as text, in which W stands
    for the number of ranks, S for ``nbytes`` and P for ``pieces``.

    ``str`` lists the steps by level; steps of one level may run at the same time.

    >>> import pycollect as pc
    >>> pc.plan("reduce", 8, algorithm="chain").order
    'native'
    """

    collective: str
    algorithm: str
    world: int
    nbytes: int
    root: int
    pieces: int
    in_place: bool
    order: str
    cost: str
    _plan: _C.Plan = field(repr=False, compare=False)
    _program: _C.Program = field(repr=False, compare=False)

    def __str__(self) -> str:
        return "\n".join([*self._header(), *self._body()])

    def _header(self) -> Iterator[str]:
        rooted = self.collective in ("reduce", "broadcast", "scatter", "gather")
        root = f", root {self.root}" if rooted else ""
        chunks = f"{self.chunks} chunks of" if self.chunks != 1 else "1 chunk of"
        size = bytes_text(self.nbytes / self.chunks)
        where = "in place" if self.in_place else "out of place"
        how = f"by '{self.algorithm}', {_ranks(self.world)}{root}, {chunks} {size}, {where}"
        yield f"{self.collective} {how}"
        count = len(self.levels)
        yield f"order {self.order}, {count} level{'s' * (count != 1)}; {self._traffic()}"

    def _traffic(self) -> str:
        chunk = self.nbytes / self.chunks
        reads, writes = [0.0] * self.world, [0.0] * self.world
        for step in self.steps:
            dsts, srcs, _ = step
            reads[_executor(step)] += chunk * sum(s[3] for s in srcs)
            writes[_executor(step)] += chunk * sum(d[3] for d in dsts)
        ranks = "each rank" if len({*zip(reads, writes, strict=True)}) == 1 else "a rank"
        return f"{ranks} reads {_span(reads)} and writes {_span(writes)}"

    def _body(self) -> Iterator[str]:
        steps, levels = self.steps, self.levels
        width = len(f"level {len(levels)}  ")
        most = len(steps) if len(steps) <= _WHOLE_STEPS else _LEVEL_STEPS
        for number, level in enumerate(levels[:_SHOWN_LEVELS], 1):
            head = f"level {number}"
            for step in level[:most]:
                yield f"{head:<{width}}rank {_executor(steps[step])}: {_step_text(steps[step])}"
                head = ""
            if len(level) > most:
                yield f"{'':<{width}}... and {len(level) - most} more steps"
        if len(levels) > _SHOWN_LEVELS:
            yield f"... and {len(levels) - _SHOWN_LEVELS} more levels"

    @property
    def chunks(self) -> int:
        """The number of chunks that a rank's largest buffer consists of."""
        return self._plan.chunks

    @cached_property
    def steps(self) -> tuple[_C.StepTuple, ...]:
        """The steps in their order: (destinations, sources, executing rank).

        A step reads all its source slices, folds them in their order, and writes the result to all
        its destination slices. A slice is (rank, buffer, first chunk, number of chunks), and a
        buffer is "in" (a rank's input), "out" (its output), "tmp" (its scratch) or "host" (memory
        that all ranks reach). The executing rank is -1 if it is the rank of the first destination.

        >>> import pycollect as pc
        >>> pc.plan("broadcast", 2).steps
        ((((0, 'out', 0, 1), (1, 'out', 0, 1)), ((0, 'in', 0, 1),), 0),)
        """
        return self._plan.steps

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the steps that run at the same time, level after level.

        >>> import pycollect as pc
        >>> pc.plan("all_reduce", 3, algorithm="one_shot").levels
        ((0, 1, 2), (3, 4, 5))
        """
        tasks = self._program.tasks
        # Without the first and the last level, whose tasks take and return the ranks' buffers.
        inner = self._program.levels[1:-1]
        return tuple(tuple(tasks[rank][index][0] for rank, index in level) for level in inner)

    def verify(self, order: Order = "rank") -> str | None:
        """Return None if the plan is correct, or else a description of its first defect.

        Executes the plan on symbols: every chunk must get the value that the collective defines,
        added in the algorithm's ``order``, and out of place the inputs must keep their values. With
        ``order="tree"``, its folds are those of calls with this argument, and every sum must be the
        balanced tree over the ranks (``help(pycollect.collectives)``). Then replays the ranks'
        tasks: no two accesses may race, and no rank may wait forever. Raises TypeError for an
        ``order`` that is not a string, and ValueError for another one.

        >>> import pycollect as pc
        >>> print(pc.plan("reduce_scatter", 5).verify())
        None
        """
        check_order(order, "verify")
        defect, found = _C.verify(self.collective, self._plan, self.root, self.in_place, order)
        if defect is not None:
            return defect
        orders = ("exact", "native", "other")
        if order == "tree" and found == "other":
            return "sums are not the balanced tree over the ranks"
        if order == "rank" and orders.index(found) > orders.index(self.order):
            return f"sums are in the order '{found}', and '{self.order}' is promised"
        races = _C.find_races(self._program)
        if races.defect is not None:
            return races.defect
        if self.collective == "barrier" and not races.is_barrier:
            return "a rank leaves the barrier before all have entered"
        return None

    def predict(self, model: str | CostModel = "nvlink") -> float:
        """Return the predicted seconds from the call until the last rank returns.

        model: "nvlink", "pcie" or a ``CostModel``, whose help has the figures. The prediction is
        for one process with one device per rank, and ignores the cost of arithmetic; it serves to
        compare algorithms and sizes, and may be wrong by 20 %. Raises ValueError for an unknown
        name, TypeError for another type.

        >>> import pycollect as pc
        >>> small, large = (pc.plan("all_reduce", 8, nbytes=n).predict() for n in (1024, 1 << 30))
        >>> small < large
        True
        """
        return self._timeline(model)[0]

    def _timeline(self, model: str | CostModel) -> tuple[float, list[_C.SpanTuple]]:
        """Return the prediction, and each task: rank, step or -1, start and end in seconds."""
        return _C.predict(self._program, self.nbytes, figures_of(model))

    def plot(self, path: str | PathLike[str], model: str | CostModel = "nvlink") -> None:
        """Draw ranks against predicted time into a PNG or SVG file, by the suffix of path.

        The picture has one lane per rank and one bar per step. Raises ImportError without
        matplotlib, and ValueError for another suffix, for more than 256 ranks, and for a path that
        cannot be written.

        >>> import pycollect as pc, tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "ring.svg"
        >>> pc.plan("all_reduce", 4, algorithm="chain").plot(path)
        >>> path.stat().st_size > 1000
        True
        """
        seconds, spans = self._timeline(model)
        size = "" if self.collective == "barrier" else f", {bytes_text(self.nbytes)}"
        title = f"{self.collective} by {self.algorithm}, {_ranks(self.world)}{size}"
        if isinstance(model, CostModel):
            model = f"{model.alpha * 1e6:.3g} µs and {model.port / 1e9:.3g} GB/s"
        predicted = f"{seconds * 1e6:.4g} µs predicted on {model}"
        draw(path, (title, predicted), self.world, self.steps, spans)


def algorithms(collective: str = "all_reduce") -> list[str]:
    """List the algorithms of a collective, those that keep the numerical contract first.

    Raises ValueError for an unknown collective, and TypeError for one that is not a string.

    >>> import pycollect as pc
    >>> "chain" in pc.algorithms("broadcast")
    True
    """
    return [a.name for a in _C.algorithms(collective)]


def plan(
    collective: str,
    world: int,
    *,
    algorithm: str | None = None,
    nbytes: int = 1 << 20,
    root: int = 0,
    pieces: int = 4,
    in_place: bool | None = None,
) -> Plan:
    """Return the plan of a collective for a world of ranks, without running it.

    algorithm: a name from ``algorithms(collective)``; None selects the one for ranks that share
    memory. world: 1 to 1024 ranks. nbytes: bytes of a rank's largest buffer, for ``predict``: its
    tensor, but the result of all_gather and gather and the input of reduce_scatter and scatter;
    ignored for a barrier. root: the root rank, 0 to world - 1, for collectives that have one.
    pieces: the number of pieces of a pipeline, 1 to 2**18 / world. in_place: whether a rank's
    output is its input; None means yes if the algorithm allows it. Raises ValueError for an unknown
    name, for a rank or number out of range, and for ``in_place=True`` if the algorithm does not
    allow it; TypeError for a value of another type.

    A group of ranks on several hosts has no plan of its own: a call consists of calls of the ranks
    of each host, each of which has a plan, and of messages between hosts (docs/distributed.md).

    >>> import pycollect as pc
    >>> print(pc.plan("all_reduce", 2, algorithm="fused"))
    all_reduce by 'fused', 2 ranks, 2 chunks of 512 KiB, in place
    order exact, 1 level; each rank reads 1 MiB and writes 1 MiB
    level 1  rank 0: out[0] on 0,1 <- sum of in[0] from 0,1
             rank 1: out[1] on 0,1 <- sum of in[1] from 0,1
    """
    world, nbytes = _C.int_from(world, "plan", "world"), _C.int_from(nbytes, "plan", "nbytes")
    root, pieces = _C.int_from(root, "plan", "root"), _C.int_from(pieces, "plan", "pieces")
    _check_numbers(world, nbytes, root, pieces)
    if algorithm is None:
        algorithm = _C.default_algorithm(collective, world, nbytes)
    chosen = _C.find_algorithm(collective, algorithm)
    wanted = chosen.in_place if in_place is None else _C.flag_from(in_place, "plan", "in_place")
    if wanted and not chosen.in_place:
        what = f"{collective} by '{algorithm}'"
        raise ValueError(f"plan: {what} cannot run in place; pass in_place=False")
    made = chosen.plan(world, root, pieces)
    return Plan(
        collective=collective,
        algorithm=chosen.name,
        world=world,
        nbytes=0 if collective == "barrier" else nbytes,
        root=root,
        pieces=pieces,
        in_place=wanted,
        order=chosen.order,
        cost=chosen.cost,
        _plan=made,
        _program=_C.Program(made, wanted),
    )


def _check_numbers(world: int, nbytes: int, root: int, pieces: int) -> None:
    if nbytes < 0:
        raise ValueError(f"plan: nbytes is {nbytes}; it cannot be negative")
    if world < 1:
        raise ValueError(f"plan: world is {world}; pass at least one rank")
    if world > _MOST_RANKS:
        raise ValueError(f"plan: world is {world}; at most {_MOST_RANKS} ranks are allowed")
    if not 0 <= root < world:
        raise ValueError(f"plan: root {root} is not a rank of a world of {world}")
    if pieces < 1:
        raise ValueError(f"plan: pieces is {pieces}; pass at least one piece")
    most = _MOST_PIECES // world
    if pieces > most:
        raise ValueError(f"plan: pieces is {pieces}; {world} ranks allow at most {most}")


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _executor(step: _C.StepTuple) -> int:
    """Return the rank that executes a step."""
    dsts, _, by = step
    return dsts[0][0] if by < 0 else by


def _span(counts: Sequence[float]) -> str:
    least, most = bytes_text(min(counts)), bytes_text(max(counts))
    if least == most:
        return least
    busiest = [rank for rank, count in enumerate(counts) if count == max(counts)]
    return f"{least} to {most} (rank{'s' * (len(busiest) != 1)} {_ranks_text(busiest)})"


def _ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks in their order, with runs of consecutive ranks as ranges.

    >>> _ranks_text([0, 1, 2, 3]), _ranks_text([2, 0, 1]), _ranks_text(range(0, 40, 4))
    ('0..3', '2,0,1', '0,4,8,12,16,20,... (10)')
    """
    texts: list[str] = []
    for run in runs(ranks):
        texts += [f"{run[0]}..{run[-1]}"] if len(run) > 2 else map(str, run)
    if len(texts) > _SHOWN_RUNS:
        texts = [*texts[:_SHOWN_RUNS], f"... ({len(ranks)})"]
    return ",".join(texts)


def _step_text(step: _C.StepTuple) -> str:
    """Return one step in words.

    >>> _step_text((((1, "out", 0, 1),), ((0, "out", 0, 1), (1, "in", 0, 1)), -1))
    'out[0] on 1 <- sum of out[0] from 0 and in[0] from 1'
    """
    dsts, srcs, _ = step
    fold = "sum of " if len(srcs) > 1 else ""
    to = " and ".join(f"{what} on {ranks}" for what, ranks in _grouped(dsts))
    return to + " <- " + fold + " and ".join(f"{what} from {r}" for what, r in _grouped(srcs))


def _grouped(side: Sequence[_C.SliceTuple]) -> Iterator[tuple[str, str]]:
    for (buffer, first, count), group in groupby(side, lambda s: s[1:]):
        chunks = f"{first}" if count == 1 else f"{first}:{first + count}"
        yield f"{buffer}[{chunks}]", _ranks_text([s[0] for s in group])
