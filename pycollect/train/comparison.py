"""Comparison of ways to reduce gradients: one training run for each, on the same batches.

The runs follow each other. Times are medians, of all steps for reduction and step and of all epochs
for the epoch; a ratio above 1 means faster than the first run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pycollect.devices import DeviceSpec

from ..errors import shown
from .curves import plot
from .options import Options
from .output import ProgressPrinter
from .prepared_run import PreparedRun, prepare
from .processes import check_available, run_spawned
from .records import RunResult
from .reduce import GRADIENT_REDUCTIONS
from .training_run import run as run_once

PAIR = ("naive", "pycollect")  # default reductions to compare, the baseline first
PROCESSES = "processes"
NAMES = (*PAIR, PROCESSES)
DEFAULT_BACKEND = "gloo"  # of "processes": the most widely available one


@dataclass(frozen=True)
class ReductionComparison:
    """Results of runs on the same batches, as `compare_reductions` returns them.

    `run_results` has a `RunResult` for each compared name, the baseline first. `str()` gives the
    printed table: the median times in milliseconds of a reduction, a step and an epoch, their
    ratios (the baseline's time divided by the run's, so above 1 is faster than the baseline), and
    the accuracy (0..1, of the test set if there is one). The last line tells whether the trained
    parameters have the same bits, or by how much they differ: a backend other than "pycollect" adds
    the gradients in an order of its own, and processes have fewer threads of torch each.
    """

    run_results: Sequence[RunResult]

    @property
    def identical(self) -> bool:
        """Whether every parameter of every rank has the same bits in all runs.

        A run of "processes" returns only rank 0's parameters, and is compared by those.
        """
        first = self.run_results[0]
        return all(run_result.difference(first) == 0 for run_result in self.run_results[1:])

    def __str__(self) -> str:
        first = self.run_results[0]
        columns = ("reduction", "step", "epoch")
        head = "".join(f"{f'{name} (ms)':>16}{'ratio':>7}" for name in columns)
        lines = [f"{'median of':<10}{head}{f'{first.epochs[-1].evaluated} acc':>10}"]
        for run_result in self.run_results:
            pairs = zip(_seconds(run_result), _seconds(first), strict=True)
            cells = "".join(
                f"{1e3 * mine:>16.3f}{of_first / mine:>7.2f}" for mine, of_first in pairs
            )
            lines.append(f"{run_result.name:<10}{cells}{run_result.epochs[-1].accuracy:>10.2f}")
        return "\n".join([*lines, self._verdicts()])

    def _verdicts(self) -> str:
        first, others = self.run_results[0], self.run_results[1:]
        what = f"parameters after {len(first.steps)} steps"
        if self.identical:
            return f"{what}: the same bits"
        found = [(other.name, other.difference(first)) for other in others]
        texts = (f"{name} by up to {much:.1e} different" for name, much in found if much != 0)
        return f"{what}, against {first.name}: {', '.join(texts)}"


def _seconds(run_result: RunResult) -> tuple[float, float, float]:
    return run_result.reduce_seconds, run_result.step_seconds, run_result.epoch_seconds


def parse_names(text: str) -> tuple[str, ...]:
    """Parse the names to compare, the baseline first; ValueError unless two or more known names.

    >>> parse_names("naive,processes")
    ('naive', 'processes')
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
    backend: str | None = None,
    quiet: bool = False,
    **options: Any,
) -> ReductionComparison:
    """Train once per name on the same batches, and return all results, the first as the baseline.

    `names` are two or more different ones of "naive", "pycollect" and "processes" (default: the
    first two), in a sequence or with commas between them. "naive" and "pycollect" are the
    reductions of `GRADIENT_REDUCTIONS`. "processes" are spawned, one per rank, and sum over the
    torch.distributed `backend` (default "gloo"); a script that calls it needs the usual
    `if __name__ == "__main__":`.

    `devices`, `batch_size`, `lr`, `quiet` and the other options are those of `train`, without
    `checkpoint`, `resume`, `log`, `graph`, `compile`, `reduce`, `sync_batchnorm` and
    `weights="auto"`. `overlap` is off unless it is given; times are exact, whatever `exact_times`
    is. Without `quiet` it prints a line per epoch and run, and the comparison.

    Raises ValueError for names, options or values that are not allowed, for a `backend` without
    "processes" or that torch does not have, and with "processes" for data and a model that cannot
    be pickled. Raises TypeError, DatasetError and OutputError as `train` does, and
    torch.multiprocessing's errors if a process fails.

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
    return run(prepared, names, printer, backend)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that comparisons do not support, without checking its value.

    >>> check_options({"log": "no such folder/run.jsonl"})
    Traceback (most recent call last):
    ValueError: a comparison does not support log
    """
    unfit = [name for name in ("checkpoint", "resume", "log") if options.get(name) is not None]
    unfit += [name for name in ("graph", "compile", "sync_batchnorm") if options.get(name)]
    weights = options.get("weights")
    if isinstance(weights, str) and weights == "auto":
        unfit.append("measured shares")
    if unfit:
        raise ValueError(f"a comparison does not support {unfit[0]}")


def check(names: Sequence[str], backend: str | None) -> None:
    """Raise ValueError for a backend that torch does not have, or without processes."""
    if PROCESSES in names:
        check_available(backend or DEFAULT_BACKEND)
    elif backend is not None:
        raise ValueError(f"{backend} is for {PROCESSES}, which is not among {', '.join(names)}")


def run(
    prepared: PreparedRun,
    names: Sequence[str],
    printer: ProgressPrinter,
    backend: str | None = None,
) -> ReductionComparison:
    """Train once per name; print a line per epoch and run, and the comparison.

    Raises the ValueErrors of `check`.
    """
    check(names, backend)
    backend = backend or DEFAULT_BACKEND
    asked = prepared.options
    asked = replace(asked, exact_times=True, overlap=bool(asked.overlap), plot=None)
    run_results = []
    for name in names:
        reduce = name if name in GRADIENT_REDUCTIONS else PAIR[1]
        one = replace(prepared, options=replace(asked, reduce=reduce))
        if name == PROCESSES:
            run_results.append(run_spawned(one, backend, printer))
        else:
            run_results.append(run_once(one, printer))
    comparison = ReductionComparison(run_results)
    printer.line(comparison)
    if prepared.options.plot is not None:
        plot(comparison.run_results, prepared.options.plot, str(prepared))
    return comparison
