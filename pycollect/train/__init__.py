"""Data-parallel training on pycollect: functions as in Dive into Deep Learning, and `train`.

    python -m pycollect.train --data digits

The from-scratch parts are plain functions of tensors and devices: `lenet`, `replicate`,
`split_batch`, `allreduce`, `train_batch`, `evaluate`. `Replicas` trains any nn.Module.
"""

from .._files import OutputError
from .checkpoint import CheckpointError
from .compare import Comparison, compare
from .data import Data, DataError, Defaults, ImageFolder, Unavailable, digits, image_folder, load
from .data_parallel import DataParallel
from .gluon import Trainer
from .graph import GraphedStep
from .loader import Batch, Loader, Loading
from .lockstep import lockstep, ranks_in_lockstep, synchronize
from .losses import summed_cross_entropy
from .models import MODELS, LeNet, init_lenet, lenet, resnet18
from .optimizers import linear_lr, sgd_optimizer
from .records import Epoch, Step
from .reduce import REDUCTIONS, allreduce, collective, naive
from .replicas import Replicas
from .replication import replicate_module
from .report import Report
from .run_result import RunResult
from .settings import Settings, StepOptions
from .shares import AutoShares, split_batch
from .step import evaluate, get_params, replicate, sgd, train_batch
from .step_clock import StepSeconds
from .sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm
from .trainer import train

__all__ = [
    "MODELS",
    "REDUCTIONS",
    "AutoShares",
    "Batch",
    "CheckpointError",
    "Comparison",
    "Data",
    "DataError",
    "DataParallel",
    "Defaults",
    "Epoch",
    "GraphedStep",
    "ImageFolder",
    "LeNet",
    "Loader",
    "Loading",
    "OutputError",
    "Replicas",
    "Report",
    "RunResult",
    "Settings",
    "Step",
    "StepOptions",
    "StepSeconds",
    "SyncBatchNorm",
    "Trainer",
    "Unavailable",
    "allreduce",
    "collective",
    "compare",
    "convert_sync_batchnorm",
    "digits",
    "evaluate",
    "get_params",
    "image_folder",
    "init_lenet",
    "lenet",
    "linear_lr",
    "load",
    "lockstep",
    "naive",
    "ranks_in_lockstep",
    "replicate",
    "replicate_module",
    "resnet18",
    "sgd",
    "sgd_optimizer",
    "split_batch",
    "summed_cross_entropy",
    "synchronize",
    "train",
    "train_batch",
]
