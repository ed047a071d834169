"""Runs test_collectives.py with its ranks on GPUs: the same values and the same expected bits."""

import test_collectives
from device_placements import PLACEMENTS, on_placements

globals().update(on_placements(test_collectives, PLACEMENTS))
