"""A prepared training run: data, model and options are loaded and checked against each other."""

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .. import _C
from .._version import __version__
from . import checkpoint, datasets
from .compiled_step import check_graph
from .data import Data, count
from .fixed_shards import check_shards
from .loader import batch_indices
from .models import MODELS, SIZE, LeNet
from .module_check import SingleValueCheck
from .module_replication import replicate_module
from .options import Options, device_list
from .shares import check_strict, microbatches, shares_of

TITLES = {"lenet": "LeNet", "resnet18": "ResNet-18"}
# Stored options that may differ in a resumed run; of the devices only the kinds must be equal.
_FREE = ("epochs", "strict", "devices")


@dataclass(frozen=True)
class PreparedRun:
    """The model, data and filled-in options of a run; ValueError if they do not fit together.

    Options that exclude each other without regard to the data are refused before, by `prepare`.
    """

    data: Data
    options: Options
    module: nn.Module
    source: Mapping[str, Any] | None  # arguments of `load_dataset`, stored to resume
    stored: Mapping[str, Any] | None = None  # the checkpoint to resume
    backend: str | None = None  # of torch.distributed, if every rank is a process

    def __post_init__(self) -> None:
        options, shape, name = self.options, self.data.image_shape, self.data.name
        self.data.check_test_image()
        if isinstance(self.module, LeNet) and shape[-2:] != (SIZE, SIZE):
            raise ValueError(
                f"LeNet takes images of {SIZE} x {SIZE}, and {name} has "
                f"{' x '.join(map(str, shape[-2:]))}; choose the model resnet18, or for a folder "
                f"the image size {SIZE}"
            )
        world, shards = len(options.devices), options.shards
        if options.strict:
            check_strict(options.batch_size, world, options.microbatch, shards)
        single = SingleValueCheck(self.module, sync_batchnorm=options.sync_batchnorm)
        # `batch_indices` also raises ValueError if drop_last leaves no batch.
        for size in sorted({len(b) for b in batch_indices(options, count(self.data.train))}):
            if options.strict:
                check_strict(size, world, options.microbatch, shards)
            if options.weights != "auto":  # measured shares are not known before the run
                shares = tuple(shares_of(size, options.weights or [1.0] * (shards or world)))
                parts = microbatches(shares, options.microbatch or size)
                single.check(parts, torch.zeros(0, *shape))

    def __str__(self) -> str:
        model = str(self.options.model)
        return f"{TITLES.get(model, model)} on {self.data}: {self.options}"

    @property
    def reducer(self) -> str:
        """The name of the gradient reduction for messages."""
        return f"processes over {self.backend}" if self.backend else self.options.reduce

    @property
    def needs_threads(self) -> bool:
        """Whether every rank must be a thread of this process: layers exchange statistics."""
        return self.backend is None and needs_group(self.options)

    def identity(self) -> dict[str, Any]:
        """Return the values that must be equal for equal bits, as plain numbers and strings."""
        kinds = [device.type for device in self.options.devices]
        return {
            "data": self.data.name,
            "training_examples": count(self.data.train),
            "image_shape": list(self.data.image_shape),
            "parameters": sum(p.numel() for p in self.module.parameters()),
            "kinds_of_devices": sorted(set(kinds)) if self.options.shards else kinds,
            **{k: v for k, v in self.options.stored().items() if k not in _FREE},
        }

    def described(self) -> dict[str, Any]:
        """Return all options and versions of the run, for the log."""
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        return {
            **self.identity(),
            **self.options.stored(),
            "test_examples": count(self.data.test),
            "reduce": self.reducer,
            "prefetch": self.options.prefetch,
            "init_from": self.options.init_from,
            "versions": {"pycollect": __version__, **versions},
        }

    @contextmanager
    def repeatable(self) -> Iterator[None]:
        """Seed torch's generators and select deterministic algorithms; restore both at the end."""
        gpus = list(dict.fromkeys(d for d in self.options.devices if d.type == "cuda"))
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(gpus))
            if self.options.deterministic:
                before = torch.are_deterministic_algorithms_enabled()
                warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
                stack.callback(torch.use_deterministic_algorithms, before, warn_only=warn_only)
                # cuBLAS needs this for the same, and reads it at its first use.
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                torch.use_deterministic_algorithms(True)
            torch.manual_seed(self.options.seed)
            yield


def needs_group(options: Options) -> bool:
    """Return whether the ranks take batch statistics together, each with its own forward pass."""
    return options.sync_batchnorm and len(options.devices) > 1


def check_combination(options: Options, backend: str | None) -> None:
    """Raise ValueError for filled-in options that exclude each other; needs no data."""
    _check_shards(options, backend)
    devices, auto, sync = options.devices, options.weights == "auto", options.sync_batchnorm
    given = None if options.weights == "auto" else options.weights
    weights = [1.0] * len(devices) if given is None else given
    one_gpu = len(set(devices)) == 1 and devices[0].type == "cuda"
    exact, graph, compiled = options.exact_times, options.graph, options.compile
    refused = (
        (auto and sync, "measured shares need separate times of the ranks, which wait for each "
         "other if batch statistics are taken over all ranks: pass weights such as 80,20"),
        (len(weights) != len(devices), "there must be one weight per rank: "
         f"{len(weights)} weights for {len(devices)} ranks"),
        (not backend and needs_group(options) and _C.is_rank_thread(), "batch statistics over all "
         "ranks need a thread for each, and this thread is a rank itself: train with a backend, or "
         "outside of the launch"),
        (options.reduce != "pycollect" and (backend or needs_group(options)),
         f"the reduction {options.reduce!r} sums over replicas of one process, and here each rank "
         "is a process or a thread: leave it out"),
        (graph and not one_gpu, "a step is captured in a CUDA graph on one GPU, not on "
         f"{device_list(devices)}; 'cuda:0*2' puts two ranks on one, and on the CPU --compile "
         "makes one graph of the step"),
        (graph and (auto or sync), "a step with measured shares or synchronised batch statistics "
         "cannot be captured: leave out --graph"),
        (graph and (exact or backend), "a captured step has no parts to time, and needs all ranks "
         "in one process: leave out --graph, or --exact-times and --backend"),
        (compiled and any(device.type != "cpu" for device in devices), "a step is compiled for "
         f"ranks on the CPU, not on {device_list(devices)}; on one GPU --graph captures it"),
        (compiled and (auto or exact), "a compiled step has no parts and ranks to time: leave out "
         "--compile, or measured shares and --exact-times"),
        (compiled and (graph or backend), "a compiled step needs all ranks in one process, and is "
         "no CUDA graph: leave out --compile, or --graph and --backend"),
    )  # fmt: skip
    for wrong, why in refused:
        if wrong:
            raise ValueError(why)
    shares_of(1, weights)
    check_graph(options.microbatch, sync, compiled)
    if options.strict:
        check_strict(options.batch_size, len(devices), options.microbatch, options.shards)


def _check_shards(options: Options, backend: str | None) -> None:
    """Raise ValueError for options that shards exclude."""
    if options.shards is None:
        return
    names = ("weights", "microbatch", "graph", "compile")
    given = [name for name in names if getattr(options, name)]
    given += ["reduce"] * (options.reduce != "pycollect") + ["overlap"] * bool(options.overlap)
    if given:
        raise ValueError(
            "shards are even, computed one after the other, and added by a tree: leave out "
            f"{' and '.join(given)}, or the shards"
        )
    if backend not in (None, "pycollect"):
        raise ValueError(f"shards are added in tree order: choose pycollect instead of {backend}")
    check_shards(options.shards, len(options.devices), alone=options.sync_batchnorm)


def _source(asked: Options, stored: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the arguments of `load_dataset` as plain values; None for the user's own data."""
    if not (asked.data is None or isinstance(asked.data, str)):
        for name in ("data_dir", "image_size"):
            if getattr(asked, name) is not None:
                raise ValueError(f"{name} is for data by name, not for data of your own")
        return None
    if asked.test_data is not None:
        raise ValueError("test_data goes with data of your own; data by name has a test set")
    if stored is not None and stored["source"] is None and asked.data is None:
        raise ValueError("the run used data of its caller: pass the same data to continue it")
    source: dict[str, Any] = {"name": "auto", "data_dir": None, "image_size": None}
    source |= (stored["source"] if stored else None) or {}
    folder = None if asked.data_dir is None else str(asked.data_dir)
    given = {"name": asked.data, "data_dir": folder, "image_size": asked.image_size}
    source |= {name: value for name, value in given.items() if value is not None}
    # With the digits in a checkpoint, the folder that was asked for may be that of "auto".
    datasets.check(source["name"], folder if asked.data else None, source["image_size"])
    if source["name"] == "digits":  # they have no folder; the stored run may have had one
        source["data_dir"] = None
    return source


def _module(asked: Options, options: Options, data: Data) -> nn.Module:
    """Return a new model for the data, or the user's module, with parameters of `init_from`."""
    module = asked.model
    if not isinstance(module, nn.Module):
        image = data.first_image
        if image.dim() != 3 or image.dtype != torch.float32:
            kind = str(image.dtype).removeprefix("torch.")
            raise ValueError(
                f"the model {options.model} takes float32 images [C, H, W], and {data.name} has "
                f"{kind} {list(image.shape)}: convert them, or pass a model of your own"
            )
        module = MODELS[str(options.model)](image.shape[0], data.num_classes, options.seed)
    if asked.init_from is not None:
        first = next(module.parameters(), torch.empty(0))
        (module,) = replicate_module(module, [first.device])  # the user's own stays as it is
        checkpoint.load_model(asked.init_from, module)
    return module


def prepare(asked: Options, backend: str | None = None) -> PreparedRun:
    """Load the data and the model of a run, and check all options against them.

    Raises ValueError for a bad value, before any data is loaded; DatasetError if the data is not
    available; CheckpointError if the run cannot be resumed with these options.
    """
    stored = None if asked.resume is None else checkpoint.load(asked.resume)
    # The usual batch size depends on the data, so without a given one it is not yet checked.
    early = replace(asked, strict=False) if asked.batch_size is None else asked
    check_combination(early.resolved(None, stored), backend)
    source = _source(asked, stored)
    if source is None:
        data = Data.of(asked.data, asked.test_data)
    else:
        data = datasets.load_dataset(**source)
        source["name"] = data.name if source["name"] == "auto" else source["name"]
    options = asked.resolved(data, stored)
    module = _module(asked, options, data)
    prepared = PreparedRun(data, options, module, source, stored, backend)
    found = checkpoint.differences(stored["identity"], prepared.identity()) if stored else []
    if found:
        raise checkpoint.CheckpointError(
            f"{asked.resume} cannot be continued with other settings: it has {'; '.join(found)}; "
            "init_from (--init-from) starts a new run from its parameters"
        )
    return prepared
