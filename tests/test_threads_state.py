"""The state of each rank that is a thread, and what a launch leaves behind.

A rank has its own random numbers, environment and groups; the caller's are restored.
"""

from __future__ import annotations

import gc
import io
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_programs import PARALLEL, ends_within, total
from torch import Tensor, nn
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


def disturb(rank: int, world: int) -> None:
    """Change what a launch restores."""
    torch.manual_seed(rank)
    torch.set_default_dtype(torch.float64)
    torch.set_anomaly_enabled(True, False)
    thread = threading.Thread(target=torch.set_num_threads, args=(7,))  # for new threads
    thread.start()
    thread.join()
    os.environ["OWN_VARIABLE"] = str(rank)
    sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
    warnings.simplefilter("ignore")
    sys.excepthook = print
    with loss_parallel(), FlopCounterMode(display=False):
        fail(rank, world)


def run(program: Callable[..., Any], **options: Any) -> None:
    try:
        threads.launch(program, 3, **options)
    except Exception:
        assert program not in (total, use_groups)
    else:
        assert program in (total, use_groups)


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
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "thread count": (torch.get_num_threads(), new_thread_count()),
        "streams": (sys.stdout, sys.stderr),
        "warnings": list(warnings.filters),
        "initialized": dist.is_initialized(),
        "handlers": dict(DTensor._op_dispatcher._custom_op_handlers),
        "dispatcher": list(vars(type(DTensor._op_dispatcher))),
        "finders": list(sys.meta_path),
        "hooks": {name: id(x) for name, x in vars(modules).items() if name.endswith("_hooks")},
        **{name: getattr(c10d, name, None) for name in names},
    }


def new_thread_count() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


@PARALLEL
@pytest.mark.parametrize("program", [total, disturb, deadlock])
def test_replaced_parts_are_restored(program, parallel):
    before = patched_state()
    run(program, parallel=parallel)
    assert patched_state() == before


@PARALLEL
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


# --- random numbers -------------------------------------------------------------------------------

WORLD = 3


def draws(rank: int, pause: Callable[[], object]) -> list[Tensor]:
    """Draw numbers of all kinds, with a pause after each."""
    torch.manual_seed(100 + rank)
    found = []
    for _ in range(3):
        for call in (
            lambda: torch.rand(5),
            lambda: torch.randn(3),  # an odd number: the generator keeps the other of a pair
            lambda: torch.randn(1, dtype=torch.float64),
            lambda: torch.randperm(7),
            lambda: torch.randint(1000, (4,)),
            lambda: nn.functional.dropout(torch.ones(20), 0.5),
            lambda: torch.nn.init.kaiming_uniform_(torch.empty(3, 3)),
            lambda: torch.bernoulli(torch.full((9,), 0.3)),
        ):
            found.append(call())
            pause()
    return found


def no_pause() -> None:
    pass


PAUSES: dict[str, Callable[[], object]] = {
    "barrier": dist.barrier,
    "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
    "async": lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
    "message": lambda: dist.batch_isend_irecv([
        dist.P2POp(dist.isend, torch.ones(20_000), (dist.get_rank() + 1) % WORLD),
        dist.P2POp(dist.irecv, torch.ones(20_000), (dist.get_rank() - 1) % WORLD),
    ])[-1].wait(),
    "subgroup": lambda: dist.all_reduce(torch.ones(3), group=dist.new_group()),
    "future": lambda: dist.all_reduce(torch.ones(3), async_op=True).get_future().wait(),
    "objects": lambda: dist.all_gather_object([None] * WORLD, "text"),
}  # fmt: skip


@pytest.mark.parametrize("pause", PAUSES)
def test_a_rank_draws_as_a_process_of_its_own(pause):
    found = threads.launch(lambda rank, world: draws(rank, PAUSES[pause]), WORLD, timeout=30)
    for rank in range(WORLD):
        wanted = draws(rank, no_pause)
        assert all(torch.equal(a, b) for a, b in zip(found[rank], wanted, strict=True)), rank


def test_ranks_begin_with_the_callers_state_and_seed_only_their_own():
    def program(rank: int, world: int) -> tuple[Tensor, int]:
        if rank == 1:
            torch.manual_seed(5)
        dist.barrier()
        return torch.rand(4), torch.initial_seed()

    torch.manual_seed(11)
    found = threads.launch(program, WORLD)
    assert [seed for _, seed in found] == [11, 5, 11]
    for numbers, seed in found:
        assert torch.equal(torch.rand(4, generator=torch.Generator().manual_seed(seed)), numbers)


def test_seeds_for_cuda_wait_for_its_first_use_in_their_rank():
    def queued() -> list[int]:
        calls = [found[0] for found in torch.cuda._lazy_seed_tracker.get_calls() if found]
        return [cell.cell_contents for call in calls for cell in call.__closure__]

    def program(rank: int, world: int) -> list[int]:
        torch.cuda.manual_seed_all(100 + rank)
        dist.barrier()
        return queued()

    before = torch.cuda._lazy_seed_tracker
    assert threads.launch(program, WORLD) == [[100 + rank] for rank in range(WORLD)]
    assert torch.cuda._lazy_seed_tracker is before


# --- the environment of ranks ---------------------------------------------------------------------


def views(name: str) -> tuple[Any, ...]:
    """Return what each way to read a variable of the environment finds."""
    copies = dict(os.environ), os.environ.copy(), {**os.environ}
    return (os.environ.get(name), os.getenv(name), *(c.get(name) for c in copies))


@PARALLEL
def test_each_rank_has_its_own_environment(parallel, monkeypatch):
    monkeypatch.setenv("OF_CALLER", "caller")

    def check(**wanted: str | None) -> None:
        dist.barrier()
        for name, value in wanted.items():
            assert views(name) == (value,) * 5, (name, views(name))
            assert (name in os.environ) == (name in list(os.environ)) == (value is not None)
        assert len(os.environ) == len(list(os.environ)) == len(os.environ.keys())

    def program(rank: int, world: int) -> None:
        check(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE="3", LOCAL_WORLD_SIZE="3", MINE=None)
        assert "MASTER_ADDR" in os.environ
        assert "MASTER_PORT" in os.environ
        os.environ["MINE"] = f"{rank}"
        check(MINE=f"{rank}")
        os.environ.update(MINE=f"{rank} again")
        if rank == 1:
            del os.environ["OF_CALLER"]
        else:
            del os.environ["MINE"]
        check(MINE="1 again" if rank == 1 else None, OF_CALLER=None if rank == 1 else "caller")
        assert os.environ.setdefault("MINE", "default") == ("1 again" if rank == 1 else "default")
        os.environ.pop("MINE")
        check(MINE=None)
        with pytest.raises(KeyError):
            os.environ["MINE"]
        with pytest.raises(TypeError):
            os.environ["NUMBER"] = 3  # type: ignore[assignment]

    threads.launch(program, 3, parallel=parallel)
    assert "MINE" not in os.environ
    assert os.environ["OF_CALLER"] == "caller"


def test_threads_of_a_rank_belong_to_it_and_find_its_groups_by_name():
    def program(rank: int, world: int) -> list[Any]:
        mesh = init_device_mesh("cpu", (world,))
        whole = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])

        def work() -> list[Any]:
            mine = dist.get_rank(), os.environ["RANK"], total(rank, world)
            return [*mine, whole.full_tensor().tolist()]

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()

    with ends_within(5):
        found = threads.launch(program, 3, timeout=1.5)
    assert found == [[r, str(r), 3.0, [0.0, 1.0, 2.0, 3.0]] for r in range(3)]


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


def test_the_groups_of_the_caller_and_of_the_ranks_are_apart():
    def program(rank: int, world: int) -> None:
        assert dist.group.WORLD is not of_caller
        assert dist.get_world_size() == world

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        of_caller, subgroup = dist.group.WORLD, dist.new_group([0])
        threads.launch(program, 3)
        for program in (total, fail, deadlock):
            run(program)
            assert dist.group.WORLD is of_caller
            assert (dist.get_backend(), dist.get_world_size()) == ("gloo", 1)
            for group in (None, subgroup):
                x = torch.ones(2)
                dist.all_reduce(x, group=group)
                assert x.tolist() == [1, 1]
            assert dist.get_world_size(dist.new_group([0])) == 1
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "pycollect", "nccl", None, "cpu:gloo,cuda:nccl"])
def test_ranks_may_make_the_default_group_with_any_backend(backend, capfd):
    def program(rank: int, world: int) -> None:
        for _ in range(2):
            dist.init_process_group(backend)
            assert (total(rank, world), dist.get_backend()) == (3.0, "pycollect")
            with pytest.raises(ValueError, match="twice"):
                dist.init_process_group(backend)
            dist.destroy_process_group()
            assert not dist.is_initialized()

    threads.launch(program, 3)
    lines = [n for n in capfd.readouterr().err.splitlines() if "serves" in n]
    replaced = backend not in ("pycollect", None)
    assert len(lines) == replaced, lines  # said once, and not by every rank


def test_a_rank_cannot_be_another_rank():
    def program(rank: int, world: int) -> None:
        dist.init_process_group("gloo", init_method="env://", rank=0, world_size=world)

    with pytest.raises(ValueError, match="rank 0 of 3 was passed by rank 1 of 3"):
        threads.launch(program, 3, timeout=20)


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


@pytest.mark.slow
def test_launches_leave_no_thread_file_or_memory():
    def run_all(times: int) -> None:
        for _ in range(times):
            for program in (use_groups, fail, deadlock):
                run(program)

    run_all(10)
    before, memory = resources(), resident_bytes()
    run_all(150)
    assert resources() == before
    assert resident_bytes() - memory < 30 << 20


def test_a_launch_keeps_no_reference_to_results_or_arguments():
    class Box:
        pass

    box = Box()
    found = threads.launch(lambda rank, world, box: Box(), 2, box)
    kept = [weakref.ref(b) for b in (box, *found)]
    del box, found
    gc.collect()
    assert [r() for r in kept] == [None] * 3
