"""Plans: what an algorithm moves where, to read, to prove and to time before anything runs.

A plan is data, so all of this works for any world on any machine: no tensor is touched here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields
from functools import cached_property
from numbers import Real
from os import PathLike
from typing import NamedTuple

from pycollect import _C
from pycollect._plan_picture import draw
from pycollect._plan_text import describe

# A plan is written out rank by rank and piece by piece; beyond these the larger ones no longer fit
# in memory: 2 W P steps of a ring are half a million then.
_MOST_RANKS = 1024
_MOST_PIECES = 1 << 18  # of all ranks together


@dataclass(frozen=True)
class Model:
    """Say how fast a machine is, for ``Plan.predict``: one device a rank.

    alpha: seconds until a rank sees that another is done. port: bytes per second into a device,
    and as many out of it. memory: bytes per second of a device's memory, reads and writes
    together. bridge: bytes per second between the two halves of the world, 0 where there is none.
    Raises ValueError for a figure that is negative, zero (but alpha and bridge) or not finite.

    >>> import pycollect as pc
    >>> model = pc.Model(alpha=5e-6, port=12e9, memory=40e9)
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
                raise TypeError(f"Model: {item.name} is a number, not {value!r}")
            least = "not negative" if item.name in ("alpha", "bridge") else "above zero"
            in_range = value >= 0 if least == "not negative" else value > 0
            if not (in_range and value <= sys.float_info.max):
                unit = "seconds" if item.name == "alpha" else "bytes per second"
                raise ValueError(
                    f"Model: {item.name} is in {unit}, finite and {least}, not {value}"
                )


class TaskSpan(NamedTuple):
    """One step of a plan in predicted time, in seconds from the call."""

    rank: int
    step: int
    start: float
    end: float


@dataclass(frozen=True)
class Plan:
    """Hold an algorithm's steps for one world; made by ``pycollect.plan``.

    ``str`` shows the steps by level, those of a level at the same time. ``order`` is how sums keep
    the numerical contract: "exact" (the left fold in rank order, rounded once), "native" (the same,
    but rounded at every hop) or "other"; ``cost`` is the algorithm's rounds and bytes in words.

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
        return describe(self)

    @property
    def chunks(self) -> int:
        """Into how many chunks a buffer is cut."""
        return self._plan.chunks

    @cached_property
    def steps(self) -> tuple[_C.StepTuple, ...]:
        """The steps as written: (destinations, sources, rank that executes it).

        A slice is (rank, "in" | "out" | "tmp" | "host", first chunk, chunks); the executing rank is
        -1 for that of the first destination.

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
        # The first level is "all are ready" and the last "all may go".
        inner = self._program.levels[1:-1]
        return tuple(tuple(tasks[rank][index][0] for rank, index in level) for level in inner)

    def verify(self) -> str | None:
        """Return None when the plan is right, or its first defect in words.

        Runs it on symbols: every chunk must end up as the collective promises, added in the order
        that the algorithm promises, and inputs must survive where outputs have their own memory.
        Then replays it rank by rank: no two accesses may race, and nobody may wait for ever.

        >>> import pycollect as pc
        >>> print(pc.plan("reduce_scatter", 5).verify())
        None
        """
        defect, order = _C.verify(self.collective, self._plan, self.root, self.in_place)
        if defect is not None:
            return defect
        orders = ("exact", "native", "other")
        if orders.index(order) > orders.index(self.order):
            return f"sums are in the order '{order}', and '{self.order}' is promised"
        replay = _C.replay(self._program)
        if replay.defect is not None:
            return replay.defect
        if self.collective == "barrier" and not replay.meets:
            return "a rank leaves the barrier before all have entered"
        return None

    def timeline(self, model: str | Model = "nvlink") -> list[TaskSpan]:
        """Return when each step would run, in the order of the steps.

        >>> import pycollect as pc
        >>> [span.rank for span in pc.plan("gather", 3).timeline()]
        [0, 0, 0]
        """
        spans = _C.predict(self._program, self.nbytes, _figures(model))[1]
        return [TaskSpan(*span) for span in spans if span[1] >= 0]

    def predict(self, model: str | Model = "nvlink") -> float:
        """Return the predicted seconds, from the call until the last rank has left.

        model: "nvlink", "pcie" or a ``Model``. One process and one device a rank; what arithmetic
        costs is left out. Good for which algorithm at which size, not for the last 20 %.
        Raises ValueError for a model that is not known.

        >>> import pycollect as pc
        >>> small, large = (pc.plan("all_reduce", 8, nbytes=n).predict() for n in (1024, 1 << 30))
        >>> small < large
        True
        """
        return _C.predict(self._program, self.nbytes, _figures(model))[0]

    def plot(self, path: str | PathLike[str], model: str | Model = "nvlink") -> None:
        """Draw ranks against predicted time into a PNG or SVG file, by the suffix of path.

        One lane a rank, one bar a step; needs matplotlib (ImportError says how to get it). Raises
        ValueError for another suffix, more ranks than a picture can show, or a place where no file
        can be.

        >>> import pycollect as pc, tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "ring.svg"
        >>> pc.plan("all_reduce", 4, algorithm="chain").plot(path)
        >>> path.stat().st_size > 1000
        True
        """
        seconds, spans = _C.predict(self._program, self.nbytes, _figures(model))
        draw(self, path, _label(model), seconds, spans)


def algorithms(collective: str = "all_reduce") -> list[str]:
    """List the algorithms of a collective, those that keep the numerical contract first.

    Raises ValueError for a collective that there is not.

    >>> import pycollect as pc
    >>> pc.algorithms("broadcast")
    ['chain', 'direct']
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
    """Write the plan of a collective for a world of ranks, without running it.

    algorithm: a name of ``algorithms(collective)``; None takes the one for ranks that share a
    memory. nbytes: of a rank's largest buffer, for ``predict``; a barrier moves none. root: of
    those collectives that have one. pieces: of a pipeline. in_place: whether a rank's output is
    its input; None means where the algorithm can.
    Raises ValueError for a name, rank or number that there is not.

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
    name = _C.default_algorithm(collective, world, nbytes) if algorithm is None else algorithm
    chosen = _C.find_algorithm(collective, name)
    in_place = _in_place(chosen, in_place)
    made = chosen.plan(world, root, pieces)
    return Plan(
        collective=collective,
        algorithm=name,
        world=world,
        nbytes=0 if collective == "barrier" else nbytes,
        root=root,
        pieces=pieces,
        in_place=in_place,
        order=chosen.order,
        cost=chosen.cost,
        _plan=made,
        _program=_C.Program(made, in_place),
    )


def _check_numbers(world: int, nbytes: int, root: int, pieces: int) -> None:
    if nbytes < 0:
        raise ValueError(f"plan: nbytes is {nbytes}; it cannot be negative")
    if world < 1:
        raise ValueError(f"plan: a world has at least one rank, not {world}")
    if world > _MOST_RANKS:
        raise ValueError(f"plan: world is {world}; plans are written for at most {_MOST_RANKS}")
    if not 0 <= root < world:
        raise ValueError(f"plan: root {root} is not a rank of a world of {world}")
    if pieces < 1:
        raise ValueError(f"plan: a pipeline has at least one piece, not {pieces}")
    most = _MOST_PIECES // world
    if pieces > most:
        raise ValueError(f"plan: pieces is {pieces}; {world} ranks allow at most {most}")


def _in_place(chosen: _C.Algorithm, asked: bool | None) -> bool:
    asked = None if asked is None else _C.flag_from(asked, "plan", "in_place")
    if asked and not chosen.in_place:
        what = f"{chosen.collective} by '{chosen.name}'"
        raise ValueError(f"plan: {what} cannot run in place; say in_place=False")
    return chosen.in_place if asked is None else asked


def _figures(model: str | Model) -> tuple[float, float, float, float]:
    if isinstance(model, str):
        known = _C.models()
        if model not in known:
            names = ", ".join(f"'{name}'" for name in known)
            raise ValueError(f"there is no model '{model}'; choose one of {names}, or a Model")
        return known[model]
    if not isinstance(model, Model):
        raise TypeError(f"a model is a name or a pycollect.Model, not {type(model).__name__}")
    return (float(model.alpha), float(model.port), float(model.memory), float(model.bridge))


def _label(model: str | Model) -> str:
    if isinstance(model, str):
        return model
    return f"{model.alpha * 1e6:.3g} µs and {model.port / 1e9:.3g} GB/s"
