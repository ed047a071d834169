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
from .optimizers import linear_lr
from .settings import Settings, parse_weights


@dataclass(frozen=True)
class Source:
    """Where a data set is loaded from; ValueError for a name or size that there is not."""

    name: str = "auto"
    data_dir: Path | str = "data"
    image_size: int | None = None  # of folders alone

    def __post_init__(self) -> None:
        data_sets.check(self.name, self.image_size)

    def stored(self) -> dict[str, Any]:
        """Give it in plain numbers and strings."""
        return {"name": self.name, "data_dir": str(self.data_dir), "image_size": self.image_size}

    def load(self) -> tuple[Data, str]:
        """Load it; see `data.load`."""
        return data_sets.load(self.name, self.data_dir, self.image_size)


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

        Without data nothing but the values is checked. `stored` is a checkpoint to continue.
        """
        known: Mapping[str, Any] = stored["settings"] if stored else {}

        def pick(name: str, default: Any) -> Any:
            asked = getattr(self, name)
            return known.get(name, default) if asked is None else asked

        given = pick("devices", None) if self.num_gpus is None else self.devices
        devices = ranks(given, self.num_gpus)
        model = self.model_name(data, known)
        defaults = data.defaults_for(model) if data else Defaults(1, 1.0, 1)
        sizes = {
            name: pick(name, getattr(defaults, name)) for name in ("batch_size", "lr", "epochs")
        }
        world = len(devices)
        if self.scale_batch:
            usual_size = defaults.batch_size if self.batch_size is None else self.batch_size
            sizes["batch_size"] = usual_size * world
        if self.scale_lr:
            usual = defaults.lr if self.lr is None else self.lr
            sizes["lr"] = linear_lr(usual, batch_size=world, base_batch_size=1)
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

    def module(self, data: Data, settings: Settings) -> nn.Module:
        """Build the model for the data, or give the module that was handed over."""
        if isinstance(self.model, nn.Module):
            return self.model
        build = MODELS[settings.model]
        return build(data.image_shape[0], data.num_classes, settings.seed)

    def source(self, stored: Mapping[str, Any] | None = None) -> Source | Data:
        """Give where the data comes from, or the data itself if it was handed over.

        Raises ValueError for what nothing can be loaded from.
        """
        if isinstance(self.data, Data):
            return self.data
        known: dict[str, Any] = Source().stored()
        if stored is not None and stored["source"] is not None:
            known = stored["source"]
        elif stored is not None and self.data is None:
            raise ValueError("the run was on data of your own: pass the same data to continue it")
        asked = {"name": self.data, "data_dir": self.data_dir, "image_size": self.image_size}
        return Source(**known | {k: value for k, value in asked.items() if value is not None})


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
