"""The user's options of a run, from the command line or `train`, and their `RunSettings`.

Options that are not given come from the resumed checkpoint or from defaults; sizes are scaled.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pycollect as pc
from pycollect import _C
from pycollect.devices import DeviceSpec

from .._files import check_output_path, check_picture
from ..errors import shown
from . import datasets as data_sets
from .checkpoint import load_model
from .data import Data, DefaultHyperparameters
from .losses import linear_lr
from .models import MODELS
from .module_replication import replicate_module
from .reduce import GRADIENT_REDUCTIONS
from .settings import RunSettings, parse_weights

_INTS = ("batch_size", "num_gpus", "epochs", "seed", "microbatch", "image_size", "prefetch")
_NUMBERS = ("lr", "momentum", "weight_decay")
_FLAGS = (
    *("sync_batchnorm", "strict", "shuffle", "drop_last", "scale_batch", "scale_lr"),
    *("overlap", "exact_times", "graph", "deterministic"),
)
_PATHS = ("data_dir", "checkpoint", "resume", "init_from", "replay_shares", "log", "plot")
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
    or SIGTERM after the current step; `resume` names a checkpoint to continue, `init_from` one with
    whose parameters and buffers a new run starts, and `replay_shares` one whose measured shares are
    used again, step for step. Raises TypeError for a value of another type, ValueError for one out
    of range.

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
    data: Any = None  # a name, or what `Data.of` takes
    test_data: Any = None
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
    init_from: Path | str | None = None
    replay_shares: Path | str | None = None
    log: Path | str | None = None
    plot: Path | str | None = None

    def __post_init__(self) -> None:
        self._check_types()
        if self.resume is not None and self.init_from is not None:
            raise ValueError("resume goes on with a run and init_from starts one: choose one")
        if self.reduce not in GRADIENT_REDUCTIONS:
            known = ", ".join(GRADIENT_REDUCTIONS)
            raise ValueError(f"unknown reduction {shown(self.reduce)}; allowed are {known}")
        if self.prefetch is not None and self.prefetch < 0:
            raise ValueError(f"prefetch must be at least 0 batches, not {self.prefetch}")
        if self.checkpoint is not None:
            check_output_path("checkpoint", self.checkpoint, moved=True)
        if self.log is not None:
            check_output_path("log", self.log, streamed=True)
        if self.plot is not None:
            check_picture(self.plot)

    def _check_types(self) -> None:
        """Replace numbers by Python's own; TypeError for a value of another type."""

        def replace(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)  # the class is frozen

        given = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}
        for name in given.keys() & {*_INTS}:
            replace(name, _C.int_from(given[name], "train", name))
        for name in given.keys() & {*_FLAGS}:
            replace(name, _C.flag_from(given[name], "train", name))
        for name in given.keys() & {*_NUMBERS}:
            replace(name, _float(name, given[name]))
        if self.weights is not None:
            replace("weights", parse_weights(self.weights))
        if self.compile is not False and not isinstance(self.compile, str):
            replace("compile", _C.flag_from(self.compile, "train", "compile"))
        kinds: dict[str, tuple[Any, str]] = {
            **dict.fromkeys(_PATHS, (str | os.PathLike, "a path")),
            "reduce": (str, "a name"),
            "model": (str | nn.Module, "a name or an nn.Module"),
        }
        for name in given.keys() & kinds.keys():
            kind, wanted = kinds[name]
            if not isinstance(given[name], kind):
                raise TypeError(f"train: {name} is a {type(given[name]).__name__}; pass {wanted}")

    @property
    def own_data(self) -> bool:
        """Whether the data is the user's own, not the name of a data set."""
        return not (self.data is None or isinstance(self.data, str))

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
            raise TypeError(f"unknown option {shown(unknown[0])}; allowed are {allowed}")
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
        name = (
            self.model
            if self.model is not None
            else stored.get("model") or (data.model if data else RunSettings.model)
        )
        if name not in MODELS:
            what = f"unknown model {shown(name)}; allowed are {', '.join(MODELS)}"
            raise ValueError(f"{what}, and any torch.nn.Module")
        return str(name)

    def module(self, data: Data, settings: RunSettings) -> nn.Module:
        """Return a new model for the data, or the module that the user passed.

        With `init_from` it has the parameters and buffers of that checkpoint. Raises ValueError for
        images that the named model does not take, CheckpointError for those of another model.
        """
        if isinstance(self.model, nn.Module):
            module = self.model
            first = next(module.parameters(), torch.empty(0))
            if self.init_from is not None:  # the user's own module stays as it is
                (module,) = replicate_module(module, [first.device])
        else:
            image = data.first_image
            if image.dim() != 3 or image.dtype != torch.float32:
                kind = str(image.dtype).removeprefix("torch.")
                raise ValueError(
                    f"the model {settings.model} takes float32 images [C, H, W], and {data.name} "
                    f"has {kind} {list(image.shape)}: convert them, or pass a model of your own"
                )
            module = MODELS[settings.model](image.shape[0], data.num_classes, settings.seed)
        if self.init_from is not None:
            load_model(self.init_from, module)
        return module

    def source(self, stored: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Return the arguments of `load_dataset` as plain values; None if the user passed a `Data`.

        Raises ValueError for arguments that do not belong to the data, and for a run to resume on
        the user's own data without that data.
        """
        if self.own_data:
            for name in ("data_dir", "image_size"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is for data by name, not for data of your own")
            return None
        if self.test_data is not None:
            raise ValueError("test_data goes with data of your own; data by name has a test set")
        known: Mapping[str, Any] = {"name": "auto", "data_dir": None, "image_size": None}
        if stored is not None and stored["source"] is not None:
            known = stored["source"]
        elif stored is not None and self.data is None:
            raise ValueError("the run used data of its caller: pass the same data to continue it")
        folder = None if self.data_dir is None else str(self.data_dir)
        asked = {"name": self.data, "data_dir": folder, "image_size": self.image_size}
        source = {**known, **{key: value for key, value in asked.items() if value is not None}}
        # With the digits in a checkpoint, the folder that was asked for may be that of "auto".
        data_sets.check(source["name"], folder if self.data else None, source["image_size"])
        if source["name"] == "digits":  # they have no folder; the stored run may have had one
            source["data_dir"] = None
        return source


def _float(name: str, number: Any) -> float:
    """Return a number, or a tensor or array of one, as Python's; TypeError for anything else."""
    try:
        if not isinstance(number, bool) and hasattr(number, "__float__"):
            return float(number)
    except OverflowError:
        raise ValueError(f"train: {name} does not fit a float") from None
    except (TypeError, ValueError, RuntimeError):  # an array of several numbers
        pass
    raise TypeError(f"train: {name} is a {type(number).__name__}; pass a number")


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
