"""Torch's DistributedDataParallel as a contestant: a process per rank, which waits for its turn.

The ranks share the cores: each has its part of the threads, as torchrun's users set them. They are
on the CPU or on GPUs, several of them on one if need be.
"""

from __future__ import annotations

import os
import tempfile
import time
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

from ..._command import interrupts_kept_from_children
from ..measure import Sampler

DDP_GLOO, DDP_OURS = "DDP, gloo", "DDP, pycollect"
BACKENDS = MappingProxyType({DDP_GLOO: "gloo", DDP_OURS: "pycollect"})
# DDP's own default; what a rank reduces by itself is cut alike.
_BUCKET_BYTES = 25 << 20
# So long a silence is a hang: a step takes seconds at most, and starting a process half a minute.
_SILENCE = 300.0
# For a rank to end by itself; nothing is lost when it is stopped then.
_PATIENCE = 20.0


@dataclass(frozen=True)
class Job:
    """What every rank trains, on its part of the batch and its own device."""

    model: str
    batch: tuple[Tensor, Tensor]
    lr: float
    devices: tuple[torch.device, ...]
    backend: str

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.devices)


Answer = tuple[list[float], list[float]]  # the seconds of steps and of reductions
Pipe = Connection  # of numbers of calls to a rank, and of its answers


class Rank:
    """One rank's replica within its process."""

    def __init__(self, job: Job, rank: int) -> None:
        from ...train.losses import summed_cross_entropy
        from ...train.models import MODELS

        device = self._device = job.devices[rank]
        self._X, self._y = (part.tensor_split(job.world)[rank].to(device) for part in job.batch)
        self._module = nn.parallel.DistributedDataParallel(MODELS[job.model]().to(device))
        self._loss = summed_cross_entropy
        # DDP takes the mean over ranks of what each rank has.
        self._scale = job.world / len(job.batch[0])
        self._sgd = torch.optim.SGD(self._module.parameters(), lr=job.lr, fused=True)
        sizes = [param.numel() for param in self._module.parameters()]
        flat = torch.zeros(sum(sizes), device=device)
        self._buckets = torch.split(flat, _BUCKET_BYTES // flat.element_size())

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def step(self) -> float:
        """Train on the batch; return the seconds until the device was done."""
        self._synchronize()
        begin = time.perf_counter()
        self._sgd.zero_grad(set_to_none=True)
        loss = self._loss(self._module(self._X), self._y) * self._scale
        loss.backward()  # type: ignore[no-untyped-call]
        self._sgd.step()
        self._synchronize()
        return time.perf_counter() - begin

    def reduce(self) -> float:
        """Reduce as many bytes as a step does, beside nothing; return the seconds it took."""
        dist.barrier()
        begin = time.perf_counter()
        for bucket in self._buckets:
            dist.all_reduce(bucket)
        self._synchronize()
        return time.perf_counter() - begin


def _work(rank: int, job: Job, store: str, threads: int, pipe: Pipe[Any, Any]) -> None:
    """Do as many calls as the pipe asks for, until it asks for none."""
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
            steps = [mine.step() for _ in range(calls)]
            pipe.send((steps, [mine.reduce() for _ in range(calls)]))
        dist.destroy_process_group()
    except Exception:
        pipe.send(f"rank {rank}: {traceback.format_exc()}")
        raise


class Crew:
    """The processes of one job, from entering to leaving."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Pipe[Any, Any]] = []
        self._processes: list[Any] = []

    def __enter__(self) -> Crew:
        try:
            self._start()
        except BaseException as error:  # Ctrl-C is one: who has been started ends with it
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
        """Return what times steps, and adds the seconds of reductions to a list."""

        def sample(calls: int) -> list[float]:
            for pipe in self._pipes:
                pipe.send(calls)
            answers = self._answers()
            reductions.extend(map(max, zip(*(answer[1] for answer in answers), strict=True)))
            return list(map(max, zip(*(answer[0] for answer in answers), strict=True)))

        return sample

    def _answers(self) -> Sequence[Answer]:
        """Wait for all ranks; RuntimeError with what the first one says that fails."""
        missing, answers = list(self._pipes), []
        while missing:
            ready = wait(missing, _SILENCE)
            if not ready:
                raise RuntimeError(f"a rank of DDP did not answer within {_SILENCE:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    answer = pipe.recv()
                except EOFError:
                    raise RuntimeError("a rank of DDP is gone without a word") from None
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
            process.join(_PATIENCE)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
        self._folder.cleanup()
