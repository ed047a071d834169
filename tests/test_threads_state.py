"""What a launch leaves behind: the state of the caller, torch and Python, and no resources."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_programs import ends_within, total
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.modules import module as modules
from torch.utils.flop_counter import FlopCounterMode

from pycollect import _C, threads


def fail(rank: int, world: int) -> None:
    dist.barrier()
    if rank == 1:
        raise KeyError("wrong")
    dist.barrier()


def deadlock(rank: int, world: int) -> None:
    dist.recv(torch.ones(1), (rank + 1) % world)


def fail_in_loss_parallel(rank: int, world: int) -> None:
    with loss_parallel(), FlopCounterMode(display=False):
        fail(rank, world)


def run(program: Callable[..., Any]) -> None:
    try:
        threads.launch(program, 3)
    except Exception:
        assert program is not total
    else:
        assert program is total


def patched_state() -> dict[str, Any]:
    """Return all that a launch replaces in Python and torch while it runs."""
    names = ("_world", "rendezvous", "_new_process_group_helper", "_default_pg_init_method")
    return {
        "excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "Thread.start": threading.Thread.start,
        "environ": type(os.environ),
        "variables": dict(os.environ),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "multithreading": torch._C._is_multithreading_enabled(),
        "random": torch.get_rng_state().tolist(),
        "initialized": dist.is_initialized(),
        "handlers": dict(DTensor._op_dispatcher._custom_op_handlers),
        "dispatcher": list(vars(type(DTensor._op_dispatcher))),
        "finders": list(sys.meta_path),
        "hooks": {name: id(x) for name, x in vars(modules).items() if name.endswith("_hooks")},
        **{name: getattr(c10d, name, None) for name in names},
    }


@pytest.mark.parametrize("program", [total, fail, fail_in_loss_parallel, deadlock])
def test_replaced_parts_are_restored(program):
    before = patched_state()
    run(program)
    assert patched_state() == before


def test_the_random_state_of_the_caller_is_restored():
    torch.manual_seed(5)
    wanted = torch.rand(6)
    torch.manual_seed(5)
    first = torch.rand(3)
    threads.launch(lambda rank, world: (torch.rand(100), torch.manual_seed(rank)), 3)
    assert torch.equal(torch.cat([first, torch.rand(3)]), wanted)


def test_a_default_dtype_set_by_a_rank_is_restored():
    threads.launch(lambda rank, world: torch.set_default_dtype(torch.float64), 2)
    assert torch.get_default_dtype() == torch.float32


def new_thread_count() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("parallel", [False, True])
def test_each_rank_has_its_own_thread_count(parallel):
    count = torch.get_num_threads()

    def program(rank: int, world: int) -> list[int]:
        found = [torch.get_num_threads()]
        torch.set_num_threads(count + 1 + rank)
        dist.barrier()
        return [*found, torch.get_num_threads(), new_thread_count()]

    found = threads.launch(program, 3, parallel=parallel)
    assert found == [[count, count + 1 + rank, count + 1 + rank] for rank in range(3)]
    assert torch.get_num_threads() == new_thread_count() == count


def test_a_thread_count_set_by_a_thread_of_a_rank_is_restored():
    count = torch.get_num_threads()

    def program(rank: int, world: int) -> None:
        thread = threading.Thread(target=torch.set_num_threads, args=(count + 1,))
        thread.start()
        thread.join()

    threads.launch(program, 2)
    assert torch.get_num_threads() == new_thread_count() == count


# --- the environment of ranks ---------------------------------------------------------------------


def test_ranks_see_the_variables_of_torchrun():
    def program(rank: int, world: int) -> tuple[str, ...]:
        return tuple(os.environ[n] for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))

    assert threads.launch(program, 3) == [(str(r), str(r), "3") for r in range(3)]


def test_each_rank_has_its_own_environment(monkeypatch):
    monkeypatch.setenv("SHARED_VARIABLE", "caller")

    def program(rank: int, world: int) -> tuple[Any, ...]:
        os.environ["OWN_VARIABLE"] = f"rank {rank}"
        if rank == 1:
            del os.environ["SHARED_VARIABLE"]
        dist.barrier()
        listed = {k: v for k, v in os.environ.items() if k.endswith("_VARIABLE")}
        assert "OWN_VARIABLE" in os.environ
        assert len(os.environ) == len(list(os.environ))
        with pytest.raises(KeyError):
            os.environ["NO_SUCH_VARIABLE"]
        with pytest.raises(TypeError):
            os.environ["NUMBER"] = 3  # type: ignore[assignment]
        return os.getenv("OWN_VARIABLE"), os.environ.get("SHARED_VARIABLE"), len(listed)

    found = threads.launch(program, 3)
    assert found == [("rank 0", "caller", 2), ("rank 1", None, 1), ("rank 2", "caller", 2)]
    assert "OWN_VARIABLE" not in os.environ
    assert os.environ["SHARED_VARIABLE"] == "caller"


def test_threads_of_a_rank_belong_to_it():
    def program(rank: int, world: int) -> list[Any]:
        found: list[Any] = []

        def inner() -> None:
            found.extend([dist.get_rank(), os.environ["RANK"], total(rank, world)])

        thread = threading.Thread(target=inner)
        thread.start()
        thread.join()
        return found

    with ends_within(5):
        found = threads.launch(program, 3, timeout=1.5)
    assert found == [[r, str(r), 3.0] for r in range(3)]


def test_threads_of_a_rank_find_its_groups_by_name():
    def program(rank: int, world: int) -> list[float]:
        mesh = init_device_mesh("cpu", (world,))
        sharded = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        with ThreadPoolExecutor(1) as pool:
            found: list[float] = pool.submit(sharded.full_tensor).result().tolist()
        return found

    assert threads.launch(program, 2, timeout=20) == [[0.0, 1.0, 2.0, 3.0]] * 2


def test_threads_of_a_forked_process_belong_to_no_rank():
    """The scheduler may be locked at the time of the fork, and its ranks are not in the child."""

    def program(rank: int, world: int) -> int:
        pid = os.fork()
        if pid == 0:
            found: list[bool] = []
            thread = threading.Thread(target=lambda: found.append(_C.is_rank_thread()))
            thread.start()
            thread.join()
            os._exit(0 if found == [False] else 1)
        return os.waitpid(pid, 0)[1]

    assert threads.launch(program, 2, timeout=20) == [0, 0]


# --- process groups -------------------------------------------------------------------------------


@pytest.fixture
def group_of_caller() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("program", [total, fail, deadlock])
def test_the_default_group_of_the_caller_is_untouched(group_of_caller, program):
    subgroup = dist.new_group([0])
    run(program)
    assert dist.group.WORLD is group_of_caller
    assert dist.get_backend() == "gloo"
    assert dist.get_world_size() == 1
    for group in (None, subgroup):
        x = torch.ones(2)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [1, 1]
    assert dist.get_world_size(dist.new_group([0])) == 1


def test_a_group_of_the_caller_is_not_the_ranks(group_of_caller):
    def program(rank: int, world: int) -> int:
        assert dist.group.WORLD is not group_of_caller
        return dist.get_world_size()

    assert threads.launch(program, 3) == [3, 3, 3]


@pytest.mark.parametrize("backend", ["gloo", "pycollect", "nccl", None, "cpu:gloo,cuda:nccl"])
def test_ranks_may_make_the_default_group_with_any_backend(backend, capfd):
    def program(rank: int, world: int) -> tuple[float, int]:
        dist.init_process_group(backend)
        found = total(rank, world), dist.get_world_size()
        dist.destroy_process_group()
        assert not dist.is_initialized()
        return found

    assert threads.launch(program, 3) == [(3.0, 3)] * 3
    lines = [n for n in capfd.readouterr().err.splitlines() if "serves" in n]
    replaced = backend not in ("pycollect", None)
    assert len(lines) == replaced, lines  # said once, and not by every rank


def test_a_rank_cannot_be_another_rank():
    def program(rank: int, world: int) -> None:
        dist.init_process_group("gloo", init_method="env://", rank=0, world_size=world)

    with pytest.raises(ValueError, match="rank 0 of 3 was passed by rank 1 of 3"):
        threads.launch(program, 3, timeout=20)


def test_a_second_default_group_is_refused():
    def program(rank: int, world: int) -> None:
        dist.init_process_group("gloo")
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group("gloo")

    threads.launch(program, 2)


def test_groups_may_be_made_again():
    def program(rank: int, world: int) -> list[float]:
        found = []
        for _ in range(3):
            dist.init_process_group("gloo")
            found.append(total(rank, world))
            dist.destroy_process_group()
        return found

    assert threads.launch(program, 3) == [[3.0] * 3] * 3


# --- resources ------------------------------------------------------------------------------------


def resources() -> tuple[int, int, int]:
    """Return the numbers of threads, as the kernel counts them, of files and of Python objects."""
    gc.collect()
    tasks, files = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
    return threading.active_count(), tasks, files


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def use_groups(rank: int, world: int) -> float:
    subgroup = dist.new_group([0, 1])
    x = torch.ones(64 << 10)  # 256 KiB: a copy that a launch keeps shows in 100 launches
    if rank < 2:
        dist.all_reduce(x, group=subgroup)
    dist.all_reduce(x, async_op=True).wait()
    return x[0].item()


@pytest.mark.parametrize("program", [use_groups, fail, deadlock])
def test_launches_leave_no_thread_file_or_memory(program):
    for _ in range(20):
        run_any(program)
    before, memory = resources(), resident_bytes()
    for _ in range(500):
        run_any(program)
    assert resources() == before
    assert resident_bytes() - memory < 30 << 20


def run_any(program: Callable[..., Any]) -> None:
    try:
        threads.launch(program, 3)
    except Exception:
        assert program is not use_groups


def test_a_launch_keeps_no_reference_to_results_or_arguments():
    import weakref

    class Box:
        pass

    box = Box()
    found = threads.launch(lambda rank, world, box: Box(), 2, box)
    kept = [weakref.ref(b) for b in (box, *found)]
    del box, found
    gc.collect()
    assert [r() for r in kept] == [None] * 3
