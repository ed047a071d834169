"""Data-parallel training on pycollect: functions as in Dive into Deep Learning, and `train`.

    python -m pycollect.train --data digits

The from-scratch parts are plain functions of tensors and devices: `lenet`,
`replicate_params`, `split_batch`, `naive_all_reduce`, `train_batch`, `evaluate`. `Replicas` trains
any nn.Module.
"""

from .._files import OutputError
from .checkpoint import CheckpointError
from .compare import Comparison, compare
from .data import (
    Data,
    DataError,
    DatasetUnavailable,
    DefaultHyperparameters,
    ImageFolder,
    digits,
    image_folder,
    load_dataset,
)
from .data_parallel import DataParallel
from .gluon import GluonTrainer
from .graph import GraphedStep
from .loader import Batch, Loader, LoaderOptions
from .lockstep import lockstep, lockstep_exchange, ranks_in_lockstep
from .losses import summed_cross_entropy
from .models import MODELS, LeNet, init_lenet, lenet, resnet18
from .optimizers import linear_lr, sgd_optimizer
from .progress_printer import ProgressPrinter
from .records import EpochRecord, StepRecord
from .reduce import (
    GRADIENT_REDUCTIONS,
    naive_all_reduce,
    reduce_gradients_coalesced,
    reduce_gradients_naive,
)
from .replicas import Replicas
from .replication import replicate_module
from .run_result import RunResult
from .settings import Settings, StepOptions
from .shares import AutoShares, split_batch
from .step import evaluate, get_params, replicate_params, sgd, train_batch
from .step_clock import StepSeconds
from .sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm
from .training_loop import train

__all__ = [
    "GRADIENT_REDUCTIONS",
    "MODELS",
    "AutoShares",
    "Batch",
    "CheckpointError",
    "Comparison",
    "Data",
    "DataError",
    "DataParallel",
    "DatasetUnavailable",
    "DefaultHyperparameters",
    "EpochRecord",
    "GluonTrainer",
    "GraphedStep",
    "ImageFolder",
    "LeNet",
    "Loader",
    "LoaderOptions",
    "OutputError",
    "ProgressPrinter",
    "Replicas",
    "RunResult",
    "Settings",
    "StepOptions",
    "StepRecord",
    "StepSeconds",
    "SyncBatchNorm",
    "compare",
    "convert_sync_batchnorm",
    "digits",
    "evaluate",
    "get_params",
    "image_folder",
    "init_lenet",
    "lenet",
    "linear_lr",
    "load_dataset",
    "lockstep",
    "lockstep_exchange",
    "naive_all_reduce",
    "ranks_in_lockstep",
    "reduce_gradients_coalesced",
    "reduce_gradients_naive",
    "replicate_module",
    "replicate_params",
    "resnet18",
    "sgd",
    "sgd_optimizer",
    "split_batch",
    "summed_cross_entropy",
    "train",
    "train_batch",
]
