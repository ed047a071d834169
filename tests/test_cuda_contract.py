"""test_contract.py again, with its ranks on GPUs: the same values and the same wanted bits."""

import test_contract
from homes import HOMES, adopt

globals().update(adopt(test_contract, HOMES))
