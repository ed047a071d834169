"""Data-parallel training on pycollect: functions as in Dive into Deep Learning, and `train`.

    python -m pycollect.train --data digits

The from-scratch parts are plain functions of tensors and devices: `lenet`, `replicate_params`,
`split_batch`, `naive_all_reduce`, `train_batch`, `evaluate_accuracy`. `ReplicaTrainer` trains any
nn.Module. Two read-only mappings hold the named choices: `MODELS` has the functions
`MODELS[name](in_channels=1, num_classes=10, seed=0)` that build "lenet" and "resnet18", and
`GRADIENT_REDUCTIONS` has the reductions "pycollect" (`reduce_gradients_coalesced`) and "naive"
(`reduce_gradients_naive`), functions of `gradients[rank][parameter]` that sum in place.
"""

from .._files import OutputError
from .checkpoint import CheckpointError, load_model
from .comparison import ReductionComparison, compare_reductions
from .cuda_graph import GraphedStep
from .data import Data, DatasetError, DatasetUnavailable, DefaultHyperparameters
from .data_parallel import DataParallel
from .datasets import ImageFolder, digits, image_folder, load_dataset
from .from_scratch import evaluate_accuracy, get_params, replicate_params, sgd, train_batch
from .gluon import GluonTrainer
from .loader import Batch, Loader
from .losses import linear_lr, sgd_factory, summed_cross_entropy
from .models import MODELS, LeNet, init_lenet, lenet, resnet18
from .module_replication import replicate_module
from .options import Options
from .reduce import (
    GRADIENT_REDUCTIONS,
    naive_all_reduce,
    reduce_gradients_coalesced,
    reduce_gradients_naive,
)
from .replica_trainer import ReplicaTrainer
from .results import EpochRecord, RunResult, StepRecord, StepSeconds
from .shares import AutoShares, split_batch
from .sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm
from .training_run import train

__all__ = [
    "GRADIENT_REDUCTIONS",
    "MODELS",
    "AutoShares",
    "Batch",
    "CheckpointError",
    "Data",
    "DataParallel",
    "DatasetError",
    "DatasetUnavailable",
    "DefaultHyperparameters",
    "EpochRecord",
    "GluonTrainer",
    "GraphedStep",
    "ImageFolder",
    "LeNet",
    "Loader",
    "Options",
    "OutputError",
    "ReductionComparison",
    "ReplicaTrainer",
    "RunResult",
    "StepRecord",
    "StepSeconds",
    "SyncBatchNorm",
    "compare_reductions",
    "convert_sync_batchnorm",
    "digits",
    "evaluate_accuracy",
    "get_params",
    "image_folder",
    "init_lenet",
    "lenet",
    "linear_lr",
    "load_dataset",
    "load_model",
    "naive_all_reduce",
    "reduce_gradients_coalesced",
    "reduce_gradients_naive",
    "replicate_module",
    "replicate_params",
    "resnet18",
    "sgd",
    "sgd_factory",
    "split_batch",
    "summed_cross_entropy",
    "train",
    "train_batch",
]
