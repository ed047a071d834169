"""Environment settings that CUDA and torch's allocator read once, at process start.

Each setting runs the matrix of test_cuda_sanitize.py in a new process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from device_placements import MARKS, STANDS_IN

pytestmark = [*MARKS, pytest.mark.slow]

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1"}
SETTINGS = {
    "none": {},
    "launch-blocking": BLOCKING,
    "expandable-segments": EXPANDABLE,
    "both": BLOCKING | EXPANDABLE,
    "no-cache": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    "async-allocator": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
    "eager-modules": {"CUDA_MODULE_LOADING": "EAGER"},
    "one-connection": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
}


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


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_the_reduced_matrix(settings):
    run_pytest(settings, "tests/test_cuda_sanitize.py", "-k", "not cpu and not several")


@pytest.mark.parametrize("settings", [BLOCKING, EXPANDABLE], ids=["blocking", "expandable"])
def test_late_streams_and_graphs(settings):
    if STANDS_IN:
        pytest.skip("needs CUDA streams")
    chosen = "(short and (virtual or staged)) or (replays_read and 4001)"
    files = ("tests/test_cuda_streams.py", "tests/test_cuda_graphs.py")
    run_pytest(settings, *files, "-k", chosen)
