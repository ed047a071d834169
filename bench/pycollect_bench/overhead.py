"""Cost of a call on little data: four ranks of four elements, timed in batches."""

from __future__ import annotations

from functools import partial

import torch

import pycollect
from pycollect._timing import Effort, Sampler, Timing, batched, interleave

from .baselines import naive_all_reduce, stack_all_reduce
from .comparison import time_inside
from .targets import CALL

RANKS, ELEMENTS = 4, 4
# Calls in a batch: enough to make the cost of reading the clock negligible, few enough to be rarely
# disturbed.
BATCH = 500


def call_costs(effort: Effort, device: torch.device) -> dict[str, Timing]:
    """Return the seconds of a call of pycollect, of its peers and of one torch function.

    The buffers hold zeros, which no sum changes, so they are not rewritten between calls. On a GPU
    the time ends when the call returns, without synchronization between calls.
    """
    data = [torch.zeros(ELEMENTS, device=device) for _ in range(RANKS)]
    one = data[0]
    samplers: dict[str, Sampler] = {
        CALL: batched(partial(pycollect.all_reduce, data), BATCH),
        "the same, naive loop": batched(partial(naive_all_reduce, data), BATCH // 10),
        "the same, stack and sum": batched(partial(stack_all_reduce, data), BATCH // 10),
        "torch: one add_ of 4 elements": batched(partial(one.add_, data[1]), BATCH),
    }
    loop = time_inside()
    if loop is not None and device.type == "cpu":
        samplers["the same, inside the extension"] = partial(loop, data, "sum", None)
    return interleave(samplers, effort)
