"""Rank threads of one process that exchange values: one thread per rank, one running at a time.

The threads pass a token in rank order, at every barrier and at their end. The order of all
operations, and so the bits, is therefore the same in every run, and the running rank has all cores.
Rank 0 runs in the caller's thread. No rank waits forever: if a rank raises, or finishes while
others wait for it, every rank stops at its next barrier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar, cast

import torch

from .._thread_count import set_thread_count

T = TypeVar("T")
V = TypeVar("V")
R = TypeVar("R")


class _Aborted(BaseException):
    """Unwinds a rank after another rank's failure; `except Exception` does not catch it."""


class _Lockstep:
    """State of a lockstep: the running rank, the values at the current barrier, the failure."""

    def __init__(self, world: int) -> None:
        lock = threading.Lock()
        self._turns = [threading.Condition(lock) for _ in range(world)]
        self._ended = threading.Condition(lock)
        self._lock = lock
        self._turn = 0
        self._running = set(range(world))
        self._arrived: list[Any] = []
        self._barrier = ""
        self._results: Sequence[Any] = ()
        self.world = world
        self.failure: BaseException | None = None

    def wait(self, rank: int) -> None:
        """Return when it is this rank's turn; raise _Aborted after a failure."""
        with self._lock:
            self._turns[rank].wait_for(lambda: self._turn == rank or self.failure is not None)
            if self.failure is not None:
                raise _Aborted

    def _pass_on(self, rank: int) -> None:
        following = [(rank + ahead) % self.world for ahead in range(1, self.world + 1)]
        self._turn = next((r for r in following if r in self._running), rank)
        self._turns[self._turn].notify_all()

    def exchange(
        self, rank: int, value: Any, combine: Callable[[list[Any]], Sequence[Any]], name: str
    ) -> Any:
        """Wait at the named barrier; return this rank's item of `combine(values)`."""
        if len(self._running) < self.world:
            done = sorted(set(range(self.world)) - self._running)
            raise _mismatch(f"rank {rank} waits at {name} for rank {done[0]}, which has finished")
        if self._arrived and self._barrier != name:
            raise _mismatch(f"rank {rank} is at {name} and rank 0 at {self._barrier}")
        self._barrier = name
        self._arrived.append(value)
        if len(self._arrived) == self.world:
            values, self._arrived = self._arrived, []
            self._results = combine(values)
        with self._lock:
            self._pass_on(rank)
        self.wait(rank)
        return self._results[rank]

    def leave(self, rank: int, error: BaseException | None) -> None:
        """Remove a finished rank; abort if it has failed, or if others wait for it at a barrier."""
        with self._lock:
            self._running.discard(rank)
            if error is None and self._arrived:
                error = _mismatch(
                    f"rank 0 waits at {self._barrier} for rank {rank}, which has finished"
                )
            if error is not None and not isinstance(error, _Aborted):
                self._fail(error)
            if self._turn == rank:
                self._pass_on(rank)
            if not self._running:
                self._ended.notify_all()

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        for turn in self._turns:
            turn.notify_all()

    def abort(self, error: BaseException) -> None:
        """Make all ranks stop at their next barrier."""
        with self._lock:
            self._fail(error)

    def join(self) -> None:
        """Wait until every rank has ended; an interrupt stops them at their next barrier."""
        with self._lock:
            try:
                self._ended.wait_for(lambda: not self._running)
            except BaseException as error:
                self._fail(error)
                self._ended.wait_for(lambda: not self._running)


def _mismatch(what: str) -> RuntimeError:
    return RuntimeError(f"lockstep: {what}; all ranks must pass the same layers in the same order")


# The lockstep of the running thread and its rank.
_current: ContextVar[tuple[_Lockstep, int] | None] = ContextVar("_current", default=None)


def lockstep_size() -> int | None:
    """Return the number of ranks of the ``run_lockstep`` in which the caller runs, or None outside.

    >>> run_lockstep([lockstep_size] * 2), lockstep_size()
    ([2, 2], None)
    """
    current = _current.get()
    return None if current is None else current[0].world


def lockstep_exchange(value: V, combine: Callable[[list[V]], Sequence[R]], name: str) -> R:
    """Wait until all ranks of the lockstep have called it; return this rank's item of the result.

    The result is ``combine(values)``: ``values`` has the ``value`` of every rank, in rank order,
    and ``combine`` returns a sequence with one item for each rank. The rank that arrives last calls
    it, once for all. Values and items are passed by reference, without a copy. ``name`` is the
    barrier's name in errors. Raises RuntimeError outside of ``run_lockstep``, and if another rank
    is at a barrier of another name or has finished; an error of ``combine`` ends all ranks.

    >>> def share(x): return [sum(x)] * len(x)
    >>> run_lockstep([lambda r=r: lockstep_exchange(r, share, "sum") for r in (1, 2)])
    [3, 3]
    """
    current = _current.get()
    if current is None:
        raise RuntimeError(
            f"{name}: ranks can exchange values only in run_lockstep(); run them in it"
        )
    shared, rank = current
    result: R = shared.exchange(rank, value, combine, name)
    return result


def run_lockstep(runs: Sequence[Callable[[], T]]) -> list[T]:
    """Run one callable per rank, one at a time in rank order; return their results in that order.

    ``runs`` has a callable without arguments for each rank; an empty list gives []. Each rank has a
    thread, rank 0 the caller's. A rank runs until it calls ``lockstep_exchange``, where callables
    exchange values, as synchronised batch normalisation does, or until it ends; then the next rank
    runs. So the order of all operations is the same in every call.

    All run under the caller's grad mode, autocast, default device, saved-tensor hooks, CUDA device
    and streams; other modes of torch, such as FlopCounterMode, apply to rank 0 only. The first
    error of any rank, KeyboardInterrupt too, is raised when all have ended: ranks that wait at a
    barrier end at once, others at their next barrier.

    >>> run_lockstep([lambda: "a", lambda: "b"])
    ['a', 'b']
    """
    if not runs:
        return []
    shared = _Lockstep(len(runs))
    results: list[Any] = [None] * len(runs)
    inherited = _ThreadState()

    def run(rank: int) -> None:
        error: BaseException | None = None
        token = _current.set((shared, rank))
        try:
            with inherited.entered() if rank else nullcontext():
                shared.wait(rank)
                results[rank] = runs[rank]()
        except BaseException as raised:
            error = raised
        finally:
            _current.reset(token)
            shared.leave(rank, error)
            del error  # breaks the reference cycle: its traceback holds this frame

    threads = [
        threading.Thread(target=copy_context().run, args=(run, rank), name=f"rank {rank}")
        for rank in range(1, len(runs))
    ]
    try:
        for thread in threads:
            thread.start()
        run(0)
        shared.join()
    except BaseException as error:  # an interrupt outside of `run` and `join`
        shared.abort(error)
        raise
    finally:
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if shared.failure is not None:
        raise shared.failure
    return results


class _ThreadState:
    """The caller's thread-local state of torch, which a new thread does not inherit."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        ]
        self._device = torch.get_default_device()
        self._thread_count = torch.get_num_threads()
        self._hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._streams: list[torch.cuda.Stream] = []
        self._gpu: int | None = None
        if cast(Any, torch.cuda).is_initialized():  # unannotated in torch
            self._gpu = torch.cuda.current_device()
            current = map(torch.cuda.current_stream, range(torch.cuda.device_count()))
            self._streams = [s for s in current if s != torch.cuda.default_stream(s.device)]

    def entered(self) -> ExitStack:
        """Apply this state to the calling thread until the returned stack is closed."""
        set_thread_count(self._thread_count)
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(self._inference))
        stack.enter_context(torch.set_grad_enabled(self._grad))
        for kind, dtype, cached in self._autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cached))
        if self._device.type != "cpu":  # a default-device mode adds some cost to every call
            stack.enter_context(self._device)
        if self._hooks is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._hooks))
        for stream in self._streams:  # streams and device are thread-local: no restore needed
            torch.cuda.set_stream(stream)
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)
        return stack
