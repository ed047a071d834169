"""What data-parallel training costs: replicas in one process and processes of DDP, in turns.

One replica on the whole batch is measured along with every number of ranks.
"""

from .contest import NAIVE, ONE, OVERLAPPED, PYCOLLECT, Case, Entry, Result, measure
from .targets import judge

__all__ = [
    "NAIVE",
    "ONE",
    "OVERLAPPED",
    "PYCOLLECT",
    "Case",
    "Entry",
    "Result",
    "judge",
    "measure",
]
