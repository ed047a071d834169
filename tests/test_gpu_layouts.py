"""Copies between tensors of different layouts in calls on lists of tensors of emulated GPUs."""

from __future__ import annotations

import pytest
import torch
from emulated_gpus import Gpus, on_ranks, total, values
from torch import Tensor


def transposed(gpus: Gpus, of: Tensor, **more: object) -> Tensor:
    """Return a tensor on a device, in column-major order."""
    return gpus.tensor(of.t().contiguous(), **more).t()  # type: ignore[arg-type]


def test_a_copy_between_layouts_leaves_the_current_stream(gpus: Gpus) -> None:
    """A rank in host memory uses the stream of the GPU, which is then in the list twice."""
    host = torch.zeros(4, 2)
    gpus.torch.adopt(host, True)
    before = gpus.torch.current(0)
    gpus.copy_(host, gpus.tensor(torch.ones(2, 4)).t(), async_op=True).wait()
    assert gpus.torch.current(0) == before


def test_copies_of_inputs_are_freed_with_the_call(gpus: Gpus) -> None:
    of = [v.reshape(4, 16) for v in values(2, 64)]
    tensors = [gpus.tensor(of[0]), transposed(gpus, of[1])]
    before = gpus.torch.blocks_in_use()
    gpus.all_gather(tensors)
    assert gpus.torch.blocks_in_use() == before


@pytest.mark.parametrize("pinned", [False, True])
def test_host_memory_is_refused_in_a_capture(gpus: Gpus, pinned: bool) -> None:
    host = torch.zeros(4, 2)
    gpus.torch.adopt(host, pinned)
    device = gpus.empty(2, 4).t()
    with gpus.capture(gpus.stream()):
        with pytest.raises(ValueError, match="different layouts"):
            gpus.copy_(device, host)
        with pytest.raises(ValueError, match="different layouts"):
            gpus.all_gather([device, host], out=[gpus.empty(8, 2), torch.zeros(8, 2)])


def test_two_devices_are_refused_in_a_capture(gpus: Gpus) -> None:
    tensors = [gpus.empty(4, 2), gpus.empty(2, 4, device=1).t()]
    origin, forked = gpus.stream(0), gpus.stream(1)
    gpus.torch.begin_capture(origin)
    gpus.fork(origin, forked)
    with gpus.on(origin), gpus.on(forked), pytest.raises(ValueError, match="two GPUs"):
        gpus.copy_(*tensors)
    gpus.fork(forked, origin)
    gpus.torch.end_capture(origin)


def test_the_host_copies_behind_the_stream(gpus: Gpus) -> None:
    """A pinned input may still be written by a copy that does not wait."""
    host, out = torch.zeros(2, 4), torch.zeros(8, 2)
    for memory in (host, out):
        gpus.torch.adopt(memory, True)
    tensors = [gpus.empty(4, 2), host.t()]

    def call() -> None:
        gpus.all_gather(tensors, out=[gpus.empty(8, 2), out])

    counted = gpus.count(call)
    assert counted["synchronize"] >= 2  # before the copy, and for the result


@pytest.mark.parametrize("lines", [1, 2])
def test_more_ranks_than_a_kernel_takes_are_refused(gpus: Gpus, lines: int) -> None:
    """The addresses are parameters of the kernel. In several lines each of them has a pitch."""
    most = 503 if lines == 1 else 251
    for world in (most, most + 1):
        of = values(world, lines, world)
        tensors = on_ranks(gpus, of)
        if world == most:
            shards = gpus.reduce_scatter(tensors, dim=1)
            for r in range(world):
                gpus.expect(shards[r], total(of)[:, r : r + 1])
        else:
            with pytest.raises(ValueError, match=f"fewer than {world} sources .* are {world}"):
                gpus.reduce_scatter(tensors, dim=1)
        for t, v in zip(tensors, of, strict=True):
            gpus.expect(t, v)
    gpus.all_reduce(tensors, algorithm="chain")
    for t in tensors:
        gpus.expect(t, total(of))
    gpus.check()
