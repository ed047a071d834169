"""Emulated devices and parts of the library, for tests (csrc/testing). Not in any wheel."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from pycollect._C import Options, Plan

# The CUDA executor on emulated devices (bind_emulated_run.cpp).

StreamIdsTuple: TypeAlias = tuple[int, int, int, int]  # caller, worker, d2h, h2d
# stream, tasks as (rank, index), indices of launches to wait for, whether an event is recorded
LaunchTuple: TypeAlias = tuple[int, list[tuple[int, int]], list[int], bool]
WorkTuple: TypeAlias = tuple[Sequence[int], Sequence[int], int]  # destinations, sources, bytes

class EmulatedRun:
    """Runs of a plan by the executor for devices, on emulated devices.

    devices: of each rank; -1 for pinned host memory, -2 for pageable host memory.
    workers: "callers", "devices" or "ranks": streams that run the plan.
    pieces: per chunk, if the plan is staged.
    bindings: number of tensors.
    machine_of: another run, whose emulated devices this one shares.
    ring: bytes and number of the pinned pieces for pageable memory.
    """

    def __init__(
        self,
        plan: Plan,
        in_place: bool,
        devices: Sequence[int],
        *,
        level_policy: str = "any",
        callers_apart: bool = False,
        workers: str = "devices",
        copy_streams: bool = False,
        join_stream: bool = False,
        peers: bool = True,
        host_waits: bool = True,
        pieces: int = 1,
        dtype: str = "float32",
        op: str = "sum",
        bindings: int = 1,
        machine_of: EmulatedRun | None = None,
        ring: tuple[int, int] = (256, 3),
    ) -> None: ...
    def run(self, calls: int = 1, capture: bool = False) -> None:
        """Issue calls, optionally during a stream capture, and run all work as late as possible."""

    def run_half_captured(self) -> None:
        """Run while only the first caller's stream is capturing."""

    def replace_streams(self, workers: str, callers_apart: bool) -> None:
        """Create new streams for later runs."""

    def fail_call(self, after: int) -> None:
        """Let the CUDA call after ``after`` successful ones fail in the next run."""

    def skip_wait(self, number: int) -> None:
        """In all later runs, let this wait for an event have no effect."""

    def redundant_waits(self) -> list[int]:
        """Return the numbers of the waits whose removal causes no race."""

    def mismatch(self, seed: int = -1) -> str | None:
        """Run the last calls again; describe the first wrong result, or return None.

        seed: of a random order that streams and events allow; negative: issue order.
        """

    @property
    def race(self) -> str | None:
        """Description of the first race of the last run, or None."""

    @property
    def waits(self) -> int:
        """Number of waits for events in the last run."""

    @property
    def counts(self) -> dict[str, int]:
        """The emulator's counters; 0 for every other name."""

    @property
    def chunk_sizes(self) -> str:
        """Sizes of the chunks: "uneven", "each" (different for every rank, too) or "even"."""

    @property
    def plan(self) -> Plan:
        """The plan as run, after staging."""

    @property
    def levels(self) -> int:
        """Number of levels of the plan."""

class PeerAccessCache:
    """Cache of the devices that can access each other's memory.

    query: returns whether the driver reports access from one device to another.
    test: returns the defect of an access, or ""; called once per pair.
    warn: logs a line.
    """

    def __init__(
        self,
        query: Callable[[int, int], bool],
        test: Callable[[int, int], str],
        warn: Callable[[str], None],
    ) -> None: ...
    def works(self, from_: int, to: int, /) -> bool:
        """Return whether work on device ``from_`` can access the memory of device ``to``."""

def stage(
    plan: Plan,
    in_place: bool,
    on_host: Sequence[bool],
    directly: Sequence[Sequence[bool]],
    pieces: int = 1,
) -> Plan:
    """Return the plan with copies through host memory (csrc/plan/stage.h).

    on_host: for each rank, whether its memory is the host's.
    directly: ``directly[r][of]``: whether rank ``r`` can access the memory of rank ``of``.
    """

def schedule(
    plan: Plan,
    in_place: bool,
    level_policy: str,
    stream_ids: Sequence[StreamIdsTuple],
    streams: int,
    join_stream: int = -1,
) -> list[LaunchTuple]:
    """Return the launches of a plan on streams, in issue order (csrc/cuda/schedule.h).

    stream_ids: numbers of each rank's streams, below ``streams``.
    """

def predict_streams(
    plan: Plan,
    in_place: bool,
    level_policy: str,
    stream_ids: Sequence[StreamIdsTuple],
    streams: int,
    join_stream: int,
    devices: Sequence[int],
    bytes: float,
    model: tuple[float, float, float, float, float],
) -> float:
    """Return the predicted seconds of a plan that one process issues to streams.

    devices: of each rank; negative for host memory.
    model: alpha, port, memory, bridge, host: the members of ``CostModel``
        in csrc/analysis/predict.h.
    """

# The CUDA emulator (bind_emulator.cpp).

class Stream:
    @property
    def device(self) -> int: ...
    @property
    def device_index(self) -> int: ...
    @property
    def stream_id(self) -> int: ...

class Event:
    @property
    def device(self) -> int: ...

class Emulator:
    """An emulator of CUDA (csrc/testing/emulator.h). Addresses are integers.

    Its calls fail with RuntimeError where CUDA would. Work runs as late as possible.
    """

    def __init__(self, devices: int) -> None: ...
    def set_device(self, device: int, /) -> None: ...
    def current_device(self) -> int: ...
    def stream(self, device: int, of_caller: bool = True) -> Stream: ...
    def default_stream(self, device: int, /) -> Stream: ...
    def event(self, device: int) -> Event: ...
    def destroy(self, event: Event, /) -> None: ...
    def record(self, event: Event, stream: Stream, /) -> None: ...
    def wait(self, stream: Stream, event: Event, /) -> None: ...
    def connect(self, device: int, of: int) -> None:
        """Enable access from a device to the memory of device ``of``."""

    def allocate(self, kind: str, device: int, bytes: int) -> int:
        """Return the address of new memory; kind: "device", "pinned" or "pageable"."""

    def launch(self, stream: Stream, works: Sequence[WorkTuple], /) -> None:
        """Enqueue a sum of uint8 for each work."""

    def copy(self, stream: Stream, dst: tuple[int, int], src: tuple[int, int], bytes: int) -> None:
        """Enqueue a copy; dst, src: address and device."""

    def capture_id(self, stream: Stream, /) -> int:
        """Return the number of the capture that the stream is in, or 0."""

    def synchronize(self, stream: Stream, /) -> None: ...
    def begin_capture(self, stream: Stream, /) -> None: ...
    def end_capture(self, stream: Stream, /) -> int:
        """Return the capture's number."""

    def at_graph_end(self, stream: Stream, destroyed: Callable[[], None], /) -> None:
        """Call a function when the graph that captures the stream is destroyed."""

    def destroy_graph(self, capture: int) -> None:
        """End the graph of a capture, given its number."""

    def allow_eager_work(self, on: bool) -> None:
        """Allow work that is not captured during a capture, as that of another thread."""

    def finish(self, stream: Stream, /) -> None:
        """Wait for the work that is on the stream now."""

    @property
    def race(self) -> str | None:
        """Description of the first race of the log, or None."""

    def inject(self, kind: str, call: str = "", after: int = 0, seconds: float = 0.0) -> None:
        """Set the fault, in place of the one before.

        kind: "fail": the call raises; "skip": it has no effect; "slow": every call of the name
            takes ``seconds`` longer; "lost": from the call on, all calls of any name raise.
        call: name of the calls; "": of any name.
        after: number of calls of the name before the one that fails or is skipped; negative: all.
        """

    def heal(self) -> None:
        """Remove the fault."""

    def set_order(self, order: str, seed: int = 1) -> None:
        """Set when work runs: "late", "eager", "as_issued" or "random"."""

    def report_device(self, device: int) -> None:
        """Report another device than the thread's current one, until the next set_device."""

    def set_pause(self, seconds: float) -> None:
        """Set the pause of the streams' thread between two rounds of work."""

    def drain_waits(self, on: bool) -> None:
        """Set whether enqueueing a wait on a caller's stream drains that stream."""

    def calls(self) -> list[str]:
        """Return the names of the stream calls so far, each followed by " caller" or " group"."""

    def counters(self) -> dict[str, int]:
        """Return the numbers of resources held now, and of calls by name."""

    def violations(self) -> list[str]:
        """Return descriptions of all violations of the rules of CUDA or of the library."""

class EmulatedTorch:
    """Torch's CUDA runtime on the emulator (bind_emulator.cpp), for calls on lists.

    Its tensors are of torch's device type "privateuseone". `emulate` makes one for process groups,
    with CPU tensors that count as tensors of one device.
    """

    def __init__(self, devices: int) -> None: ...
    def close(self) -> None:
        """End the use of the emulated devices, of which no tensor may exist any more."""

    @property
    def cuda(self) -> Emulator: ...
    def empty(self, sizes: Sequence[int], device: int = 0) -> torch.Tensor:
        """Return an uninitialized float32 tensor of an emulated device."""

    def empty_pinned(self, sizes: Sequence[int]) -> torch.Tensor:
        """Return an uninitialized float32 tensor in pinned memory."""

    def empty_foreign(self, count: int, device: int = 0, offset: int = 0) -> torch.Tensor:
        """Return a float32 tensor [count] whose memory is reused as soon as it is freed.

        offset: of the tensor in its memory, in bytes.
        """

    def adopt(self, tensor: torch.Tensor, pinned: bool) -> None:
        """Make the memory of a CPU tensor known, as pinned or as pageable."""

    def put_on_host(self, tensor: torch.Tensor) -> None:
        """Treat the tensor as an ordinary CPU tensor."""

    def connect(self, on: bool) -> None:
        """Set whether devices reach each other's memory."""

    def current(self, device: int = 0) -> Stream:
        """Return the current stream of the device, or of the calling thread."""

    def use(self, stream: Stream) -> None:
        """Make the stream the current one of its device."""

    def use_own_stream(self) -> None:
        """Make a new stream the calling thread's current one."""

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Enqueue a copy of CPU values to the tensor on the current stream."""

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Enqueue a copy of the tensor on the current stream; return the CPU tensor it goes to."""

    def finish(self) -> None:
        """Wait for all work of the calling thread's current stream."""

    def stall(self, stream: Stream) -> None:
        """Stop the stream until `resume`."""

    def resume(self) -> None: ...
    def begin_capture(self, stream: Stream, by_torch: bool = True) -> None:
        """Begin a capture; ``by_torch``: torch keeps memory that is allocated meanwhile."""

    def end_capture(self, stream: Stream) -> int:
        """Return the capture's number."""

    def run(self, seed: int) -> None:
        """Run all work in a random order, and begin a new log."""

    def recorded(self) -> int:
        """Return the number of records of streams so far."""

    def blocks_in_use(self) -> int:
        """Return the number of blocks of memory that tensors use, pinned ones too."""

def emulate(options: Options, eager: bool = ..., own_thread: bool = ...) -> EmulatedTorch:
    """Set an emulated torch runtime in a group's options and return it.

    eager: run work as early as possible instead of as late as possible.
    own_thread: a thread of the emulator runs the streams' work.
    """

# The device's kernels on host memory, and host copies (bind_kernels.cpp).

# destinations, sources, their pitches in bytes, elements of a line, lines, whether `avg` scales
LaunchWorkTuple: TypeAlias = tuple[
    Sequence[int], Sequence[int], Sequence[int], Sequence[int], int, int, bool
]

def emulate_launch(
    works: Sequence[LaunchWorkTuple],
    dtype: str,
    op: str,
    world: int,
    multiprocessors: int,
    float8: Sequence[int],
) -> list[dict[str, Any]]:
    """Run the works with the device's kernels on host memory; describe each launch.

    A description has the keys kind, works, args_bytes, accesses (of each block),
    widest_load and widest_store (bytes), and loaded, loaded_twice, stored, stored_twice (bytes).

    float8: bytes of overflow, infinity and NaN, in float8_e4m3fn and in float8_e5m2.
    """

def copy_rows(
    dst: torch.Tensor, src: torch.Tensor, bytes: int, rows: int, pitches: tuple[int, int]
) -> None:
    """Copy ``rows`` rows of ``bytes`` bytes between CPU tensors, as the executor's host copies.

    pitches: bytes from one row to the next, in ``dst`` and in ``src``.
    """

# Emulated GPUs for list calls (bind_emulator.cpp).

collectives: Any  # the functions of pycollect._C, for tensors of emulated GPUs, too
