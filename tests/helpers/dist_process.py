"""Runs complete Python programs, for behaviour that a rank of a pool cannot show."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile

import pytest
from dist_jobs import MOST_SECONDS


def own_process(arguments: list[str], seconds: float, **environ: str) -> str:
    """Run a Python program to its end and return its output; on a hang kill its whole session."""
    with tempfile.TemporaryDirectory(prefix="program_") as folder:  # torchrun leaves files there
        child = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder, **environ},
        )
        try:
            output, _ = child.communicate(timeout=min(seconds, MOST_SECONDS))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            output, _ = child.communicate()
            pytest.fail(f"{arguments} hangs\n{output}", pytrace=False)
    assert child.returncode == 0, output
    return output
