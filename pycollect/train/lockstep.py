"""Ranks of one process that meet in the middle: a thread each, of which one runs at a time.

The threads pass a baton in rank order, at every meeting and at the end, so that the order of all
that happens, and with it the bits, is the same in every run; each rank has all cores to itself
while it runs. Rank 0 runs in the caller's thread. Nobody waits for ever: when one rank raises, or
has finished while others wait for it, all of them stop at their next meeting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar, cast

import torch

T = TypeVar("T")
V = TypeVar("V")
R = TypeVar("R")


class _Stopped(BaseException):
    """Unwinds a rank because of another one's failure; not for `except Exception` to swallow."""


class _Baton:
    """Whose turn it is, who has arrived at the meeting, and what went wrong first."""

    def __init__(self, world: int) -> None:
        lock = threading.Lock()
        self._turns = [threading.Condition(lock) for _ in range(world)]
        self._over = threading.Condition(lock)
        self._lock = lock
        self._turn = 0
        self._running = set(range(world))
        self._arrived: list[Any] = []
        self._what = ""
        self._results: Sequence[Any] = ()
        self.world = world
        self.failure: BaseException | None = None

    def wait(self, rank: int) -> None:
        """Return when it is this rank's turn."""
        with self._lock:
            self._turns[rank].wait_for(lambda: self._turn == rank or self.failure is not None)
            if self.failure is not None:
                raise _Stopped

    def _pass_on(self, rank: int) -> None:
        following = [(rank + ahead) % self.world for ahead in range(1, self.world + 1)]
        self._turn = next((r for r in following if r in self._running), rank)
        self._turns[self._turn].notify_all()

    def meet(
        self, rank: int, value: Any, combine: Callable[[list[Any]], Sequence[Any]], what: str
    ) -> Any:
        """Hand in a value, and return this rank's part of what is made of all of them."""
        if len(self._running) < self.world:
            done = sorted(set(range(self.world)) - self._running)
            raise _unlike(f"rank {rank} waits at {what} for rank {done[0]}, which has finished")
        if self._arrived and self._what != what:
            raise _unlike(f"rank {rank} is at {what} and rank 0 at {self._what}")
        self._what = what
        self._arrived.append(value)
        if len(self._arrived) == self.world:
            values, self._arrived = self._arrived, []
            self._results = combine(values)
        with self._lock:
            self._pass_on(rank)
        self.wait(rank)
        return self._results[rank]

    def leave(self, rank: int, error: BaseException | None) -> None:
        """Take this rank out; its error, or others who wait for it in a meeting, stop all."""
        with self._lock:
            self._running.discard(rank)
            if error is None and self._arrived:
                error = _unlike(f"rank 0 waits at {self._what} for rank {rank}, which has finished")
            if error is not None and not isinstance(error, _Stopped):
                self._fail(error)
            if self._turn == rank:
                self._pass_on(rank)
            if not self._running:
                self._over.notify_all()

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        for turn in self._turns:
            turn.notify_all()

    def stop(self, error: BaseException) -> None:
        """Have all ranks stop at their next meeting."""
        with self._lock:
            self._fail(error)

    def finish(self) -> None:
        """Wait until no rank runs; an interrupt meanwhile stops them at their next meeting."""
        with self._lock:
            try:
                self._over.wait_for(lambda: not self._running)
            except BaseException as error:
                self._fail(error)
                self._over.wait_for(lambda: not self._running)


def _unlike(what: str) -> RuntimeError:
    return RuntimeError(f"lockstep: {what}; all ranks must pass the same layers in the same order")


_seat: ContextVar[tuple[_Baton, int] | None] = ContextVar("_seat", default=None)


def ranks_in_lockstep() -> int | None:
    """Return how many ranks the lockstep has that this is called in, or None outside of one.

    >>> lockstep([ranks_in_lockstep] * 2), ranks_in_lockstep()
    ([2, 2], None)
    """
    seat = _seat.get()
    return None if seat is None else seat[0].world


def meet(value: V, combine: Callable[[list[V]], Sequence[R]], what: str) -> R:
    """Wait for all other ranks of the lockstep; return this rank's item of ``combine(values)``.

    ``values`` are in rank order, and one rank calls ``combine`` for all. ``what`` names the meeting
    in errors. Raises RuntimeError outside of a lockstep, and when another rank is at another
    meeting or has finished.

    >>> def share(x): return [sum(x)] * len(x)
    >>> lockstep([lambda: meet(1, share, "a sum"), lambda: meet(2, share, "a sum")])
    [3, 3]
    """
    seat = _seat.get()
    if seat is None:
        raise RuntimeError(f"{what}: the ranks can only meet in lockstep(); call them through that")
    baton, rank = seat
    result: R = baton.meet(rank, value, combine, what)
    return result


def lockstep(runs: Sequence[Callable[[], T]]) -> list[T]:
    """Run one callable per rank, one at a time in rank order; return what they return.

    A callable may meet the others on its way (``meet``; synchronised batch normalisation does).
    All run under the caller's grad mode, autocast, default device, saved-tensor hooks, CUDA device
    and streams; other modes of torch, such as FlopCounterMode, see rank 0 alone. The first error of
    any rank comes out, KeyboardInterrupt too, when all have ended: those that wait in a meeting at
    once, others at their next one.

    >>> lockstep([lambda: "a", lambda: "b"])
    ['a', 'b']
    """
    if not runs:
        return []
    baton = _Baton(len(runs))
    results: list[Any] = [None] * len(runs)
    state = _ThreadState()

    def run(rank: int) -> None:
        error: BaseException | None = None
        token = _seat.set((baton, rank))
        try:
            with state.entered() if rank else nullcontext():
                baton.wait(rank)
                results[rank] = runs[rank]()
        except BaseException as raised:
            error = raised
        finally:
            _seat.reset(token)
            baton.leave(rank, error)
            del error  # its traceback holds this frame

    threads = [
        threading.Thread(target=copy_context().run, args=(run, rank), name=f"rank {rank}")
        for rank in range(1, len(runs))
    ]
    try:
        for thread in threads:
            thread.start()
        run(0)
        baton.finish()
    except BaseException as error:  # an interrupt, and between two ranks' turns
        baton.stop(error)
        raise
    finally:
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if baton.failure is not None:
        raise baton.failure
    return results


class _ThreadState:
    """What torch keeps for each thread and a new one does not inherit."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        ]
        self._device = torch.get_default_device()
        self._hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._streams: list[torch.cuda.Stream] = []
        self._gpu: int | None = None
        if cast(Any, torch.cuda).is_initialized():  # torch leaves it unannotated
            self._gpu = torch.cuda.current_device()
            current = map(torch.cuda.current_stream, range(torch.cuda.device_count()))
            self._streams = [s for s in current if s != torch.cuda.default_stream(s.device)]

    def entered(self) -> ExitStack:
        """Put the calling thread into this state, until the stack is closed."""
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(self._inference))
        stack.enter_context(torch.set_grad_enabled(self._grad))
        for kind, dtype, cached in self._autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cached))
        if self._device.type != "cpu":  # a mode that costs every call a little
            stack.enter_context(self._device)
        if self._hooks is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._hooks))
        for stream in self._streams:  # streams and device are the thread's own, and gone with it
            torch.cuda.set_stream(stream)
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)
        return stack
