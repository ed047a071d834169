"""Tests that do not run for want of hardware or of a package are counted at the end, by reason."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
TESTS = """
import pytest
from homes import several_gpus


@pytest.fixture
def cupy():
    return pytest.importorskip("no_such_cupy", reason="needs CuPy: pip install it")


@pytest.mark.cuda
@pytest.mark.parametrize("n", [1, 2])
def test_gpu(n):
    pass


@pytest.fixture
def two():
    several_gpus()


def test_in_a_fixture(two):
    pass


def test_in_the_call():
    several_gpus()


def test_with_cupy(cupy):
    pass


def test_runs():
    pass
"""


def run(folder: Path, **environ: str) -> str:
    for name in ("conftest.py", "homes.py"):
        shutil.copy(HERE / name, folder)
    (folder / "test_some.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = cuda: needs a GPU\n")
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYCOLLECT_TEST_GPU": "cuda:0"}
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder],
        env=os.environ | hidden | {"PYTHONPATH": os.pathsep.join(paths)} | environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout


def test_every_reason_is_counted(tmp_path: Path) -> None:
    said = run(tmp_path, PYCOLLECT_REQUIRE_CUDA="0").splitlines()
    assert "1 passed, 5 skipped" in said[-1]
    for line in (
        "2 tests did not run: no CUDA GPU here",
        "2 tests did not run: there are fewer than two CUDA GPUs here",
        "1 test did not run: CuPy is not installed",
    ):
        assert any(s.startswith(line) for s in said), f"{line!r} is missing from {said}"


def test_a_gpu_may_be_insisted_on(tmp_path: Path) -> None:
    said = run(tmp_path, PYCOLLECT_REQUIRE_CUDA="1")
    assert "PYCOLLECT_REQUIRE_CUDA=1 forbids to skip it" in said
    assert "2 errors" in said or "2 failed" in said
