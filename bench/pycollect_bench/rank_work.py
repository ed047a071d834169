"""The program of a rank that is a process: its candidates, their turns, and the checks.

Every rank runs `work` at the same time. All candidates use the same tensors, except `zero-copy`,
whose tensors are in the group's symmetric memory. The limit is `memory`: every rank multiplies its
share of the bytes in place. For ranks on one GPU it is `memcpy`: rank 0 copies the same bytes
there. Between hosts it is `link` (hosts.py). A time is that of the slowest rank.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

import pycollect
from pycollect._timing import Effort, Sampler, batched, host_time, shuffled
from pycollect.gpus import synchronizer

from . import hosts
from .cases import Buffers, Call, Case, run_checked
from .clocks import LEAST_ON_DEVICE, batch_seconds, gpu_time, sized
from .ranks import Rank
from .runner import (
    GPU,
    LIMIT,
    OURS,
    PEER,
    RETURN,
    WALL,
    Result,
    Row,
    Way,
    clocked,
    in_turns,
    reason,
)

PROGRAM = "pycollect_bench.rank_work:work"
ZERO_COPY, OPERATOR = "zero-copy", "operator"
GLOO, MPI, DEEPSPEED, HSDP = "gloo", "mpi", "deepspeed", "hsdp"
PEERS = (GLOO, MPI, DEEPSPEED)
LINK = "link"
LIMITS = ("memory", "memcpy", LINK)
# Least size in bytes for a limit: fewer bytes take no longer than a call through Python and a
# barrier. Largest size at which calls between CPUs are timed in batches, because they are short.
_LEAST_FOR_LIMIT, _LARGEST_IN_BATCHES = 256 << 10, 16 << 10
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

    With `both_clocks` candidates are timed by the host's and by the device's clock. `hosts` is the
    number of hosts, `rate` that of their links in bits per second, if it is limited.
    """

    devices: tuple[torch.device, ...]
    names: tuple[str, ...]
    effort: Effort
    backend: str = OURS
    both_clocks: bool = False
    hosts: int = 1
    rate: float | None = None

    @property
    def ranks_per_host(self) -> int:
        """The number of ranks of each host."""
        return len(self.devices) // self.hosts

    def about(self, case: Case) -> dict[str, Any]:
        """Return the case for the record and the table."""
        shape = {"shape": f"{self.hosts}x{self.ranks_per_host}", "rate": self.rate}
        return case.about() | (shape if self.hosts > 1 else {})


@dataclass
class Candidate:
    """A candidate on one rank; `check` runs one call and returns this rank's wrong elements."""

    name: str
    call: Call
    rewrite: Callable[[int], object] = lambda value: None
    check: Callable[[], int] | None = None
    first: float = 0.0  # seconds of the first call on this rank

    @property
    def kind(self) -> str:
        """The kind of its rows."""
        return LIMIT if self.name in LIMITS else PEER if self.name in (*PEERS, HSDP) else OURS


def work(rank: Rank, task: Task) -> None:
    """Measure the cases that are requested; rank 0 answers with the results."""
    rank.init_process_group(device=task.devices[rank.number])
    measurement = Measurement(rank, task)
    for number, case in enumerate(rank.requests()):
        rank.send(measurement.result(case, number))


def _group(backend: str, timeout: timedelta) -> Any:
    if not dist.is_backend_available(backend):
        raise ValueError(f"torch.distributed has no backend {backend!r}")
    return dist.new_group(backend=backend, timeout=timeout)


def _mpi() -> Any:
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        raise ValueError("mpi4py is not installed, or Open MPI was not found")
    return import_module("mpi4py.MPI")  # which initialises MPI


def _deepspeed(rank: Rank) -> Any:
    """Return DeepSpeed's operator for shared memory, which is compiled at its first use."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise it warns that it found no other one
    # It names its shared memory after the port, and uses it if all ranks are on this host.
    os.environ |= {"MASTER_PORT": rank.folder.name, "LOCAL_SIZE": str(rank.world)}
    with redirect_stdout(sys.stderr):
        builder = import_module("deepspeed.ops.op_builder.cpu.comm").ShareMemCommBuilder()
        builder.load().initialize(rank.world, rank.number)
    return torch.ops.deepspeed.inference_all_reduce_


class Measurement:
    """What this rank measures together with the others.

    It has the groups and modules of the candidates by name, each or why it is missing. All ranks
    call the methods at the same time.
    """

    def __init__(self, rank: Rank, task: Task) -> None:
        self.rank, self.task, self.device = rank, task, task.devices[rank.number]
        self.synchronize = synchronizer([self.device])
        makers: dict[str, Callable[[], Any]] = {
            GLOO: lambda: dist.group.WORLD,
            OURS: partial(_group, task.backend, rank.timeout),
            MPI: _mpi,
            DEEPSPEED: partial(_deepspeed, rank),
            HSDP: partial(hosts.hsdp_groups, task.hosts, task.ranks_per_host),
        }
        self.groups = {n: self._tries(n, makers[n]) for n in task.names if n in makers}

    def _tries(self, name: str, make: Callable[[], Any]) -> tuple[Any, str]:
        """Return what `make` returns, and why a rank refused it, or "".

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

    def _group(self, name: str) -> Any:
        """Return a candidate's group; a ValueError has the reason why there is none."""
        group, refusal = self.groups[name]
        if refusal:
            raise ValueError(refusal)
        return group

    def _candidate(self, name: str, plain: Buffers) -> Candidate:
        """Return a candidate, after its first run."""
        case, buffers = plain.case, plain
        if name == ZERO_COPY:
            empty = partial(pycollect.symmetric_empty, group=self._group(OURS))
            buffers = Buffers(case, plain.rank, empty)
        call = self._call(name, buffers)
        begin = time.perf_counter()
        call()
        self.synchronize()
        first = time.perf_counter() - begin
        check = partial(run_checked, [buffers], call, self.synchronize)
        if case.collective == "barrier":
            check = partial(_early, call, self.rank)
        return Candidate(name, call, buffers.rewrite, check, first)

    def _call(self, name: str, buffers: Buffers) -> Call:
        """Return the call of a candidate; a ValueError has the reason why there is none."""
        case = buffers.case
        group = self._group(OURS if name in (ZERO_COPY, OPERATOR) else name)
        if name in (OPERATOR, DEEPSPEED):
            of_floats = case.dtype in (torch.float32, torch.bfloat16, torch.float16)
            if (case.collective, case.op) != ("all_reduce", "sum") or not of_floats:
                raise ValueError("is measured only for sums of floats by all_reduce")
            if name == DEEPSPEED:
                return partial(group, buffers.input)
            operator = torch.ops.pycollect.group_all_reduce_.default
            return partial(operator, buffers.input, "sum", group.group_name)
        if name == MPI:
            if case.dtype not in _MPI_TYPES or case.op not in ("sum", "none"):
                what = f"{case.op} of {case.dtype}"
                raise ValueError(f"is measured only for sums of C types, not {what}")
            assert case.spec.mpi is not None
            return case.spec.mpi(buffers, group, getattr(group, _MPI_TYPES[case.dtype]))
        if name == HSDP:
            return hosts.hsdp_call(buffers, group)
        if (name, case.collective, self.device.type) == (GLOO, "send_recv", "cuda"):
            # gloo reads GPU memory as host memory, and the failing write ends the process.
            raise ValueError("cannot send CUDA tensors")
        assert case.spec.group is not None
        return case.spec.group(buffers, group)

    def _limits(self, case: Case) -> list[Candidate]:
        """Return the limit of this case, or nothing for small sizes and on several GPUs."""
        task, number = self.task, self.rank.number
        if task.hosts > 1:
            send = hosts.link_call(case, number, task.ranks_per_host, task.rate)
            return [Candidate(LINK, send)]
        if case.nbytes < _LEAST_FOR_LIMIT or (case.on_gpus and not case.one_memory):
            return []
        return [_memcpy(case, self.rank) if case.on_gpus else _memory(case, self.rank)]

    def _ways(self, one: Candidate, case: Case) -> dict[str, Way]:
        """Return the candidate's ways by row name: one, or with both clocks one for each clock."""
        rank, barrier, name = self.rank, self.rank.barrier.barrier, one.name
        zeros, ones = (partial(one.rewrite, value) for value in (0, 1))
        one_by_one = partial(host_time, one.call, barrier=barrier)
        whole = one_by_one(ones, self.synchronize)
        # Limits are timed one by one because a batch of sends is no latency.
        few = case.nbytes <= _LARGEST_IN_BATCHES and name not in (ZERO_COPY, *LIMITS)
        if few and not self.task.both_clocks:
            timer = partial(host_time, rewrite=zeros, barrier=barrier)
            in_batches = partial(batched, one.call, timer=timer)
            whole = sized(in_batches, rank.slowest, batch_seconds(rank.world))
        check = one.check and partial(self._of_all, one.check)
        ways = {name: Way(self._slowest(whole, one), one.kind, WALL, check)}
        if self.task.both_clocks:
            timer = partial(
                gpu_time, rewrite=zeros, devices=[self.device], barrier=barrier, delayed=False
            )
            in_batches = partial(batched, one.call, timer=timer)
            on_device = sized(in_batches, rank.slowest, least=LEAST_ON_DEVICE)

            def rewritten() -> None:
                ones()
                self.synchronize()

            until_return = {RETURN: one_by_one(rewritten)} if one.kind != LIMIT else {}
            samplers = {**until_return, GPU: on_device}
            for clock, sampler in samplers.items():
                ways[clocked(name, clock)] = Way(self._slowest(sampler, one), one.kind, clock)
        return ways

    def _slowest(self, sampler: Sampler, one: Candidate) -> Sampler:
        """Return a sampler of the times of the slowest rank; collective.

        In a send between two hosts the other ranks sleep.
        """
        sleeps = one.name == LINK and self.rank.number not in (0, self.task.ranks_per_host)

        def sample(calls: int) -> list[float]:
            return [self.rank.slowest(0.0 if sleeps else mine) for mine in sampler(calls)]

        return sample

    def _of_all(self, check: Callable[[], int]) -> int:
        """Return the wrong elements of all ranks; collective."""
        return int(sum(self.rank.barrier.gather(check())))

    def result(self, case: Case, seed: int) -> Result | None:
        """Measure the candidates of a case and check their results; rank 0 gets the result.

        All ranks take the same turns. The order is shuffled, because the threads of a peer may
        still be busy after its turn: they must not always disturb the same candidate.
        """
        plain = Buffers(case, self.rank.number, partial(torch.empty, device=self.device))
        names = [name for name in self.task.names if case.count or name != ZERO_COPY]
        tried = {name: self._tries(name, partial(self._candidate, name, plain)) for name in names}
        not_run = {name: refusal for name, (_, refusal) in tried.items() if refusal}
        found = {name: one for name, (one, _) in tried.items() if name not in not_run}
        found |= {one.name: one for one in self._limits(case)}
        ways: dict[str, Way] = {}
        for one in found.values():
            ways |= self._ways(one, case)

        def numbers(row: Row) -> dict[str, Any]:
            speed = case.speed(row.seconds) if case.count else {}
            if self.task.hosts == 1:
                return speed
            return speed | self._between_hosts(found[row.name], case)

        slowest = self.rank.slowest
        rows = in_turns(ways, self.task.effort, shuffled(seed), slowest, numbers)
        result = Result(self.task.about(case), rows, not_run, OURS in not_run)
        return None if self.rank.number else result

    def _between_hosts(self, one: Candidate, case: Case) -> dict[str, Any]:
        """Return what is measured only between hosts; collective."""
        task = self.task
        assert case.spec.link is not None
        one.rewrite(0)
        moved = hosts.link_bytes(one.call, case.nbytes, self.rank.barrier)
        if one.kind == LIMIT:
            return moved | {"least": 1}
        least = case.spec.link(task.hosts, task.ranks_per_host)
        return moved | {"first": self.rank.slowest(one.first), "least": least}


def _early(call: Call, rank: Rank) -> int:
    """Return the number of ranks that had not entered the barrier when this rank left it."""
    page = rank.barrier
    page.gather(0.0)
    if rank.number == rank.world - 1:
        time.sleep(_LATE)
    page.numbers[rank.number] = 1.0
    call()
    early = sum(number != 1.0 for number in page.numbers)
    page.barrier()  # before any rank writes its next number
    return early


def _memory(case: Case, rank: Rank) -> Candidate:
    """Return the limit on CPUs: each rank multiplies its share in place, 8 bytes per float32."""
    flat = torch.ones(case.minimum_bytes // case.world // 8)
    # Ranks that share a core multiply one after the other, and the limit is the time of all ranks.
    crowded = case.world > len(os.sched_getaffinity(0))

    def multiply() -> None:
        flat.mul_(1.0)
        if crowded:
            rank.barrier.barrier()

    return Candidate("memory", multiply, lambda value: flat.fill_(1.0))


def _memcpy(case: Case, rank: Rank) -> Candidate:
    """Return the limit on one GPU: rank 0 copies the bytes, the other ranks are idle."""
    nbytes = case.minimum_bytes // 2 if rank.number == 0 else 0
    source, target = (
        torch.zeros(nbytes, dtype=torch.uint8, device=case.devices[rank.number]) for _ in range(2)
    )
    return Candidate("memcpy", partial(target.copy_, source), source.fill_)
