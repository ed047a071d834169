"""Runs test_contract.py with its ranks on GPUs: the same values and the same expected bits."""

import test_contract
from device_placements import PLACEMENTS, on_placements

globals().update(on_placements(test_contract, PLACEMENTS))
