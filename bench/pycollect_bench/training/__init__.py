"""Cost of data-parallel training: replicas in one process and DDP processes, in turns.

One replica on the whole batch is measured with every number of ranks.
"""

from .comparison import (
    COMPILED,
    NAIVE,
    ONE,
    OVERLAPPED,
    PYCOLLECT,
    Measured,
    Result,
    TrainingCase,
    measure,
)
from .loading import LoadingResult, measure_loading
from .targets import judge

__all__ = [
    "COMPILED",
    "NAIVE",
    "ONE",
    "OVERLAPPED",
    "PYCOLLECT",
    "LoadingResult",
    "Measured",
    "Result",
    "TrainingCase",
    "judge",
    "measure",
    "measure_loading",
]
