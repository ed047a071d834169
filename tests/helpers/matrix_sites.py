"""The sites of the conformance matrix: each runs a case of matrix.py and returns the differences.

`Lists` and `EmulatedLists` make calls of pycollect with a tensor of every rank; `Rank` makes those
of torch.distributed with the tensors of one rank.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from dist_pool import BACKEND, OURS, RankContext
from emulated_gpus import Gpus
from matrix import (
    INSIDE,
    MANY,
    TORCH_OPS,
    Case,
    difference,
    filler,
    modelled,
    placed,
    zeros,
)
from reference import (
    NARROW,
    as_bits,
    expected,
    fold,
    surrounding_bytes,
    viewed_as,
    whole_memory,
)
from sites import Placement
from torch import Tensor

import pycollect as pc

Tensors = list[Tensor]

# --- lists: a tensor of every rank in one process -------------------------------------------------

# The results; and those of further tensors, each with the wanted one.
Found = tuple[list[Tensor], list[tuple[Tensor, Tensor]]]


class Lists:
    """Calls of pycollect on lists of tensors, in host memory or on the GPUs of a placement."""

    def __init__(self, placement: Placement | None = None) -> None:
        self.placement = placement or Placement("host", ("cpu",))
        self.copies = placement is not None

    def call(self, name: str, world: int) -> Callable[..., Any]:
        if name in ("scatter", "replicate"):
            return self.placement.bound(name, world)
        return getattr(self.placement.api(world), name, None) or getattr(pc, name)

    def put(self, on_host: Tensor, rank: int) -> Tensor:
        """A copy of the tensor's whole memory, and the same view of it, on the rank's device."""
        if not self.copies:
            return on_host
        device = self.placement.devices(rank + 1)[rank]
        return viewed_as(whole_memory(on_host).to(device, copy=True), on_host)

    def read(self, tensor: Tensor) -> Tensor:
        return viewed_as(whole_memory(tensor).cpu(), tensor) if tensor.is_cuda else tensor

    def is_placed(self, tensor: Tensor, rank: int) -> bool:
        return tensor.device == self.placement.devices(rank + 1)[rank]

    def end(self) -> None:
        """End the work of a case, before its values are compared."""

    def differs(self, case: Case, world: int) -> list[str]:
        inputs, wanted = modelled(case, world, 1, not case.exact(world))
        results = [w for w in wanted if w is not None]
        on_host = [placed(t, case.layout) for t in inputs]
        on_host += [zeros(w, case.into) for w in results] if case.into else []
        around = [surrounding_bytes(t) for t in on_host]
        watched = [self.put(t, r % world) for r, t in enumerate(on_host)]
        tensors, out = watched[:world], watched[world:]
        run = RUNS.get(case.collective, Lists.in_place)
        found, extras = run(self, case, inputs, tensors, out)
        in_place = found is tensors
        assert all(f is o for f, o in zip(found, out, strict=False)), f"{case}: not in its out"
        if not in_place and not out:
            new = [*found, *(t for t, _ in extras), *tensors]
            assert share_no_memory(new), f"{case}: results share memory"
            assert all(map(self.is_placed, found, range(world))), f"{case}: on another device"
        pairs = list(zip(found, results, strict=True)) + extras
        pairs += [] if in_place else list(zip(tensors, inputs, strict=True))
        got, after = [self.read(t) for t, _ in pairs], [self.read(t) for t in watched]
        self.end()
        wrong = [difference(g, w, case) for g, (_, w) in zip(got, pairs, strict=True)]
        wrong += [
            "memory around a view has changed"
            for before, t in zip(around, after, strict=True)
            if not torch.equal(before, surrounding_bytes(t))
        ]
        return [f"{case}, world {world}: {why}" for why in wrong if why]

    def close(self) -> None:
        """End the site, of which no tensor may exist any more."""

    # --- the calls: with a case, the inputs, and copies of them and outputs on the site ---

    def in_place(self, case: Case, inputs: Tensors, tensors: Tensors, out: Tensors) -> Found:
        more = options(case, out, "async_op", "algorithm", *["op", "order"] * case.reduces)
        if case.collective in ROOT_NAMES:
            more[ROOT_NAMES[case.collective]] = case.root_of(len(tensors))
        result = self.call(case.collective, len(tensors))(tensors, **more)
        assert (result.wait() if case.async_op else result) is None
        return tensors, []

    def coalesced(self, case: Case, inputs: Tensors, tensors: Tensors, out: Tensors) -> Found:
        """Together with tensors of another dtype: several elements, one, and none."""
        world, root = len(tensors), case.root_of(len(tensors))
        columns = [[torch.arange(3) * (r + 2) for r in range(world)]]
        columns += [[column[r].sum() for r in range(world)] for column in columns]
        columns += [[torch.zeros(0, 3, dtype=torch.int64)] * world]
        placed_columns = [[self.put(t.clone(), r) for r, t in enumerate(c)] for c in columns]
        lists = [list(row) for row in zip(tensors, *placed_columns, strict=True)]
        call = self.call(case.collective, world)
        if case.collective == "broadcast_coalesced":
            assert call(lists, root) is None
            wanted = [expected("broadcast", c, root=root) for c in columns]
        else:
            result = call(lists, **options(case, out, "op", "order", "async_op", "algorithm"))
            assert (result.wait() if case.async_op else result) is None
            wanted = [expected("all_reduce", c, case.op) for c in columns]
        pairs = [zip(p, w, strict=True) for p, w in zip(placed_columns, wanted, strict=True)]
        return tensors, [pair for column in pairs for pair in column]

    def out_of_place(self, case: Case, inputs: Tensors, tensors: Tensors, out: Tensors) -> Found:
        more = options(case, out, "dim", "async_op", *["op", "order"] * case.reduces)
        if case.collective != "all_to_all":
            more["algorithm"] = case.passed_algorithm
        result = self.call(case.collective, len(tensors))(tensors, **more)
        result = result.wait() if case.async_op else result
        assert isinstance(result, list)
        return result, []

    def scatter(self, case: Case, inputs: Tensors, tensors: Tensors, out: Tensors) -> Found:
        call = self.call("scatter", len(tensors))
        result = call(tensors[0], **options(case, out, "dim", "async_op"))
        return result.wait() if case.async_op else result, []

    def gather(self, case: Case, inputs: Tensors, tensors: Tensors, out: Tensors) -> Found:
        call = self.call("gather", len(tensors))
        return [call(tensors, dim=case.dim, **({"out": out[0]} if out else {}))], []

    def replicate(self, case: Case, inputs: Tensors, tensors: Tensors, out: Tensors) -> Found:
        pairs = self.call("replicate", len(tensors))([tensors[0], tensors[0][:1]])
        return [t for t, _ in pairs], [(first, inputs[0][:1]) for _, first in pairs]

    def copy(self, case: Case, inputs: Tensors, tensors: Tensors, out: Tensors) -> Found:
        for copy in out:
            result = self.call("copy_", len(tensors))(copy, tensors[0], async_op=case.async_op)
            assert (result.wait() if case.async_op else result) is None
        return out, []

    def tree_sum(self, case: Case, inputs: Tensors, tensors: Tensors, out: Tensors) -> Found:
        """Also without rounding, and of the sums of aligned parts, which is the same."""
        mine = [self.put(placed(t, case.layout), 0) for t in inputs]
        call = self.call("tree_sum", len(tensors))
        result = call(mine)
        if case.dtype not in NARROW:
            parts = [call(mine[i : i + 2]) for i in range(0, len(mine), 2)]
            return [result], [(call(parts), fold(inputs, "sum", "tree"))]
        total = call(mine, dtype=torch.float32)
        return [result], [(total, fold([t.float() for t in inputs], "sum", "tree"))]


ROOT_NAMES = {"reduce": "dst", "broadcast": "src"}
RUNS: dict[str, Callable[..., Found]] = {
    "all_reduce_coalesced": Lists.coalesced,
    "broadcast_coalesced": Lists.coalesced,
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), Lists.out_of_place),
    "tree_sum": Lists.tree_sum,
    "scatter": Lists.scatter,
    "gather": Lists.gather,
    "replicate": Lists.replicate,
    "copy_": Lists.copy,
}


def share_no_memory(tensors: Sequence[Tensor]) -> bool:
    filled = [t for t in tensors if t.numel()]
    return len({t.untyped_storage().data_ptr() for t in filled}) == len(filled)


def options(case: Case, out: list[Tensor], *names: str) -> dict[str, Any]:
    """The arguments of these names, and `out` if the case passes it."""
    given = {"async_op": case.async_op, "algorithm": case.passed_algorithm, "dim": case.dim}
    given |= {"op": case.op, "order": case.order}
    return {n: given[n] for n in names} | ({"out": out} if out else {})


class EmulatedLists(Lists):
    """Calls on tensors of emulated GPUs, whose work runs in a random order that events allow."""

    def __init__(self, devices: int) -> None:
        self.gpus, self.devices, self.seed = Gpus(devices), devices, 0
        self._whole: dict[int, Tensor] = {}  # address of a view -> the memory around it

    def call(self, name: str, world: int) -> Callable[..., Any]:
        return getattr(self.gpus, name)

    def put(self, on_host: Tensor, rank: int) -> Tensor:
        device, values = rank % self.devices, whole_memory(on_host)
        floats = -(-values.numel() // 16) * 4
        whole = self.gpus.empty(floats, device=device).view(torch.uint8)
        whole = whole.as_strided(values.size(), (1,))
        with self.gpus.on(self.gpus.torch.current(device)):
            self.gpus.torch.write(whole, values)
        view = viewed_as(whole, on_host)
        self._whole[id(view)] = whole
        return view

    def read(self, tensor: Tensor) -> Tensor:
        whole = self._whole.get(id(tensor), tensor)
        with self.gpus.on(self.gpus.torch.current(tensor.device.index)):
            on_host = self.gpus.torch.read(whole)
        return on_host if whole is tensor else viewed_as(on_host, tensor)

    def is_placed(self, tensor: Tensor, rank: int) -> bool:
        return tensor.device.index == rank % self.devices

    def end(self) -> None:
        self.seed += 1
        self.gpus.check(self.seed)
        self._whole.clear()

    def close(self) -> None:
        gc.collect()
        self.gpus.close()


# --- ranks: a thread or a process each, through torch.distributed ---------------------------------


@dataclasses.dataclass(frozen=True)
class Rank:
    """A rank that runs a case in a group; the arguments of its call are on the site's device."""

    me: RankContext
    group: Any
    case: Case
    inputs: list[tuple[Tensor, Tensor]] = dataclasses.field(default_factory=list)
    around: list[tuple[Tensor, Tensor]] = dataclasses.field(default_factory=list)

    @property
    def root(self) -> int:
        return self.case.root_of(self.me.world)

    def run(self, mine: Tensor) -> list[Tensor]:
        """The results of this rank, none if the collective leaves them undefined."""
        return RANK_CALLS.get(self.case.collective, _to_or_from_blocks)(self, mine)

    def put(self, values: Tensor, layout: str = "") -> Tensor:
        """A copy on the device, in the case's layout unless it is given."""
        x = self.me.site.put(placed(values, layout or self.case.layout))
        self.around.append((x, surrounding_bytes(x)))
        return x

    def input(self, values: Tensor) -> Tensor:
        """A copy on the device that the call does not change."""
        x = self.put(values)
        self.inputs.append((x, values))
        return x

    def changed(self) -> list[str]:
        """What the call has changed beside its outputs."""
        case, changed = self.case, []
        if any(difference(x.cpu(), values, case) for x, values in self.inputs):
            changed.append("an input has changed")
        for t, before in self.around:
            if not torch.equal(before, surrounding_bytes(t)):
                changed.append("memory around a view has changed")
        return changed

    @property
    def filler(self) -> Tensor:
        return filler(self.case, blocks_of(self.case, self.me.world))

    def outputs(self, count: int) -> list[Tensor]:
        return [self.put(self.filler, self.case.into) for _ in range(count)]

    def call(self, *args: Any, **more: Any) -> None:
        if self.case.reduces:
            more["op"] = getattr(dist.ReduceOp, TORCH_OPS[self.case.op])
        call = getattr(dist, TORCH_NAMES.get(self.case.collective, self.case.collective))
        work = call(*args, **more, group=self.group, async_op=self.case.async_op)
        if self.case.async_op:
            work.wait()

    def blocks(self, mine: Tensor) -> list[Tensor]:
        return [self.input(b) for b in mine.split(len(mine) // self.me.world)]


def _of_one_tensor(rank: Rank, mine: Tensor) -> list[Tensor]:
    x, root = rank.put(mine), rank.root
    more = {ROOT_NAMES[n]: root for n in ROOT_NAMES if n == rank.case.collective}
    rank.call(x, **more)
    return [] if rank.case.collective == "reduce" and rank.me.rank != root else [x]


def _of_two_tensors(rank: Rank, mine: Tensor) -> list[Tensor]:
    tensors = [rank.put(mine), rank.put(mine[:1], "contiguous")]
    rank.call(tensors)
    return tensors


def _to_or_from_blocks(rank: Rank, mine: Tensor) -> list[Tensor]:
    """The collectives with a list of one tensor for each rank, as input, output or both."""
    name, at_root = rank.case.collective, rank.me.rank == rank.root
    outputs = rank.outputs(1 if name in ("scatter", "reduce_scatter") else rank.me.world)
    x: Any = rank.blocks(mine) if name in MANY else rank.input(mine)
    if name == "gather":
        rank.call(x, outputs if at_root else None, dst=rank.root)
        outputs = outputs if at_root else []
    elif name == "scatter":
        rank.call(outputs[0], x if at_root else None, src=rank.root)
    else:
        rank.call(outputs[0] if name == "reduce_scatter" else outputs, x)
    return [joined(outputs)] if outputs else []


def _of_whole_tensors(rank: Rank, mine: Tensor) -> list[Tensor]:
    """The collectives whose blocks of all ranks are one tensor."""
    blocks = 1 if rank.case.collective == "reduce_scatter_tensor" else rank.me.world
    out = rank.put(joined([rank.filler] * blocks), rank.case.into)
    rank.call(out, rank.input(mine))
    return [out]


def _inside(rank: Rank, mine: Tensor) -> list[Tensor]:
    """The rank's block is a part of the tensor of all blocks."""
    gathers, rows = rank.case.collective == "all_gather_inside", len(rank.filler)
    whole = rank.put(joined([rank.filler] * rank.me.world) if gathers else mine)
    parts = whole.split(rows)
    part = parts[rank.me.rank]
    if gathers:
        as_bits(part).copy_(as_bits(mine))
    else:
        others = zip(parts, mine.split(rows), strict=True)
        rank.inputs.extend(pair for r, pair in enumerate(others) if r != rank.me.rank)
    rank.call(*((whole, part) if gathers else (part, whole)))
    return [whole if gathers else part]


def joined(blocks: list[Tensor]) -> Tensor:
    return torch.cat([as_bits(b) for b in blocks]).view(blocks[0].dtype)


TORCH_NAMES = {
    "all_gather_inside": "all_gather_into_tensor",
    "reduce_scatter_inside": "reduce_scatter_tensor",
}
RANK_CALLS: dict[str, Callable[[Rank, Tensor], list[Tensor]]] = {
    **dict.fromkeys(("all_reduce", "reduce", "broadcast"), _of_one_tensor),
    "all_reduce_coalesced": _of_two_tensors,
    **dict.fromkeys(("all_gather_into_tensor", "reduce_scatter_tensor"), _of_whole_tensors),
    "all_to_all_single": _of_whole_tensors,
    **dict.fromkeys(INSIDE, _inside),
}


def rank_differs(me: RankContext, cases: Sequence[Case]) -> list[str]:
    """Run cases in groups of all ranks, and return how this rank's results differ."""
    wrong, groups = [], {"rank": dist.group.WORLD}
    if OURS:
        tree = pc.distributed.options(order="tree")
        groups["tree"] = dist.new_group(backend=BACKEND, pg_options=tree)
    with torch._C.DisableTorchFunction():  # only arguments of calls are in the device's memory
        for case in cases:
            inputs, results = modelled(case, me.world, blocks_of(case, me.world), not OURS)
            rank = Rank(me, groups[case.order], case)
            found = rank.run(inputs[me.rank])
            me.site.synchronize()
            close = 0 if OURS else _roundings(me, case)
            differs = _compared(me, case, found, results, close) + rank.changed()
            wrong += [f"{case}: {why}" for why in differs]
    if OURS:
        dist.destroy_process_group(groups["tree"])
    return wrong


def differs_from_gloo(me: RankContext, cases: Sequence[Case]) -> list[str]:
    """Run cases in the default group and in gloo's, and return how this rank's results differ."""
    wrong = []
    for case in cases:
        inputs, _ = modelled(case, me.world, blocks_of(case, me.world), True)
        mine = inputs[me.rank]
        ours, theirs = (Rank(me, g, case).run(mine) for g in (dist.group.WORLD, me.second_group))
        assert len(ours) == len(theirs)
        close = _roundings(me, case)
        found = [difference(o, t, case, close) for o, t in zip(ours, theirs, strict=True)]
        wrong += [f"{case}: {why}" for why in found if why]
    return wrong


def blocks_of(case: Case, world: int) -> int:
    return world if case.collective in MANY else 1


def _roundings(me: RankContext, case: Case) -> int:
    """gloo divides a sum by the number of ranks; the contract multiplies by its inverse."""
    return me.world if case.reduces and case.op == "avg" else 0


def _compared(
    me: RankContext, case: Case, found: list[Tensor], results: list[Tensor | None], close: int
) -> list[str]:
    wanted = results[me.rank]
    if case.collective == "reduce" and me.rank != case.root_of(me.world):
        wanted = None  # torch leaves it undefined
    if not found or wanted is None:
        return [] if not found and wanted is None else ["only one of them has a result"]
    if found[0].device.type != torch.device(me.site.device).type:
        return [f"the result is on {found[0].device}"]
    pairs = zip(found, [wanted, wanted[:1]], strict=False)
    return [why for f, w in pairs if (why := difference(f.cpu(), w, case, close))]
