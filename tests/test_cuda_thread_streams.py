"""Threads with their own CUDA streams and communicators, or with shared ones; also on the CPU,
where there are no streams.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from reference import assert_same, expected, randoms
from test_threads import run_concurrently

import pycollect as pc

PLACES = [pytest.param("cpu", id="cpu"), pytest.param("cuda:0", marks=pytest.mark.cuda, id="gpu")]


def new_stream(device):
    """A context whose current stream is a new one; on the CPU, an empty context."""
    return contextlib.nullcontext() if device == "cpu" else torch.cuda.stream(torch.cuda.Stream())


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("peer_access", [None, False])
@pytest.mark.parametrize("shared", [False, True])
def test_threads_with_streams_and_communicators(device, peer_access, shared):
    communicator, stream = pc.Communicator([device] * 3, peer_access=peer_access), None
    if shared and device != "cpu":
        stream = torch.cuda.Stream()

    def task(i):
        mine = communicator
        if not shared:
            mine = pc.Communicator([device] * 3, peer_access=peer_access)
        values = randoms(3, (30_000 + i,), torch.int32, seed=i)
        with torch.cuda.stream(stream) if stream else new_stream(device):
            tensors = [v.to(device, copy=True) for v in values]
            for algorithm in [None, *pc.algorithms("reduce_scatter")] * 3:
                got = mine.reduce_scatter(tensors, algorithm=algorithm)
                wanted = expected("reduce_scatter", values)
                assert_same([g.cpu() for g in got], wanted, f"thread {i}, {algorithm}")
            mine.all_reduce(tensors, async_op=True).wait()
            wanted = expected("all_reduce", values)
            assert_same([t.cpu() for t in tensors], wanted, f"thread {i}")

    run_concurrently(task)
