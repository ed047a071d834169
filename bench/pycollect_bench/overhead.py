"""Cost of a call on minimal data: four ranks of four elements, timed in batches."""

from __future__ import annotations

from functools import partial

import torch

import pycollect
from pycollect._timing import Effort, Sampler, Timing, interleave
from pycollect._timing import batched as in_batches

from .comparison import time_inside
from .peers import naive_all_reduce, stack_all_reduce
from .targets import CALL

RANKS, ELEMENTS = 4, 4
# Calls in a batch: enough that reading the clock costs nothing, few enough to be rarely disturbed.
BATCH = 500


def call_costs(effort: Effort, device: torch.device) -> dict[str, Timing]:
    """Return the seconds of a call for the library, its peers and one torch call.

    The buffers hold zeros, which no sum changes, so they are not rewritten between calls. On a GPU
    the time ends when the call returns: nothing is synchronised between calls.
    """
    data = [torch.zeros(ELEMENTS, device=device) for _ in range(RANKS)]
    one = data[0]
    samplers: dict[str, Sampler] = {
        CALL: in_batches(partial(pycollect.all_reduce, data), BATCH),
        "the same, naive loop": in_batches(partial(naive_all_reduce, data), BATCH // 10),
        "the same, stack and sum": in_batches(partial(stack_all_reduce, data), BATCH // 10),
        "torch: one add_ of 4 elements": in_batches(partial(one.add_, data[1]), BATCH),
    }
    loop = time_inside()
    if loop is not None and device.type == "cpu":
        samplers["the same, inside the extension"] = partial(loop, data, "sum", None)
    return interleave(samplers, effort)
