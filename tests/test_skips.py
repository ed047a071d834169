"""Tests skipped for lack of hardware or a package are counted at the end, by reason, as are slow
tests that were left out. A test that hangs ends the run where a time limit is set.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import conftest
import dist_pool
import programs
import pytest
import torch
from dist_pool import RankContext, fresh

HERE = Path(__file__).parent
TESTS = """
import pytest
from device_placements import several_gpus


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


TOGETHER = """
import os
import pytest


@pytest.mark.parametrize("n", range(20))
def test_here(n, request):
    workers = request.config.rootpath / (request.path.name + ".workers")
    with open(workers, "a") as file:
        file.write(os.environ["PYTEST_XDIST_WORKER"] + "\\n")
    assert len(set(workers.read_text().split())) == 1
"""


SLOW = """
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("n", range(60))
def test_slow(n):
    pass


@pytest.mark.slow
@pytest.mark.cuda
def test_slow_on_a_gpu():
    pass


def test_quick():
    pass
"""


LINE = "61 slow tests were left out; about 2 minutes: python -m pytest -q -n auto -m slow"


HANGS = """
import time


def test_ends():
    pass


def test_hangs():
    time.sleep(100)
"""


def pytest_run(
    folder: Path, *arguments: str, tests: str = TESTS, **environ: str
) -> subprocess.CompletedProcess[str]:
    for name in ("conftest.py", "device_placements.py", "dist_ranks.py"):
        shutil.copy(HERE / name, folder)
    (folder / "test_some.py").write_text(tests)
    shutil.copy(HERE.parent / "pyproject.toml", folder)
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYCOLLECT_TEST_GPU_DEVICE": "cuda:0"}
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    outside = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    return programs.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "."],
        cwd=folder,
        env=outside | hidden | {"PYTHONPATH": os.pathsep.join(paths)} | environ,
        timeout=120,
    )


def run(folder: Path, *arguments: str, **more: str) -> str:
    return pytest_run(folder, *arguments, **more).stdout


def hang(me: RankContext) -> None:
    time.sleep(100)


def test_a_job_that_hangs_fails_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh(1, group=False) as pool:
        monkeypatch.setattr(dist_pool, "MOST_SECONDS", 0.2)
        with pytest.raises(pytest.fail.Exception, match="hang: ranks \\[0\\] hang"):
            pool.run(hang, seconds=60)


def test_a_test_that_hangs_ends_the_run(tmp_path: Path) -> None:
    done = pytest_run(tmp_path, tests=HANGS, PYCOLLECT_TEST_SECONDS="0.2")
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "in test_hangs" in done.stderr


def test_every_reason_is_counted(tmp_path: Path) -> None:
    output = run(tmp_path, PYCOLLECT_REQUIRE_CUDA="0").splitlines()
    assert "1 passed, 5 skipped" in output[-1]
    for line in (
        "2 tests did not run: no CUDA GPU here",
        "2 tests did not run: there are fewer than two CUDA GPUs here",
        "1 test did not run: CuPy is not installed",
    ):
        assert any(s.startswith(line) for s in output), f"{line!r} is missing from {output}"


def test_a_gpu_can_be_required(tmp_path: Path) -> None:
    output = run(tmp_path, PYCOLLECT_REQUIRE_CUDA="1")
    assert "PYCOLLECT_REQUIRE_CUDA=1 forbids to skip it" in output
    assert "2 errors" in output or "2 failed" in output


def test_slow_tests_are_deselected_and_counted(tmp_path: Path) -> None:
    """Slow tests are deselected by default; slow tests on a missing GPU would take no time."""
    *_, line, last = run(tmp_path, tests=SLOW).splitlines()
    assert line == LINE
    assert last.startswith("1 passed, 61 deselected")


def test_workers_deselect_the_same_tests_and_keep_a_file_together(tmp_path: Path) -> None:
    """A file's tests stay in one worker, with the processes that they share."""
    pytest.importorskip("xdist", reason="needs pytest-xdist")
    for name in ("one", "two"):
        (tmp_path / f"test_{name}.py").write_text(TOGETHER)
    *_, line, last = run(tmp_path, "-n", "2", tests=SLOW).splitlines()
    assert line == LINE
    assert last.startswith("41 passed")
    assert len({f.read_text().split()[0] for f in tmp_path.glob("*.workers")}) == 2


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_run(tmp_path: Path) -> None:
    """The run ends before a replacement repeats the dead worker's files or waits for them."""
    pytest.importorskip("xdist", reason="needs pytest-xdist")
    for number in range(6):
        (tmp_path / f"test_{number}.py").write_text(TOGETHER)
    dies = "import os\n\ndef test_here():\n    pass\n\ndef test_that_dies():\n    os._exit(1)\n"
    output = run(tmp_path, "-n", "2", tests=dies)
    assert "crashed" in output
    assert "1 failed" in output.splitlines()[-1]


def test_a_worker_for_two_cores_unless_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, gpu, workers in (
        (1, False, 1), (2, False, 2), (3, False, 2), (6, False, 3), (64, False, 8), (64, True, 0)
    ):  # fmt: skip
        monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        assert conftest.pytest_xdist_auto_num_workers() == workers
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "5")
    assert conftest.pytest_xdist_auto_num_workers() == 5


@pytest.mark.parametrize(
    ("arguments", "left_out", "ran"),
    [
        (["-m", ""], "", "61 passed, 1 skipped"),
        (["-k", "quick"], "", "1 passed, 61 deselected"),
        (["-k", "slow and 7"], "6 slow tests were left out; about 1 minute:", "62 deselected"),
    ],
)
def test_only_tests_deselected_as_slow_are_counted(
    tmp_path: Path, arguments: list[str], left_out: str, ran: str
) -> None:
    output = run(tmp_path, *arguments, tests=SLOW)
    assert ran in output.splitlines()[-1]
    assert left_out in output
    assert ("slow test" in output) == bool(left_out)
