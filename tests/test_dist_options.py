"""Options of a group, and bootstrap on a store that still holds keys of other groups: failed
attempts, other sizes, earlier groups.
"""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import (
    BACKEND,
    OURS,
    Caught,
    ForwardingStore,
    JobPool,
    RankContext,
    Spec,
    caught,
    check_side_by_side,
    fresh,
)
from sites import HOSTS, PROCESSES, THREADS, not_on, only_on

import pycollect as pc
from pycollect import _C

pytestmark = [
    pytest.mark.skipif(not OURS, reason=f"{BACKEND} has no options, or hangs"),
    pytest.mark.pools_with(group=False),
]
SHORT_TIMEOUT = 1.0  # timeout in seconds of attempts that must fail
LONE_TIMEOUT = 0.2  # timeout in seconds of a rank without peers


def make_group(store: Any, rank: int, world: int, seconds: float = 20) -> None:
    """Make a group on the store as torch does, run one all_reduce, and shut the group down."""
    options = pc.distributed.options()
    options._timeout = datetime.timedelta(seconds=seconds)
    options.group_name = "again"
    backend = _C.make_backend(store, rank, world, options)
    x = torch.ones(10)
    backend.allreduce([x], dist.AllreduceOptions()).wait()
    assert x.eq(world).all()
    backend.shutdown()


def group_after_a_failed_attempt(me: RankContext, early: tuple[int, ...]) -> Caught | None:
    """The `early` ranks time out in a first attempt; then all ranks make the group."""
    store = dist.FileStore(f"{me.folder}/early", me.world)
    error = None
    if me.rank in early:
        error = caught(make_group, store, me.rank, me.world, SHORT_TIMEOUT)
    store.set(f"done {me.rank}", "")
    store.wait([f"done {rank}" for rank in range(me.world)])
    make_group(store, me.rank, me.world)
    return error


# The ranks of the first attempt -> those that they miss: rank 0 alone, if it is missing.
EARLY = {(0,): "ranks 1, 2", (1,): "rank 0", (0, 1): "rank 2", (1, 2): "rank 0"}


def test_a_failed_attempt_of_some_ranks_does_not_block_the_next():
    def check(early: tuple[int, ...], pool: JobPool) -> None:
        errors = pool.results(seconds=40)
        for rank in early:
            assert errors[rank].kind == "Timeout", errors[rank]
            assert f"{EARLY[early]} did not arrive" in errors[rank].text, errors[rank]

    spec = Spec(3, group=False)
    check_side_by_side(
        ((early, spec, group_after_a_failed_attempt, (early,)) for early in EARLY), check
    )


def groups_of_different_sizes(me: RankContext) -> None:
    store = dist.FileStore(f"{me.folder}/sizes", me.world)
    for turn, world in enumerate((2, 3, 1, 3, 2)):
        if me.rank < world:
            make_group(store, me.rank, world)
        store.set(f"turn {turn} of {me.rank}", "")
        store.wait([f"turn {turn} of {rank}" for rank in range(me.world)])


def one_after_the_other(me: RankContext) -> None:
    """Make and shut down 30 groups on one store, without synchronisation in between."""
    store = dist.FileStore(f"{me.folder}/many", me.world)
    for _ in range(30):
        _C.make_backend(store, me.rank, me.world, pc.distributed.options()).shutdown()


@only_on(PROCESSES, "makes its groups itself")
@pytest.mark.parametrize("job", [groups_of_different_sizes, one_after_the_other])
def test_many_groups_on_one_store(pools, job):
    pools(3).run(job)


class SlowReadStore(ForwardingStore):
    """A store for a rank that reads the key of the open rendezvous slowly: after it is closed."""

    def get(self, key: str) -> bytes:
        self.store.wait(["closed"])
        found = self.store.get(key)
        self.store.set("read", "")
        return found


class LateTimeoutStore(ForwardingStore):
    """A store that cannot check keys, and whose wait for a missing key times out late."""

    waits = 0

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("only waits")

    def wait(self, *keys_and_timeout: Any) -> None:
        if self.store.check(keys_and_timeout[0]):
            return
        self.waits += 1
        time.sleep(LONE_TIMEOUT + 0.2)
        raise RuntimeError("timed out")


def on_tcp(folder: Path) -> list[Any]:
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return [server, dist.TCPStore("localhost", server.port, is_master=False)]


STORES: dict[str, Callable[[Path], list[Any]]] = {
    "TCPStore": on_tcp,
    "FileStore": lambda folder: [dist.FileStore(f"{folder}/store", 2) for _ in range(2)],
    "HashStore": lambda folder: [dist.HashStore()] * 2,
}


@pytest.mark.parametrize("kind", STORES)
def test_a_rendezvous_that_closes_while_a_rank_reads_its_key(tmp_path, kind):
    """The rank joins the next rendezvous, and does not wait for a deleted key until the store's
    timeout."""
    stores = STORES[kind](tmp_path)
    for store in stores:
        store.set_timeout(datetime.timedelta(seconds=10))
    with ThreadPoolExecutor(1) as other:
        second = other.submit(make_group, SlowReadStore(stores[1]), 1, 2)
        assert caught(make_group, stores[0], 0, 2, SHORT_TIMEOUT).kind == "Timeout"
        stores[0].set("closed", "")
        stores[0].wait(["read"])
        make_group(stores[0], 0, 2)
        second.result()


def test_a_timeout_on_a_store_whose_waits_end_late():
    """After its timeout a rank checks once more for a missing peer, without a further wait."""
    store = LateTimeoutStore(dist.HashStore())
    assert caught(make_group, store, 0, 2, LONE_TIMEOUT).kind == "Timeout"
    assert store.waits == 2


# --- timeouts -------------------------------------------------------------------------------------


def calls_with_timeout(me: RankContext, timeout: datetime.timedelta) -> None:
    """Every wait that takes a timeout, with a timeout beyond the range of clocks."""
    me.init("timeouts", timeout=timeout)
    if me.rank == 1:
        time.sleep(0.3)
    x = torch.ones(10)
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait(timeout)
    if me.rank == 0:
        dist.irecv(x, 1).wait(timeout)
        dist.recv(x, 1)
        dist.irecv(x, 1).get_future().wait()
    for _ in range(3 * me.rank):
        time.sleep(0.3)
        dist.send(x, 0)
    dist.barrier(async_op=True).wait(timeout)
    time.sleep(0.3 * me.rank)
    with dist._coalescing_manager(device=x.device, async_ops=True) as manager:
        for source in (0, 1):
            dist.broadcast(x, source, async_op=True)
    manager.works[0].wait(timeout)
    dist.destroy_process_group()


def test_timeouts_beyond_the_range_of_clocks():
    limits = [datetime.timedelta(days=days) for days in (365 * 293, 365 * 290_000)]
    check_side_by_side(
        ((limit, Spec(2, group=False), calls_with_timeout, (limit,)) for limit in limits),
        lambda _, pool: pool.results(),
    )


def test_timeouts_that_are_refused():
    options = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    with pytest.raises(ValueError, match=r"must not be negative.* 292,000 years"):
        dist.init_process_group("pycollect", timeout=datetime.timedelta.max, **options)
    backend = _C.make_backend(dist.HashStore(), 0, 1, pc.distributed.options())
    with pytest.raises(ValueError, match="set_timeout: -1000 ms; it must not be negative"):
        backend.set_timeout(datetime.timedelta(seconds=-1))
    backend.shutdown()


# --- options --------------------------------------------------------------------------------------


ALLOWED = {"hosts": "'exact', 'one'", "order": "'rank', 'tree'"}
OF_BYTES = ("buffer_bytes", "symmetric_heap_bytes")
# Option, value, the error, and its words.
BAD_VALUES: list[tuple[str, Any, type[Exception], str]] = [
    *(
        (name, size, ValueError, f"{name} is {size}; it must be at most {2**46}")
        for name in OF_BYTES
        for size in (2**46 + 1, 2**63, 2**64, 10**30)
    ),
    *(
        ("algorithm", value, TypeError, f"algorithm is a {type(value).__name__}; pass .*algorithms")
        for value in (3, b"ring", ["ring"])
    ),
    *(
        (name, word, ValueError, f"{name} is '{word}'; allowed are {words}$")
        for name, words in ALLOWED.items()
        for word in ("fast", "Exact", "")
    ),
    *((name, 3, TypeError, f"{name} is a int; pass one of {w}$") for name, w in ALLOWED.items()),
]


def test_bad_values_are_refused():
    for name, value, error, words in BAD_VALUES:
        with pytest.raises(error, match=words):
            pc.distributed.options(**{name: value})
    for name in OF_BYTES:
        assert getattr(pc.distributed.options(**{name: 2**46}), name) == 2**46


IN_ANOTHER_ORDER = (1e8, 1.0, -1e8)  # one value per rank; the sum depends on the order


def with_an_algorithm(me: RankContext, name: str) -> torch.Tensor:
    me.init("algorithm", pg_options=pc.distributed.options(algorithm=name))
    summed, gathered = torch.full((9,), IN_ANOTHER_ORDER[me.rank]), torch.empty(27)
    dist.all_reduce(summed)
    x = summed.clone()
    dist.broadcast(x, 0)
    dist.all_gather_into_tensor(gathered, x)
    dist.barrier()
    assert torch.equal(gathered, x.repeat(3))
    return summed


@not_on(HOSTS, "they have one way for each collective")
@pytest.mark.parametrize("name", ["fused", "ring"])
def test_an_algorithm_is_for_the_collectives_that_have_it(name, pools):
    """With the order of its sums."""
    wanted = [torch.full((9,), value) for value in IN_ANOTHER_ORDER]
    pc.all_reduce(wanted, algorithm=name)
    assert torch.equal(wanted[0], torch.zeros(9)) == (name != "ring")
    with pools.fresh(3) as pool:
        found = pool.run(with_an_algorithm, name)
    assert [t.tolist() for t in found] == [t.tolist() for t in wanted]


def in_tree_order_by_name(me: RankContext, name: str) -> list[str]:
    options = pc.distributed.options(algorithm=name, order="tree")
    me.init("algorithm in tree order", pg_options=options)
    x, gathered = torch.ones(9), torch.empty(9 * me.world)
    errors = [caught(lambda: dist.all_reduce(x)) for _ in range(2)]
    assert x.tolist() == [1] * 9
    dist.all_gather_into_tensor(gathered, x)
    return [f"{e.kind} {e.text}" for e in errors]


@not_on(HOSTS, "they have one way for each collective")
@pytest.mark.parametrize("name", ["ring", "chain", "tree", "halving_doubling"])
@pytest.mark.parametrize("world", [1, 3])
def test_an_algorithm_in_several_steps_is_refused_in_tree_order(name, world, pools):
    with pools.fresh(world) as pool:
        for error in [e for errors in pool.run(in_tree_order_by_name, name) for e in errors]:
            assert error.startswith("ValueError")
            assert f"algorithm '{name}' adds in several steps, which order='tree'" in error


VERSIONS = ["0.0.1", "0.0.2", "0.0.2"]
SET_ONLY = ("exactly", *VERSIONS)


def with_option(me: RankContext, name: str, values: list[Any]) -> tuple[Caught, float]:
    value, start = values[me.rank], time.monotonic()
    options = pc.distributed.options(**({} if value in SET_ONLY else {name: value}))
    setattr(options, name, value)  # also what the function above would refuse

    def use() -> None:
        me.init("bootstrap", timeout=datetime.timedelta(seconds=3), pg_options=options)
        dist.all_reduce(torch.ones(9))

    error = caught(use)
    return error, error.when - start


# Option, value of each rank, words of the error, and where the ranks are. Ranks with different
# algorithms would add in different orders; threads have no buffers. Other versions may select other
# algorithms, and so exchange other messages.
ALGORITHMS, DIFFERENT = ["ring", "ring", "fused"], "different algorithms"
HEAPS = f"symmetric_heap_bytes={1 << 20}.*symmetric_heap_bytes={1 << 21}"
OF_ONE_HOST = "is for ranks on one host; ranks on several hosts have one way"
MIXED_HOSTS = "rank 0 has .* hosts=exact .*, rank 2 has .* hosts=one "
MIXED_VERSIONS = "rank 0 has .* pycollect=0.0.1, rank 1 has .* pycollect=0.0.2"
NOT_ONE = "hosts='one', but ranks 0, 1 are on a, rank 2 is on b"
REFUSED: list[tuple[str, list[Any], str, dict[str, str]]] = [
    ("buffer_bytes", [8192, 8192, 4096], "buffer_bytes=8192.*buffer_bytes=4096", {}),
    ("symmetric_heap_bytes", [1 << 20, 1 << 20, 1 << 21], HEAPS, {}),
    ("algorithm", ALGORITHMS, DIFFERENT, {}),
    ("algorithm", ALGORITHMS, OF_ONE_HOST, {"ranks_as": HOSTS}),
    ("algorithm", ["fused"] * 3, OF_ONE_HOST, {"ranks_as": HOSTS}),
    ("algorithm", ALGORITHMS, "same options", {"ranks_as": THREADS}),
    ("order", ["tree", "tree", "rank"], "order=tree.*order=rank", {}),
    ("order", ["tree", "tree", "rank"], "order=tree.*order=rank", {"ranks_as": HOSTS}),
    ("order", ["tree", "tree", "rank"], "same options", {"ranks_as": THREADS}),
    ("order", ["exactly"] * 3, f"order is 'exactly'; allowed are {ALLOWED['order']}", {}),
    ("hosts", ["exactly"] * 3, f"hosts is 'exactly'; allowed are {ALLOWED['hosts']}", {}),
    ("hosts", ["exact", "exact", "one"], MIXED_HOSTS, {"placement": "aab"}),
    ("_version", VERSIONS, MIXED_VERSIONS, {"placement": "aab"}),
    ("hosts", ["one"] * 3, NOT_ONE, {"placement": "aab"}),
]


@pytest.mark.parametrize(("name", "values", "words", "where"), REFUSED)
def test_options_that_ranks_refuse(name, values, words, where):
    with fresh(3, group=False, **where) as pool:
        for error, took in pool.run(with_option, name, values):
            assert error.kind == "ValueError", error
            assert re.search(words, error.text), error
            assert took < 3


def at_the_end(me: RankContext) -> None:
    """All-gather of blocks of unlike sizes, the small one at the end of the symmetric heap."""
    counts = [1 << 20, 1 << 14]
    options = pc.distributed.options(symmetric_heap_bytes=12 << 20)
    group = dist.new_group([0, 1], backend=BACKEND, pg_options=options)
    whole = pc.symmetric_empty(sum(counts), group=group)
    parts = []
    while not caught(lambda: parts.append(pc.symmetric_empty(counts[me.rank], group=group))).kind:
        pass
    parts[-1].fill_(me.rank + 1.0)
    dist.all_gather(list(whole.split(counts)), parts[-1], group)
    assert [part.unique().tolist() for part in whole.split(counts)] == [[1.0], [2.0]]


def test_a_tensor_at_the_end_of_the_symmetric_heap():
    with fresh(2) as pool:
        pool.run(at_the_end)
