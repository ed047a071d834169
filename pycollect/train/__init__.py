"""Data-parallel training on pycollect: the book's functions, and `train` that puts them together.

    python -m pycollect.train --data digits

Every part is a plain function of tensors and devices: `lenet`, `replicate`, `split_batch`,
`allreduce`, `train_batch`, `evaluate`.
"""

from .compare import Comparison, compare
from .data import Data, Defaults, digits, load
from .fashion import DataError, Unavailable
from .lenet import init_lenet, lenet
from .reduce import REDUCTIONS, allreduce, collective, naive
from .report import Epoch, Report
from .settings import Settings
from .step import evaluate, get_params, replicate, sgd, split_batch, train_batch
from .trainer import History, train

__all__ = [
    "REDUCTIONS",
    "Comparison",
    "Data",
    "DataError",
    "Defaults",
    "Epoch",
    "History",
    "Report",
    "Settings",
    "Unavailable",
    "allreduce",
    "collective",
    "compare",
    "digits",
    "evaluate",
    "get_params",
    "init_lenet",
    "lenet",
    "load",
    "naive",
    "replicate",
    "sgd",
    "split_batch",
    "train",
    "train_batch",
]
