"""The program of a rank that is a process: its candidates, their turns, and the checks.

Every rank runs `work` at the same time. All candidates use the same tensors, except `zero-copy`,
whose tensors are in the group's symmetric memory. The limit is `memory`: every rank multiplies its
share of the bytes in place. For ranks on one GPU it is `memcpy`: rank 0 copies the same bytes
there. Between hosts it is `link` (hosts.py).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

import pycollect
from pycollect._timing import Effort, Sampler, Timing, batched, host_time, interleave, shuffled

from . import host_calls
from .cases import Buffers, Call, Case, run_checked
from .clocks import (
    LEAST_ON_DEVICE,
    batch_seconds,
    gpu_time,
    recorded,
    sized,
    slowest_rank,
    synchronizer,
)
from .lists import reason
from .ranks import Rank
from .runner import GPU, LIMIT, OURS, PEER, RETURN, WALL, Result, Row, clocked

PROGRAM = "pycollect_bench.rank_work:work"
ZERO_COPY, OPERATOR, FAST = "zero-copy", "operator", "fast"
GLOO, MPI, DEEPSPEED, HSDP = "gloo", "mpi", "deepspeed", "hsdp"
PEERS = (GLOO, MPI, DEEPSPEED)
LINK = "link"
LIMITS = ("memory", "memcpy", LINK)
# Least size in bytes for a limit: fewer bytes take no longer than a call through Python and a
# barrier. Largest size at which calls between CPUs are timed in batches, because they are short.
_LEAST_FOR_LIMIT, _LARGEST_IN_BATCHES = 256 << 10, 16 << 10
# Candidates that use the group of another one.
_GROUPS = {ZERO_COPY: OURS, OPERATOR: OURS}
# Seconds by which the last rank is late in the check of a barrier.
_LATE = 0.01
_MPI_TYPES = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
}


@dataclass(frozen=True)
class Task:
    """What the ranks of one world measure.

    `no_mpi` is the reason why MPI is not measured, or "". With `both_clocks` candidates are timed
    by the host's and by the device's clock. `hosts` is the number of hosts, `rate` that of their
    links in bits per second, if it is limited.
    """

    devices: tuple[torch.device, ...]
    cases: tuple[Case, ...]
    names: tuple[str, ...]
    effort: Effort
    backend: str = OURS
    no_mpi: str = "it is not among the peers"
    both_clocks: bool = False
    hosts: int = 1
    rate: float | None = None

    @property
    def ranks_per_host(self) -> int:
        """The number of ranks of each host."""
        return len(self.devices) // self.hosts


@dataclass(frozen=True)
class Candidate:
    """A candidate on one rank; `wrong` runs one call and returns this rank's wrong elements."""

    name: str
    kind: str
    call: Call
    rewrite: Callable[[int], object]
    wrong: Callable[[], int] | None
    one_by_one: bool = False  # whether also small calls are timed one by one
    first: float = 0.0  # seconds of the first call on this rank


@dataclass
class Setting:
    """What the candidates of a rank need: groups and modules by name, each or why it is missing."""

    rank: Rank
    task: Task
    groups: dict[str, tuple[Any, str]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The rank's device."""
        return self.task.devices[self.rank.number]

    def tries(self, name: str, make: Callable[[], Any]) -> tuple[Any, str]:
        """Return what `make` returns, and why a rank refused it, or ""; collective.

        Any error of a peer is a reason; one of pycollect that is no refusal fails the run.
        """
        made, refusal = None, ""
        try:
            made = make()
        except Exception as error:
            ours = name not in (*PEERS, HSDP) or isinstance(error, pycollect.CollectiveError)
            if ours and not isinstance(error, TypeError | ValueError | NotImplementedError):
                raise
            refusal = reason(error)
        refused = self.rank.barrier.gather(float(bool(refusal)))
        if any(refused) and not refusal:
            refusal = f"rank {refused.index(1.0)} refused"
        return made, refusal

    def group(self, name: str) -> Any:
        """Return a candidate's group; a ValueError has the reason why there is none."""
        group, refusal = self.groups[name]
        if refusal:
            raise ValueError(refusal)
        return group


def work(rank: Rank, task: Task) -> None:
    """Measure the cases on this rank; rank 0 sends the results."""
    if task.devices[rank.number].type == "cuda":
        torch.cuda.set_device(task.devices[rank.number])
    rank.init_process_group()
    setting = Setting(rank, task)
    makers: dict[str, Callable[[], Any]] = {
        GLOO: lambda: dist.group.WORLD,
        OURS: partial(_group, task.backend, rank.timeout),
        MPI: partial(_mpi, task.no_mpi),
        DEEPSPEED: partial(_deepspeed, rank),
        HSDP: partial(host_calls.hsdp_groups, task.hosts, task.ranks_per_host),
        FAST: host_calls.fast_group,
    }
    for name in task.names:
        if name in makers:
            setting.groups[name] = setting.tries(name, makers[name])
    for number, case in enumerate(task.cases):
        result = run_case(case, setting, number)
        if result is not None:
            rank.send(result)


def _group(backend: str, timeout: timedelta) -> Any:
    if not dist.is_backend_available(backend):
        raise ValueError(f"torch.distributed has no backend {backend!r}")
    return dist.new_group(backend=backend, timeout=timeout)


def _mpi(no_mpi: str) -> Any:
    if no_mpi:
        raise ValueError(no_mpi)
    return import_module("mpi4py.MPI")  # which initialises MPI


def _deepspeed(rank: Rank) -> Any:
    """Return DeepSpeed's operator for shared memory, which is compiled at its first use."""
    if find_spec("deepspeed") is None:
        raise ValueError("DeepSpeed is not installed")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise it warns that it found no other one
    with redirect_stdout(sys.stderr):
        builder = import_module("deepspeed.ops.op_builder.cpu.comm").ShareMemCommBuilder()
        builder.load().initialize(rank.world, rank.number)
    return torch.ops.deepspeed.inference_all_reduce_


def candidates(case: Case, setting: Setting) -> tuple[list[Candidate], dict[str, str]]:
    """Return the candidates of a case, and why others do not run; collective."""
    plain = Buffers(case, setting.rank.number, partial(torch.empty, device=setting.device))
    found, not_run = [], dict[str, str]()
    for name in setting.task.names:
        if name == ZERO_COPY and not case.count:
            continue
        made, refusal = setting.tries(name, partial(_made, name, plain, setting))
        if refusal:
            not_run[name] = refusal
        else:
            found.append(made)
    return found, not_run


def _made(name: str, plain: Buffers, setting: Setting) -> Candidate:
    """Return a candidate, after its first run."""
    case, buffers, synchronize = plain.case, plain, synchronizer([setting.device])
    if name == ZERO_COPY:
        empty = partial(pycollect.symmetric_empty, group=setting.group(OURS))
        buffers = Buffers(case, plain.rank, empty)
    call = _call(name, buffers, setting)
    begin = time.perf_counter()
    call()
    synchronize()
    first = time.perf_counter() - begin
    check = partial(run_checked, [buffers], call, synchronize)
    if case.collective == "barrier":
        check = partial(_early, call, setting.rank)
    folds = case.op == "sum" and case.dtype.is_floating_point
    if setting.task.hosts > 1 and name == OURS and folds:
        check = partial(host_calls.fold_checked, buffers, call, check)
    kind = PEER if name in (*PEERS, HSDP) else OURS
    return Candidate(name, kind, call, buffers.rewrite, check, name == ZERO_COPY, first)


def _call(name: str, buffers: Buffers, setting: Setting) -> Call:
    """Return the call of a candidate; a ValueError has the reason why there is none."""
    case, group = buffers.case, setting.group(_GROUPS.get(name, name))
    if name in (OPERATOR, DEEPSPEED):
        if not case.is_sum(torch.float32, torch.bfloat16, torch.float16):
            raise ValueError("is measured only for sums of floats by all_reduce")
        if name == DEEPSPEED:
            return partial(group, buffers.input)
        operator = torch.ops.pycollect.group_all_reduce_.default
        return partial(operator, buffers.input, "sum", group.group_name)
    if name == MPI:
        if case.dtype not in _MPI_TYPES or case.op not in ("sum", "none"):
            raise ValueError(f"is measured only for sums of C types, not {case.op} of {case.dtype}")
        assert case.spec.mpi is not None
        return case.spec.mpi(buffers, group, getattr(group, _MPI_TYPES[case.dtype]))
    if name == HSDP:
        return host_calls.hsdp_call(buffers, group)
    if (name, case.collective, setting.device.type) == (GLOO, "send_recv", "cuda"):
        # gloo reads GPU memory as host memory, and the failing write ends the process.
        raise ValueError("cannot send CUDA tensors")
    assert case.spec.group is not None
    return case.spec.group(buffers, group)


def _early(call: Call, rank: Rank) -> int:
    """Return the number of ranks that had not entered the barrier when this rank left it."""
    page = rank.barrier
    page.gather(0.0)
    if rank.number == rank.world - 1:
        time.sleep(_LATE)
    page.publish(1.0)
    call()
    early = sum(number != 1.0 for number in page.published())
    page.barrier()  # before any rank publishes its next number
    return early


def _limits(case: Case, setting: Setting) -> list[Candidate]:
    """Return the limit of this case, or nothing for small sizes and for ranks on several GPUs."""
    task, number = setting.task, setting.rank.number
    if task.hosts > 1:
        call = host_calls.link_call(case, number, task.ranks_per_host, task.rate)
        # It is timed call by call, as a batch of sends is no latency.
        return [Candidate(LINK, LIMIT, call, lambda value: None, None, one_by_one=True)]
    if case.nbytes < _LEAST_FOR_LIMIT or (case.on_gpus and not case.one_memory):
        return []
    return [_memcpy(case, setting.rank)] if case.on_gpus else [_memory(case, setting.rank)]


def _memory(case: Case, rank: Rank) -> Candidate:
    """Return the limit on CPUs: each rank multiplies its share in place, 8 bytes per float32."""
    flat = torch.ones(case.minimum_bytes // case.world // 8)
    # Ranks that share a core multiply one after the other, and the limit is the time of all ranks.
    crowded = case.world > len(os.sched_getaffinity(0))

    def multiply() -> None:
        flat.mul_(1.0)
        if crowded:
            rank.barrier.barrier()

    return Candidate("memory", LIMIT, multiply, lambda value: flat.fill_(1.0), None, True)


def _memcpy(case: Case, rank: Rank) -> Candidate:
    """Return the limit on one GPU: rank 0 copies the bytes, the other ranks are idle."""
    nbytes = case.minimum_bytes // 2 if rank.number == 0 else 0
    source, target = (
        torch.zeros(nbytes, dtype=torch.uint8, device=case.devices[rank.number]) for _ in range(2)
    )
    return Candidate("memcpy", LIMIT, partial(target.copy_, source), source.fill_, None, True)


def samplers(
    one: Candidate, case: Case, setting: Setting, returned: dict[str, list[float]]
) -> dict[str, Sampler]:
    """Return the candidate's samplers by row name: one, or one each for host and device.

    All ranks make the same, and run them at the same time. With both clocks `returned[name]` gets
    the seconds until each call returned, warm-up included.
    """
    rank, barrier, name = setting.rank, setting.rank.barrier.barrier, one.name
    zeros, ones = (partial(one.rewrite, value) for value in (0, 1))
    synchronize = synchronizer([setting.device])
    if setting.task.both_clocks:
        once = recorded(one.call, returned.setdefault(name, []))
        on_device = partial(
            gpu_time, rewrite=zeros, devices=[setting.device], barrier=barrier, delayed=False
        )
        in_batches = partial(batched, one.call, timer=on_device)
        return {
            name: host_time(once, ones, synchronize, barrier=barrier),
            clocked(name, GPU): sized(in_batches, rank.slowest, least=LEAST_ON_DEVICE),
        }
    if case.nbytes > _LARGEST_IN_BATCHES or one.one_by_one:
        return {name: host_time(one.call, ones, synchronize, barrier=barrier)}
    on_host = partial(host_time, rewrite=zeros, barrier=barrier)
    in_batches = partial(batched, one.call, timer=on_host)
    return {name: sized(in_batches, rank.slowest, batch_seconds(rank.world))}


def measured(found: list[Candidate], case: Case, setting: Setting, seed: int) -> dict[str, Timing]:
    """Return this rank's times by row name.

    All ranks take the same turns. The order is shuffled, because the threads of a peer may still
    be busy after its turn: they must not always disturb the same candidate.
    """
    returned: dict[str, list[float]] = {}
    ways: dict[str, Sampler] = {}
    for one in found:
        ways |= samplers(one, case, setting, returned)
    timings = interleave(ways, setting.task.effort, shuffled(seed), setting.rank.slowest)
    for name, seconds in returned.items():
        timings[clocked(name, RETURN)] = timings[name].of_same_calls(seconds)
    return timings


def run_case(case: Case, setting: Setting, seed: int) -> Result | None:
    """Measure the candidates of a case and check their results; rank 0 gets the result."""
    found, not_run = candidates(case, setting)
    found += _limits(case, setting)
    mine = measured(found, case, setting, seed)
    numbers: dict[str, dict[str, Any]] = {one.name: {} for one in found}
    if setting.task.hosts > 1:
        if setting.rank.number not in (0, setting.task.ranks_per_host):  # their sleep is no send
            mine[LINK] = Timing(tuple((0.0,) * len(seconds) for seconds in mine[LINK].samples))
        for one in found:
            one.rewrite(0)
            moved = host_calls.link_bytes(one.call, case.nbytes, setting.rank.barrier)
            first = setting.rank.slowest(one.first)
            numbers[one.name] = moved if one.kind == LIMIT else {"first": first, **moved}
    gather = setting.rank.barrier.gather
    wrong = {one.name: int(sum(gather(one.wrong()))) for one in found if one.wrong}
    everyone: list[Any] | None = [None] * case.world if setting.rank.number == 0 else None
    dist.gather_object(mine, everyone)
    if everyone is None:
        return None
    timings = slowest_rank(everyone)
    rows = [
        _row(one, clock, case, timings, wrong.get(one.name), numbers[one.name])
        for one in found
        for clock in (WALL, RETURN, GPU)
        if clocked(one.name, clock) in timings
        and (one.kind, clock) != (LIMIT, RETURN)  # no limit is measured until the return
    ]
    return Result(case.about(), rows, not_run, OURS in not_run)


def _row(
    one: Candidate,
    clock: str,
    case: Case,
    timings: dict[str, Timing],
    wrong: int | None,
    numbers: dict[str, Any],
) -> Row:
    name = clocked(one.name, clock)
    ways = [] if clock == RETURN else [clocked(limit, clock) for limit in LIMITS]
    limit = next((timings[way] for way in ways if way in timings), None)
    peers = {p: timings[clocked(p, clock)] for p in PEERS if clocked(p, clock) in timings}
    numbers = case.speed(timings[name].percentile(50)) | numbers if case.count else numbers
    wrong = wrong if clock == WALL else None
    row = Row(name, timings[name], one.kind, clock, wrong, numbers=numbers)
    return row.compared(peers, limit)
