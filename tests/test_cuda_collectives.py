"""Runs test_collectives.py with its ranks on GPUs: the same values and the same expected bits."""

import test_collectives
from device_placements import PLACEMENTS, adopt

globals().update(adopt(test_collectives, PLACEMENTS))
