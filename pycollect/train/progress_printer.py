"""Output of a training run: lines on standard output, and a progress bar on a terminal.

The bar needs tqdm and goes to standard error; without tqdm or a terminal there is no bar.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from .._command import escaped

# Least seconds between two reads of the loss for the bar; each read waits for the GPU.
_READ_INTERVAL = 0.5


class Bar:
    """The progress of an epoch: images per second and the loss; disappears at its end.

    >>> with Bar(None) as bar:  # without a terminal
    ...     bar.step(64, lambda: 2.3)
    """

    def __init__(self, tqdm: Any | None) -> None:
        self._tqdm = tqdm
        self._next = time.monotonic()

    def __enter__(self) -> "Bar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._tqdm is not None:
            self._tqdm.close()

    def step(self, examples: int, loss: Callable[[], float]) -> None:
        """Advance by `examples` images; call `loss` at most every _READ_INTERVAL seconds."""
        if self._tqdm is None:
            return
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _READ_INTERVAL
            self._tqdm.set_postfix_str(f"loss {loss():.3f}", refresh=False)
        self._tqdm.update(examples)


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

    def bar(self, label: str, images: int, done: int = 0) -> Bar:
        """Return a progress bar over `images` images, which starts at `done`."""
        if self.quiet or not sys.stderr.isatty():
            return Bar(None)
        try:
            from tqdm import tqdm
        except ImportError:
            return Bar(None)
        return Bar(tqdm(total=images, initial=done, desc=label, leave=False, unit=" images"))
