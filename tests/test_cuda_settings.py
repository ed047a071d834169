"""Settings of the environment that CUDA and torch's allocator read once, at process start.

Each setting runs some tests of lists and of processes in a new process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dist_pool import RankContext, fresh
from sites import REAL

pytestmark = pytest.mark.cuda

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1"}
SETTINGS = {
    "launch-blocking": BLOCKING,
    "expandable-segments": EXPANDABLE,
    "both": BLOCKING | EXPANDABLE,
    "no-cache": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    "async-allocator": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
    "eager-modules": {"CUDA_MODULE_LOADING": "EAGER"},
    "one-connection": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
}
VALUES = "(test_lists and (virtual-5 or staged-5)) or (test_ranks and processes-cuda-2)"
STREAMS = "(short and (virtual or staged)) or (replays_read and 4001)"


def run_pytest(settings, *what):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "", *what],
        cwd=Path(__file__).parents[1],
        env=os.environ | settings,
        timeout=300,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_values_and_streams(name):
    run_pytest(SETTINGS[name], "tests/test_matrix.py", "-k", VALUES)
    if name in ("launch-blocking", "expandable-segments"):
        files = ("tests/test_cuda_streams.py", "tests/test_cuda_graphs.py")
        run_pytest(SETTINGS[name], *files, "-k", STREAMS)


def expandable(me: RankContext, at_runtime: bool) -> bool:
    """A call with expandable segments, which torch maps piece by piece."""
    if at_runtime:
        set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        if set_settings is None:  # the name in torch 2.11
            set_settings = torch.cuda.memory._set_allocator_settings
        set_settings("expandable_segments:True")
    x = torch.ones(1 << 20)
    segments = torch.cuda.memory.memory_snapshot()
    assert segments, "nothing is tested"
    assert all(segment["is_expandable"] for segment in segments)
    dist.all_reduce(x)
    return bool(x.eq(me.world).all())


@pytest.mark.parametrize("site", REAL)
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", ""])
def test_expandable_segments(name, site):
    environ = ((name, "expandable_segments:True"),) if name else ()
    with fresh(2, site=site, environ=environ) as pool:
        assert pool.run(expandable, not name) == [True, True]
