"""First calls of a group with CUDA tensors on emulated devices: calls that do not match, unusual
situations of the bootstrap, and the selection of the transport by name.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, Caught, RankContext, caught, fresh, program_output
from dist_sites import Emulated
from test_cuda_dist_faults import FAULTY_RANK
from test_cuda_dist_lifecycle import connect

pytestmark = pytest.mark.skipif(not OURS, reason="tests the staging buffers of pycollect")

# --- first calls that do not match ----------------------------------------------------------------


def mismatched_bootstrap(me: RankContext, how: str) -> Caught:
    """The faulty rank's first call differs, or its device fails; every rank raises."""
    is_faulty, x = me.rank == FAULTY_RANK, torch.ones(4)
    site = me.start(how)
    if is_faulty and how == "host":
        site.host(x)
    if is_faulty and how == "broken":
        site.fake.gpu.fail("register_host", 0)
    if how == "broken" or (how == "some bound" and not is_faulty):
        return caught(connect, me)
    return caught(dist.all_reduce, x)


REFUSED = {
    "host": ["rank 1 called all_reduce of 4 float32", "on GPUs, for the first time"],
    "some bound": [
        "rank 0 called init_process_group with a device_id",
        "all_reduce of tensors on GPUs, for the first time",
    ],
    "broken": [
        "init_process_group: PYCOLLECT_CUDA_TRANSPORT=cuda_ipc does not work here: rank 1: ",
    ],
}


@pytest.mark.parametrize("how", REFUSED)
def test_mismatched_bootstraps_raise(how):
    with fresh(3, group=False, site="eager:cuda_ipc") as pool:
        for error in pool.run(mismatched_bootstrap, how):
            assert error.kind == "ValueError" or how == "broken", error
            assert all(words in error.text for words in REFUSED[how]), error


def mismatched_first_calls(me: RankContext) -> tuple[str, str, float]:
    """One rank's first calls use host memory, or are refused; a later matching call succeeds."""
    site, x, y = me.start("unlike"), torch.ones(4), torch.ones(4)
    if me.rank == FAULTY_RANK:
        site.host(x)
    first = caught(dist.all_reduce, x)
    second = caught(dist.broadcast, y, 7 if me.rank == FAULTY_RANK else 0)
    dist.all_reduce(y)
    return first.kind, second.kind, y.sum().item()


def test_a_mismatched_first_call_raises():
    with fresh(3, group=False, site="eager:auto") as pool:
        for rank, (first, second, total) in enumerate(pool.run(mismatched_first_calls)):
            assert first == "ValueError"
            assert second == "ValueError" or rank == FAULTY_RANK
            assert total == 12.0


# --- situations of the bootstrap ------------------------------------------------------------------


def in_a_callback(me: RankContext) -> list[float]:
    """The callback of a host call starts a GPU call, beside the group's first GPU call."""
    site = me.start("callback")
    host, x, y = site.host(torch.ones(4)), torch.full((5,), 3.0), torch.full((5,), 2.0)
    inner = []

    def then(future: torch.futures.Future[Any]) -> Any:
        inner.append(dist.all_reduce(x, async_op=True))
        return future.value()

    chained = dist.all_reduce(host, async_op=True).get_future().then(then)
    dist.all_reduce(y)
    chained.wait()
    inner[0].wait()
    return (x + y).unique().tolist()


def with_an_odd_buffer_size(me: RankContext) -> list[float]:
    me.start("odd", Emulated("eager:cuda_ipc", cuda_buffer_bytes=16_667))
    x = torch.full((30_000,), 1.25)
    for _ in range(2):
        dist.all_reduce(x)
    return (x * 2).unique().tolist()


def without_staging_buffers(me: RankContext) -> list[float]:
    """With host staging, connecting needs no CUDA calls."""
    site = me.start("unbound", Emulated("eager"))
    connect(me)
    assert site.calls() == []
    x = torch.full((3,), 5.0)
    dist.all_reduce(x)
    return x.unique().tolist()


@pytest.mark.parametrize("job", [in_a_callback, with_an_odd_buffer_size, without_staging_buffers])
def test_unusual_bootstraps(job):
    with fresh(2, group=False, site="eager:cuda_ipc") as pool:
        assert pool.run(job) == [[10.0]] * 2


# --- selection of the transport -------------------------------------------------------------------

PROGRAM = """
import pycollect as pc, torch, torch.distributed as dist
from pycollect import _testing
try:
    options = pc.distributed.options(**{options})
    _testing.emulate(options)
    dist.init_process_group("pycollect", store=dist.HashStore(), rank=0, world_size=1,
                            pg_options=options)
    for _ in range(2):
        dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()
except ValueError as error:
    print(error)
"""


def test_the_transport_is_logged_once():
    lines = program_output(PROGRAM.replace("{options}", "{}"), PYCOLLECT_LOG="info")
    assert lines.count("PYCOLLECT_CUDA_TRANSPORT=host_staging") == 1
    assert "pinned memory" in lines


@pytest.mark.parametrize(
    ("options", "environ", "words"),
    [
        ("{}", "host_staging", ""),
        ("{'cuda_transport': 'host_staging'}", "", ""),
        (
            "{'cuda_transport': 'ipc'}",
            "",
            "cuda_transport is 'ipc'; allowed are auto, cuda_ipc, host_staging",
        ),
        ("{}", "spin", "PYCOLLECT_CUDA_TRANSPORT is 'spin'; allowed are cuda_ipc, host_staging"),
    ],
)
def test_transports_by_name(options, environ, words):
    program = PROGRAM.replace("{options}", options)
    assert program_output(program, PYCOLLECT_CUDA_TRANSPORT=environ).strip() == words
