"""Runs test_threads.py with its ranks on GPUs: module functions from many threads at once."""

import test_threads
from homes import HOMES, adopt

globals().update(adopt(test_threads, HOMES))
