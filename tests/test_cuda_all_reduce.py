"""Runs test_all_reduce.py with its ranks on GPUs: the same values and the same expected bits."""

import test_all_reduce
from homes import HOMES, adopt

globals().update(adopt(test_all_reduce, HOMES))
