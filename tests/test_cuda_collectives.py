"""Runs test_collectives.py with its ranks on GPUs: the same values and the same expected bits."""

import test_collectives
from homes import HOMES, adopt

globals().update(adopt(test_collectives, HOMES))
