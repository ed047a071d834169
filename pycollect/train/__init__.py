"""Data-parallel training on pycollect: the book's functions, and `train` that puts them together.

    python -m pycollect.train --data digits

Every part is a plain function of tensors and devices: `lenet`, `replicate`, `split_batch`,
`allreduce`, `train_batch`, `evaluate`.
"""

from .compare import Comparison, compare
from .data import Data, Defaults, digits, load
from .data_parallel import DataParallel
from .fashion import DataError, Unavailable
from .gluon import Trainer
from .lenet import init_lenet, lenet
from .lockstep import lockstep, meet, ranks_in_lockstep
from .reduce import REDUCTIONS, allreduce, collective, naive
from .report import Epoch, Report
from .settings import Settings
from .step import evaluate, get_params, replicate, sgd, split_batch, train_batch
from .sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm
from .trainer import History, train

__all__ = [
    "REDUCTIONS",
    "Comparison",
    "Data",
    "DataError",
    "DataParallel",
    "Defaults",
    "Epoch",
    "History",
    "Report",
    "Settings",
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
    "init_lenet",
    "lenet",
    "load",
    "lockstep",
    "meet",
    "naive",
    "ranks_in_lockstep",
    "replicate",
    "sgd",
    "split_batch",
    "train",
    "train_batch",
]
