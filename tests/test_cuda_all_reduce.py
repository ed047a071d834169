"""Runs test_all_reduce.py with its ranks on GPUs: the same values and the same expected bits."""

import test_all_reduce
from device_placements import PLACEMENTS, on_placements

globals().update(on_placements(test_all_reduce, PLACEMENTS))
