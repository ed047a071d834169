"""Stores of `init_process_group` in ranks that are threads: torch's own, and a user's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_programs import PARALLEL, ends_within, total

from pycollect import threads


@pytest.mark.parametrize("method", ["env://", "tcp://localhost:1", "file", "store"])
def test_ranks_may_name_a_rendezvous(method, tmp_path):
    store = dist.HashStore()
    where: dict[str, Any] = {"init_method": method}
    if method == "file":
        where = {"init_method": f"file://{tmp_path}/store"}
    if method == "store":
        where = {"store": store}

    def program(rank: int, world: int) -> tuple[float, float]:
        dist.init_process_group("gloo", rank=rank, world_size=world, **where)
        subgroup = dist.new_group([0, 2])
        x = torch.ones(1)
        if rank != 1:
            dist.all_reduce(x, group=subgroup)
        return total(rank, world), x.item()

    assert threads.launch(program, 3, timeout=20) == [(3.0, 2.0), (3.0, 1.0), (3.0, 2.0)]


class PythonStore(dist.Store):
    """A user's store, which takes the GIL in every call and may be broken."""

    def __init__(self, checks: int) -> None:
        super().__init__()
        self._keys, self._left = dist.HashStore(), checks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._keys, name)

    def set(self, key: str, value: Any) -> None:
        self._keys.set(key, value)

    def get(self, key: str) -> Any:
        return self._keys.get(key)

    def add(self, key: str, value: int) -> int:
        return self._keys.add(key, value)

    def check(self, keys: list[str]) -> bool:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("the store is broken")
        return self._keys.check(keys)


@PARALLEL
@pytest.mark.parametrize("checks", [0, 1, 2, 5, 1_000_000])
def test_a_users_store_may_be_broken(checks, parallel):
    store = PythonStore(checks)

    def program(rank: int, world: int) -> float:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        return total(rank, world)

    if checks == 1_000_000:
        assert threads.launch(program, 3, parallel=parallel, timeout=20) == [3.0] * 3
        return
    with pytest.raises(RuntimeError, match="the store is broken"), ends_within(5):
        threads.launch(program, 3, parallel=parallel, timeout=20)


def test_a_key_may_be_deleted_while_another_rank_reads_it():
    def program(rank: int, world: int) -> bytes | None:
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            store.set("key", "first")
            found: bytes = store.get("key")  # lets rank 1 run
            return found
        store.delete_key("key")
        store.check(["another"])  # lets rank 0 run
        store.set("key", "second")
        return None

    with ends_within(5):
        assert threads.launch(program, 2, timeout=10) == [b"second", None]
