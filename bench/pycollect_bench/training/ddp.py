"""torch's DistributedDataParallel as a candidate: a process per rank, idle between its turns.

The ranks divide the cores among their threads. They are on the CPU or on GPUs, and several ranks
may share a GPU.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pycollect._command import interrupts_kept_from_children
from pycollect._timing import Sampler, host_time

from ..gpu import synchronizer

DDP_GLOO, DDP_OURS = "DDP, gloo", "DDP, pycollect"
BACKENDS = MappingProxyType({DDP_GLOO: "gloo", DDP_OURS: "pycollect"})
# DDP's default bucket size; the separately timed reduction uses the same buckets.
_BUCKET_BYTES = 25 << 20
# Timeout in seconds for an answer: a step takes seconds at most, the start of a process half a
# minute.
_ANSWER_SECONDS = 300.0
# Seconds until a rank that does not end is killed; its results have arrived by then.
_END_SECONDS = 20.0


@dataclass(frozen=True)
class DDPJob:
    """The training job of all ranks; each rank has a part of the batch and a device."""

    model: str
    batch: tuple[Tensor, Tensor]
    lr: float
    devices: tuple[torch.device, ...]
    backend: str

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.devices)


Answer = tuple[list[float], list[float]]  # seconds of steps, seconds of reductions
Pipe = Connection  # carries numbers of calls to a rank, and its answers back


class Rank:
    """The DDP replica of one rank, in its process."""

    def __init__(self, job: DDPJob, rank: int) -> None:
        from pycollect.train.losses import summed_cross_entropy
        from pycollect.train.models import MODELS

        device = job.devices[rank]
        self._synchronize = synchronizer([device])
        self._X, self._y = (part.tensor_split(job.world)[rank].to(device) for part in job.batch)
        self._module = nn.parallel.DistributedDataParallel(MODELS[job.model]().to(device))
        self._loss = summed_cross_entropy
        # DDP averages the gradients over the ranks. This scale makes them those of the batch mean.
        self._scale = job.world / len(job.batch[0])
        self._sgd = torch.optim.SGD(self._module.parameters(), lr=job.lr, fused=True)
        sizes = [param.numel() for param in self._module.parameters()]
        flat = torch.zeros(sum(sizes), device=device)
        self._buckets = torch.split(flat, _BUCKET_BYTES // flat.element_size())

    def _step(self) -> None:
        self._sgd.zero_grad(set_to_none=True)
        loss = self._loss(self._module(self._X), self._y) * self._scale
        loss.backward()  # type: ignore[no-untyped-call]
        self._sgd.step()

    def _reduce(self) -> None:
        for bucket in self._buckets:
            dist.all_reduce(bucket)

    def times(self, calls: int) -> Answer:
        """Time steps on the batch, and then reductions of a step's bytes without other work."""
        step = host_time(self._step, synchronize=self._synchronize)
        reduction = host_time(self._reduce, synchronize=self._synchronize, barrier=dist.barrier)
        return step(calls), reduction(calls)


def _work(rank: int, job: DDPJob, store: str, threads: int, pipe: Pipe[Any, Any]) -> None:
    """Run the number of steps and reductions that the pipe sends, until it sends 0."""
    try:
        import pycollect  # noqa: F401  # registers the backend

        torch.set_num_threads(threads)
        if job.devices[rank].type == "cuda":
            torch.cuda.set_device(job.devices[rank])
        dist.init_process_group(
            job.backend, init_method=f"file://{store}", rank=rank, world_size=job.world
        )
        mine = Rank(job, rank)
        while calls := pipe.recv():
            pipe.send(mine.times(calls))
        dist.destroy_process_group()
    except Exception:
        pipe.send(f"rank {rank}: {traceback.format_exc()}")
        raise


class DDPWorkers:
    """Context manager of the DDP processes of one job."""

    def __init__(self, job: DDPJob) -> None:
        self._job = job
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Pipe[Any, Any]] = []
        self._processes: list[Any] = []

    def __enter__(self) -> DDPWorkers:
        try:
            self._start()
        except BaseException as error:  # also Ctrl-C: end the processes that have started
            self.__exit__(type(error), error, None)
            raise
        return self

    def _start(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        store = str(Path(self._folder.name, "store"))
        threads = max(1, len(os.sched_getaffinity(0)) // self._job.world)
        for rank in range(self._job.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(rank, self._job, store, threads, theirs), daemon=True
            )
            with interrupts_kept_from_children(by_multiprocessing=True):
                process.start()
                self._pipes.append(ours)
                self._processes.append(process)
            theirs.close()

    def sampler(self, reductions: list[float]) -> Sampler:
        """Return a sampler of steps, which appends the seconds of reductions to `reductions`."""

        def sample(calls: int) -> list[float]:
            for pipe in self._pipes:
                pipe.send(calls)
            answers = self._answers()
            reductions.extend(map(max, zip(*(answer[1] for answer in answers), strict=True)))
            return list(map(max, zip(*(answer[0] for answer in answers), strict=True)))

        return sample

    def _answers(self) -> Sequence[Answer]:
        """Return the answers of all ranks; raise RuntimeError with the first failure's text."""
        missing, answers = list(self._pipes), []
        while missing:
            ready = wait(missing, _ANSWER_SECONDS)
            if not ready:
                raise RuntimeError(f"a rank of DDP did not answer within {_ANSWER_SECONDS:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    answer = pipe.recv()
                except EOFError:
                    raise RuntimeError("a rank of DDP ended without an answer") from None
                if isinstance(answer, str):
                    raise RuntimeError(answer)
                answers.append(answer)
                missing.remove(pipe)
        return answers

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if kind is None and process.is_alive():
                pipe.send(0)
            else:
                process.terminate()
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            process.join(_END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
        self._folder.cleanup()
