"""Runs test_layouts.py with its ranks on GPUs: the same values and the same expected bits."""

import test_layouts
from device_placements import PLACEMENTS, on_placements

globals().update(on_placements(test_layouts, PLACEMENTS))
