"""Runs test_threads.py with its ranks on GPUs: module functions from many threads at once."""

import test_threads
from device_placements import PLACEMENTS, adopt

globals().update(adopt(test_threads, PLACEMENTS))
