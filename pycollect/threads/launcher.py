"""Runs a function as all ranks of a `torch.distributed` program, one thread for each rank."""

from __future__ import annotations

import ctypes
import datetime
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from .. import _C
from ..errors import CollectiveError, Timeout, shown
from . import torch_internals
from .op_handlers import op_handlers_of_ranks
from .process_wide import second_uses_refused
from .rank_environ import environ_of_ranks
from .started_threads import new_threads_restored, set_thread_count, threads_of_ranks

# A rank that waits raises at once when the launch ends; one that runs is interrupted after this.
_INTERRUPT_SECONDS = 1.0
# A rank that cannot be interrupted, as in a long call of C code, is left behind after this.
_ABANDON_SECONDS = 10.0
_POLL_SECONDS = 0.1  # between two looks at the clock

# Files that are not the user's.
_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (
        Path(torch.__file__).parent,
        Path(__file__).parents[1],
        sysconfig.get_path("stdlib"),
    )
)
_SITE = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("purelib", "platlib"))

_cuda: Any = torch.cuda  # without types in torch

_running = threading.Lock()  # held by the launch of this process


class _Stopped(CollectiveError):
    """Raised in a rank that runs when the launch has ended."""

    def __str__(self) -> str:
        return "the launch has ended"


def launch(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    device: Any = None,
    parallel: bool = False,
    timeout: float | datetime.timedelta | None = None,
) -> list[Any]:
    """Run `fn(rank, world, *args)` as `world` ranks, and return the list of their results.

    Each rank is a thread of this process, with a default process group and a random state of its
    own, so `fn` may be any program of `torch.distributed`. It may call `init_process_group` itself,
    with any backend: "pycollect" serves every one. All collectives, messages and subgroups have the
    bits and the errors that they have between processes.

    One rank runs at a time, until it waits, and then the next one, in the order of ranks: each has
    all cores, and a run is reproducible. Ranks begin with the caller's random state. With
    `parallel=True` they run at once, and share the process's random state.

    device: where the ranks' tensors are, for `torch.cuda.current_device()`: None for the CPU, a
    GPU such as "cuda:0" for all ranks, or a list with one device per rank. Each rank has a stream
    of its own. timeout: seconds (or a timedelta) for all of it; None is no limit.

    The first exception of a rank is raised again, with its rank and the other ranks' exceptions as
    notes; the other ranks raise PeerLost where they wait. If every rank waits and none can
    continue, all raise Deadlock at once. Raises Timeout when the time is over; TypeError for a
    function that cannot be called, ValueError for a `world` below 1 or another number of devices,
    and RuntimeError in a rank (launches cannot nest) and while another thread launches.

    >>> from pycollect import threads
    >>> threads.launch(lambda rank, world: rank * world, 2)
    [0, 2]
    """
    return Launch(world, device=device, parallel=parallel, timeout=timeout).run(fn, args)


def _create_contexts(devices: Iterable[torch.device | None]) -> None:
    """Create the CUDA contexts of a launch before its scheduler, by an allocation on each GPU.

    Their threads wait as long as the process lives, and the scheduler takes threads that wait
    before it exists for no part of a deadlock. torch.cuda is then initialised, so that every rank
    begins with random states of all GPUs.
    """
    for gpu in {found for found in devices if found and found.type == "cuda"}:
        torch.empty(1, device=gpu)


class Launch:
    """One launch; `run` may be called once."""

    def __init__(
        self,
        world: int,
        *,
        device: Any = None,
        parallel: bool = False,
        timeout: float | datetime.timedelta | None = None,
        default_group: bool = True,
        variables: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Prepare a launch; see `launch` for the arguments it has, too.

        default_group: whether the launch makes a default group. variables: further module variables
        of which each rank has its own value, as (module, name); an empty name stands for the module
        itself, in sys.modules. `self.variables.set(rank, module, name, value)` sets a first value.
        """
        world = _C.int_from(world, "launch", "world")
        if world < 1:
            raise ValueError(f"launch: world is {world}; it must be at least 1")
        self._world = world
        self._devices = _devices_of(device, world)
        self._deadline = None if timeout is None else time.monotonic() + _seconds_of(timeout)
        self._parallel = bool(parallel)
        self._thread_count = torch.get_num_threads()
        self._default_group = default_group
        _create_contexts(self._devices)
        self._random = _C.RandomStates(world, _cuda.is_initialized())
        self.variables = _C.RankVariables(world, [*torch_internals.RANK_VARIABLES, *variables])
        torch_internals.set_variables(self.variables, world)
        # The scheduler must not refer to this object, which refers to it.
        threads: list[threading.Thread] = []
        self._threads = threads
        self._scheduler = _C.RankScheduler(
            world,
            self._parallel,
            random=self._random,
            variables=self.variables,
            find_line=lambda rank: _user_line(threads[rank].ident),
        )
        self._results: list[Any] = [None] * world
        self._failures: list[tuple[int, BaseException]] = []
        self._replaced: set[str] = set()
        self._ended = [threading.Event() for _ in range(world)]

    def rank_of_thread(self) -> int:
        """Return the rank of the calling thread; -1: it belongs to no rank of this launch."""
        return self._scheduler.rank_of_thread()

    def run(self, fn: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
        if not callable(fn):
            raise TypeError(
                f"launch: fn is a {type(fn).__name__}; pass a function of (rank, world)"
            )
        torch_internals.require_parts()
        with ExitStack() as stack:
            self._require_alone(stack)
            stack.callback(lambda: self._random.restore(_cuda.is_initialized()))
            stack.callback(self.variables.restore)
            stack.enter_context(new_threads_restored())
            scheduler = self._scheduler
            stack.enter_context(torch_internals.worlds_of(scheduler, self._warn_of_backend))
            stack.enter_context(environ_of_ranks(scheduler.rank_of_thread, self._world))
            stack.enter_context(threads_of_ranks(scheduler))
            stack.enter_context(second_uses_refused(scheduler.rank_of_thread))
            stack.enter_context(op_handlers_of_ranks(scheduler.rank_of_thread, self._world))
            self._threads += [
                threading.Thread(
                    target=self._run_rank, args=(rank, fn, args), name=f"rank {rank}", daemon=True
                )
                for rank in range(self._world)
            ]
            self._run_ranks()
        self._raise_failure()
        return self._results

    def _require_alone(self, stack: ExitStack) -> None:
        if _C.is_rank_thread():
            raise RuntimeError("launch: this thread is a rank already; launches cannot nest")
        if not _running.acquire(blocking=False):
            raise RuntimeError(
                "launch: another thread of this process runs a launch; start one after the other"
            )
        stack.callback(_running.release)

    def _warn_of_backend(self, wanted: str) -> None:
        if wanted in self._replaced:
            return
        self._replaced.add(wanted)
        print(
            f"pycollect.threads: backend 'pycollect' serves {wanted!r}, because the ranks are "
            "threads of one process",
            file=sys.stderr,
        )

    def _run_rank(self, rank: int, fn: Callable[..., Any], args: Sequence[Any]) -> None:
        try:
            try:
                self._scheduler.enter(rank)
                with ExitStack() as stack:
                    self._enter_rank(stack, rank)
                    self._run_program(rank, fn, args)
            except BaseException as error:
                self._fail(rank, error)
            finally:
                self._leave_rank(rank)
        finally:
            self._ended[rank].set()

    def _run_program(self, rank: int, fn: Callable[..., Any], args: Sequence[Any]) -> None:
        try:
            self._results[rank] = fn(rank, self._world, *args)
        except BaseException as error:  # also SystemExit: it must end the launch
            # Before the rank leaves its groups, which ends the other ranks' waits, too.
            self._fail(rank, error)

    def _enter_rank(self, stack: ExitStack, rank: int) -> None:
        set_thread_count(self._thread_count)
        # Otherwise one thread of torch per device would run the backward passes of all ranks.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        device = self._devices[rank]
        if device is not None and device.type == "cuda":
            torch.cuda.set_device(device)
            stream: Any = torch.cuda.Stream
            stack.enter_context(torch.cuda.stream(stream(device)))
        if self._default_group:
            torch_internals.make_default_group()
            self._scheduler.align(rank)
        stack.callback(torch_internals.leave_groups)

    def _fail(self, rank: int, error: BaseException) -> None:
        if any(rank == other for other, _ in self._failures):
            return  # another error follows from the first
        self._failures.append((rank, error))
        self._scheduler.abort(_C.AbortKind.PEER_LOST, f"rank {rank} raised {_summary(error)}")

    def _leave_rank(self, rank: int) -> None:
        try:
            torch_internals.leave_groups()
        except Exception as error:  # the rank has failed, or its groups have
            self._fail(rank, error)
        finally:
            self._scheduler.leave()

    def _run_ranks(self) -> None:
        """Run all ranks until they have ended; end them when the time is over, or at Ctrl-C."""
        try:
            for thread in self._threads:
                thread.start()
            while not self._scheduler.is_aborted() and (alive := self._alive()):
                if not self._ended[alive[0]].wait(_POLL_SECONDS):
                    self._scheduler.poll()
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    self._time_out()
        except BaseException as error:  # Ctrl-C, or a thread that could not be started
            self._failures.insert(0, (-1, error))
            self._scheduler.abort(_C.AbortKind.PEER_LOST, "the launch was interrupted")
        self._stop_ranks()
        self._scheduler.abort(
            _C.AbortKind.PEER_LOST, "the launch has ended"
        )  # for works that still wait

    def _alive(self) -> list[int]:
        # Not Thread.is_alive: an interrupted join makes it wrong until Python 3.12.
        ended = [event.is_set() for event in self._ended]
        return [r for r, thread in enumerate(self._threads) if thread.ident and not ended[r]]

    def _time_out(self) -> None:
        cause = "the launch has not ended within its timeout"
        lines = ""
        for rank in self._alive():
            place = _user_line(self._threads[rank].ident).removeprefix(", ")
            lines += f"\n  rank {rank} is {place or 'waiting for its first turn'}"
        self._failures.insert(0, (-1, Timeout(f"launch: {cause}:{lines}")))
        self._scheduler.abort(_C.AbortKind.TIMED_OUT, cause)

    def _stop_ranks(self) -> None:
        """Wait for the ranks, which raise where they wait; interrupt those that run."""
        begin = time.monotonic()
        interrupts = 0
        while alive := self._alive():
            if not self._ended[alive[0]].wait(_POLL_SECONDS):
                self._scheduler.poll()
            waited = time.monotonic() - begin
            if waited >= _INTERRUPT_SECONDS * (interrupts + 1):
                interrupts += 1
                for rank in self._alive():
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(self._threads[rank].ident or 0), ctypes.py_object(_Stopped)
                    )
            if waited >= _ABANDON_SECONDS:
                self._abandon(alive)
                return

    def _abandon(self, ranks: Sequence[int]) -> None:
        names = ", ".join(f"rank {rank}" for rank in ranks)
        print(f"pycollect.threads: {names} did not stop, and was left", file=sys.stderr)
        if self._failures:
            return
        try:
            self._scheduler.throw_cause(f"{names} did not stop")
        except CollectiveError as error:
            self._failures.append((-1, error))

    def _raise_failure(self) -> None:
        if not self._failures:
            return
        rank, error = self._failures[0]
        if rank >= 0:
            _add_note(error, f"raised by rank {rank} of {self._world}")
        for other, another in self._failures[1:]:
            how = "was stopped" if isinstance(another, _Stopped) else f"raised {_summary(another)}"
            _add_note(error, f"rank {other} {how}")
        if isinstance(error, ValueError) and "world group map" in str(error):
            _add_note(error, "each rank has process groups of its own: this one is another rank's")
        raise error


def _summary(error: BaseException) -> str:
    """Return the type and the first line of an exception: others may repeat the rest."""
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _add_note(error: BaseException, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:  # not printed, but there for who looks
        error.__notes__ = [*getattr(error, "__notes__", []), note]


# --- arguments and places -----------------------------------------------------------------------


def _seconds_of(timeout: float | datetime.timedelta) -> float:
    if isinstance(timeout, datetime.timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"launch: timeout is a {type(timeout).__name__}; pass seconds, or None")
    if timeout < 0:
        raise ValueError(f"launch: timeout is {timeout}; it must not be negative")
    return timeout


def _devices_of(device: Any, world: int) -> list[torch.device | None]:
    if device is None or isinstance(device, (str, int, torch.device)):
        device = [device] * world
    devices = [None if d is None else _device_of(d) for d in device]
    if len(devices) != world:
        raise ValueError(f"launch: {len(devices)} devices for {world} ranks; pass one for each")
    return devices


def _device_of(given: Any) -> torch.device:
    try:
        found = torch.device(given)
    except RuntimeError as error:
        raise ValueError(
            f"launch: device is {shown(given)}; torch has no such device: {error}"
        ) from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"launch: device is '{found}'; pass None, 'cpu' or a GPU ('cuda:0')")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"launch: device is '{found}', and torch finds no GPU here")
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found


def _user_line(thread: int | None) -> str:
    """Return ", at script.py:12 in step", or "" if the thread runs no code of the user."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    while frame is not None:
        file = frame.f_code.co_filename
        library = file.startswith(_LIBRARIES) and not file.startswith(_SITE)
        if not (library or file.startswith(_LIBRARIES[:2]) or file.startswith("<")):
            return f", at {file}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
