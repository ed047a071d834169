# ruff: noqa: RUF009  (the helper of the fields returns dataclasses.field)
"""The options of a training run, each stated once: as a field of `Options`.

The fields make the command line, the checks of values, the documentation of `train`, and the
settings in a checkpoint.
"""

import argparse
import math
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

import pycollect as pc
from pycollect import _C
from pycollect.devices import DeviceSpec

from .._files import check_output_path, check_picture
from ..errors import shown
from .data import Data, DefaultHyperparameters
from .datasets import DIGITS, FASHION_MNIST, IMAGE_SIZE, NAMES
from .losses import linear_lr
from .models import MODELS
from .reduce import GRADIENT_REDUCTIONS

FilePath: TypeAlias = Path | str | None
Weights: TypeAlias = tuple[float, ...] | Literal["auto"] | None
# Default number of batches prepared ahead: one takes the work off the step, the second evens out
# slow batches.
PREFETCH = 2
# Titles in --help. Options of the last three decide how a run runs; the others, what results.
GROUPS = ("ranks", "model and data", "training", "output", "reduction", "speed")
# What argparse makes of a word of the command line, and its placeholder, by the type of the field.
_WORDS: Mapping[Any, Mapping[str, Any]] = {
    int: {"type": int, "metavar": "N"},
    int | None: {"type": int, "metavar": "N"},
    float: {"type": float},
    FilePath: {"type": Path, "metavar": "FILE"},
}


def _converted(name: str, kind: Any, value: Any) -> Any:
    """Return a value as the type of its field, numbers as Python's; TypeError for another type."""
    wanted = {FilePath: "a path", str: "a name", str | nn.Module: "a name or an nn.Module"}
    if kind in (int, int | None):
        return _C.int_from(value, "train", name)
    if kind in (bool, bool | None) or (kind == bool | str and not isinstance(value, str)):
        return _C.flag_from(value, "train", name)
    if kind == Weights:
        return _weights(value)
    if kind is float:
        return _number(name, value)
    if kind in wanted and not isinstance(value, str | os.PathLike if kind == FilePath else kind):
        raise TypeError(f"train: {name} is a {type(value).__name__}; pass {wanted[kind]}")
    return list(value) if isinstance(value, Iterator) else value  # it is read more than once


def _number(name: str, value: Any) -> float:
    try:
        if not isinstance(value, bool) and hasattr(value, "__float__"):
            return float(value)
    except OverflowError:
        raise ValueError(f"train: {name} does not fit a float") from None
    except (TypeError, ValueError, RuntimeError):  # an array of several numbers
        pass
    raise TypeError(f"train: {name} is a {type(value).__name__}; pass a number")


def _weights(value: Any) -> Weights:
    if isinstance(value, str) and value == "auto":
        return "auto"
    try:
        if isinstance(value, Mapping | Set):  # its order is not that of the ranks
            raise TypeError
        return tuple(map(float, value.split(",") if isinstance(value, str) else value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"weights are 'auto' or one number per rank such as '80,20', not {shown(value)}"
        ) from error


def _must(be: str, holds: Callable[[Any], bool]) -> Callable[[Any], None]:
    """Return a check that raises ValueError with this sentence and the value."""

    def check(value: Any) -> None:
        if not holds(value):
            raise ValueError(f"{be}, not {f'{value:g}' if isinstance(value, float) else value}")

    return check


def _usual(name: str) -> str:
    digits, fashion = getattr(DIGITS, name), getattr(FASHION_MNIST, name)
    return f"for LeNet {digits} for the digits, {fashion} for Fashion-MNIST"


def _option(group: str, text: str, default: Any = None, *, usual: str = "", stored: bool = False,
            python: str = "", shell: str = "", check: Callable[[Any], None] | None = None,
            **argument: Any) -> Any:  # fmt: skip
    """Return the field of an option, in which None stands for its default.

    `text` is its documentation, followed by `python` for `train` and by `shell` for --help, and by
    its default, which `usual` describes. A `stored` option decides the result: it is in a
    checkpoint, and compared if the run is resumed. `check` raises ValueError for a bad value.
    `argument` is for argparse; the command line has no option without a group.
    """
    usual = usual or ("yes" if default is True else str(default or ""))
    end = f" (default: {usual})" if usual else ""
    texts = {"train": text + python + end, "help": text + shell + end}
    metadata = {"group": group, "default": default, "stored": stored, "check": check, **texts}
    metadata["argument"] = argument
    return field(default=None if stored else default, compare=stored, metadata=metadata)


@dataclass(frozen=True)
class Options:
    """The options of a run: those that a user asks for, and filled in, those that a run has.

    The fields are described by `train`. An option that is not given is None, or has its default if
    it is not stored in checkpoints. `resolved` fills in the others: `devices` has a device for each
    rank, `batch_size` and `lr` are scaled, `model` and `data` are names; the types of the fields
    are these. Options are equal if everything that is stored is equal. Raises TypeError for a value
    of another type, ValueError for one out of range.

    >>> Options(epochs=0)
    Traceback (most recent call last):
    ValueError: the number of epochs must be at least 1, not 0
    """

    # fmt: off
    devices: tuple[torch.device, ...] = _option(
        "ranks", "one rank per device, e.g. 'cpu*4', 'cuda:*', 'cuda:0*2' or cuda:0 cpu",
        usual="every CUDA device, else two ranks on the CPU", stored=True, nargs="+",
        metavar="SPEC", python="; all that `pycollect.devices` takes, or a number of GPUs, as in "
        "Dive into Deep Learning (of ranks on the CPU where there is no GPU)")
    num_gpus: int | None = _option(
        "ranks", "the first N GPUs, or N ranks on the CPU where there is no GPU",
        python=", in place of `devices`")
    batch_size: int = _option(
        "training", "examples of all ranks together, at least 1", usual=_usual("batch_size"),
        check=_must("the batch size must be at least 1", lambda n: n >= 1), stored=True)
    lr: float = _option(
        "training", "learning rate on the mean loss, above 0", usual=_usual("lr"), stored=True,
        check=_must("the learning rate must be a positive number", lambda x: 0 < x < math.inf),
        metavar="RATE")
    epochs: int = _option(
        "training", "passes over the training set, at least 1", usual=_usual("epochs"),
        check=_must("the number of epochs must be at least 1", lambda n: n >= 1), stored=True)
    scale_batch: bool = _option(
        "training", "multiply the batch size by the number of ranks", False)
    scale_lr: bool = _option(
        "training", "multiply the learning rate by the number of ranks", False)
    seed: int = _option(
        "training", "seed of initialisation and order, from 0 to 2**63 - 1; the same seed gives "
        "the same bits", 0, usual="0", stored=True,
        check=_must("the seed must be from 0 to 2**63 - 1", lambda n: n >= 0))
    model: str | nn.Module = _option(
        "model and data", "the network", "lenet", usual="resnet18 for a folder, else lenet",
        python=": a name in `MODELS`, or any nn.Module", stored=True, choices=tuple(MODELS))
    momentum: float = _option(
        "training", "momentum of SGD, from 0 to below 1", 0, usual="0", stored=True, metavar="M",
        check=_must("the momentum must be from 0 to below 1", lambda x: 0 <= x < 1))
    weight_decay: float = _option(
        "training", "weight decay, at least 0", 0, usual="0", stored=True, metavar="D",
        check=_must("the weight decay must be at least 0", lambda x: 0 <= x < math.inf))
    weights: Weights = _option(
        "ranks", "shares of a batch per rank, e.g. 80,20 for a fast and a slow device, or auto: by "
        "measured throughput", usual="even shares", stored=True, metavar="W,W,...",
        python="; as text, or a number for each rank, at least 0 and not all 0")
    shards: int | None = _option(
        "ranks", "always divide a batch into N parts, which the ranks share evenly: any number of "
        "ranks has the same bits, and may continue a run",
        check=_must("there must be at least 1 shard", lambda n: n >= 1), stored=True,
        python="; each rank has a power of two of them, and buffers and random states belong to a "
        "part", shell="; each rank has a power of two of them")
    microbatch: int | None = _option(
        "training", "accumulate the gradients of N examples of all ranks at a time, to save memory",
        check=_must("a microbatch must have at least 1 example", lambda n: n >= 1), stored=True,
        python=", at least 1")
    sync_batchnorm: bool = _option(
        "training", "batch statistics over all ranks, not with measured shares", False, stored=True)
    strict: bool = _option(
        "ranks", "refuse a batch or microbatch that the ranks do not divide", False, stored=True)
    shuffle: bool = _option(
        "model and data", "shuffle the examples by seed and epoch", True, stored=True)
    drop_last: bool = _option(
        "model and data", "leave out the last batch of an epoch if it is smaller", False,
        stored=True)
    data: Any = _option(
        "model and data", "auto: Fashion-MNIST if it is in --data-dir or can be downloaded (needs "
        "torchvision and a network), else the handwritten digits of scikit-learn; folder: the "
        "images in --data-dir, which has train/ and val/ or test/ with one folder per class",
        usual="auto", choices=NAMES, python="; digits or fashion-mnist alone, as in "
        "`load_dataset`; or examples of your own: a map-style data set, a pair of tensors (images "
        "and labels), or a `Data`")
    test_data: Any = _option(
        "", "test set of your own examples; without it the accuracy is that of training")
    data_dir: FilePath = _option(
        "model and data", "folder of Fashion-MNIST, also for its download, or the image folder",
        usual="data", metavar="DIR")
    image_size: int | None = _option(
        "model and data", "height and width to which a folder's images are scaled",
        usual=f"{IMAGE_SIZE}", metavar="PIXELS")
    checkpoint: FilePath = _option(
        "output", "write the state to FILE after every epoch, and at Ctrl-C or SIGTERM",
        check=partial(check_output_path, "checkpoint", moved=True),
        python=" after the current step")
    resume: FilePath = _option(
        "output", "continue the run of a checkpoint, with its options unless they are given")
    init_from: FilePath = _option(
        "output", "start a new run with the parameters and buffers of a checkpoint",
        python="; ranks, learning rate and all else may differ. `load_model` does the same for a "
        "module of yours")
    plot: FilePath = _option(
        "output", "draw loss, accuracy and the time per step (.png, .svg or .pdf)",
        check=check_picture)
    log: FilePath = _option(
        "output", "write JSON lines: the start, every step, every epoch, the end",
        shell=" (under torchrun it is --log-file)",
        check=partial(check_output_path, "log", streamed=True))
    reduce: str = _option(
        "reduction", "naive: Dive into Deep Learning's loop over the tensors", "pycollect",
        python="; a name in `GRADIENT_REDUCTIONS`", choices=tuple(GRADIENT_REDUCTIONS))
    overlap: bool | None = _option(
        "speed", "reduce the gradients of the last layers while the backward pass still computes "
        "the first; the bits are the same", usual="yes, but not in a comparison")
    prefetch: int = _option(
        "speed", "batches to prepare ahead, 0 for none; the bits are the same",
        usual=f"{PREFETCH} if files are decoded or a GPU is used, else 0",
        check=_must("prefetch must be at least 0 batches", lambda n: n >= 0))
    graph: bool = _option(
        "speed", "capture the whole step in a CUDA graph, with all ranks on one GPU", False)
    compile: bool | str = _option(
        "speed", "run the steps after the first as one graph of torch.compile", False, nargs="?",
        const=True, metavar="BACKEND", shell=" (alone: by inductor)",
        python="; True, or the name of one of its backends")
    deterministic: bool = _option(
        "speed", "use only algorithms of torch that give the same bits every time; GPUs need it",
        False)
    exact_times: bool = _option(
        "speed", "wait for the GPUs at every time measurement, so that a step's times are exact",
        False)
    # fmt: on

    def __post_init__(self) -> None:
        for option in fields(self):
            value, check = getattr(self, option.name), option.metadata["check"]
            given = value is not None
            value = _converted(option.name, option.type, value) if given else option.default
            object.__setattr__(self, option.name, value)  # the class is frozen
            if check is not None and value is not None:
                check(value)
        if self.reduce not in GRADIENT_REDUCTIONS:
            known = ", ".join(GRADIENT_REDUCTIONS)
            raise ValueError(f"unknown reduction {shown(self.reduce)}; allowed are {known}")
        if self.resume is not None and self.init_from is not None:
            raise ValueError("resume goes on with a run and init_from starts one: choose one")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Options":
        """Return the options with these names; TypeError for an unknown name."""
        known = {option.name for option in fields(cls)}
        unknown = sorted(options.keys() - known)
        if unknown:
            allowed = ", ".join(sorted(known))
            raise TypeError(f"unknown option {shown(unknown[0])}; allowed are {allowed}")
        return cls(**options)

    @classmethod
    def add_arguments(cls, parser: Any, group: str) -> None:
        """Add the flags of a group to an argparse parser, or to a group of it."""
        for option in (option for option in fields(cls) if option.metadata["group"] == group):
            about, argument = option.metadata, dict(_WORDS.get(option.type, {}))
            if option.type in (bool, bool | None):  # a stored option may be given either way
                both = option.default is None
                argument["action"] = argparse.BooleanOptionalAction if both else "store_true"
            # torchrun takes a script's --log as an abbreviation of its own --log-dir.
            flags = [f"--{option.name.replace('_', '-')}", *["--log-file"][option.name != "log" :]]
            parser.add_argument(*flags, help=about["help"], **argument | about["argument"])

    @classmethod
    def documentation(cls) -> str:
        """Return what every option means, as paragraphs for the documentation of `train`."""
        result = ["Options that decide the result:", ""]
        how = ["", "Options that decide how the training runs, and are not in a checkpoint:", ""]
        for option in fields(cls):
            text = f"{option.name}: {option.metadata['train']}".replace("--data-dir", "data_dir")
            entry = textwrap.fill(text, 96, subsequent_indent="    ")
            (how if option.metadata["group"] in GROUPS[3:] else result).append(entry)
        return "\n".join(result + how)

    def resolved(self, data: Data | None, stored: Mapping[str, Any] | None = None) -> "Options":
        """Return the options with None filled in, from the checkpoint to resume or by defaults.

        Without data its own defaults are 1, to check the other values before it is loaded. Raises
        ValueError for a model or device that does not exist.
        """
        known: Mapping[str, Any] = stored["settings"] if stored else {}
        model = self.model
        if not isinstance(model, nn.Module):
            if model is None:
                model = known.get("model") or (data.model if data else "lenet")
            if model not in MODELS:
                what = f"unknown model {shown(model)}; allowed are {', '.join(MODELS)}"
                raise ValueError(f"{what}, and any torch.nn.Module")
        name = model if isinstance(model, str) else type(model).__name__
        usual = data.defaults_for(name) if data else DefaultHyperparameters(1, 1.0, 1)
        values: dict[str, Any] = {}
        for option in (option for option in fields(self) if option.metadata["stored"]):
            asked = getattr(self, option.name)
            default = getattr(usual, option.name, option.metadata["default"])
            values[option.name] = known.get(option.name, default) if asked is None else asked
        spec = values["devices"] if self.num_gpus is None else self.devices
        devices = tuple(ranks(spec, self.num_gpus))
        if values["shards"] and (self.scale_batch or self.scale_lr):
            raise ValueError(
                "with shards the number of ranks changes nothing, so nothing can be scaled by it: "
                "leave out scale_batch and scale_lr"
            )
        if self.scale_batch:
            size = usual.batch_size if self.batch_size is None else self.batch_size
            values["batch_size"] = size = size * len(devices)
            if size >= 2**63:
                raise ValueError(f"the batch size must be at most {2**63 - 1}, not {size}")
        if self.scale_lr:
            lr = usual.lr if self.lr is None else self.lr
            values["lr"] = linear_lr(lr, batch_size=len(devices), base_batch_size=1)
        if self.prefetch is None:
            decoded = data is not None and not isinstance(data.train, tuple)
            ahead = decoded or any(device.type == "cuda" for device in devices)
            values["prefetch"] = PREFETCH if ahead else 0
        values |= {"devices": devices, "model": name, "data": data.name if data else None}
        done = {"num_gpus": None, "scale_batch": False, "scale_lr": False, "test_data": None}
        return replace(self, **values | done)

    def __str__(self) -> str:
        given = self.weights or ()
        weights = given if isinstance(given, str) else ",".join(f"{weight:g}" for weight in given)
        parts = [f"batch size {self.batch_size}"]
        parts += [f"{self.shards} shards"] if self.shards else []
        parts += [f"microbatch {self.microbatch}"] if self.microbatch else []
        parts += [f"lr {self.lr:g}"]
        parts += [f"momentum {self.momentum:g}"] if self.momentum else []
        parts += [f"weight decay {self.weight_decay:g}"] if self.weight_decay else []
        parts += [f"epochs {self.epochs}, seed {self.seed}"]
        parts += ["batch statistics of all ranks"] if self.sync_batchnorm else []
        parts += [f"weights {weights}"] if weights else []
        return f"{', '.join(parts)}, on {device_list(self.devices)}"

    def stored(self) -> dict[str, Any]:
        """Return the options that decide the result, for a checkpoint, as plain values."""
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata["stored"]}
        return {**kept, "devices": [str(device) for device in self.devices]}


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


def device_list(devices: Sequence[torch.device]) -> str:
    """Format the devices in rank order.

    >>> device_list([torch.device("cpu"), torch.device("cuda:0")])
    '[cpu, cuda:0]'
    """
    return f"[{', '.join(map(str, devices))}]"
