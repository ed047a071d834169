"""Runs test_large.py with its ranks on GPUs."""

import test_large
from homes import HOMES, adopt

globals().update(adopt(test_large, HOMES))
