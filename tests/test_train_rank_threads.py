"""Rank threads (lockstep): one at a time, in rank order, always the same; and no test hangs."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

import pytest
import torch

from pycollect.train import lockstep_exchange, lockstep_size, run_lockstep

WORLDS = (1, 2, 3, 5)
TIMEOUT_SECONDS = 20  # a hang is a failure, and must not block the test run


@pytest.fixture(autouse=True)
def all_threads_end() -> Iterator[None]:
    """Interrupt a test that hangs, and assert that all its threads have ended."""
    before = threading.active_count()
    alarm = threading.Timer(TIMEOUT_SECONDS, _thread.interrupt_main)
    alarm.start()
    yield
    alarm.cancel()
    alarm.join()
    assert threading.active_count() == before


def exchange(value: object, name: str = "a barrier") -> list[object]:
    return lockstep_exchange(value, lambda values: [values] * len(values), name)


@pytest.mark.parametrize("world", WORLDS)
def test_one_at_a_time_in_rank_order(world: int) -> None:
    trace: list[tuple[int, int]] = []

    def run(rank: int) -> int:
        for layer in range(3):
            trace.append((layer, rank))
            time.sleep(0.002 * (world - rank))  # overtaking would show
            assert exchange((layer, rank)) == [(layer, r) for r in range(world)]
        trace.append((3, rank))
        return 10 * rank

    got = run_lockstep([lambda rank=rank: run(rank) for rank in range(world)])  # type: ignore[misc]
    assert got == [10 * rank for rank in range(world)]
    assert trace == [(layer, rank) for layer in range(4) for rank in range(world)]


def test_each_rank_gets_its_own_result() -> None:
    def double(values: list[int]) -> list[int]:
        return [2 * v for v in values]

    assert run_lockstep([lambda r=r: lockstep_exchange(r, double, "b") for r in range(4)]) == [
        0,
        2,
        4,
        6,
    ]  # type: ignore[misc]


def test_no_ranks_and_one_rank() -> None:
    assert run_lockstep([]) == []
    assert run_lockstep([lambda: (exchange(1), lockstep_size())]) == [([1], 1)]
    assert lockstep_size() is None


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_error_of_any_rank_is_raised(world: int, layer: int) -> None:
    for bad in range(world):
        ended: list[int] = []

        def run(rank: int, bad: int = bad, ended: list[int] = ended) -> None:
            try:
                for number in range(3):
                    if (rank, number) == (bad, layer):
                        raise ZeroDivisionError(f"rank {rank}")
                    exchange(rank)
            finally:
                ended.append(rank)

        with pytest.raises(ZeroDivisionError, match=f"rank {bad}"):
            run_lockstep([lambda rank=rank: run(rank) for rank in range(world)])  # type: ignore[misc]
        started = world if layer else bad + 1
        assert sorted(ended) == list(range(started))
        assert lockstep_size() is None


def test_a_module_that_catches_errors_is_stopped_too() -> None:
    caught: list[Exception] = []

    def run(rank: int) -> None:
        try:
            exchange(rank)
            raise ZeroDivisionError if rank else LookupError
        except Exception as error:
            caught.append(error)
            if rank == 0:
                raise

    with pytest.raises(LookupError):
        run_lockstep([lambda: run(0), lambda: run(1)])
    assert [type(error) for error in caught] == [LookupError]


def test_the_first_error_is_the_one_raised() -> None:
    def wait_and_fail() -> None:
        try:
            exchange(0)
        finally:
            raise LookupError("while cleaning up")

    def fail() -> None:
        raise ZeroDivisionError("first")

    with pytest.raises(ZeroDivisionError, match="first"):
        run_lockstep([wait_and_fail, fail])


def test_an_error_of_combine_is_raised() -> None:
    def combine(values: list[int]) -> list[int]:
        raise LookupError("combine")

    with pytest.raises(LookupError, match="combine"):
        run_lockstep([lambda: lockstep_exchange(0, combine, "b")] * 3)


class Interrupt:
    """Raise KeyboardInterrupt in the main thread, wherever it is, as Ctrl-C does."""

    def __call__(self) -> None:
        _thread.interrupt_main()
        time.sleep(0.05)  # keeps this rank away from any barrier for a while


def interrupted(runs: Sequence[Callable[[], object]]) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_lockstep(runs)


def test_an_interrupt_while_the_caller_waits_at_a_barrier() -> None:
    continued: list[int] = []

    def run(rank: int) -> None:
        exchange(rank)
        if rank == 1:
            Interrupt()()
        exchange(rank)
        continued.append(rank)

    interrupted([lambda rank=rank: run(rank) for rank in range(3)])  # type: ignore[misc]
    assert continued == []


def test_an_interrupt_while_the_caller_waits_for_the_last_rank() -> None:
    interrupted([lambda: None, Interrupt(), lambda: None])


def test_an_interrupt_in_the_callers_own_rank() -> None:
    interrupted([Interrupt(), lambda: None])


def test_ranks_that_pass_different_layers_are_refused() -> None:
    for runs, message in (
        ([lambda: exchange(0, "bn1"), lambda: None], "rank 0 waits at bn1 for rank 1, which has"),
        ([lambda: None, lambda: exchange(0, "bn1")], "rank 1 waits at bn1 for rank 0, which has"),
        (
            [lambda: exchange(0, "bn1"), lambda: exchange(0, "bn2")],
            "rank 1 is at bn2 and rank 0 at bn1",
        ),
    ):
        with pytest.raises(RuntimeError, match=f"{message}.*same layers in the same order"):
            run_lockstep(runs)  # type: ignore[arg-type]


def test_synchronize_outside_of_a_lockstep_is_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"bn1: ranks can exchange values only in run_lockstep\(\)"
    ):
        exchange(0, "bn1")


def test_a_lockstep_inside_of_one() -> None:
    def run() -> object:
        inner = run_lockstep([lambda: exchange("a"), lambda: exchange("b")])
        return inner, exchange("outer")

    assert run_lockstep([run] * 3) == [([["a", "b"]] * 2, ["outer"] * 3)] * 3


def test_every_rank_has_the_callers_torch_state() -> None:
    seen: ContextVar[str] = ContextVar("seen")

    def state() -> tuple[object, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            torch.empty(1).device.type,
            torch.get_num_threads(),
            seen.get(None),
        )

    def check() -> None:
        assert run_lockstep([state] * 3) == [state()] * 3

    check()
    seen.set("by the caller")
    with torch.no_grad():
        check()
    with torch.inference_mode():
        check()
    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        check()
    with torch.device("meta"):
        check()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    check()
    other = threading.Thread(target=torch.set_num_threads, args=(threads + 2,))
    other.start()  # sets the count of new threads, not the caller's
    other.join()
    check()


def test_saved_tensors_pass_through_the_callers_hooks() -> None:
    saved: list[object] = []

    def run() -> None:
        (torch.ones(2, requires_grad=True) ** 2).sum()

    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run_lockstep([run] * 3)
    assert len(saved) == 3


def test_random_numbers_are_drawn_in_rank_order() -> None:
    def draw() -> list[float]:
        first = torch.rand(1).item()
        exchange(0)
        return [first, torch.rand(1).item()]

    drawn = run_lockstep([draw] * 3)
    torch.manual_seed(0)
    expected = torch.rand(6).tolist()
    assert [d[0] for d in drawn] + [d[1] for d in drawn] == expected


@pytest.mark.cuda
def test_every_rank_has_the_callers_cuda_stream() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert run_lockstep([torch.cuda.current_stream] * 3) == [stream] * 3
