"""Output of a training run: lines, a progress bar on a terminal, a log, and plots.

The log has JSON lines: one object per line, its kind under "event".

    start    the options: data, model, devices, batch_size, lr, ..., and the versions
    step     epoch, step, examples, loss, shares (examples of every rank), and data_seconds,
             split_seconds, compute_seconds, reduction_seconds, update_seconds
    epoch    epoch, seconds, data_seconds, loss, accuracy, evaluated: "test", or "train" if there
             is no test set, for the set of which the accuracy is
    end      accuracy, seconds_per_epoch, seconds_per_epoch_with_data, first_batch_seconds,
             diverged: null, or a sentence if the loss or the model is not finite at the end
    stopped  why: "interrupted", or the message of an error

Losses are means per example, times are seconds; a number that is not finite is null.

Plots need matplotlib, which is imported only when one is drawn.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from .._command import escaped
from .._files import OutputError, open_lines, write_picture, writing
from .results import PARTS, EpochRecord, RunResult, StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Least seconds between two reads of the loss for the bar; each read waits for the GPU.
_READ_INTERVAL = 0.5


class Log:
    """Writes JSON lines to a file, each line at once; without a path it writes nothing.

    The file may be a FIFO, a terminal, /dev/stdout or /dev/stderr. A resumed run appends to the
    existing log. Raises OutputError if the log cannot be written.

    >>> with Log(None) as log:
    ...     log.write("start", lr=0.1)
    """

    def __init__(self, path: Path | str | None, *, append: bool = False) -> None:
        self._file: TextIO | None = None
        self._path = path or ""
        if path is not None:
            with writing("log", path):
                self._file = open_lines(path, append=append)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # After an error the log may fail again; the error that stopped the run is the one to raise.
        with suppress(OutputError) if error is not None else nullcontext():
            if error is not None:
                why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
                self.write("stopped", why=why)
            if self._file is not None:
                with writing("log", self._path):
                    self._file.close()

    def write(self, event: str, **fields: Any) -> None:
        """Write one object; paths and devices become strings."""
        if self._file is None:
            return
        for name, value in fields.items():
            if isinstance(value, float) and not math.isfinite(value):
                fields[name] = None  # JSON has neither NaN nor infinity
        line = json.dumps({"event": event, **fields}, allow_nan=False, default=str)
        with writing("log", self._path):
            self._file.write(line + "\n")
            self._file.flush()

    def step(self, step: StepRecord) -> None:
        """Write the line of a step."""
        seconds = {f"{part}_seconds": value for part, value in step.parts.items()}
        counts = {"step": step.number, "examples": step.examples, "shares": step.shares}
        self.write("step", epoch=step.epoch, loss=step.loss, **counts, **seconds)

    def epoch(self, epoch: EpochRecord) -> None:
        """Write the line of an epoch."""
        fields = asdict(epoch)
        self.write("epoch", epoch=fields.pop("number"), **fields)


@dataclass(frozen=True)
class ProgressPrinter:
    """Prints the lines of a run, and shows a progress bar on a terminal.

    With `quiet` (default: off) it does neither. The bar needs tqdm and goes to standard error.

    >>> ProgressPrinter().line("epoch 1")
    epoch 1
    """

    quiet: bool = False

    def line(self, text: object) -> None:
        """Print one line and flush, so that a pipe gets it at once."""
        if self.quiet:
            return
        try:
            print(text, flush=True)
        except UnicodeEncodeError:  # an output of few letters must not end a run
            print(escaped(str(text), sys.stdout.encoding), flush=True)

    def notice(self, text: str) -> None:
        """Print the notice of a data set, unless it is empty."""
        if text:
            self.line(text)

    def warning(self, text: object) -> None:
        """Print one line on standard error."""
        if not self.quiet:
            print(f"warning: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def bar(
        self, label: str, images: int, done: int = 0
    ) -> Iterator[Callable[[int, Callable[[], float]], None]]:
        """Show a progress bar over `images` images, which starts at `done` and disappears.

        The context is a function that advances by a number of images, and calls its second argument
        for the loss at most every _READ_INTERVAL seconds.

        >>> with ProgressPrinter().bar("epoch 1", images=64) as advance:  # without a terminal
        ...     advance(64, lambda: 2.3)
        """
        if self.quiet or not sys.stderr.isatty() or find_spec("tqdm") is None:
            yield lambda examples, loss: None
            return
        from tqdm import tqdm

        next_read = 0.0

        def advance(examples: int, loss: Callable[[], float]) -> None:
            nonlocal next_read
            if time.monotonic() >= next_read:
                bar.set_postfix_str(f"loss {loss():.3f}", refresh=False)
                next_read = time.monotonic() + _READ_INTERVAL
            bar.update(examples)

        with tqdm(total=images, initial=done, desc=label, leave=False, unit=" images") as bar:
            yield advance


# --- plots --------------------------------------------------------------------------------------


def plot(runs: Sequence[RunResult], path: Path | str, caption: str = "") -> None:
    """Write a plot of the runs: PNG, SVG or PDF by the suffix; OutputError if not writable.

    A run without steps has no per-step line and no bar.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context("tableau-colorblind10"):
        figure = Figure(figsize=(12, 3.8), layout="constrained")
        # The name of a folder may have bytes that are no letters, and dollars that are no formula.
        figure.suptitle(escaped(caption, "utf-8"), fontsize="medium", parse_math=False)
        loss, accuracy, bars = figure.subplots(1, 3)
        _curves(loss, accuracy, runs)
        _bars(bars, [run for run in runs if run.steps])
        for axes in figure.axes:  # below the axis, where a legend hides no line
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, fontsize="small")
        write_picture(figure, path)


def _curves(loss: Axes, accuracy: Axes, runs: Sequence[RunResult]) -> None:
    """Draw loss and accuracy of every epoch, and for a single run also the loss of every step."""
    from matplotlib.ticker import MaxNLocator

    for number, run in enumerate(runs):
        if len(runs) == 1 and run.steps:
            last = {step.epoch: step.number for step in run.steps}
            points = [step.epoch - 1 + step.number / last[step.epoch] for step in run.steps]
            loss.plot(points, run.losses, alpha=0.4, linewidth=1, label="every step")
        epochs = [epoch.number for epoch in run.epochs]
        # Lines of runs on the same batches coincide, and the second leaves the first visible.
        line = {"color": f"C{number}", "linestyle": ("-", "--")[number], "marker": "o"}
        looks: dict[str, Any] = {**line, "markersize": 8 / (1 + number)}
        looks["markevery"] = 1 + len(epochs) // 30
        looks["label"] = run.settings.reduce if len(runs) > 1 else "every epoch"
        loss.plot(epochs, [epoch.loss for epoch in run.epochs], **looks)
        accuracy.plot(epochs, [100 * epoch.accuracy for epoch in run.epochs], **looks)
    evaluated = next((epoch.evaluated for run in runs for epoch in run.epochs), "test")
    accuracy.set(title=f"{evaluated} accuracy", ylabel="classified correctly (%)", ylim=(0, 102))
    loss.set(title="training loss", ylabel="cross-entropy per example")
    loss.set_ylim(0, 1.1 * loss.get_ylim()[1])
    for axes in (loss, accuracy):
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)


def _bars(axes: Axes, runs: Sequence[RunResult]) -> None:
    """Draw a bar for each run, its parts in the order in which a step runs them."""
    slow = any(sum(run.parts.values()) >= 1 for run in runs)
    unit, scale = ("s", 1.0) if slow else ("ms", 1e3)
    names = [run.settings.reduce for run in runs]
    ends = [0.0] * len(runs)
    for part in PARTS:
        widths = [scale * run.parts[part] for run in runs]
        label = f"{part} {widths[0]:.2g} {unit}" if len(runs) == 1 else part
        axes.barh(names, widths, height=0.6, left=ends, label=label)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for row, end in enumerate(ends):
        axes.text(end, row, f" {end:.3g} {unit}", va="center")
    axes.set(title="time per step (median)", xlabel=f"time ({unit})")
    axes.set_ylabel("gradients reduced by")
    axes.set_xlim(0, 1.25 * max(ends, default=0) or 1)
    room = (4 - len(runs)) / 2  # a single bar is as thick as one of two
    axes.set_ylim(len(runs) - 1 + room, -room)
