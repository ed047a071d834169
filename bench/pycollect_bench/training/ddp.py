"""Torch's DistributedDataParallel as a candidate: a process per rank, idle between its turns.

The ranks share the cores: each has its part of the threads, as is usual under torchrun. They are on
the CPU or on GPUs, which several ranks may share.
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

from pycollect._command import interrupts_kept_from_children
from pycollect._timing import Sampler

DDP_GLOO, DDP_OURS = "DDP, gloo", "DDP, pycollect"
BACKENDS = MappingProxyType({DDP_GLOO: "gloo", DDP_OURS: "pycollect"})
# DDP's default bucket size; the separately timed reduction uses the same buckets.
_BUCKET_BYTES = 25 << 20
# Timeout in seconds for an answer: a step takes seconds at most, starting a process half a minute.
_SILENCE = 300.0
# Seconds for a rank to end by itself before it is killed; no result is lost then.
_PATIENCE = 20.0


@dataclass(frozen=True)
class DDPJob:
    """The training job of all ranks, each on its part of the batch and its own device."""

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

        device = self._device = job.devices[rank]
        self._X, self._y = (part.tensor_split(job.world)[rank].to(device) for part in job.batch)
        self._module = nn.parallel.DistributedDataParallel(MODELS[job.model]().to(device))
        self._loss = summed_cross_entropy
        # DDP averages the gradients over the ranks; this scale makes them those of the batch mean.
        self._scale = job.world / len(job.batch[0])
        self._sgd = torch.optim.SGD(self._module.parameters(), lr=job.lr, fused=True)
        sizes = [param.numel() for param in self._module.parameters()]
        flat = torch.zeros(sum(sizes), device=device)
        self._buckets = torch.split(flat, _BUCKET_BYTES // flat.element_size())

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def step(self) -> float:
        """Train on the batch; return the seconds until the device is done."""
        self._synchronize()
        begin = time.perf_counter()
        self._sgd.zero_grad(set_to_none=True)
        loss = self._loss(self._module(self._X), self._y) * self._scale
        loss.backward()  # type: ignore[no-untyped-call]
        self._sgd.step()
        self._synchronize()
        return time.perf_counter() - begin

    def reduce(self) -> float:
        """Reduce as many bytes as a step does, without other work; return the seconds."""
        dist.barrier()
        begin = time.perf_counter()
        for bucket in self._buckets:
            dist.all_reduce(bucket)
        self._synchronize()
        return time.perf_counter() - begin


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
            steps = [mine.step() for _ in range(calls)]
            pipe.send((steps, [mine.reduce() for _ in range(calls)]))
        dist.destroy_process_group()
    except Exception:
        pipe.send(f"rank {rank}: {traceback.format_exc()}")
        raise


class DDPWorkers:
    """Context with the DDP processes of one job."""

    def __init__(self, job: DDPJob) -> None:
        self._job = job
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Pipe[Any, Any]] = []
        self._processes: list[Any] = []

    def __enter__(self) -> DDPWorkers:
        try:
            self._start()
        except BaseException as error:  # also Ctrl-C: end the processes started so far
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
        """Wait for the answers of all ranks; RuntimeError with the first failure's text."""
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
            process.join(_PATIENCE)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
        self._folder.cleanup()
