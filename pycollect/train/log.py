"""The log of a run as JSON lines: one object per line, its kind under "event".

    start    the options: data, model, devices, batch_size, lr, ..., and the versions
    step     epoch, step, examples, loss, shares (examples of every rank), and data_seconds,
             split_seconds, compute_seconds, reduction_seconds, update_seconds
    epoch    epoch, seconds, data_seconds, loss, accuracy, evaluated: "test", or "train" if there
             is no test set, for the set of which the accuracy is
    end      accuracy, seconds_per_epoch, seconds_per_epoch_with_data, first_batch_seconds,
             diverged: null, or a sentence if the loss or the model is not finite at the end
    stopped  why: "interrupted", or the message of an error

Losses are means per example, times are seconds; a number that is not finite is null.
"""

import json
import math
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from .._files import OutputError, open_lines, writing
from .records import EpochRecord, StepRecord


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
        if path is None:
            return
        with writing("log", path):
            self._file = open_lines(path, append=append)

    def __enter__(self) -> "Log":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is None:
            return
        # After an error the log may fail again; the error that stopped the run is the one to raise.
        with suppress(OutputError) if error is not None else nullcontext():
            if error is not None:
                why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
                self.write("stopped", why=why)
            with writing("log", self._path):
                self._file.close()

    def write(self, event: str, **fields: Any) -> None:
        """Write one object; paths and devices become strings."""
        if self._file is None:
            return
        line = json.dumps({"event": event, **_finite(fields)}, allow_nan=False, default=str)
        with writing("log", self._path):
            self._file.write(line + "\n")
            self._file.flush()

    def step(self, step: StepRecord) -> None:
        """Write the line of a step."""
        seconds = {f"{part}_seconds": value for part, value in step.parts.items()}
        self.write(
            "step",
            epoch=step.epoch,
            step=step.number,
            examples=step.examples,
            loss=step.loss,
            shares=step.shares,
            **seconds,
        )

    def epoch(self, epoch: EpochRecord) -> None:
        """Write the line of an epoch."""
        self.write(
            "epoch",
            epoch=epoch.number,
            seconds=epoch.seconds,
            data_seconds=epoch.data_seconds,
            loss=epoch.loss,
            accuracy=epoch.accuracy,
            evaluated=epoch.evaluated,
        )


def _finite(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity by None, because JSON has neither."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }
