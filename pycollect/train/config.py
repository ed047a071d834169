"""The user's options of a run, from the command line or `train`, and their `RunSettings`.

Options that are not given come from the resumed checkpoint or from defaults; sizes are scaled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pycollect as pc
from pycollect.devices import DeviceSpec

from .._files import check_output_path, check_picture
from . import data as data_sets
from .data import Data, DefaultHyperparameters
from .models import MODELS
from .optimizers import linear_lr
from .reduce import GRADIENT_REDUCTIONS
from .settings import RunSettings, parse_weights

# Default number of batches prepared ahead: one takes the work off the step, the second evens out
# slow batches.
PREFETCH = 2


@dataclass(frozen=True)
class Config:
    """The options of a training run; None means the default of data set, model or machine.

    The fields down to `image_size` decide the result. A resumed run takes those that are None from
    its checkpoint. `scale_batch` and `scale_lr` multiply batch size and learning rate by the number
    of ranks.

    The other fields decide how the training runs, and are not in a checkpoint. `deterministic`
    restricts torch to algorithms that give the same bits every time, which costs time on a GPU and
    none on the CPU. `graph` replays the step as a CUDA graph, on one GPU; `compile` makes it one
    graph of torch.compile, by the backend that it names. `overlap` reduces gradients while the
    backward pass runs (default: yes, but not in a comparison, which measures the reduction).
    `prefetch` is the number of batches prepared ahead; by default 2 if files are
    decoded or a GPU is used, otherwise 0. `checkpoint` is written after every epoch, and at Ctrl-C
    or SIGTERM after the current step; `resume` names a checkpoint to continue, and `replay_shares`
    one whose measured shares are used again, step for step. Raises ValueError for a value out of
    range.

    >>> Config(prefetch=-1)
    Traceback (most recent call last):
    ValueError: prefetch must be at least 0 batches, not -1
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
    reduce: str = "pycollect"
    overlap: bool | None = None
    prefetch: int | None = None
    exact_times: bool = False
    graph: bool = False
    compile: bool | str = False
    deterministic: bool = False
    checkpoint: Path | str | None = None
    resume: Path | str | None = None
    replay_shares: Path | str | None = None
    log: Path | str | None = None
    plot: Path | str | None = None

    def __post_init__(self) -> None:
        if self.reduce not in GRADIENT_REDUCTIONS:
            known = ", ".join(GRADIENT_REDUCTIONS)
            raise ValueError(f"unknown reduction {self.reduce!r}; allowed are {known}")
        if self.prefetch is not None and self.prefetch < 0:
            raise ValueError(f"prefetch must be at least 0 batches, not {self.prefetch}")
        if self.checkpoint is not None:
            check_output_path("checkpoint", self.checkpoint, moved=True)
        if self.log is not None:
            check_output_path("log", self.log, streamed=True)
        if self.plot is not None:
            check_picture(self.plot)

    def batches_ahead(self, data: Data, devices: tuple[torch.device, ...]) -> int:
        """Return the number of batches to prepare ahead: `prefetch` or its default."""
        if self.prefetch is not None:
            return self.prefetch
        lazy = not isinstance(data.train, tuple)
        return PREFETCH if lazy or any(d.type == "cuda" for d in devices) else 0

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Config":
        """Return the config with these options by name; TypeError for an unknown name."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(options.keys() - known)
        if unknown:
            allowed = ", ".join(sorted(known))
            raise TypeError(f"unknown option {unknown[0]!r}; allowed are {allowed}")
        return cls(**options)

    def settings(self, data: Data | None, stored: Mapping[str, Any] | None = None) -> RunSettings:
        """Return the settings, None filled in; ValueError for a value or device out of range.

        Without data only the values are checked. `stored` is the checkpoint to resume.
        """
        known: Mapping[str, Any] = stored["settings"] if stored else {}

        def pick(name: str, default: Any) -> Any:
            asked = getattr(self, name)
            return known.get(name, default) if asked is None else asked

        given = pick("devices", None) if self.num_gpus is None else self.devices
        devices = ranks(given, self.num_gpus)
        model = self.model_name(data, known)
        defaults = data.defaults_for(model) if data else DefaultHyperparameters(1, 1.0, 1)
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
        values = {field.name: pick(field.name, field.default) for field in fields(RunSettings)}
        values |= {"devices": tuple(devices), **sizes, "model": model}
        values["weights"] = parse_weights(values["weights"])
        return RunSettings(**values)

    def model_name(self, data: Data | None, stored: Mapping[str, Any]) -> str:
        """Return the model's name, for a module its class name; ValueError if unknown."""
        if isinstance(self.model, nn.Module):
            return type(self.model).__name__
        name = self.model or stored.get("model") or (data.model if data else RunSettings.model)
        if name not in MODELS:
            what = f"unknown model {name!r}; allowed are {', '.join(MODELS)}"
            raise ValueError(f"{what}, and any torch.nn.Module")
        return str(name)

    def module(self, data: Data, settings: RunSettings) -> nn.Module:
        """Return a new model for the data, or the module that the user passed."""
        if isinstance(self.model, nn.Module):
            return self.model
        build = MODELS[settings.model]
        return build(data.image_shape[0], data.num_classes, settings.seed)

    def source(self, stored: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Return the arguments of `load_dataset` as plain values; None if the user passed a `Data`.

        Raises ValueError for arguments that `load_dataset` would refuse, and for a run to resume on
        the user's own data without that data.
        """
        if isinstance(self.data, Data):
            return None
        known: Mapping[str, Any] = {"name": "auto", "data_dir": "data", "image_size": None}
        if stored is not None and stored["source"] is not None:
            known = stored["source"]
        elif stored is not None and self.data is None:
            raise ValueError("the run used data of its caller: pass the same data to continue it")
        folder = None if self.data_dir is None else str(self.data_dir)
        asked = {"name": self.data, "data_dir": folder, "image_size": self.image_size}
        source = {**known, **{key: value for key, value in asked.items() if value is not None}}
        data_sets.check(source["name"], source["image_size"])
        return source


def ranks(devices: DeviceSpec, num_gpus: int | None) -> list[torch.device]:
    """Return one device per rank. A number is a number of GPUs, as in Dive into Deep Learning.

    Without any GPU a number means that many ranks on the CPU. Raises ValueError for more GPUs than
    there are, and if both arguments are given.

    >>> ranks("cpu*3", None)
    [device(type='cpu'), device(type='cpu'), device(type='cpu')]
    """
    if num_gpus is None and isinstance(devices, int) and not isinstance(devices, bool):
        devices, num_gpus = None, devices
    if num_gpus is None:
        return pc.devices(devices)
    if devices is not None:
        raise ValueError("pass either devices or num_gpus, not both")
    if num_gpus < 1:
        raise ValueError(f"num_gpus must be at least 1, not {num_gpus}")
    visible = torch.cuda.device_count()
    if visible == 0:
        return pc.devices(f"cpu*{num_gpus}")
    if num_gpus > visible:
        raise ValueError(
            f"num_gpus is {num_gpus}, and {visible} GPUs are visible; devices='cuda:0*{num_gpus}' "
            "puts several ranks on one"
        )
    return pc.devices("cuda:*")[:num_gpus]
