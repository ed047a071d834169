"""What data-parallel training costs: replicas in one process and processes of DDP, in turns.

One replica on the whole batch is measured along with every number of ranks.
"""

from .contest import NAIVE, ONE, OVERLAPPED, PYCOLLECT, Case, Entry, Result, measure
from .loading import LoadingResult, measure_loading
from .targets import judge

__all__ = [
    "NAIVE",
    "ONE",
    "OVERLAPPED",
    "PYCOLLECT",
    "Case",
    "Entry",
    "LoadingResult",
    "Result",
    "judge",
    "measure",
    "measure_loading",
]
