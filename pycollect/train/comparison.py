"""Comparison of gradient reductions: one training run per reduction, on the same batches.

Runs of one process alternate at every step. Times are medians, of all steps for reduction and step
and of all epochs for the epoch; a ratio above 1 means faster than the first run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pycollect.devices import DeviceSpec

from ..errors import shown
from .curves import plot
from .log import Log
from .module_check import unused_parameters
from .options import Options
from .prepared_run import PreparedRun, prepare
from .processes import check_available, run_spawned, threads_per_rank
from .progress_printer import ProgressPrinter
from .reduce import GRADIENT_REDUCTIONS
from .run_result import RunResult
from .training_loop import fit, start_run

PAIR = ("naive", "pycollect")  # default reductions to compare, the baseline first
NAMES = (*PAIR, "ddp")
# Largest difference of parameters that rounding explains after few steps; training amplifies it.
_ROUNDING = 1e-4
DDP_BACKEND = "gloo"  # default backend of "ddp": the most widely available one


@dataclass(frozen=True)
class ReductionComparison:
    """Results of runs on the same batches, as `compare_reductions` returns them.

    `run_results` has a `RunResult` for each compared name, the baseline first. `str()` gives the
    printed summary. For two runs it has the median times in milliseconds of a reduction and an
    epoch, and their ratios: the baseline's time divided by the other's, so above 1 is faster than
    the baseline. For more runs it is a table, with the time of a step and the accuracy (0..1, of
    the test set if there is one) as well. The last line tells whether the trained parameters have
    the same bits. `rounding` is why those of "ddp" may not, "" if they should.
    """

    run_results: Sequence[RunResult]
    rounding: str = ""

    @property
    def identical(self) -> bool:
        """Whether every parameter of every rank has the same bits in all runs.

        A run of "ddp" returns only rank 0's parameters, and is compared by those.
        """
        first = self.run_results[0]
        return all(run_result.difference(first) == 0 for run_result in self.run_results[1:])

    def __str__(self) -> str:
        last = self.run_results[-1]
        steps, epochs = len(last.steps), len(last.epochs)
        if len(self.run_results) > 2:
            return f"{self._table()}\n{self._verdicts(steps)}"
        return "\n".join(
            (
                self._ratio(f"reduction time, median of {steps} steps", _reduction),
                self._ratio(f"epoch time, median of {epochs} epochs", _epoch),
                self._verdicts(steps),
            )
        )

    def _ratio(self, what: str, seconds: Callable[[RunResult], float]) -> str:
        first, second = (seconds(run_result) for run_result in self.run_results)
        names = [run_result.name for run_result in self.run_results]
        return (
            f"{what}: {names[0]} {1e3 * first:.3f} ms, {names[1]} {1e3 * second:.3f} ms, "
            f"ratio {first / second:.2f}"
        )

    def _table(self) -> str:
        """Return a table with one line per run and its ratios to the first run."""
        first = self.run_results[0]
        columns = (("reduction", _reduction), ("step", _step), ("epoch", _epoch))
        head = "".join(f"{f'{name} (ms)':>16}{'ratio':>7}" for name, _ in columns)
        lines = [f"{'median of':<10}{head}{f'{first.epochs[-1].evaluated} acc':>10}"]
        for run_result in self.run_results:
            cells = "".join(
                f"{1e3 * seconds(run_result):>16.3f}{seconds(first) / seconds(run_result):>7.2f}"
                for _, seconds in columns
            )
            lines.append(f"{run_result.name:<10}{cells}{run_result.epochs[-1].accuracy:>10.2f}")
        return "\n".join(lines)

    def _verdicts(self, steps: int) -> str:
        first, others = self.run_results[0], self.run_results[1:]
        if self.identical:
            return f"parameters after {steps} steps: the same bits"
        found = ", ".join(f"{other.name} {self._verdict(first, other)}" for other in others)
        return f"parameters after {steps} steps, against {first.name}: {found}"

    def _verdict(self, first: RunResult, other: RunResult) -> str:
        difference = other.difference(first)
        if difference == 0:
            return "the same bits"
        if not self.rounding or "ddp" not in (first.name, other.name):
            return f"DIFFERENT BITS, by up to {difference:.1e}"
        if difference <= _ROUNDING:
            return f"by up to {difference:.1e} different, as rounding may be: {self.rounding}"
        return (
            f"DIFFERENT BITS, by up to {difference:.1e}, more than rounding ({self.rounding}) in a "
            "few steps; dropout differs, too"
        )


def _reduction(run_result: RunResult) -> float:
    return run_result.reduce_seconds


def _step(run_result: RunResult) -> float:
    return run_result.step_seconds


def _epoch(run_result: RunResult) -> float:
    return run_result.epoch_seconds


def parse_names(text: str) -> tuple[str, ...]:
    """Parse the names to compare, the baseline first; ValueError unless two or more known names.

    >>> parse_names("naive,ddp")
    ('naive', 'ddp')
    """
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in NAMES]
    if unknown or len(set(names)) != len(names) or len(names) < 2:
        raise ValueError(f"a comparison takes two or more of {','.join(NAMES)}, not {shown(text)}")
    return names


def compare_reductions(
    devices: DeviceSpec = None,
    batch_size: int | None = None,
    lr: float | None = None,
    *,
    names: Sequence[str] | str = PAIR,
    ddp_backend: str | None = None,
    quiet: bool = False,
    **options: Any,
) -> ReductionComparison:
    """Train once per name on the same batches, and return all results, the first as the baseline.

    `names` are two or more different ones of "naive", "pycollect" and "ddp" (default: the first
    two), in a sequence or with commas between them. "naive" and "pycollect" are the reductions of
    `GRADIENT_REDUCTIONS`; their runs alternate at every step in this process. "ddp" is torch's
    DistributedDataParallel in spawned processes, one per rank, over the torch.distributed backend
    `ddp_backend` (default "gloo"); it runs after them, and a script that calls it needs the usual
    `if __name__ == "__main__":`.

    `devices`, `batch_size`, `lr`, `quiet` and the other options are those of `train`, without
    `checkpoint`, `resume`, `log`, `graph`, `compile`, `reduce`, `replay_shares` and
    `weights="auto"`. `overlap` is off unless it is given; times are exact, whatever `exact_times`
    is. Without `quiet` it prints a line per epoch and run, and the comparison.

    Raises ValueError for names, options or values that are not allowed, for a `ddp_backend` without
    "ddp" or that torch does not have, and with "ddp" for parameters that the output does not depend
    on, and for data or a model that cannot be pickled. Raises TypeError, DatasetError and
    OutputError as `train` does, and torch.multiprocessing's errors if a process of "ddp" fails.

    >>> comparison = compare_reductions("cpu*2", data="digits", epochs=1, quiet=True)
    >>> comparison.identical
    True
    """
    names = parse_names(names if isinstance(names, str) else ",".join(names))
    check_options(options)
    if options.get("reduce") is not None:
        raise ValueError("a comparison does not support reduce; pass names")
    asked = {"devices": devices, "batch_size": batch_size, "lr": lr, **options}
    prepared = prepare(Options.of(asked))
    printer = ProgressPrinter(quiet)
    printer.notice(prepared.data.notice)
    return run(prepared, names, printer, ddp_backend)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that comparisons do not support, without checking its value.

    >>> check_options({"log": "no such folder/run.jsonl"})
    Traceback (most recent call last):
    ValueError: a comparison does not support log
    """
    unfit = [name for name in ("checkpoint", "resume", "log") if options.get(name) is not None]
    unfit += [name for name in ("graph", "compile") if options.get(name)]
    weights = options.get("weights")
    if (isinstance(weights, str) and weights == "auto") or options.get("replay_shares") is not None:
        unfit.append("measured shares")
    if unfit:
        raise ValueError(f"a comparison does not support {unfit[0]}")


def check(prepared: PreparedRun, names: Sequence[str], backend: str | None) -> None:
    """Raise ValueError for a run that cannot be compared with ddp, or a backend without ddp."""
    if "ddp" in names:
        check_available(backend or DDP_BACKEND)
        _check_all_used(prepared)
    elif backend is not None:
        raise ValueError(f"{backend} is for ddp, which is not among {', '.join(names)}")


def _check_all_used(prepared: PreparedRun) -> None:
    """Raise ValueError for unused parameters, which DDP would refuse only in the second step."""
    unused = unused_parameters(prepared.module, prepared.data.image_shape)
    if unused:
        raise ValueError(
            f"the model's output does not depend on {', '.join(unused)}, and ddp waits for the "
            "gradients of all parameters: freeze them with requires_grad_(False)"
        )


def run(
    prepared: PreparedRun,
    names: Sequence[str],
    printer: ProgressPrinter,
    backend: str | None = None,
) -> ReductionComparison:
    """Train once per name; print a line per epoch and run, and the comparison.

    Raises the ValueErrors of `check`.
    """
    check(prepared, names, backend)
    printer.line(f"{prepared}, {' against '.join(names)}")
    in_turns = _in_turns(prepared, [name for name in names if name in GRADIENT_REDUCTIONS], printer)
    run_results = {run_result.name: run_result for run_result in in_turns}
    if "ddp" in names:
        run_results["ddp"] = run_spawned(prepared, backend or DDP_BACKEND, printer)
    rounding = _rounding(prepared, backend or DDP_BACKEND)
    comparison = ReductionComparison([run_results[name] for name in names], rounding)
    printer.line(comparison)
    for run_result in comparison.run_results:
        if lost := run_result.divergence:
            printer.warning(f"{run_result.name}: {lost}")
    if prepared.options.plot is not None:
        plot(comparison.run_results, prepared.options.plot, str(prepared))
    return comparison


def _rounding(prepared: PreparedRun, backend: str) -> str:
    """Return why a run of ddp over this backend may round differently; "" if it should not."""
    devices, threads = prepared.options.devices, torch.get_num_threads()
    why = []
    if any(d.type == "cpu" for d in devices) and threads_per_rank(len(devices)) != threads:
        each = threads_per_rank(len(devices))
        why.append(f"a rank of ddp has {each} of the {threads} threads, and torch splits its sums")
    several = len(devices) > 2  # two numbers have one sum
    if several and not all(name.rpartition(":")[2] == "pycollect" for name in backend.split(",")):
        why.append(f"{backend} adds the ranks in an order of its own")
    return "; ".join(why)


def _in_turns(
    prepared: PreparedRun, names: Sequence[str], printer: ProgressPrinter
) -> list[RunResult]:
    """Train the runs that share this process, alternating at every step."""
    if not names:
        return []
    with Log(None) as log, prepared.repeatable():
        runs = [start_run(prepared, name, log, compared=True) for name in names]
        for _ in fit(prepared, runs, printer):
            for run in runs:
                printer.line(f"{run.epochs[-1]} ({run.name})")
    return [run.result(prepared.options) for run in runs]
