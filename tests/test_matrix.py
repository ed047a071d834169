"""Every collective gives the values of reference.py, bit for bit, wherever its ranks are.

The cases are those of matrix.py: quick runs take cases in which any two values of two axes meet,
`-m slow` all cases of a dtype. Between processes, results also equal gloo's: bit by bit for copies
and integers, within one rounding per rank for floats.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from devices import cpu_by_default
from dist_pool import BACKEND, OURS, Caught, Pools, RankContext, backend_of, caught
from matrix import LARGE, Case, difference, drawn, every, every_fold, modelled, zeros
from matrix_sites import EmulatedLists, Lists, Rank, differs_from_gloo, rank_differs
from reference import COMPLEX, DTYPES, MOVED, NARROW, as_bits, left_fold, short
from sites import PLACEMENTS, PROCESSES, only_on, sites

OF = "ranks" if OURS else "gloo"  # the cases that the tested backend defines
_MOST = 12  # largest number of reported failures
ALL_DTYPES = pytest.mark.parametrize("dtype", [*DTYPES, *MOVED], ids=short)


def report(wrong: Iterable[str]) -> None:
    lines = list(wrong)
    assert not lines, "\n".join([f"{len(lines)} wrong results", *lines[:_MOST]])


# --- lists: a tensor of every rank in one process -------------------------------------------------

LIST_SITES = [
    pytest.param(Lists, "lists", id="host"),
    pytest.param(lambda: EmulatedLists(1), "emulated lists", id="emulated"),
    pytest.param(lambda: EmulatedLists(2), "emulated lists", id="2-emulated"),
    *[
        pytest.param(lambda p=p: Lists(p.values[0]), "lists", id=p.id, marks=p.marks)
        for p in PLACEMENTS
    ],
]


WORLDS = (1, 2, 3, 4, 5, 8, 9, 16)
QUICK_WORLDS = {"emulated": (1, 3, 8), "2-emulated": (2, 5, 16)}


def list_worlds() -> Iterator[Any]:
    """pytest parameters (site, of, world)."""
    for p, world in itertools.product(LIST_SITES, WORLDS):
        slow = [pytest.mark.slow] * (world not in QUICK_WORLDS.get(p.id, WORLDS))
        yield pytest.param(*p.values, world, id=f"{p.id}-{world}", marks=[*p.marks, *slow])


@pytest.mark.parametrize(("site", "of", "world"), [*list_worlds()])
def test_lists(site: Callable[[], Lists], of: str, world: int) -> None:
    with contextlib.closing(site()) as lists:
        report(why for case in drawn(of, world) for why in lists.differs(case, world))


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8, 9])
def test_every_fold(world: int) -> None:
    report(why for case in every_fold(world) for why in Lists().differs(case, world))


@pytest.mark.slow
@ALL_DTYPES
@pytest.mark.parametrize(("site", "of"), LIST_SITES)
def test_every_case_of_lists(site: Callable[[], Lists], of: str, dtype: torch.dtype) -> None:
    with contextlib.closing(site()) as lists:
        report(why for case in every(of, dtype) for why in lists.differs(case, 3))


# --- ranks: a thread or a process each, through torch.distributed ---------------------------------

# Hosts of equal and of unequal sizes, one rank per host, and ranks that are not consecutive.
PLACEMENTS_ON_HOSTS = (
    "a",
    "ab",
    "abb",
    "aba",
    "aabb",
    "abab",
    "abbc",
    "abca",
    "abcd",
    "aaaaaabb",
    "abcdabcd",
)
QUICK = ("abb", "aabb", "abca")


def of_ranks(ranks_as: str, world: int, site: str = "", *, slow: bool = False, **more: Any) -> Any:
    """pytest parameters (pools, options): the kind of ranks, and the options of a pool."""
    name = "-".join([ranks_as, *[site] * bool(site), more.get("placement", str(world))])
    options = {"world": world, "ranks_as": ranks_as, "site": site, **more}
    marks = [pytest.mark.slow] * slow + (sites(site)[0].marks if site else [])
    return pytest.param(ranks_as, options, id=name, marks=marks)


RANKS = [
    *[of_ranks("threads", world, slow=world == 8) for world in (1, 2, 3, 4, 8)],
    *[of_ranks("processes", world, slow=world != 3) for world in (1, 2, 3, 4, 8)],
    *[
        of_ranks("processes", len(p), placement=p, slow=p not in QUICK)
        for p in PLACEMENTS_ON_HOSTS * OURS
    ],
    *[of_ranks(k, 3, "late") for k in ("threads", "processes")],
    *[of_ranks(k, w, "late", slow=True) for k in ("threads", "processes") for w in (1, 2)],
    *[of_ranks(k, 3, "eager") for k in ("threads", "processes")],
    of_ranks("processes", 8, "eager", slow=True),
    *[of_ranks(k, w, "cuda", slow=w == 8) for k in ("threads", "processes") for w in (2, 4, 8)],
]
RANKS = [p for p in RANKS if OURS or (p.values[0] == PROCESSES and not p.values[1]["site"])]


def run_by(ranks: list[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("pools", "options"), ranks, indirect=["pools"], scope="module")


@run_by(RANKS)
def test_ranks(pools: Pools, options: dict[str, Any]) -> None:
    cases = drawn(OF, zlib.crc32(repr(options).encode()))
    assert len(cases) > 300
    _report(pools(**options).run(rank_differs, cases, seconds=90))


def _report(of_ranks: list[list[str]]) -> None:
    report(f"rank {rank}: {why}" for rank, wrong in enumerate(of_ranks) for why in wrong)


EVERY_CASE = ("threads-3", "processes-3", "processes-abca", "processes-late-3")


@pytest.mark.slow
@ALL_DTYPES
@run_by([p for p in RANKS if p.id in EVERY_CASE])
def test_every_case_of_ranks(pools: Pools, options: dict[str, Any], dtype: torch.dtype) -> None:
    _report(pools(**options).run(rank_differs, list(every(OF, dtype)), seconds=120))


@only_on(PROCESSES, "gloo has no other ranks")
@pytest.mark.parametrize(
    "world", [1, 3, *(pytest.param(w, marks=pytest.mark.slow) for w in (2, 8))]
)
def test_results_equal_gloos(pools: Pools, world: int) -> None:
    pool = pools(world, second_backend="gloo")
    _report(pool.run(differs_from_gloo, drawn("gloo", world), seconds=90))


@cpu_by_default
def premultiplied(me: RankContext) -> list[str]:
    """Check that PREMUL_SUM gives the sum of factor * x. By 0.5, which is exact in every type, the
    moment of rounding has no effect."""
    wrong = []
    for dtype, factor, as_tensor, count in itertools.product(
        (torch.float32, torch.float64, *NARROW[:2]), (0.5, 0.3), (False, True), (0, 1, 35, LARGE)
    ):
        op = dist._make_nccl_premul_sum(
            torch.tensor([factor], dtype=dtype) if as_tensor else factor
        )
        case = Case("all_reduce", "sum", dtype, count, "every_other", into="misaligned")
        rank, inputs = Rank(me, dist.group.WORLD, case), modelled(case, me.world, 1, True)[0]
        wanted = left_fold([t * factor for t in inputs], "sum")
        x = rank.put(inputs[me.rank])
        dist.all_reduce(x, op)
        out, shares = (
            rank.put(zeros(wanted, "contiguous")),
            rank.put(torch.cat([inputs[me.rank]] * me.world)),
        )
        dist.reduce_scatter_tensor(out, shares, op)
        close = 0 if factor == 0.5 else 2 * me.world
        why = [difference(t.cpu(), wanted, case, close) for t in (x, out)]
        wrong += [f"{case} by {factor}: {w}" for w in why if w]
    return wrong


@pytest.mark.skipif(not OURS, reason=f"{BACKEND} refuses PREMUL_SUM")
@run_by([p for p in RANKS if p.values[1]["world"] in (1, 3) or "cuda" in p.id])
def test_premul_sum(pools: Pools, options: dict[str, Any]) -> None:
    _report(pools(**options).run(premultiplied, seconds=60))


UNDEFINED = [(torch.float32, op) for op in ("BAND", "BOR", "BXOR")]
UNDEFINED += [(torch.bool, "AVG"), (torch.uint16, "SUM"), (torch.float8_e8m0fnu, "MAX")]


def undefined_reductions(me: RankContext) -> list[str]:
    """Ops that the contract does not define raise on every rank, name op and dtype, and move no
    data."""
    wrong = []
    for dtype, op in UNDEFINED:
        x, kept = torch.ones(5, dtype=dtype), torch.ones(5, dtype=dtype)
        for call in (
            dist.all_reduce,
            lambda t, op: dist.reduce(t, 0, op),
            lambda t, op: dist.reduce_scatter(t, [t.clone()] * me.world, op),
            lambda t, op: dist.all_reduce_coalesced([t], op),
        ):
            error = caught(call, x, getattr(dist.ReduceOp, op))
            named = (dtype in MOVED or op.lower() in error.text) and short(dtype) in error.text
            if error.kind != "TypeError" or not named:
                wrong.append(f"{dtype} {op}: {error}")
            if not torch.equal(as_bits(x), as_bits(kept)):
                wrong.append(f"{dtype} {op} changed the tensor")
    for dtype, op in itertools.product(COMPLEX, ("PRODUCT", "MAX")):  # refused by torch
        error = caught(dist.all_reduce, torch.ones(3, dtype=dtype), getattr(dist.ReduceOp, op))
        if error.kind != "ValueError":
            wrong.append(f"{dtype} {op}: {error}")
    dist.all_reduce(torch.ones(3))
    return wrong


@pytest.mark.skipif(not OURS, reason=f"{BACKEND} raises RuntimeError, or computes wrong results")
@run_by([p for p in RANKS if p.values[1]["world"] == 3])
def test_undefined_reductions_raise(pools: Pools, options: dict[str, Any]) -> None:
    _report(pools(**options).run(undefined_reductions))


def invalid_calls(me: RankContext) -> tuple[list[Caught], float]:
    x, on_host = torch.ones(12), me.site.host(torch.ones(12))
    errors = [
        caught(dist.all_reduce_coalesced, [x, on_host]),
        caught(dist.all_to_all_single, on_host, x),
        caught(backend_of().allgather, [[x[:2]] * me.world], [x[:2]]),
        caught(dist.all_reduce, torch.ones(1).expand(4)),
    ]
    dist.all_reduce(x)
    dist.all_reduce(on_host)  # valid in a call without GPU tensors
    return errors, x.sum().item() + on_host.sum().item()


def mismatched_calls(me: RankContext) -> tuple[list[Caught], float]:
    last = me.rank == me.world - 1
    x, y = torch.ones(10), torch.ones(4)
    dist.all_reduce(x)
    errors = [
        caught(dist.all_reduce, torch.ones(10 + last)),
        caught(dist.broadcast, torch.ones(3), 0) if last else caught(dist.all_reduce, x),
        caught(dist.all_reduce, torch.ones(1).expand(4 if last else 1)),
    ]
    dist.all_reduce(y)
    return errors, y.sum().item()


ON_DEVICES = [p for p in RANKS if p.values[1]["site"] and p.values[1]["world"] in (2, 3, 4)]
ON_DEVICES = [  # the CPU does not stand in for a GPU
    pytest.param(*p.values, id=p.id, marks=[*p.marks, *[pytest.mark.cuda] * ("cuda" in p.id)])
    for p in ON_DEVICES
]


@run_by(ON_DEVICES)
def test_host_and_device_memory_in_one_call_is_refused(
    pools: Pools, options: dict[str, Any]
) -> None:
    """Invalid calls are refused by each rank, mismatched calls by all; the group stays usable."""
    world = options["world"]
    for errors, total in pools(**options).run(invalid_calls):
        assert [e.kind for e in errors] == ["ValueError"] * 4, errors
        assert all("all in host memory or all on GPUs" in e.text for e in errors[:2]), errors
        assert total == 24.0 * world
    for errors, total in pools(**options).run(mismatched_calls):
        assert [e.kind for e in errors] == ["ValueError"] * 3, errors
        assert f"rank {world - 1} called all_reduce of 11 float32" in errors[0].text
        assert f"rank {world - 1} called broadcast" in errors[1].text
        assert f"rank {world - 1} refused all_reduce" in errors[2].text
        assert total == 4.0 * world
