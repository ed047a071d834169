"""Threads with their own CUDA streams and communicators, or with shared ones.

Without a GPU the ranks are on the CPU, without streams.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from reference import assert_same, expected, left_fold, randoms
from test_threads import run_concurrently

import pycollect as pc

PLACES = [pytest.param("cpu", id="cpu"), pytest.param("cuda:0", marks=pytest.mark.cuda, id="gpu")]


def new_stream(device):
    """A side stream, or None on the CPU."""
    return None if device == "cpu" else torch.cuda.Stream(device)


def on(stream):
    """Context that makes the stream the thread's current one; does nothing for None."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


@pytest.mark.parametrize("device", PLACES)
def test_threads_with_their_own_streams(device):
    def task(i):
        world = 2 + i % 3
        values = randoms(world, (20_000 + i,), torch.int32, seed=i)
        wanted = expected("all_reduce", values)
        for algorithm in (None, *pc.algorithms()):
            with on(new_stream(device)):
                tensors = [v.to(device, copy=True) for v in values]
                pc.all_reduce(tensors, algorithm=algorithm)
                got = [t.cpu() for t in tensors]
            assert_same(got, wanted, f"thread {i}, {algorithm}")

    run_concurrently(task)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("peer_access", [None, False])
def test_threads_with_their_own_communicators(device, peer_access):
    def task(i):
        communicator = pc.Communicator([device] * 3, peer_access=peer_access)
        values = randoms(3, (30_000 + i,), torch.int32, seed=i)
        wanted = expected("reduce_scatter", values)
        with on(new_stream(device)):
            tensors = [v.to(device, copy=True) for v in values]
            for algorithm in [None, *pc.algorithms("reduce_scatter")] * 5:
                got = communicator.reduce_scatter(tensors, algorithm=algorithm)
                assert_same([g.cpu() for g in got], wanted, f"thread {i}, {algorithm}")

    run_concurrently(task)


@pytest.mark.parametrize("device", PLACES)
def test_threads_share_a_communicator_and_a_stream(device):
    communicator = pc.Communicator([device] * 4)
    stream = new_stream(device)

    def task(i):
        values = randoms(4, (10_000 + i,), torch.int32, seed=i)
        with on(stream):
            for _ in range(20):
                tensors = [v.to(device, copy=True) for v in values]
                communicator.all_reduce(tensors)
                assert_same([t.cpu() for t in tensors], [left_fold(values, "sum")] * 4)

    run_concurrently(task)


@pytest.mark.parametrize("device", PLACES)
def test_async_works_of_many_threads(device):
    def task(i):
        values = randoms(3, (50_000 + i,), torch.int32, seed=i)
        with on(new_stream(device)):
            many = [[v.to(device, copy=True) for v in values] for _ in range(10)]
            works = [pc.all_reduce(tensors, async_op=True) for tensors in many]
            for tensors, work in zip(many, reversed(works), strict=True):
                work.wait()
                del tensors
            for tensors in many:
                assert_same([t.cpu() for t in tensors], [left_fold(values, "sum")] * 3)

    run_concurrently(task)
