"""Runs test_threads.py with its ranks on GPUs: module functions from many threads at once."""

import test_threads
from device_placements import PLACEMENTS, on_placements

globals().update(on_placements(test_threads, PLACEMENTS))
