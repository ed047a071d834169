"""The settings that decide the result of a run (model, devices, hyperparameters, seed, shares).

Bad values raise ValueError here, before any data is loaded or downloaded.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import torch

from ..errors import shown
from .shares import check_strict, shares_of

Weights: TypeAlias = "tuple[float, ...] | Literal['auto'] | None"
# Default bucket size. About one bucket is still to be reduced when the backward pass ends, so
# buckets are small; but a launch costs a GPU microseconds. LeNet has one bucket, ResNet-18 seven.
BUCKET_BYTES = 4 << 20


@dataclass(frozen=True)
class StepOptions:
    """Options of a training step, for `ReplicaTrainer`; ValueError for a value out of range.

    `microbatch` is the number of examples of a microbatch over all ranks, at least 1; the gradients
    of the microbatches are accumulated. None, the default, trains on the whole batch at once.
    `overlap` (default: on) reduces gradients in buckets of about `bucket_bytes` (at least 1,
    default 4 MiB) while the backward pass still runs; the bits are the same without. The other
    options are off by default. `sync_batchnorm` takes batch statistics over all ranks. `strict`
    refuses a batch that the number of ranks does not divide, as BatchFlow does. `exact_times`
    waits for the devices wherever time is taken, so the host can no longer issue work ahead of a
    GPU. `compile` runs every step after the first as one graph of torch.compile, by the backend
    that it names, or "inductor" for True, and reduces after the backward pass, whatever `overlap`
    is. It excludes `microbatch` and `sync_batchnorm`.

    >>> StepOptions(microbatch=0)
    Traceback (most recent call last):
    ValueError: a microbatch must have at least 1 example, not 0
    """

    microbatch: int | None = None
    overlap: bool = True
    bucket_bytes: int = BUCKET_BYTES
    sync_batchnorm: bool = False
    strict: bool = False
    exact_times: bool = False
    compile: bool | str = False

    def __post_init__(self) -> None:
        if self.compile and (self.microbatch is not None or self.sync_batchnorm):
            what = "batch statistics over all ranks" if self.sync_batchnorm else "microbatches"
            raise ValueError(f"a step with {what} is not one graph: leave out compile")
        if self.microbatch is not None and self.microbatch < 1:
            raise ValueError(f"a microbatch must have at least 1 example, not {self.microbatch}")
        if self.bucket_bytes < 1:
            raise ValueError(f"a bucket must have at least 1 byte, not {self.bucket_bytes}")

    @property
    def backend(self) -> str | None:
        """The backend of torch.compile, or None."""
        return (
            self.compile if isinstance(self.compile, str) else "inductor" if self.compile else None
        )


@dataclass(frozen=True)
class RunSettings:
    """All values that decide the result of a run on given data; ValueError if out of range.

    `devices` has a device for each rank, at least one. `batch_size` and `epochs` are at least 1;
    the learning rate `lr` is finite and above 0. `seed`, from 0 to 2**63 - 1 (default 0), is that
    of initialisation and order. `model` is a name in `MODELS`, or the class name of another module
    (default "lenet"). `momentum`, from 0 to below 1, and `weight_decay`, at least 0, are those of
    SGD (default 0).

    `weights` divide a batch: one number per rank, at least 0 and not all 0, "auto" for shares by
    measured throughput, or None (the default) for even shares. `microbatch` is the number of
    examples whose gradients are computed at a time, at least 1, or None (the default) for all.
    `batch_size` and `microbatch` count the examples of all ranks together. `sync_batchnorm` takes
    batch statistics over all ranks, and excludes "auto". `strict` refuses sizes that the number of
    ranks does not divide. `shuffle` is on by default; `sync_batchnorm`, `strict` and `drop_last`,
    which leaves out a smaller last batch, are off.

    >>> RunSettings((torch.device("cpu"),), batch_size=64, lr=0.3, epochs=0)
    Traceback (most recent call last):
    ValueError: the number of epochs must be at least 1, not 0
    """

    devices: tuple[torch.device, ...]
    batch_size: int
    lr: float
    epochs: int
    seed: int = 0
    model: str = "lenet"
    momentum: float = 0.0
    weight_decay: float = 0.0
    weights: Weights = None
    microbatch: int | None = None
    sync_batchnorm: bool = False
    strict: bool = False
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError("there must be at least one device to train on")
        for name, value in (("batch size", self.batch_size), ("number of epochs", self.epochs)):
            if value < 1:
                raise ValueError(f"the {name} must be at least 1, not {value}")
            if value >= 2**63:
                raise ValueError(f"the {name} must be at most {2**63 - 1}, not {value}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"the learning rate must be a positive number, not {self.lr:g}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"the momentum must be from 0 to below 1, not {self.momentum:g}")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ValueError(f"the weight decay must be at least 0, not {self.weight_decay:g}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"the seed must be from 0 to 2**63 - 1, not {self.seed}")
        self._check_shares()

    def _check_shares(self) -> None:
        world = len(self.devices)
        StepOptions(microbatch=self.microbatch)
        if self.strict:
            check_strict(self.batch_size, world, self.microbatch)
        if self.weights == "auto" and self.sync_batchnorm:
            raise ValueError(
                "measured shares need separate times of the ranks, which wait for each other if "
                "batch statistics are taken over all ranks: pass weights such as 80,20"
            )
        if self.weights is None or self.weights == "auto":
            return
        if len(self.weights) != world:
            raise ValueError(
                f"there must be one weight per rank: {len(self.weights)} weights for {world} ranks"
            )
        shares_of(1, self.weights)

    def __str__(self) -> str:
        parts = [f"batch size {self.batch_size}"]
        parts += [f"microbatch {self.microbatch}"] if self.microbatch else []
        parts += [f"lr {self.lr:g}"]
        parts += [f"momentum {self.momentum:g}"] if self.momentum else []
        parts += [f"weight decay {self.weight_decay:g}"] if self.weight_decay else []
        parts += [f"epochs {self.epochs}, seed {self.seed}"]
        parts += ["batch statistics of all ranks"] if self.sync_batchnorm else []
        parts += [f"weights {weights_text(self.weights)}"] if self.weights else []
        return f"{', '.join(parts)}, on {device_list(self.devices)}"

    def stored(self) -> dict[str, Any]:
        """Return the settings for a checkpoint, as plain numbers and strings."""
        return {**asdict(self), "devices": [str(device) for device in self.devices]}


def weights_text(weights: Weights) -> str:
    """Format weights as the command line accepts them.

    >>> weights_text((80.0, 20.0)), weights_text("auto")
    ('80,20', 'auto')
    """
    if weights is None or isinstance(weights, str):
        return weights or "none"
    return ",".join(f"{weight:g}" for weight in weights)


def parse_weights(text: str | Sequence[float] | None) -> Weights:
    """Parse weights: "auto", "80,20", or a sequence of numbers; ValueError for anything else.

    >>> parse_weights("80,20")
    (80.0, 20.0)
    """
    if text is None or (isinstance(text, str) and text == "auto"):
        return None if text is None else "auto"
    try:
        if isinstance(text, Mapping | Set):  # its order is not that of the ranks
            raise TypeError
        return tuple(map(float, text.split(",") if isinstance(text, str) else text))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"weights are 'auto' or one number per rank such as '80,20', not {shown(text)}"
        ) from error


def device_list(devices: Sequence[torch.device]) -> str:
    """Format the devices in rank order.

    >>> device_list([torch.device("cpu"), torch.device("cuda:0")])
    '[cpu, cuda:0]'
    """
    return f"[{', '.join(str(device) for device in devices)}]"
