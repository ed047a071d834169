"""Steps of the soak that are not a single collective: messages, batches, and mistakes."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from dist_soak_calls import (
    COLLECTIVES,
    Check,
    Side,
    Step,
    Works,
    check,
    draw,
    given,
    lay,
    room,
)

import pycollect as pc

_CPU = torch.device("cpu")
_REFUSALS = (TypeError, ValueError)
LENT = "calls on lent memory"  # long; only in groups with a stopped rank whose peers time out
LENT_BYTES = 16 << 20
# Kinds of steps and their weights; "collective" then selects uniformly among all collectives.
KINDS = {
    "collective": 40,
    "exchange": 8,
    "message": 5,
    "batch of messages": 5,
    "batch": 5,
    "list of calls": 5,
    "mistake": 5,
    "mistake in a list": 3,
    "message too long": 2,
    LENT: 300,
}
MESSAGES = ("exchange", "message", "message too long")


@dataclasses.dataclass
class Pending:
    """A step in flight on this rank."""

    step: Step
    works: Works
    check: Check
    refused: bool = False  # every rank must refuse the step

    def finish(self) -> None:
        """Wait for the step and check its result."""
        told = None
        try:
            for work in self.works:
                if work is not None:
                    work.wait()
        except _REFUSALS as error:
            told = error
            if not self.refused:
                raise
        assert not self.refused or told or self.works == (), f"this rank did not refuse {self.step}"
        self.check()


def exchange(side: Side, step: Step) -> tuple[Works, Check]:
    """Every rank sends to one rank and receives from another, along a random ring."""
    order = list(range(step.world))
    step.own("order").shuffle(order)
    place = order.index(side.rank)
    to, source = order[(place + 1) % step.world], order[place - 1]
    out = room(side, step)
    sent = lay(side, given(step, side.rank))
    calls = [
        lambda: dist.isend(sent, side.at(to), side.group, tag=step.number),
        lambda: dist.irecv(out, side.at(source), side.group, tag=step.number),
    ]
    side.local.shuffle(calls)
    return [call() for call in calls], check(step, [(out, given(step, source))])


def message(side: Side, step: Step) -> tuple[Works, Check]:
    """One rank sends to another, which may receive from any source."""
    source, to = step.own("pair").sample(range(step.world), 2)
    if side.rank == source:
        dist.send(lay(side, given(step, source)), side.at(to), side.group, tag=step.number)
    if side.rank != to:
        return [], check(step, [])
    out = room(side, step)
    anybody = side.local.random() < 0.3
    who = dist.recv(out, None if anybody else side.at(source), side.group, tag=step.number)
    assert who == side.at(source)
    return [], check(step, [(out, given(step, source))])


def batch_of_messages(side: Side, step: Step, to_self: bool = True) -> tuple[Works, Check]:
    rng = step.own("batch")
    pairs = [(rng.randrange(step.world), rng.randrange(step.world)) for _ in range(8)]
    asked, found = [], []
    for n, (source, to) in enumerate(pairs):
        if source == to and not to_self:
            continue
        count = rng.randint(0, step.count)
        values = given(step, source, n, count)
        if side.rank == source:
            sent = lay(side, values)
            asked.append(dist.P2POp(dist.isend, sent, side.at(to), side.group, step.number))
        if side.rank == to:
            out = room(side, step, count)
            asked.append(dist.P2POp(dist.irecv, out, side.at(source), side.group, step.number))
            found.append((out, values))
    return dist.batch_isend_irecv(asked) if asked else [], check(step, found)


# Collectives that torch itself coalesces (_coalescing_manager without a device).
FAST = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


def batch(side: Side, step: Step, mixed: bool = True) -> tuple[Works, Check]:
    """Calls of one kind and op, which torch coalesces into one; `mixed`: with several dtypes."""
    rng = step.own("batch")
    kind = rng.choice(FAST)
    first = draw(kind, 0, step.seed, step.world)
    small = {"count": min(first.count, 50_000)}
    calls = [dataclasses.replace(first, seed=first.seed + n, **small) for n in range(1, 4)]
    if mixed and first.op in ("sum", "min", "max", "prod"):
        calls.append(dataclasses.replace(calls[0], dtype=torch.float64, seed=first.seed + 9))
        calls.append(dataclasses.replace(calls[0], dtype=torch.int16, seed=first.seed + 10))
        rng.shuffle(calls)
    return _together(side, step, calls, None)


def list_of_calls(side: Side, step: Step) -> tuple[Works, Check]:
    """Calls of different kinds, which the backend coalesces."""
    rng = step.own("list")
    kinds = [k for k in COLLECTIVES if k not in (*FAST, "all_reduce_coalesced")]
    calls = [draw(rng.choice(kinds), n, step.seed, step.world) for n in range(rng.randint(0, 4))]
    return _together(side, step, calls, _CPU)


def _together(
    side: Side, step: Step, calls: list[Step], device: torch.device | None
) -> tuple[Works, Check]:
    checks = []
    with dist._coalescing_manager(side.group, device, async_ops=True) as all_of_them:
        for call in calls:
            _, found = COLLECTIVES[call.kind](side, call, group=side.group, async_op=True)
            checks.append(found)
    return [all_of_them], lambda: [found() for found in checks] and None


def calls_on_lent_memory(side: Side, step: Step) -> tuple[Works, Check]:
    """100 zero-copy all_reduces, in which every rank writes to all; one is stopped amid a call.

    A rank that resumes late may also read new tensors, which hold large numbers; the op is MIN, so
    its late writes are smaller and therefore show.
    """
    x = pc.empty(LENT_BYTES // 4, dtype=torch.int32, group=side.group).fill_(side.rank)
    for _ in range(100):
        dist.all_reduce(x, dist.ReduceOp.MIN, group=side.group)
    return [], check(step, [(x, torch.zeros_like(x))])


# --- mistakes -------------------------------------------------------------------------------------

Ask = Callable[[torch.Tensor], Any]


def _asks(side: Side, step: Step) -> tuple[Ask, Ask]:
    """The call of most ranks, and the mistaken call of the odd rank."""
    how = {"group": side.group, "async_op": step.later}
    first, last = side.at(0), side.at(step.world - 1)

    def gathers(x: torch.Tensor, more: int = 0) -> Any:
        return dist.all_gather_into_tensor(x.new_empty(step.world * x.numel() + more), x, **how)

    all_reduce: Ask = lambda x: dist.all_reduce(x, **how)  # noqa: E731
    mistakes: dict[str, tuple[Ask, Ask]] = {
        "count": (all_reduce, lambda x: dist.all_reduce(x.new_ones(x.numel() + 1), **how)),
        "dtype": (all_reduce, lambda x: dist.all_reduce(x.double(), **how)),
        "no such dtype": (all_reduce, lambda x: dist.all_reduce(x.to(torch.uint16), **how)),
        "op": (all_reduce, lambda x: dist.all_reduce(x, dist.ReduceOp.BAND, **how)),
        "stride 0": (all_reduce, lambda x: dist.all_reduce(x[:1].expand(x.numel()), **how)),
        "collective": (all_reduce, lambda x: dist.broadcast(x, first, **how)),
        "barrier": (all_reduce, lambda x: dist.barrier(**how)),
        "root": (
            lambda x: dist.broadcast(x, first, **how),
            lambda x: dist.broadcast(x, last, **how),
        ),
        "room": (gathers, lambda x: gathers(x, 1)),
    }
    return mistakes[step.own("mistake").choice(sorted(mistakes))]


def mistake(side: Side, step: Step) -> Pending:
    """One rank makes another, or an invalid, call: every rank refuses, and no data changes."""
    step = dataclasses.replace(step, dtype=torch.float32, count=max(2, step.count))
    x = lay(side, given(step, side.rank))
    before = x.clone()
    pending = Pending(step, (), check(step, [(x, before)]), refused=True)
    with contextlib.suppress(*_REFUSALS):
        work = _asks(side, step)[side.rank == step.odd](x)
        pending.works = [work]
    return pending


def mistake_in_a_list(side: Side, step: Step) -> Pending:
    """A mistake among coalesced calls: all ranks raise, after the same number of calls."""
    calls = [draw("broadcast", n, step.seed, step.world) for n in range(3)]
    where = step.own("where").randrange(3)
    pending = Pending(step, (), lambda: None, refused=True)
    with contextlib.suppress(*_REFUSALS):
        with dist._coalescing_manager(side.group, _CPU, async_ops=True) as all_of_them:
            for n, call in enumerate(calls):
                x = lay(side, given(call, side.rank))
                if n == where and side.rank == step.odd:
                    x = torch.ones(1).expand(2 * call.count + 1)  # size of no root, even as reals
                dist.broadcast(x, side.at(call.root), group=side.group, async_op=True)
        pending.works = [all_of_them]
    return pending


def message_too_long(side: Side, step: Step) -> Pending:
    """The receiver's tensor is smaller than the message: it raises, and so may the sender."""
    step = dataclasses.replace(step, count=step.count + 2)
    source, to = step.own("pair").sample(range(step.world), 2)
    out = room(side, step, step.count - 1)
    before = out.clone()
    told = False
    try:
        if side.rank == source:
            dist.send(lay(side, given(step, source)), side.at(to), side.group, tag=step.number)
        if side.rank == to:
            dist.recv(out, side.at(source), side.group, tag=step.number)
    except ValueError:
        told = True
    assert told or side.rank != to, f"this rank did not refuse {step}"
    return Pending(step, [], check(step, [(out, before)]))


# --- all of them ----------------------------------------------------------------------------------


def choose(rng: random.Random, only: tuple[str, ...], without: frozenset[str]) -> str:
    kinds = [k for k in only if k not in without]
    kind = rng.choices(kinds, [KINDS[k] for k in kinds])[0]
    return rng.choice(sorted(COLLECTIVES)) if kind == "collective" else kind


def begin_step(side: Side, kind: str, number: int, seed: int, without: frozenset[str]) -> Pending:
    world = dist.get_world_size(side.group)
    step = draw(kind, number, seed, world)
    makers = {"mistake": mistake, "mistake in a list": mistake_in_a_list}
    makers["message too long"] = message_too_long
    if kind in makers:
        return makers[kind](side, step)
    if kind in COLLECTIVES:
        return Pending(step, *COLLECTIVES[kind](side, step, group=side.group, async_op=step.later))
    if kind == "batch of messages":
        return Pending(step, *batch_of_messages(side, step, "messages to oneself" not in without))
    if kind == "batch":
        return Pending(step, *batch(side, step, "several dtypes" not in without))
    calls = {"exchange": exchange, "message": message, "list of calls": list_of_calls}
    calls[LENT] = calls_on_lent_memory
    return Pending(step, *calls[kind](side, step))
