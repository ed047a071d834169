"""test_collectives.py again, with its ranks on GPUs: the same values and the same wanted bits."""

import test_collectives
from homes import HOMES, adopt

globals().update(adopt(test_collectives, HOMES))
