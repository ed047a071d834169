"""What the user asked for, made into settings: defaults, scaling, and what a checkpoint brings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pycollect as pc
from pycollect.devices import DeviceSpec

from . import data as data_sets
from .data import Data, Defaults
from .models import MODELS
from .settings import Settings, parse_weights

# What a run may be continued with in another form: where it runs, how long, and strictness.
_FREE = ("devices", "epochs", "strict")


@dataclass(frozen=True)
class Choice:
    """What the user asked for; None means the default of data set, model or machine.

    A run that is continued has the settings of its checkpoint where nothing else is asked for.
    `scale_batch` and `scale_lr` multiply batch size and learning rate by the number of ranks.
    """

    devices: DeviceSpec = None
    batch_size: int | None = None
    lr: float | None = None
    num_gpus: int | None = None
    epochs: int | None = None
    seed: int | None = None
    model: str | nn.Module | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    weights: str | Sequence[float] | None = None
    microbatch: int | None = None
    sync_batchnorm: bool | None = None
    strict: bool | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None
    scale_batch: bool = False
    scale_lr: bool = False
    data: Data | str | None = None
    data_dir: Path | str | None = None
    image_size: int | None = None

    def settings(self, data: Data | None, stored: Mapping[str, Any] | None = None) -> Settings:
        """Fill in what was not asked for; ValueError for a value or device out of range.

        Without data nothing but the values is checked.
        """
        known = stored or {}

        def pick(name: str, default: Any) -> Any:
            asked = getattr(self, name)
            return known.get(name, default) if asked is None else asked

        devices = ranks(pick("devices", None), self.num_gpus)
        model = self.model_name(data, known)
        defaults = data.defaults_for(model) if data else Defaults(1, 1.0, 1)
        sizes = {
            name: pick(name, getattr(defaults, name)) for name in ("batch_size", "lr", "epochs")
        }
        for name, scaled in (("batch_size", self.scale_batch), ("lr", self.scale_lr)):
            if scaled:
                asked = getattr(self, name)
                value = getattr(defaults, name) if asked is None else asked
                sizes[name] = value * len(devices)
        return Settings(
            devices=tuple(devices),
            **sizes,
            seed=pick("seed", 0),
            model=model,
            momentum=pick("momentum", 0.0),
            weight_decay=pick("weight_decay", 0.0),
            weights=parse_weights(pick("weights", None)),
            microbatch=pick("microbatch", None),
            sync_batchnorm=pick("sync_batchnorm", False),
            strict=pick("strict", False),
            shuffle=pick("shuffle", True),
            drop_last=pick("drop_last", False),
        )

    def model_name(self, data: Data | None, stored: Mapping[str, Any]) -> str:
        """Give the name of the model; that of a module is its class's. ValueError if unknown."""
        if isinstance(self.model, nn.Module):
            return type(self.model).__name__
        name = self.model or stored.get("model") or (data.model if data else "lenet")
        if name not in MODELS:
            what = f"unknown model {name!r}; there are {', '.join(MODELS)}"
            raise ValueError(f"{what}, and any torch.nn.Module")
        return str(name)

    def load(self, stored: Mapping[str, Any] | None = None) -> tuple[Data, str]:
        """Load the data; give it and what was used instead of Fashion-MNIST, or "".

        Raises ValueError for a bad name and DataError if the data cannot be had.
        """
        if isinstance(self.data, Data):
            return self.data, ""
        known = stored or {}
        name = self.data or known.get("data") or "auto"
        size = known.get("image_size") if self.image_size is None else self.image_size
        data_sets.check(name, size)
        return data_sets.load(name, self.data_dir or known.get("data_dir") or "data", size)

    def check(self) -> None:
        """Raise ValueError for everything that is wrong whatever the data is."""
        if self.batch_size is None and self.strict:
            pass  # whether it divides is only known with the data set's own batch size
        self.settings(None)


def ranks(devices: DeviceSpec, num_gpus: int | None) -> list[torch.device]:
    """Give one device per rank. A number means so many GPUs, as in the chapters.

    Where there is no GPU at all a number means ranks on the CPU. Raises ValueError for more GPUs
    than there are, and if both are given.

    >>> ranks("cpu*3", None)
    [device(type='cpu'), device(type='cpu'), device(type='cpu')]
    """
    if num_gpus is None and isinstance(devices, int) and not isinstance(devices, bool):
        devices, num_gpus = None, devices
    if num_gpus is None:
        return pc.devices(devices)
    if devices is not None:
        raise ValueError("give either devices or num_gpus")
    if num_gpus < 1:
        raise ValueError(f"num_gpus must be at least 1, not {num_gpus}")
    there = torch.cuda.device_count()
    if there == 0:
        return pc.devices(f"cpu*{num_gpus}")
    if num_gpus > there:
        raise ValueError(
            f"num_gpus is {num_gpus} and {there} can be seen; devices='cuda:0*{num_gpus}' puts "
            "several ranks on one"
        )
    return pc.devices("cuda:*")[:num_gpus]
