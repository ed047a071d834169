"""Runs: a prepared run from its first line to its result, in one thread or one for each rank.

A `TrainingRun` is one in progress: its loop, its measurements, and its checkpoint state.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from inspect import cleandoc
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pycollect import threads
from pycollect.devices import DeviceSpec

from .._command import Stopped
from . import checkpoint, results
from .cuda_graph import GraphedStep
from .data import Examples
from .fixed_shards import of_ranks, total_loss
from .interrupt import Interrupt, StopConsensus
from .loader import Batch, Loader
from .losses import sgd_factory
from .options import Options
from .output import Log, ProgressPrinter, plot
from .prepared_run import PreparedRun, prepare
from .random_states import mixed_seed, random_states, set_random_states
from .reduce import GRADIENT_REDUCTIONS, gathered
from .replica_trainer import ReplicaTrainer
from .results import EpochRecord, RunResult, StepRecord, StepSeconds, wait_for
from .shares import AutoShares, shares_of

_dist: Any = dist  # torch's type stubs lack exports
# Steps between two reads of the losses, each of which waits for the GPUs: rare enough to cost
# nothing, often enough to follow a log. Counted in steps so that all processes read at once.
_READ_EVERY = 50
# Options that ReplicaTrainer has under the same name.
_OF_STEPS = ("shards", "microbatch", "sync_batchnorm", "strict", "exact_times", "compile")
# Examples of all ranks in an evaluation batch, unless a training batch is larger.
_TEST_BATCH = 1024


class TrainingRun:
    """A training run at its first step, or at that of its checkpoint: its replicas and records.

    It trains the replicas of this process on shares that are even, weighted or measured. If the run
    has a `backend`, each rank is a process (or thread) of the default group of torch.distributed,
    and all must call the same methods in the same order. Data order, shares and sums are those of
    one process, so the bits are, too, where the group adds in rank order, as pycollect's does;
    measured shares are equal because each process computes them from the times of all ranks.
    """

    def __init__(self, prepared: PreparedRun, printer: ProgressPrinter, log: Log) -> None:
        self._started = time.perf_counter()  # before the replicas are created
        self._prepared, self._printer, self._log = prepared, printer, log
        options, devices = prepared.options, prepared.options.devices
        self.group = None if prepared.backend is None else dist.group.WORLD
        self.replicas = ReplicaTrainer(
            prepared.module,
            devices if self.group is None else devices[dist.get_rank()],
            optimizer=sgd_factory(options.lr, options.momentum, options.weight_decay),
            reduction=GRADIENT_REDUCTIONS[options.reduce],
            group=self.group,
            seed=options.seed,
            overlap=options.overlap is not False,
            **{name: getattr(options, name) for name in _OF_STEPS},
        )
        # The loader of a process takes its part of a batch ahead of the steps before.
        delay = 0 if self.group is None else options.prefetch
        self.auto = AutoShares(len(devices), delay) if options.weights == "auto" else None
        even = [1.0] * (options.shards or len(devices))
        self._weights: Any = even if self.auto else options.weights or even
        self._graphs: dict[int, Callable[[Tensor, Tensor], Sequence[Tensor]]] = {}
        if self.group is not None:  # a data set may draw: processes draw other numbers
            torch.manual_seed(mixed_seed(options.seed, len(devices) + self.replicas.ranks[0]))
        self.steps: list[StepRecord] = []
        self.epochs: list[EpochRecord] = []
        self.first_batch: float | None = None  # seconds from the start to the end of the first step
        self._unread: list[tuple[StepRecord, Sequence[Tensor]]] = []
        self._train = self._loader(prepared.data.train, options)
        # Images from files may be large: a batch size that fits for training fits here, too.
        small = _TEST_BATCH if isinstance(prepared.data.test, tuple) else 0
        test_size = max(small, options.batch_size)
        in_order = replace(options, batch_size=test_size, shuffle=False, drop_last=False)
        self._test = self._loader(prepared.data.test, in_order, ahead=False)
        if prepared.stored is not None:
            self.load_state_dict(prepared.stored["run"])

    def run(self, interrupt: Interrupt) -> None:
        """Train to the end, with a printed line and a checkpoint per epoch.

        If a checkpoint is to be written, a signal takes effect after the current step.
        """
        epochs = self._prepared.options.epochs
        if len(self.epochs) >= epochs:
            self._printer.notice(
                f"nothing is left to train: the run has had {len(self.epochs)} epochs, of "
                f"{epochs}; pass more epochs to go on"
            )
            self.save()
            return
        try:
            for number in range(len(self.epochs) + 1, epochs + 1):
                self._epoch(number, interrupt)
                self._printer.line(self.epochs[-1])
                self.save()
                interrupt.check()
        except Stopped:
            self.save()
            raise

    def _epoch(self, number: int, interrupt: Interrupt) -> None:
        """Train one epoch, or what is left of it, and evaluate the model."""
        done = sum(step.epoch == number for step in self.steps)  # before the checkpoint
        images = self._train.examples(number)
        bar = self._printer.bar(f"epoch {number}", sum(images), sum(images[:done]))
        with closing(self._train.epoch(number, done)) as batches, bar as advance:
            for step, batch in enumerate(batches, done + 1):
                self.step(batch, number, step)
                advance(batch.examples, self.latest_loss)
                interrupt.check()
        self._finish_epoch(number)

    # --- a step -----------------------------------------------------------------------------------

    def step(self, batch: Batch, epoch: int, number: int) -> None:
        """Train on one batch and record the times; the loss is read later."""
        n = batch.examples
        parts = self.auto.shares(n) if self.auto else self._parts(n)
        shares = tuple(of_ranks(parts, self.replicas.world))
        if self._prepared.options.graph:
            losses, seconds = self._replay(batch, shares)
        else:
            if batch.shards is None:
                losses = self.replicas.step(batch.X, batch.y, shares=parts)
            else:
                losses = self.replicas.step_on_shards(*batch.shards, shares=parts)
            if self.replicas.shards:  # one sum of all, in the order of the gradients
                losses = [total_loss(losses, self.replicas.devices[0])]
            seconds = self.replicas.seconds
            self._measure()
        step = StepRecord(epoch, number, n, float("nan"), batch.waited, seconds, shares)
        self._unread.append((step, losses))
        if self.first_batch is None:
            wait_for(self.replicas.devices)
            self.first_batch = time.perf_counter() - self._started
        if len(self._unread) >= _READ_EVERY:
            self.read()

    def _parts(self, n: int, steps: int = 0) -> list[int]:
        """Return the parts of a batch of n examples that comes `steps` steps after the next.

        They are those of the ranks, or if the run has shards, of the shards.
        """
        return self.auto.shares_ahead(n, steps) if self.auto else shares_of(n, self._weights)

    def _loader(self, examples: Examples, options: Options, *, ahead: bool = True) -> Loader:
        """Return a loader of this process's part of every batch.

        With `ahead`, for training, it copies shards to the GPUs ahead if the shares are known.
        """
        devices, world = self.replicas.devices, self.replicas.world

        def part(indices: Tensor, steps: int) -> Tensor:
            shares = of_ranks(self._parts(len(indices), steps if ahead else 0), world)
            return torch.split(indices, shares)[self.replicas.ranks[0]]

        if self.group is not None:
            own = (lambda n: [n]) if ahead else None
            return Loader(examples, options, devices=devices, shares=own, part=part)
        unknown = not ahead or self.auto is not None or self._prepared.options.graph
        shares = None if unknown else lambda n: of_ranks(self._parts(n), world)
        return Loader(examples, options, devices=devices, shares=shares)

    def _measure(self) -> None:
        """Take the times of all ranks for the next measured shares."""
        if self.auto is None:
            return
        seconds = [0.0] * self.auto.world
        for rank, own in zip(self.replicas.ranks, self.replicas.rank_seconds(), strict=True):
            seconds[rank] = own
        self.auto.observe(self._total(seconds))

    def _replay(self, batch: Batch, shares: Sequence[int]) -> tuple[list[Tensor], StepSeconds]:
        """Replay the CUDA graph of the step; each batch size is captured at its first use."""
        begin, n = time.perf_counter(), batch.examples
        if n not in self._graphs:
            self._graphs[n] = GraphedStep.of(batch.X, batch.y, self.replicas, shares=shares)
        losses = self._graphs[n](batch.X, batch.y)
        # The parts of a graph cannot be timed separately, so all of its time counts as compute.
        seconds = StepSeconds(compute=time.perf_counter() - begin)
        return [loss.clone() for loss in losses], seconds  # the next replay overwrites them

    def latest_loss(self) -> float:
        """Return the mean loss of this process's examples in the last step; waits for GPUs."""
        if not self._unread:
            return self.steps[-1].loss
        step, losses = self._unread[-1]
        return sum(map(float, losses)) / max(1, sum(step.shares[r] for r in self.replicas.ranks))

    def read(self) -> None:
        """Convert the pending losses to numbers and log their steps; collective over processes."""
        sums = self._total([sum(map(float, losses)) for _, losses in self._unread])
        for (step, _), loss in zip(self._unread, sums, strict=True):
            self.steps.append(replace(step, loss=loss / step.examples))
            self._log.step(self.steps[-1])
        self._unread = []

    def _total(self, sums: list[float]) -> list[float]:
        """Return the numbers summed over all processes; collective."""
        if self.group is None:
            return sums
        whole = torch.tensor(sums, dtype=torch.float64, device=self.replicas.devices[0])
        dist.all_reduce(whole, group=self.replicas.group)
        return list(whole.tolist())

    def _finish_epoch(self, number: int) -> None:
        """Evaluate the model, and record and log the epoch."""
        start = time.perf_counter()
        wait_for(self.replicas.devices)
        tail = time.perf_counter() - start
        self.read()
        steps = [step for step in self.steps if step.epoch == number]
        seconds = sum(step.seconds.total for step in steps) + tail
        waited = sum(step.waited for step in steps)
        loss = sum(s.loss * s.examples for s in steps) / sum(s.examples for s in steps)
        with closing(self._test.epoch()) as batches:
            accuracy = self.replicas.evaluate((batch.X, batch.y) for batch in batches)
        evaluated = self._prepared.data.evaluated
        record = EpochRecord(number, seconds, loss, accuracy, waited, evaluated)
        self.epochs.append(record)
        self._log.epoch(record)

    # --- its state --------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the checkpoint if the options name one; collective over processes."""
        prepared = self._prepared
        if prepared.options.checkpoint is None:
            return
        state = {
            "settings": prepared.options.stored(),
            "identity": prepared.identity(),
            "source": prepared.source,
            "run": self.state_dict(),
        }
        if self.replicas.ranks[0] == 0:
            checkpoint.save(prepared.options.checkpoint, state)
        self._total([0.0])  # a barrier: no process continues before the file is written

    @property
    def _processes(self) -> int:
        return 1 if self.group is None else self.replicas.world

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a resumed run gives the same bits; collective."""
        self.read()
        own = [random_states(device) for device in self.replicas.devices]
        engine = {
            "replicas": self.replicas.state_dict(),
            "auto": self.auto.state_dict() if self.auto else None,
            "generators": gathered(own, self.group),
            "processes": self._processes,
        }
        return {"engine": engine, **results.stored(self.steps, self.epochs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`, of the same ranks.

        The generators are those of this process if the state has as many processes.
        """
        engine = state["engine"]
        self.replicas.load_state_dict(engine["replicas"])
        if self.auto:
            self.auto.load_state_dict(engine["auto"])
        if engine["processes"] == self._processes:
            known = engine["generators"]  # of another number of ranks, if the run has shards
            for rank, device in zip(self.replicas.ranks, self.replicas.devices, strict=True):
                set_random_states(known[min(rank, len(known) - 1)], device)
        self.steps, self.epochs = results.restored(state)

    def result(self) -> RunResult:
        """Return the result of the finished run."""
        settings, modules = self._prepared.options, self.replicas.modules
        return RunResult(settings, self.epochs, self.steps, modules, self.first_batch)


def run(
    prepared: PreparedRun, printer: ProgressPrinter, consensus: StopConsensus | None = None
) -> RunResult:
    """Train, print a line per epoch, and return the result; see `train`.

    Several processes need `consensus` to write a checkpoint at a signal, after the same step.
    """
    if not torch.is_grad_enabled():
        raise ValueError("training records gradients, which is switched off here")
    printer.line(f"{prepared}, reduced by {prepared.reducer}")
    with Log(prepared.options.log, append=prepared.stored is not None) as log:
        log.write("start", **prepared.described())
        with prepared.repeatable():
            if prepared.needs_threads:
                result = _run_as_threads(prepared, printer, log)
            else:
                result = _trained(prepared, printer, log, consensus)
        finish(result, prepared, printer, log)
    return result


def _trained(
    prepared: PreparedRun,
    printer: ProgressPrinter,
    log: Log,
    consensus: StopConsensus | None = None,
    interrupt: Interrupt | None = None,
) -> RunResult:
    """Train the ranks of this process; with `interrupt`, another thread receives the signals."""
    alone = prepared.backend is None
    enabled = prepared.options.checkpoint is not None and (alone or consensus is not None)
    training = TrainingRun(prepared, printer, log)
    with Interrupt(enabled, consensus, interrupt) as stop:
        training.run(stop)
    return training.result()


def _run_as_threads(prepared: PreparedRun, printer: ProgressPrinter, log: Log) -> RunResult:
    """Train with a thread for each rank, as batch statistics over all ranks need."""
    devices, store = list(prepared.options.devices), _dist.HashStore()
    prepared, quiet = replace(prepared, backend="pycollect"), ProgressPrinter(quiet=True)
    enter_modes = _thread_modes()

    def run_rank(rank: int, world: int) -> RunResult:
        consensus = StopConsensus(store, rank, world, lambda: wait_for([devices[rank]]))
        output = (printer, log) if rank == 0 else (quiet, Log(None))
        with ExitStack() as stack:
            enter_modes(stack)
            return _trained(prepared, *output, consensus, interrupt)

    with Interrupt(prepared.options.checkpoint is not None) as interrupt:
        outcomes = threads.launch(run_rank, len(devices), device=devices)
    first: RunResult = outcomes[0]
    return replace(first, modules=[result.module for result in outcomes])


def _thread_modes() -> Callable[[ExitStack], None]:
    """Return a function that enters the caller's modes of torch that are a thread's own."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]
    cached, device = torch.is_autocast_cache_enabled(), torch.get_default_device()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def enter(stack: ExitStack) -> None:
        for kind, dtype in casts:
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cached))
        if device.type != "cpu":  # a mode for the default device costs some time in every call
            stack.enter_context(device)
        if hooks is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*hooks))

    return enter


def finish(result: RunResult, prepared: PreparedRun, printer: ProgressPrinter, log: Log) -> None:
    """Print, log and plot the result of a run."""
    without, with_data = result.seconds_per_epoch
    log.write(
        "end",
        accuracy=result.accuracy,
        seconds_per_epoch=without,
        seconds_per_epoch_with_data=with_data,
        first_batch_seconds=result.first_batch,
        diverged=result.divergence or None,
    )
    printer.line(result.times)
    printer.line(result)
    if result.divergence:
        printer.warning(f"{result.divergence}; a smaller learning rate may help")
    if prepared.options.plot is not None:
        on_gpu = any(device.type == "cuda" for device in prepared.options.devices)
        hint = " (times of the host)" if on_gpu and not prepared.options.exact_times else ""
        plot([result], prepared.options.plot, f"{prepared}{hint}")


def train(
    devices: DeviceSpec = None,
    batch_size: int | None = None,
    lr: float | None = None,
    *,
    quiet: bool = False,
    **options: Any,
) -> RunResult:
    """Train a model data-parallel, with one replica per rank, and return the `RunResult`.

    Without `quiet` it prints a line per epoch. Equal options give equal bits, whatever the load of
    the machine, but not with `weights="auto"`, nor on GPUs without `deterministic`. An option that
    is None or left out has the value of the checkpoint to resume, or its default.

    Raises ValueError for a bad value, TypeError for an unknown option or a value of another type,
    DatasetError if the data is not available, CheckpointError if a checkpoint cannot be read,
    written or resumed, OutputError if log or plot cannot be written, and KeyboardInterrupt at a
    signal, once the checkpoint is written.

    >>> train("cpu*2", data="digits", epochs=1, quiet=True).epochs[0].number
    1
    """
    asked = {"devices": devices, "batch_size": batch_size, "lr": lr, **options}
    prepared = prepare(Options.of(asked))
    printer = ProgressPrinter(quiet)
    printer.notice(prepared.data.notice)
    return run(prepared, printer)


train.__doc__ = f"{cleandoc(train.__doc__ or '')}\n\n{Options.documentation()}"
