"""Runs test_large.py with its ranks on GPUs."""

import test_large
from device_placements import PLACEMENTS, adopt

globals().update(adopt(test_large, PLACEMENTS))
