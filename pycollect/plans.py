"""Plans: the steps of an algorithm, to print, verify, predict and draw without running them.

A plan is data, so this works for any world on any machine and uses no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import NamedTuple

from pycollect import _C
from pycollect._cost_model import CostModel, figures_of, label_of
from pycollect._plan_arguments import check_numbers, in_place_of, ranks_of_hosts
from pycollect._plan_picture import draw
from pycollect._plan_text import describe

_PIECES = 4  # of a plan for one host


class TaskSpan(NamedTuple):
    """The predicted start and end of one step, in seconds since the call.

    rank: the rank that executes the step. step: the step's index in ``Plan.steps``. A copy between
    hosts goes on while its rank, the receiver, executes other steps.
    """

    rank: int
    step: int
    start: float
    end: float


@dataclass(frozen=True)
class Plan:
    """Hold an algorithm's steps for one world; made by ``pycollect.plan``.

    ``collective`` and ``algorithm`` are names, ``world`` is the number of ranks, and ``hosts`` are
    the numbers of ranks on each host, in rank order. ``nbytes``: bytes of a rank's largest buffer,
    0 for a barrier. ``root``: the root rank, 0 for collectives without one, unless another was
    passed. ``pieces``: the pieces of a pipeline; only pipelined algorithms use them. ``in_place``:
    whether a rank's output is its input. ``order``: the order of additions, "exact" (the left fold
    in rank order, rounded once), "native" (the same, but rounded at every hop) or "other".
    ``cost``: the algorithm's rounds and bytes, as text, in which W stands for the number of ranks,
    H for that of hosts, S for ``nbytes`` and P for ``pieces``.

    Over several hosts, the steps are those of processes: a step uses the memory of one host, and
    between hosts are only copies, which the receiving rank executes.

    ``str`` lists the steps by level; steps of one level may run at the same time.

    >>> import pycollect as pc
    >>> pc.plan("reduce", 8, algorithm="chain").order
    'native'
    """

    collective: str
    algorithm: str
    world: int
    hosts: tuple[int, ...]
    nbytes: int
    root: int
    pieces: int
    in_place: bool
    order: str
    cost: str
    _plan: _C.Plan = field(repr=False, compare=False)
    # None if it is made when it is needed.
    _program: _C.Program | None = field(repr=False, compare=False)
    # What the plan is made from over several hosts; None on one host.
    _world_view: _C.WorldView | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return describe(self)

    @property
    def chunks(self) -> int:
        """The number of chunks that a rank's largest buffer consists of.

        Over several hosts, "host" and "acc" have more chunks, for what a rank receives.
        """
        return self._plan.chunks if self._world_view is None else self._world_view.chunks

    @cached_property
    def host_of(self) -> tuple[int, ...]:
        """The number of the host of each rank.

        >>> import pycollect as pc
        >>> pc.plan("all_reduce", hosts=(2, 1)).host_of
        (0, 0, 1)
        """
        return tuple(host for host, ranks in enumerate(self.hosts) for _ in range(ranks))

    @cached_property
    def steps(self) -> tuple[_C.StepTuple, ...]:
        """The steps in their order: (destinations, sources, executing rank).

        A step reads all its source slices, folds them in their order, and writes the result to all
        its destination slices. A slice is (rank, buffer, first chunk, number of chunks), and a
        buffer is "in" (a rank's input), "out" (its output), "tmp" (its scratch), "acc" (scratch for
        sums that are not rounded) or "host" (memory that all ranks of its host reach). The
        executing rank is -1 if it is the rank of the first destination.

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
        tasks = self._lowered.tasks
        # Without the first and the last level, whose tasks take and return the ranks' buffers.
        inner = self._lowered.levels[1:-1]
        return tuple(tuple(tasks[rank][index][0] for rank, index in level) for level in inner)

    def verify(self) -> str | None:
        """Return None if the plan is correct, or else a description of its first defect.

        Executes the plan on symbols: every chunk must get the value that the collective defines,
        added in the algorithm's ``order``, and out of place the inputs must keep their values.
        Over several hosts, all that passes between them must be copies. Then replays the ranks'
        tasks: no two accesses may race, and no rank may wait forever.

        >>> import pycollect as pc
        >>> print(pc.plan("reduce_scatter", 5).verify())
        None
        """
        if self._world_view is None:
            defect, order = _C.verify(self.collective, self._plan, self.root, self.in_place)
        else:
            defect, order = self._world_view.verify(self.collective, self.root)
        if defect is not None:
            return defect
        orders = ("exact", "native", "other")
        if orders.index(order) > orders.index(self.order):
            return f"sums are in the order '{order}', and '{self.order}' is promised"
        races = _C.find_races(self._lowered)
        if races.defect is not None:
            return races.defect
        if self.collective == "barrier" and not races.is_barrier:
            return "a rank leaves the barrier before all have entered"
        return None

    def timeline(self, model: str | CostModel | None = None) -> list[TaskSpan]:
        """Return the predicted times of the steps, in the order of the steps.

        A ``pycollect.plans.TaskSpan`` has rank, step, start and end. Over several hosts, data that
        is larger than the staging buffers passes in several runs of all steps, which are listed one
        after the other, the first six at most. Takes the models of ``predict``, and raises the same
        errors.

        >>> import pycollect as pc
        >>> [span.rank for span in pc.plan("gather", 3).timeline()]
        [0, 0, 0]
        """
        spans = self._timeline(model)[1]
        return [TaskSpan(*span) for span in spans if span[1] >= 0]

    def predict(self, model: str | CostModel | None = None) -> float:
        """Return the predicted seconds from the call until the last rank returns.

        model: "nvlink", "pcie", "ethernet" or a ``CostModel``, whose help has the figures; None is
        "nvlink" on one host and "ethernet" over several. The prediction is for one process with one
        device per rank, over several hosts for one process per rank, and ignores the cost of
        arithmetic; it serves to compare algorithms and sizes, and may be wrong by 20 %. Over hosts,
        it is for a dtype of 4 bytes and staging buffers of the default size. Raises ValueError for
        an unknown name, TypeError for another type.

        >>> import pycollect as pc
        >>> small, large = (pc.plan("all_reduce", 8, nbytes=n).predict() for n in (1024, 1 << 30))
        >>> small < large
        True
        """
        if self._world_view is None:
            return self._timeline(model)[0]
        figures = figures_of(self._model(model))
        return self._world_view.predict(self.nbytes, _C.HOSTS_BUFFER_BYTES, figures)

    @cached_property
    def _lowered(self) -> _C.Program:
        return self._program or _C.Program(self._plan, self.in_place)

    def _timeline(self, model: str | CostModel | None) -> tuple[float, list[_C.SpanTuple]]:
        figures = figures_of(self._model(model))
        if self._world_view is not None:
            return self._world_view.timeline(self.nbytes, _C.HOSTS_BUFFER_BYTES, figures)
        alpha, port, memory, bridge, _, _ = figures
        return _C.predict(self._lowered, self.nbytes, (alpha, port, memory, bridge))

    def _model(self, model: str | CostModel | None) -> str | CostModel:
        if model is not None:
            return model
        return "nvlink" if len(self.hosts) == 1 else "ethernet"

    def plot(self, path: str | PathLike[str], model: str | CostModel | None = None) -> None:
        """Draw ranks against predicted time into a PNG or SVG file, by the suffix of path.

        The picture has one lane per rank and one bar per step, and lines between hosts. A copy
        between hosts is a thin bar below the others of the rank that receives it. Raises
        ImportError without matplotlib, and ValueError for another suffix, for more than 256 ranks,
        and for a path that cannot be written.

        >>> import pycollect as pc, tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "ring.svg"
        >>> pc.plan("all_reduce", 4, algorithm="chain").plot(path)
        >>> path.stat().st_size > 1000
        True
        """
        seconds, spans = self._timeline(model)
        draw(self, path, label_of(self._model(model)), seconds, spans)


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
    world: int | None = None,
    *,
    hosts: Sequence[int] | None = None,
    algorithm: str | None = None,
    nbytes: int = 1 << 20,
    root: int = 0,
    pieces: int | None = None,
    in_place: bool | None = None,
) -> Plan:
    """Return the plan of a collective for a world of ranks, without running it.

    algorithm: a name from ``algorithms(collective)``; None selects the one for ranks that share
    memory, or over several hosts the one that a group over these hosts selects. world: 1 to 1024
    ranks, or up to 4096 on hosts with up to 64 each, if the plan is not too large; may be left out
    with hosts. hosts: the number of ranks on each host, in rank order; None means that all ranks
    are on one. nbytes: bytes of a rank's largest buffer, for ``predict``: its tensor, but the
    result of all_gather and gather and the input of reduce_scatter and scatter; ignored for a
    barrier. root: the root rank, 0 to world - 1, for collectives that have one. pieces: the number
    of pieces of a pipeline, 1 to 2**18 / world; None means 4, or over several hosts what a group
    selects. in_place: whether a rank's output is its input; None means yes if the algorithm allows
    it. Raises ValueError for an unknown name, for a rank or number out of range, for hosts without
    ranks or with other ranks than the world, and for ``in_place=True`` if the algorithm does not
    allow it; TypeError for a value of another type.

    >>> import pycollect as pc
    >>> print(pc.plan("all_reduce", 2, algorithm="fused"))
    all_reduce by 'fused', 2 ranks, 2 chunks of 512 KiB, in place
    order exact, 1 level; each rank reads 1 MiB and writes 1 MiB
    level 1  rank 0: out[0] on 0,1 <- sum of in[0] from 0,1
             rank 1: out[1] on 0,1 <- sum of in[1] from 0,1
    >>> pc.plan("all_reduce", hosts=(8, 8, 4)).algorithm
    'host_chain'
    """
    places = ranks_of_hosts(world, hosts)
    nbytes, root = _C.int_from(nbytes, "plan", "nbytes"), _C.int_from(root, "plan", "root")
    pieces = None if pieces is None else _C.int_from(pieces, "plan", "pieces")
    check_numbers(places, nbytes, root, 1 if pieces is None else pieces)
    name, best, first_ranks_send = _select(collective, places, nbytes, algorithm)
    chosen, pieces = _C.find_algorithm(collective, name), best if pieces is None else pieces
    in_place = in_place_of(chosen, in_place)
    view = None
    if len(places) > 1:
        view = _C.WorldView(chosen, places, root, in_place, (pieces, first_ranks_send))
    made = chosen.plan(places[0], root, pieces) if view is None else view.plan
    return Plan(
        collective=collective,
        algorithm=name,
        world=sum(places),
        hosts=places,
        nbytes=0 if collective == "barrier" else nbytes,
        root=root,
        pieces=pieces,
        in_place=in_place,
        order=chosen.order,
        cost=chosen.cost,
        _plan=made,
        _program=_C.Program(made, in_place) if view is None else None,
        _world_view=view,
    )


def _select(
    collective: str, hosts: tuple[int, ...], nbytes: int, algorithm: str | None
) -> tuple[str, int, bool]:
    """Return algorithm, pieces, and whether only the first ranks of hosts send to other hosts."""
    named = "" if algorithm is None else _C.find_algorithm(collective, algorithm).name
    if len(hosts) > 1:
        return _C.select_over_hosts(collective, hosts, nbytes, named)
    return named or _C.default_algorithm(collective, hosts[0], nbytes), _PIECES, False
