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
    GroupRank,
    Step,
    Works,
    check,
    draw,
    in_random_layout,
    input_block,
    output_tensor,
)

import pycollect as pc

_CPU = torch.device("cpu")
_REFUSALS = (TypeError, ValueError)
# A long step, only in groups in which the peers of a stopped rank time out.
SYMMETRIC_CALLS = "calls on symmetric memory"
SYMMETRIC_BYTES = 16 << 20
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
    SYMMETRIC_CALLS: 300,
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
        raised = None
        try:
            for work in self.works:
                if work is not None:
                    work.wait()
        except _REFUSALS as error:
            raised = error
            if not self.refused:
                raise
        assert not self.refused or raised or self.works == (), (
            f"this rank did not refuse {self.step}"
        )
        self.check()


def exchange(me: GroupRank, step: Step) -> tuple[Works, Check]:
    """Every rank sends to one rank and receives from another, along a random ring."""
    order = list(range(step.world))
    step.rng("order").shuffle(order)
    place = order.index(me.rank)
    to, source = order[(place + 1) % step.world], order[place - 1]
    out = output_tensor(me, step)
    sent = in_random_layout(me, input_block(step, me.rank))
    calls = [
        lambda: dist.isend(sent, me.global_rank(to), me.group, tag=step.number),
        lambda: dist.irecv(out, me.global_rank(source), me.group, tag=step.number),
    ]
    me.local.shuffle(calls)
    return [call() for call in calls], check(step, [(out, input_block(step, source))])


def send_block(me: GroupRank, step: Step, to: int) -> None:
    x = in_random_layout(me, input_block(step, me.rank))
    dist.send(x, me.global_rank(to), me.group, tag=step.number)


def message(me: GroupRank, step: Step) -> tuple[Works, Check]:
    """One rank sends to another, which may receive from any source."""
    source, to = step.rng("pair").sample(range(step.world), 2)
    if me.rank == source:
        send_block(me, step, to)
    if me.rank != to:
        return [], check(step, [])
    out = output_tensor(me, step)
    any_source = me.local.random() < 0.3
    sender = dist.recv(
        out, None if any_source else me.global_rank(source), me.group, tag=step.number
    )
    assert sender == me.global_rank(source)
    return [], check(step, [(out, input_block(step, source))])


def batch_of_messages(me: GroupRank, step: Step, to_self: bool = True) -> tuple[Works, Check]:
    rng = step.rng("batch")
    pairs = [(rng.randrange(step.world), rng.randrange(step.world)) for _ in range(8)]
    ops, found = [], []
    for n, (source, to) in enumerate(pairs):
        if source == to and not to_self:
            continue
        count = rng.randint(0, step.count)
        values = input_block(step, source, n, count)
        if me.rank == source:
            sent = in_random_layout(me, values)
            ops.append(dist.P2POp(dist.isend, sent, me.global_rank(to), me.group, step.number))
        if me.rank == to:
            out = output_tensor(me, step, count)
            ops.append(dist.P2POp(dist.irecv, out, me.global_rank(source), me.group, step.number))
            found.append((out, values))
    return dist.batch_isend_irecv(ops) if ops else [], check(step, found)


# Collectives that torch itself coalesces (_coalescing_manager without a device).
COALESCED_BY_TORCH = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


def batch(me: GroupRank, step: Step, mixed: bool = True) -> tuple[Works, Check]:
    """Calls of one kind and op, which torch coalesces into one; `mixed`: with several dtypes."""
    rng = step.rng("batch")
    kind = rng.choice(COALESCED_BY_TORCH)
    first = draw(kind, 0, step.seed, step.world)
    small = {"count": min(first.count, 50_000)}
    calls = [dataclasses.replace(first, seed=first.seed + n, **small) for n in range(1, 4)]
    if mixed and first.op in ("sum", "min", "max", "prod"):
        calls.append(dataclasses.replace(calls[0], dtype=torch.float64, seed=first.seed + 9))
        calls.append(dataclasses.replace(calls[0], dtype=torch.int16, seed=first.seed + 10))
        rng.shuffle(calls)
    return _coalesced(me, step, calls, None)


def list_of_calls(me: GroupRank, step: Step) -> tuple[Works, Check]:
    """Calls of different kinds, which the backend coalesces."""
    rng = step.rng("list")
    kinds = [k for k in COLLECTIVES if k not in (*COALESCED_BY_TORCH, "all_reduce_coalesced")]
    calls = [draw(rng.choice(kinds), n, step.seed, step.world) for n in range(rng.randint(0, 4))]
    return _coalesced(me, step, calls, _CPU)


def _coalesced(
    me: GroupRank, step: Step, calls: list[Step], device: torch.device | None
) -> tuple[Works, Check]:
    checks = []
    with dist._coalescing_manager(me.group, device, async_ops=True) as manager:
        for call in calls:
            _, found = COLLECTIVES[call.kind](me, call, group=me.group, async_op=True)
            checks.append(found)
    return [manager], lambda: [found() for found in checks] and None


def calls_on_symmetric_memory(me: GroupRank, step: Step) -> tuple[Works, Check]:
    """100 zero-copy all_reduces, in which every rank writes to all; one is stopped during a call.

    A rank that resumes late may also read new tensors, which hold large numbers; the op is MIN, so
    its late writes are smaller and therefore show.
    """
    x = pc.symmetric_empty(SYMMETRIC_BYTES // 4, dtype=torch.int32, group=me.group).fill_(me.rank)
    for _ in range(100):
        dist.all_reduce(x, dist.ReduceOp.MIN, group=me.group)
    return [], check(step, [(x, torch.zeros_like(x))])


# --- mistakes -------------------------------------------------------------------------------------

CollectiveCall = Callable[[torch.Tensor], Any]


def _correct_and_mistaken_call(me: GroupRank, step: Step) -> tuple[CollectiveCall, CollectiveCall]:
    """The call of most ranks, and the mistaken call of the odd rank."""
    options = {"group": me.group, "async_op": step.async_op}
    first, last = me.global_rank(0), me.global_rank(step.world - 1)

    def gathers(x: torch.Tensor, more: int = 0) -> Any:
        return dist.all_gather_into_tensor(x.new_empty(step.world * x.numel() + more), x, **options)

    all_reduce: CollectiveCall = lambda x: dist.all_reduce(x, **options)  # noqa: E731
    mistakes: dict[str, tuple[CollectiveCall, CollectiveCall]] = {
        "count": (all_reduce, lambda x: dist.all_reduce(x.new_ones(x.numel() + 1), **options)),
        "dtype": (all_reduce, lambda x: dist.all_reduce(x.double(), **options)),
        "no such dtype": (all_reduce, lambda x: dist.all_reduce(x.to(torch.uint16), **options)),
        "op": (all_reduce, lambda x: dist.all_reduce(x, dist.ReduceOp.BAND, **options)),
        "stride 0": (all_reduce, lambda x: dist.all_reduce(x[:1].expand(x.numel()), **options)),
        "collective": (all_reduce, lambda x: dist.broadcast(x, first, **options)),
        "barrier": (all_reduce, lambda x: dist.barrier(**options)),
        "root": (
            lambda x: dist.broadcast(x, first, **options),
            lambda x: dist.broadcast(x, last, **options),
        ),
        "output size": (gathers, lambda x: gathers(x, 1)),
    }
    return mistakes[step.rng("mistake").choice(sorted(mistakes))]


def mistake(me: GroupRank, step: Step) -> Pending:
    """One rank makes another, or an invalid, call: every rank refuses, and no data changes."""
    step = dataclasses.replace(step, dtype=torch.float32, count=max(2, step.count))
    x = in_random_layout(me, input_block(step, me.rank))
    before = x.clone()
    pending = Pending(step, (), check(step, [(x, before)]), refused=True)
    with contextlib.suppress(*_REFUSALS):
        work = _correct_and_mistaken_call(me, step)[me.rank == step.odd](x)
        pending.works = [work]
    return pending


def mistake_in_a_list(me: GroupRank, step: Step) -> Pending:
    """A mistake among coalesced calls: all ranks raise, after the same number of calls."""
    calls = [draw("broadcast", n, step.seed, step.world) for n in range(3)]
    where = step.rng("where").randrange(3)
    pending = Pending(step, (), lambda: None, refused=True)
    with contextlib.suppress(*_REFUSALS):
        with dist._coalescing_manager(me.group, _CPU, async_ops=True) as manager:
            for n, call in enumerate(calls):
                x = in_random_layout(me, input_block(call, me.rank))
                if n == where and me.rank == step.odd:
                    x = torch.ones(1).expand(2 * call.count + 1)  # size of no root, even as reals
                dist.broadcast(x, me.global_rank(call.root), group=me.group, async_op=True)
        pending.works = [manager]
    return pending


def message_too_long(me: GroupRank, step: Step) -> Pending:
    """The receiver's tensor is smaller than the message: it raises, and so may the sender."""
    step = dataclasses.replace(step, count=step.count + 2)
    source, to = step.rng("pair").sample(range(step.world), 2)
    out = output_tensor(me, step, step.count - 1)
    before = out.clone()
    raised = False
    try:
        if me.rank == source:
            send_block(me, step, to)
        if me.rank == to:
            dist.recv(out, me.global_rank(source), me.group, tag=step.number)
    except ValueError:
        raised = True
    assert raised or me.rank != to, f"this rank did not refuse {step}"
    return Pending(step, [], check(step, [(out, before)]))


# --- all of them ----------------------------------------------------------------------------------


def choose(rng: random.Random, only: tuple[str, ...], without: frozenset[str]) -> str:
    kinds = [k for k in only if k not in without]
    kind = rng.choices(kinds, [KINDS[k] for k in kinds])[0]
    return rng.choice(sorted(COLLECTIVES)) if kind == "collective" else kind


def begin_step(
    me: GroupRank, kind: str, number: int, seed: int, without: frozenset[str]
) -> Pending:
    world = dist.get_world_size(me.group)
    step = draw(kind, number, seed, world)
    makers = {"mistake": mistake, "mistake in a list": mistake_in_a_list}
    makers["message too long"] = message_too_long
    if kind in makers:
        return makers[kind](me, step)
    if kind in COLLECTIVES:
        return Pending(step, *COLLECTIVES[kind](me, step, group=me.group, async_op=step.async_op))
    if kind == "batch of messages":
        return Pending(step, *batch_of_messages(me, step, "messages to self" not in without))
    if kind == "batch":
        return Pending(step, *batch(me, step, "several dtypes" not in without))
    calls = {"exchange": exchange, "message": message, "list of calls": list_of_calls}
    calls[SYMMETRIC_CALLS] = calls_on_symmetric_memory
    return Pending(step, *calls[kind](me, step))
