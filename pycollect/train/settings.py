"""What decides the result of a run: devices, hyperparameters, seed, and the data they belong to.

Bad values are refused here, before any data is loaded or downloaded.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import pycollect as pc
from pycollect.devices import DeviceSpec

from .data import DIGITS, Data, Defaults, load


@dataclass(frozen=True)
class Settings:
    """Everything that decides the result of a run on given data; ValueError if out of range.

    >>> Settings((torch.device("cpu"),), batch_size=64, lr=0.3, epochs=0)
    Traceback (most recent call last):
    ValueError: the number of epochs must be at least 1, not 0
    """

    devices: tuple[torch.device, ...]
    batch_size: int
    lr: float
    epochs: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError("there must be at least one device to train on")
        if self.batch_size < 1:
            raise ValueError(f"the batch size must be at least 1, not {self.batch_size}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"the learning rate must be a positive number, not {self.lr:g}")
        if self.epochs < 1:
            raise ValueError(f"the number of epochs must be at least 1, not {self.epochs}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"the seed must be from 0 to 2**63 - 1, not {self.seed}")

    def __str__(self) -> str:
        return (
            f"batch size {self.batch_size}, lr {self.lr:g}, epochs {self.epochs}, "
            f"seed {self.seed}, on {device_list(self.devices)}"
        )


@dataclass(frozen=True)
class Choice:
    """What the user asked for; None means the default of the data set, or of the machine."""

    devices: DeviceSpec = None
    batch_size: int | None = None
    lr: float | None = None
    epochs: int | None = None
    seed: int = 0
    data: Data | str = "auto"
    data_dir: Path | str = "data"

    def settings(self, defaults: Defaults) -> Settings:
        """Fill in what was not asked for; ValueError for a value or device out of range."""
        return Settings(
            devices=tuple(pc.devices(self.devices)),
            batch_size=defaults.batch_size if self.batch_size is None else self.batch_size,
            lr=defaults.lr if self.lr is None else self.lr,
            epochs=defaults.epochs if self.epochs is None else self.epochs,
            seed=self.seed,
        )

    def prepare(self) -> tuple[Data, Settings, str]:
        """Load the data; give it, the settings, and what was used instead of Fashion-MNIST or "".

        Raises ValueError for a bad value, before anything is loaded, and DataError if the data
        cannot be had.
        """
        self.settings(DIGITS)
        notice = ""
        if isinstance(self.data, Data):
            data = self.data
        else:
            data, notice = load(self.data, self.data_dir)
        return data, self.settings(data.defaults), notice


def device_list(devices: Sequence[torch.device]) -> str:
    """Name the devices in rank order.

    >>> device_list([torch.device("cpu"), torch.device("cuda:0")])
    '[cpu, cuda:0]'
    """
    return f"[{', '.join(str(device) for device in devices)}]"
