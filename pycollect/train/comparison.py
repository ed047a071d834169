"""Comparison of the two reductions of gradients: a training run with each, on the same batches.

The runs follow each other. Times are medians, of all steps for reduction and step and of all epochs
for the epoch; a ratio above 1 means faster than the first run, with the naive reduction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pycollect.devices import DeviceSpec

from .options import Options
from .output import ProgressPrinter, plot
from .prepared_run import PreparedRun, prepare
from .results import RunResult
from .training_run import run as run_once

COMPARED = ("naive", "pycollect")  # the baseline first
# Options that a comparison does not support: it chooses `reduce`, and one file is for one run.
_REFUSED = ("checkpoint", "resume", "log", "graph", "compile", "reduce", "sync_batchnorm", "shards")


@dataclass(frozen=True)
class ReductionComparison:
    """Results of two runs on the same batches, as `compare_reductions` returns them.

    `run_results` has the `RunResult` with the reduction "naive", the baseline, and that with
    "pycollect". `str()` gives the printed table: the median times in milliseconds of a reduction, a
    step and an epoch, their ratios (the baseline's time divided by the run's, so above 1 is faster
    than the baseline), and the accuracy (0..1, of the test set if there is one). The last line
    tells whether the trained parameters have the same bits, or by how much they differ.
    """

    run_results: Sequence[RunResult]

    @property
    def identical(self) -> bool:
        """Whether every parameter of every rank has the same bits in both runs."""
        baseline, other = self.run_results
        return other.difference(baseline) == 0

    def __str__(self) -> str:
        baseline = self.run_results[0]
        columns = ("reduction", "step", "epoch")
        head = "".join(f"{f'{name} (ms)':>16}{'ratio':>7}" for name in columns)
        lines = [f"{'median of':<10}{head}{f'{baseline.epochs[-1].evaluated} acc':>10}"]
        for run_result in self.run_results:
            pairs = zip(_seconds(run_result), _seconds(baseline), strict=True)
            cells = "".join(
                f"{1e3 * mine:>16.3f}{of_baseline / mine:>7.2f}" for mine, of_baseline in pairs
            )
            name = run_result.settings.reduce
            lines.append(f"{name:<10}{cells}{run_result.epochs[-1].accuracy:>10.2f}")
        return "\n".join([*lines, self._verdict()])

    def _verdict(self) -> str:
        baseline, other = self.run_results
        what = f"parameters after {len(baseline.steps)} steps"
        much = other.difference(baseline)
        if much == 0:
            return f"{what}: the same bits"
        names = f"against {baseline.settings.reduce}: {other.settings.reduce}"
        return f"{what}, {names} by up to {much:.1e} different"


def _seconds(run_result: RunResult) -> tuple[float, float, float]:
    return run_result.reduce_seconds, run_result.step_seconds, run_result.epoch_seconds


def compare_reductions(
    devices: DeviceSpec = None,
    batch_size: int | None = None,
    lr: float | None = None,
    *,
    quiet: bool = False,
    **options: Any,
) -> ReductionComparison:
    """Train with either reduction of `GRADIENT_REDUCTIONS` on the same batches; return both runs.

    `devices`, `batch_size`, `lr`, `quiet` and the other options are those of `train`, without
    `checkpoint`, `resume`, `log`, `graph`, `compile`, `reduce`, `sync_batchnorm` and
    `weights="auto"`. `overlap` is off unless it is given; times are exact, whatever `exact_times`
    is. Without `quiet` it prints a line per epoch and run, and the comparison.

    Raises ValueError for options or values that are not allowed; TypeError, DatasetError and
    OutputError as `train` does.

    >>> comparison = compare_reductions("cpu*2", data="digits", epochs=1, quiet=True)
    >>> comparison.identical
    True
    """
    check_options(options)
    asked = {"devices": devices, "batch_size": batch_size, "lr": lr, **options}
    prepared = prepare(Options.of(asked))
    printer = ProgressPrinter(quiet)
    printer.notice(prepared.data.notice)
    return run(prepared, printer)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that comparisons do not support, without checking its value.

    >>> check_options({"log": "no such folder/run.jsonl"})
    Traceback (most recent call last):
    ValueError: a comparison does not support log
    """
    given = {name for name, value in options.items() if value is not None and value is not False}
    unfit = [name for name in _REFUSED if name in given]
    weights = options.get("weights")
    if isinstance(weights, str) and weights == "auto":
        unfit.append("measured shares")
    if unfit:
        raise ValueError(f"a comparison does not support {unfit[0]}")


def run(prepared: PreparedRun, printer: ProgressPrinter) -> ReductionComparison:
    """Train with each reduction; print a line per epoch and run, and the comparison."""
    asked = prepared.options
    asked = replace(asked, exact_times=True, overlap=bool(asked.overlap), plot=None)
    run_results = [
        run_once(replace(prepared, options=replace(asked, reduce=name)), printer)
        for name in COMPARED
    ]
    comparison = ReductionComparison(run_results)
    printer.line(comparison)
    if prepared.options.plot is not None:
        plot(comparison.run_results, prepared.options.plot, str(prepared))
    return comparison
