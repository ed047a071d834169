"""What a run says: one line an epoch on standard output, a progress bar on a terminal.

The bar needs tqdm and goes to standard error; without tqdm or a terminal there is none.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Epoch:
    """What one epoch gave: seconds without evaluation, mean loss per example, test accuracy 0..1.

    >>> print(Epoch(3, 1.94, 0.4118, 0.8712))
    epoch 3, time 1.9 sec, loss 0.412, test acc 0.87
    """

    number: int  # from 1
    seconds: float
    loss: float
    accuracy: float

    def __str__(self) -> str:
        return (
            f"epoch {self.number}, time {self.seconds:.1f} sec, loss {self.loss:.3f}, "
            f"test acc {self.accuracy:.2f}"
        )


@dataclass(frozen=True)
class Report:
    """Prints the lines of a run and shows its progress; a quiet one does neither."""

    quiet: bool = False

    def line(self, text: object) -> None:
        """Print one line, at once even into a pipe."""
        if not self.quiet:
            print(text, flush=True)

    def progress(self, items: Sequence[T], label: str) -> Iterable[T]:
        """Give the items to iterate over, with a bar that disappears when they are used up."""
        if self.quiet or not sys.stderr.isatty():
            return items
        try:
            from tqdm import tqdm
        except ImportError:
            return items
        bar: Iterable[T] = tqdm(items, desc=label, leave=False, unit="batch")
        return bar
