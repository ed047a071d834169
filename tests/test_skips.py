"""A run that leaves tests out says so, and fails instead where a GPU is required."""

import os
import shutil
import sys
from pathlib import Path

import programs
import pytest

TESTS = """
import pytest

@pytest.mark.cuda
def test_on_a_gpu(): pass
@pytest.mark.slow
@pytest.mark.parametrize("n", range(161))
def test_slow(n): pass
def test_quick(): pass
"""
SLOW = "161 slow tests were left out; about 2 minutes: python -m pytest -q -n auto -m slow"


@pytest.mark.parametrize(
    ("required", "workers", "ended", "reason"),
    [
        ("1", "0", "1 passed", "PYCOLLECT_REQUIRE_CUDA=1 forbids to skip it"),
        pytest.param(
            *("0", "1", "1 passed, 1 skipped", "1 test did not run: no CUDA GPU here"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_says_what_it_left_out(tmp_path: Path, required, workers, ended, reason) -> None:
    for file in ("conftest.py", "helpers/sites.py", "../pyproject.toml"):
        shutil.copy(Path(__file__).parent / file, tmp_path)
    (tmp_path / "test_some.py").write_text(TESTS)
    environ = {k: v for k, v in os.environ.items() if "PYTEST" not in k}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "PYCOLLECT_REQUIRE_CUDA": required}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", workers, "."]
    ran = programs.run(command, cwd=tmp_path, env=environ, timeout=120)
    *lines, left_out, last = ran.stdout.splitlines()
    assert (ran.returncode, left_out, ended in last) == (int(required), SLOW, True)
    assert ("161 deselected" in last) == (workers == "0")
    assert any(reason in line for line in lines)
