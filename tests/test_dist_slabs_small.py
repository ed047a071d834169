"""Collectives of a few bytes that go through the host although slabs work, where a group is made
with `cuda_host_bytes`; without a device, as test_dist_slabs.py is.
"""

from __future__ import annotations

import dist_fake
import dist_staged
import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, Me, caught, fresh, said

import pycollect as pc

pytestmark = pytest.mark.skipif(not OURS, reason="has slabs of its own")
LIMIT = 1024
COUNT = LIMIT // 4  # of float32, in as many bytes


def launches(me: Me) -> int:
    return me.fake.gpu.books().get("launch", 0)


def ways(me: Me) -> dict[str, int]:
    """How many launches each call took."""
    found = {}

    def note(name: str, call: object, *args: object) -> None:
        before = launches(me)
        call(*args)  # type: ignore[operator]
        found[name] = launches(me) - before

    def ones(count: int) -> torch.Tensor:
        return torch.ones(count)

    note("small", dist.all_reduce, ones(COUNT))
    met = me.fake.gpu.books().get("allocated", 0)
    note("large", dist.all_reduce, ones(COUNT + 1))
    note("small again", dist.all_reduce, ones(COUNT))
    note("double", dist.all_reduce, ones(COUNT).double())
    note("together", dist.all_reduce_coalesced, [ones(COUNT), ones(1)])
    note("reduce", dist.reduce, ones(COUNT), 1)
    note("broadcast", dist.broadcast, ones(COUNT), 1)
    part = COUNT // 2
    note("gathered", dist.all_gather_into_tensor, ones(2 * part), ones(part))
    note("gathered, large", dist.all_gather_into_tensor, ones(2 * part + 2), ones(part + 1))
    note("scattered", dist.reduce_scatter_tensor, ones(part), ones(2 * part))
    note("scattered, large", dist.reduce_scatter_tensor, ones(part + 1), ones(2 * part + 2))
    note("lists", dist.all_gather, [ones(part), ones(part)], ones(part))
    note("lists, large", dist.reduce_scatter, ones(COUNT), [ones(COUNT), ones(COUNT)])
    note("unknown", dist.all_to_all_single, ones(2), ones(2))
    return {**found, "allocated": met}


def test_which_way():
    with fresh(2, staged=f"eager:stream:{LIMIT}") as pool:
        for found in pool.run(ways):
            assert found.pop("allocated") == 0  # nobody met for the first one
            large = {"large", "double", "together", "unknown"}
            assert {n for n, made in found.items() if made > 0} == large | {
                name for name in found if name.endswith(", large")
            }


@pytest.mark.parametrize("rung", ["stream", "wait"])
def test_bits_of_the_host(rung):
    with fresh(3, staged=f"late:{rung}:{LIMIT}") as pool:
        found = pool.run(dist_staged.sweep, torch.bfloat16, "cpu", seconds=60.0)
        dist_staged.report([wrong for _, wrong in found])
        dist_staged.report(pool.run(dist_staged.own_parts, torch.float32, "cpu"))


def in_turn(me: Me) -> list[float]:
    """A tensor that goes one way and then the other, and nobody waits in between."""
    sums = []
    for _ in range(5):
        x = torch.zeros(4 * COUNT)
        me.fake.fill_later(x, 1.0)
        dist.all_reduce(x, async_op=True).wait()
        head = x[:COUNT]
        dist.all_reduce(head, async_op=True).wait()
        dist.all_reduce(x, async_op=True).wait()
        sums.append(x.sum().item())
    return sums


def test_one_after_the_other():
    with fresh(3, staged=f"late:stream:{LIMIT}") as pool:
        wanted = COUNT * 27.0 + 3 * COUNT * 9.0
        assert pool.run(in_turn) == [[wanted] * 5] * 3


def disagreeing(me: Me) -> tuple[list[Caught], float]:
    sizes = (COUNT, COUNT + 1)
    errors = [caught(dist.all_reduce, torch.ones(sizes[me.rank == 1])) for _ in range(2)]
    x = torch.ones(2 * COUNT)
    dist.all_reduce(x)
    errors += [caught(dist.all_reduce, torch.ones(sizes[me.rank == 0]))]
    y = torch.ones(3)
    dist.all_reduce(y)
    return errors, x.sum().item() + y.sum().item()


def test_sizes_on_both_sides_of_the_limit():
    """Before the ranks have met and after it: all of them are told, and none hangs."""
    with fresh(2, staged=f"late:stream:{LIMIT}") as pool:
        for errors, total in pool.run(disagreeing):
            assert [e.kind for e in errors] == ["ValueError"] * 3, errors
            assert "rank 1 called all_reduce of tensors on GPUs, for the first time" in str(
                errors[0].text
            )
            assert f"rank 0 called all_reduce of {COUNT + 1} float32" in errors[2].text
            assert total == 4 * COUNT + 6


def unlike_limits(me: Me) -> Caught:
    made, _ = dist_fake.options(f"eager:stream:{LIMIT * (me.rank == 0)}")
    me.init("unlike", pg_options=made)
    dist.all_reduce(torch.ones(4 * COUNT))
    error = caught(dist.all_reduce, torch.ones(COUNT))
    dist.destroy_process_group()
    return error


def test_unlike_limits():
    with fresh(2, group=False) as pool:
        for error in pool.run(unlike_limits):
            assert error.kind == "ValueError"
            assert "on GPUs" in error.text
            assert "on the host" in error.text


def test_refused_limits():
    with pytest.raises(ValueError, match="cuda_host_bytes is -1; it must be at least 0"):
        pc.distributed.options(cuda_host_bytes=-1)
    with pytest.raises(TypeError, match="cuda_host_bytes is a str"):
        pc.distributed.options(cuda_host_bytes="1024")  # type: ignore[arg-type]


PROGRAM = """
import pycollect as pc, torch.distributed as dist
made = pc.distributed.options({options})
pc.distributed._read_environment(made)
print(made.cuda_host_bytes)
"""


@pytest.mark.parametrize(
    ("options", "environ", "says"),
    [
        ("", "", "None"),
        ("", "65536", "65536"),
        ("cuda_host_bytes=0", "65536", "0"),
        ("", "64k", "PYCOLLECT_CUDA_HOST_BYTES is '64k'; it must be a number of bytes"),
    ],
)
def test_the_variable(options, environ, says):
    program = PROGRAM.format(options=options)
    told = f"try:\n  exec({program!r})\nexcept ValueError as error:\n  print(error)"
    assert said(told, PYCOLLECT_CUDA_HOST_BYTES=environ).strip() == says
