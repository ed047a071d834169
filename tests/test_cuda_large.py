"""Runs test_large.py with its ranks on GPUs."""

import test_large
from device_placements import PLACEMENTS, on_placements

globals().update(on_placements(test_large, PLACEMENTS))
