"""What torch and Python have once in a process, used by ranks that are threads."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import sys
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_programs import PARALLEL, ends_within

import pycollect as pc
from pycollect import threads


@PARALLEL
def test_a_second_profiler_is_refused(parallel):
    """It ended the process."""

    def program(rank: int, world: int) -> None:
        with torch.profiler.profile():
            dist.barrier()

    with pytest.raises(RuntimeError, match=r"the profiler.*profile in one rank"):
        threads.launch(program, 2, timeout=20, parallel=parallel)


def test_the_caller_may_profile_instead_of_the_ranks():
    def program(rank: int, world: int) -> None:
        with torch.profiler.profile():
            dist.barrier()

    with torch.profiler.profile() as found:
        with pytest.raises(RuntimeError, match=r"the profiler, which another thread has"):
            threads.launch(program, 1, timeout=20)
        torch.ones(1) + 1
    assert found.events()
    threads.launch(program, 1, timeout=20)


def test_one_rank_may_profile():
    def program(rank: int, world: int) -> int:
        count = 0
        for profiling in range(world):
            profiler: Any = torch.profiler.profile if rank == profiling else contextlib.nullcontext
            with profiler() as found:
                dist.all_reduce(torch.ones(2))
            if found is not None:
                count += len(found.events())
            dist.barrier()
        return count

    assert min(threads.launch(program, 2, timeout=20)) > 0


def test_a_second_definition_of_an_operator_is_refused():
    """It ended the process, because it destroys the first one."""

    def program(rank: int, world: int) -> None:
        @torch.library.custom_op("pycollect_tests::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        dist.barrier()

    with pytest.raises(RuntimeError, match=r"pycollect_tests::twice.*in a module that the ranks"):
        threads.launch(program, 2, timeout=20)


def test_a_rank_may_define_its_operator_again():
    def program(rank: int, world: int) -> float:
        for factor in (2, 3):

            @torch.library.custom_op(f"pycollect_tests::scale{rank}", mutates_args=())
            def scale(x: torch.Tensor) -> torch.Tensor:
                return x * factor  # noqa: B023 - called before the next one is made

            dist.barrier()
            found: float = scale(torch.ones(1)).item()
        return found

    assert threads.launch(program, 2, timeout=20) == [3.0, 3.0]


@pytest.mark.parametrize("backend", ["gloo", "pycollect"])
def test_detailed_debugging(backend):
    """torch would make a group of gloo, in which rank 0 would wait and keep its turn."""
    level = dist.get_debug_level()

    def program(rank: int, world: int) -> float:
        dist.init_process_group(backend)
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with ends_within(5):
            assert threads.launch(program, 2, timeout=20) == [2.0, 2.0]
    finally:
        dist.set_debug_level(level)


def contexts(rank: int, world: int) -> tuple[str, bool, bool]:
    """Enter contexts that are in force until the rank leaves them, while other ranks run."""
    text = io.StringIO()
    with (
        contextlib.redirect_stdout(text),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error" if rank == 0 else "ignore")
        dist.barrier()
        print(f"printed by rank {rank}")
        try:
            warnings.warn("by a rank", stacklevel=1)
            raised = False
        except UserWarning:
            raised = True
        dist.barrier()
    dist.barrier()
    return text.getvalue(), raised, sys.stdout is text


def test_each_rank_has_its_own_output_and_warning_filters():
    found = threads.launch(contexts, 3, timeout=20)
    assert found == [(f"printed by rank {r}\n", r == 0, False) for r in range(3)]


@PARALLEL
def test_output_warning_filters_and_anomaly_mode_are_restored(parallel):
    def state() -> list[Any]:
        return [
            sys.stdout,
            sys.stderr,
            list(warnings.filters),
            torch.is_anomaly_enabled(),
            torch.is_anomaly_check_nan_enabled(),
        ]

    def program(rank: int, world: int) -> None:
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        warnings.simplefilter("ignore")
        torch.set_anomaly_enabled(True, False)
        dist.barrier()

    before = state()
    threads.launch(program, 3, timeout=20, parallel=parallel)
    assert state() == before


def test_the_monitor_of_progress_bars_hides_no_deadlock():
    bars = pytest.importorskip("tqdm")
    if bars.tqdm.monitor is not None:
        bars.tqdm.monitor.exit()
        bars.tqdm.monitor = None

    def program(rank: int, world: int) -> None:
        if rank == 0:
            for _ in bars.tqdm(range(2), file=io.StringIO()):
                pass
        dist.recv(torch.ones(1), 1 - rank)

    with ends_within(5), pytest.raises(pc.Deadlock):
        threads.launch(program, 2, timeout=20)


def set_later(event: Any) -> None:
    time.sleep(4)
    event.set()


@pytest.mark.slow
def test_a_rank_waits_for_another_process():
    """Such a wait is like one for a lock, but another process ends it."""

    def program(rank: int, world: int) -> None:
        if rank == 0:
            context = multiprocessing.get_context("fork")
            event = context.Event()
            process = context.Process(target=set_later, args=(event,))
            process.start()
            event.wait()
            process.join()
        dist.barrier()

    threads.launch(program, 2, timeout=30)
