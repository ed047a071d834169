"""A prepared training run: data, settings and model are loaded and checked against each other."""

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import _C
from .._version import __version__
from . import checkpoint
from .config import Config
from .data import Data, count
from .datasets import load_dataset
from .loader import LoaderOptions
from .models import SIZE, LeNet
from .module_check import SingleValueCheck
from .settings import RunSettings, StepOptions, device_list
from .shares import check_strict, microbatches, shares_of

TITLES = {"lenet": "LeNet", "resnet18": "ResNet-18"}
# Settings that may differ when a run is resumed; for the devices only their kinds must be equal.
_FREE = ("epochs", "strict", "devices")


@dataclass(frozen=True)
class PreparedRun:
    """The model, data and options of a run; ValueError if they do not fit together."""

    data: Data
    settings: RunSettings
    config: Config
    module: nn.Module
    source: Mapping[str, Any] | None  # arguments of `load_dataset`, stored to resume
    stored: Mapping[str, Any] | None = None  # the checkpoint to resume
    shares: Mapping[str, Any] | None = None  # measured shares of a stored run, to replay
    backend: str | None = None  # of torch.distributed, if every rank is a process

    def __post_init__(self) -> None:
        self.data.check_test_image()
        if self.needs_threads and _C.is_rank_thread():
            raise ValueError(
                "batch statistics over all ranks need a thread for each, and this thread is a rank "
                "itself: train with a backend, or outside of the launch"
            )
        if self.config.reduce != "pycollect" and (self.needs_threads or self.backend is not None):
            raise ValueError(
                f"the reduction {self.config.reduce!r} sums over replicas of one process, and here "
                "each rank is a process or a thread: leave it out"
            )
        if self.config.graph:
            self._check_graph()
        if self.config.compile:
            self._check_compile()
        if isinstance(self.module, LeNet) and self.data.image_shape[-2:] != (SIZE, SIZE):
            height, width = self.data.image_shape[-2:]
            raise ValueError(
                f"LeNet takes images of {SIZE} x {SIZE}, and {self.data.name} has {height} x "
                f"{width}; choose the model resnet18, or for a folder the image size {SIZE}"
            )
        # `batches` also raises ValueError if drop_last leaves no batch.
        sizes = {len(batch) for batch in self.loading.batches(count(self.data.train))}
        if self.settings.strict:
            for size in sorted(sizes):
                check_strict(size, len(self.settings.devices), self.settings.microbatch)
        self._check_single_values(sizes)

    def _check_single_values(self, sizes: set[int]) -> None:
        """Raise ValueError before training if batch normalisation would fail on some batch."""
        settings = self.settings
        if settings.weights == "auto":
            return  # measured shares are not known before the run
        weights = settings.weights or [1.0] * len(settings.devices)
        single = SingleValueCheck(self.module, sync_batchnorm=settings.sync_batchnorm)
        for size in sorted(sizes):
            parts = microbatches(tuple(shares_of(size, weights)), settings.microbatch or size)
            single.check(parts, torch.zeros(0, *self.data.image_shape))

    def _check_graph(self) -> None:
        devices = self.settings.devices
        if len(set(devices)) > 1 or devices[0].type != "cuda":
            raise ValueError(
                f"a step is captured in a CUDA graph on one GPU, not on {device_list(devices)}; "
                "'cuda:0*2' puts two ranks on one"
            )
        if self.settings.weights == "auto" or self.settings.sync_batchnorm:
            raise ValueError(
                "a step with measured shares or synchronised batch statistics cannot be captured: "
                "leave out --graph"
            )
        if self.config.exact_times or self.backend is not None:
            raise ValueError(
                "a captured step has no parts to time, and needs all ranks in one process: leave "
                "out --graph, or --exact-times and --backend"
            )

    def _check_compile(self) -> None:
        self.step_options()
        if self.settings.weights == "auto" or self.config.exact_times:
            raise ValueError(
                "a compiled step has no parts and ranks to time: leave out --compile, or measured "
                "shares and --exact-times"
            )
        if self.config.graph or self.backend is not None:
            raise ValueError(
                "a compiled step needs all ranks in one process, and is no CUDA graph: leave out "
                "--compile, or --graph and --backend"
            )

    @cached_property
    def loading(self) -> LoaderOptions:
        """The batch options of training."""
        return LoaderOptions(
            self.settings.batch_size,
            seed=self.settings.seed,
            shuffle=self.settings.shuffle,
            drop_last=self.settings.drop_last,
            prefetch=self.config.batches_ahead(self.data, self.settings.devices),
        )

    def __str__(self) -> str:
        model = TITLES.get(self.settings.model, self.settings.model)
        return f"{model} on {self.data}: {self.settings}"

    @property
    def reducer(self) -> str:
        """The name of the gradient reduction for messages."""
        return self.config.reduce if self.backend is None else f"processes over {self.backend}"

    @property
    def needs_threads(self) -> bool:
        """Whether every rank must be a thread of this process: layers exchange statistics."""
        several = len(self.settings.devices) > 1
        return self.backend is None and self.settings.sync_batchnorm and several

    def identity(self) -> dict[str, Any]:
        """Return the values that must be equal for equal bits, as plain numbers and strings."""
        stored = {k: v for k, v in self.settings.stored().items() if k not in _FREE}
        return {
            "data": self.data.name,
            "training_examples": count(self.data.train),
            "image_shape": list(self.data.image_shape),
            "parameters": sum(p.numel() for p in self.module.parameters()),
            "kinds_of_devices": [device.type for device in self.settings.devices],
            **stored,
        }

    def described(self) -> dict[str, Any]:
        """Return all options and versions of the run, for the log."""
        return {
            **self.identity(),
            **{name: self.settings.stored()[name] for name in _FREE},
            "test_examples": count(self.data.test),
            "reduce": self.reducer,
            "prefetch": self.loading.prefetch,
            "init_from": self.config.init_from,
            "versions": {
                "pycollect": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }

    def step_options(self) -> StepOptions:
        """Return the options of a training step."""
        return StepOptions(
            microbatch=self.settings.microbatch,
            overlap=self.config.overlap is not False,
            sync_batchnorm=self.settings.sync_batchnorm,
            strict=self.settings.strict,
            exact_times=self.config.exact_times,
            compile=self.config.compile,
        )

    @contextmanager
    def repeatable(self) -> Iterator[None]:
        """Seed torch's generators and select deterministic algorithms; restore both at the end."""
        gpus = list(dict.fromkeys(d for d in self.settings.devices if d.type == "cuda"))
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(gpus))
            if self.config.deterministic:
                stack.enter_context(_deterministic_algorithms())
            torch.manual_seed(self.settings.seed)
            yield


@contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    """Restrict torch to algorithms that give the same bits every time."""
    # One of the two settings that make cuBLAS deterministic; cuBLAS reads it at its first use.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def prepare(config: Config, backend: str | None = None) -> PreparedRun:
    """Load the data and the model of a run, and check all options against them.

    Raises ValueError for a bad value, before any data is loaded; DatasetError if the data is not
    available; CheckpointError if the run cannot be resumed with these options.
    """
    stored = None if config.resume is None else checkpoint.load(config.resume)
    shares = None
    if config.replay_shares is not None:
        shares = _measured_shares(config.replay_shares)
        if config.weights not in (None, "auto"):
            raise ValueError("weights and measured shares to replay exclude each other: choose one")
        config = replace(config, weights="auto")
    # Check the values first. The default batch size depends on the data set, so without a given
    # batch size strictness is checked only after loading.
    (config if config.batch_size else replace(config, strict=None)).settings(None, stored)
    source = config.source(stored)
    if config.own_data:
        data = Data.of(config.data, config.test_data)
    else:
        assert source is not None
        data = load_dataset(**source)
        source["name"] = data.name if source["name"] == "auto" else source["name"]
    settings = config.settings(data, stored)
    module = config.module(data, settings)
    prepared = PreparedRun(data, settings, config, module, source, stored, shares, backend)
    found = checkpoint.differences(stored["identity"], prepared.identity()) if stored else []
    if found:
        raise checkpoint.CheckpointError(
            f"{config.resume} cannot be continued with other settings: it has {'; '.join(found)}; "
            "init_from (--init-from) starts a new run from its parameters"
        )
    return prepared


def _measured_shares(path: Path | str) -> dict[str, Any]:
    """Read the measured shares of a run from its checkpoint."""
    found = checkpoint.load(path)["run"]["engine"].get("auto")
    if found is None:
        raise checkpoint.CheckpointError(f"{path} holds no measured shares")
    return dict(found)
