"""test_layouts.py again, with its ranks on GPUs: the same values and the same wanted bits."""

import test_layouts
from homes import HOMES, adopt

globals().update(adopt(test_layouts, HOMES))
