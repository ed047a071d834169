"""The compiled extension, called only by this package and with all arguments."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch._C._distributed_c10d import Backend

# Plans, programs, the registry of algorithms, and the analysis of plans (csrc/torch/bind_plan.cpp).
SliceTuple: TypeAlias = tuple[int, str, int, int]  # rank, in | out | tmp | host, first, count
StepTuple: TypeAlias = tuple[tuple[SliceTuple, ...], tuple[SliceTuple, ...], int]
TaskTuple: TypeAlias = tuple[int, int, list[tuple[int, int]]]  # step or -1, level, waits
SpanTuple: TypeAlias = tuple[int, int, float, float]  # rank, step or -1, start, end
Devices: TypeAlias = Sequence[torch.device]
ModelTuple: TypeAlias = tuple[float, float, float, float]  # alpha, port, memory, bridge

COLLECTIVES: tuple[str, ...]

class Plan:
    def __init__(
        self,
        world: int,
        chunks: int,
        steps: Sequence[tuple[Sequence[SliceTuple], Sequence[SliceTuple], int]],
    ) -> None: ...
    @property
    def world(self) -> int: ...
    @property
    def chunks(self) -> int: ...
    @property
    def steps(self) -> tuple[StepTuple, ...]: ...
    def check(self, in_place: bool) -> None: ...
    def finishes(self, in_place: bool) -> list[bool]: ...

class Program:
    def __init__(self, plan: Plan, in_place: bool, level_policy: str = "any") -> None: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def in_place(self) -> bool: ...
    @property
    def tasks(self) -> list[list[TaskTuple]]: ...
    @property
    def levels(self) -> list[list[tuple[int, int]]]: ...
    def without_wait(self, rank: int, index: int, wait: int) -> Program: ...
    def with_wait(self, rank: int, index: int, wait: tuple[int, int]) -> Program: ...

class PlanOffsets:
    def __init__(self, plan: Plan, blocks: Sequence[int], align: int = 1) -> None: ...
    def set(self, rank: int, buffer: str, blocks: Sequence[int]) -> None: ...
    def begin(self, at: SliceTuple) -> int: ...
    def count(self, at: SliceTuple) -> int: ...
    def total(self, rank: int, buffer: str) -> int: ...
    def check(self, plan: Plan) -> None: ...

class Algorithm:
    @property
    def name(self) -> str: ...
    @property
    def collective(self) -> str: ...
    @property
    def cost(self) -> str: ...
    @property
    def order(self) -> str: ...
    @property
    def in_place(self) -> bool: ...
    def keeps_contract(self, dtype: str) -> bool: ...
    def plan(self, world: int, root: int = 0, pieces: int = 4) -> Plan: ...

class RaceReport:
    @property
    def defect(self) -> str | None: ...
    @property
    def races(self) -> int: ...
    @property
    def waits(self) -> int: ...
    @property
    def deadlock(self) -> bool: ...
    @property
    def is_barrier(self) -> bool: ...

def algorithms(collective: str) -> list[Algorithm]: ...
def find_algorithm(collective: str, name: str) -> Algorithm: ...
def default_algorithm(collective: str, world: int, nbytes: int) -> str: ...
def verify(collective: str, plan: Plan, root: int, in_place: bool) -> tuple[str | None, str]: ...
def find_races(program: Program) -> RaceReport: ...
def predict(program: Program, bytes: float, model: ModelTuple) -> tuple[float, list[SpanTuple]]: ...
def models() -> dict[str, ModelTuple]: ...

# Conversion of a caller's objects (csrc/torch/from_python.cpp); TypeErrors such as "plan: world is
# a str; pass an int".
def int_from(number: Any, call: str, name: str, /) -> int: ...
def flag_from(flag: Any, call: str, name: str, /) -> bool: ...

# The collectives (csrc/torch/module.cpp), which also convert the Python arguments.
class Work:
    """A collective that was called with ``async_op=True``."""

    def wait(self, timeout: float | None = None) -> Any:
        """Return the result of the call: None for a collective in place, else its tensors.

        Without CUDA tensors, the host waits until the collective has finished, and an error of the
        collective is raised. With CUDA tensors, the current stream of each GPU in the call waits
        for the collective, but the host does not, unless ``timeout`` is given in seconds.

        Raises pycollect.Timeout if the collective has not finished after ``timeout`` seconds; it
        keeps running. None, and more than 1e9 seconds, are no limit. Raises ValueError for a
        negative timeout, and TypeError for one that is not a number.
        """

    def result(self, timeout: float | None = None) -> Any:
        """Wait and return as ``wait`` does."""

    def is_completed(self) -> bool:
        """Return whether the collective has finished or failed, without waiting."""

    def exception(self) -> Exception | None:
        """Return a RuntimeError with the message of a collective that failed, else None.

        Always None with CUDA tensors, whose errors are raised when the collective is called.
        """

def all_reduce(
    tensors: Any, op: Any, algorithm: str | None, async_op: bool, streams: Any, peer_access: bool
) -> Work | None: ...
def all_reduce_coalesced(
    tensor_lists: Any,
    op: Any,
    algorithm: str | None,
    async_op: bool,
    streams: Any,
    peer_access: bool,
) -> Work | None: ...
def reduce(
    tensors: Any,
    dst: int,
    op: Any,
    algorithm: str | None,
    async_op: bool,
    streams: Any,
    peer_access: bool,
) -> Work | None: ...
def broadcast(
    tensors: Any, src: int, algorithm: str | None, async_op: bool, streams: Any, peer_access: bool
) -> Work | None: ...
def broadcast_coalesced(
    tensor_lists: Any, src: int, async_op: bool, streams: Any, peer_access: bool
) -> Work | None: ...
def all_gather(
    tensors: Any,
    dim: int,
    algorithm: str | None,
    out: Any,
    async_op: bool,
    streams: Any,
    peer_access: bool,
) -> list[torch.Tensor] | Work: ...
def reduce_scatter(
    tensors: Any,
    op: Any,
    dim: int,
    algorithm: str | None,
    out: Any,
    async_op: bool,
    streams: Any,
    peer_access: bool,
) -> list[torch.Tensor] | Work: ...
def all_to_all(
    tensors: Any,
    dim: int,
    split_sizes: Any,
    out: Any,
    async_op: bool,
    streams: Any,
    peer_access: bool,
) -> list[torch.Tensor] | Work: ...
def scatter(
    tensor: Any,
    devices: Devices,
    sizes: Any,
    dim: int,
    out: Any,
    async_op: bool,
    streams: Any,
    peer_access: bool,
) -> list[torch.Tensor] | Work: ...
def gather(
    tensors: Any, device: Devices, dim: int, out: Any, streams: Any, peer_access: bool
) -> torch.Tensor: ...
def replicate(tensors: Any, devices: Devices, peer_access: bool) -> list[torch.Tensor] | None: ...
def copy_(dst: Any, src: Any, async_op: bool, peer_access: bool) -> Work | None: ...
def drain() -> None: ...
def has_cuda() -> bool: ...

# Returns the driver's answer, the defect found by a self-test or "", and the performance rank.
def peer_access(from_: int, to: int, /) -> tuple[bool, str, int]: ...
def enable_log() -> None: ...
def instruction_set() -> str: ...
def time_all_reduce(
    tensors: Any, op: Any, algorithm: str | None, iterations: int
) -> list[float]: ...

# Ranks as processes (csrc/torch/bind_distributed.cpp): absent if torch has no torch.distributed.
class Options(Backend.Options):
    """The options of a group; ``pycollect.distributed.options`` checks and describes them.

    Defaults: algorithm "" (the library selects one for each call), buffer_bytes 524288 (512 KiB),
    symmetric_heap_bytes None (by the host's memory and the number of ranks), cuda_buffer_bytes
    16777216 (16 MiB), cuda_transport "auto". An unknown cuda_transport raises ValueError; the other
    values are first checked when a group or a call uses them.
    """

    algorithm: str
    buffer_bytes: int
    symmetric_heap_bytes: int | None
    cuda_buffer_bytes: int
    cuda_transport: str
    def __init__(self) -> None: ...

def make_backend(store: Any, rank: int, world: int, options: Options) -> Any: ...
def symmetric_heap_usage(backend: Any) -> tuple[int, int, int] | None: ...
def symmetric_memory_usage(backend: Any) -> tuple[int, int] | None: ...
def in_symmetric_memory(backend: Any, tensor: torch.Tensor) -> bool: ...
def is_backend(backend: Any) -> bool: ...
def abandon_coalescing(backend: Any, why: str, unlisted: bool) -> None: ...
def close_groups() -> bool: ...
def cuda_transports() -> list[str]: ...
