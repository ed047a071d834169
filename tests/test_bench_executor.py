"""bench/executor_bandwidth.py: its report of the programs' output, and both programs' results."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture(scope="module")
def script():
    """Import the script as a module."""
    spec = importlib.util.spec_from_file_location(
        "executor_bandwidth", BENCH / "executor_bandwidth.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_output_is_read(script):
    text = "  bytes us GB/s\n      4 0.50 0.01\n 1048576 100.00 10.49\n barrier 0.25\n"
    assert script.medians(text) == {4: 5e-7, 1 << 20: 1e-4, script.BARRIER: 2.5e-7}


def test_targets_take_the_worst_median(script):
    times = {
        script.COPY: {4: [1.0, 1.0, 1.0], 1 << 20: [1.0, 2.0, 1.0], script.BARRIER: [9.0] * 3},
        script.ZERO_COPY: {4: [9.0] * 3, 1 << 20: [1.0, 1.0, 1.0]},
        script.MPI: {4: [0.9, 5.0, 0.8], 1 << 20: [3.0, 3.0, 3.0], script.BARRIER: [1.0] * 3},
    }
    own, zero_copy = script.judge({2: times})
    assert (own.measured, own.met, own.where) == (0.9, False, "2 ranks, 4 B")
    assert (zero_copy.measured, zero_copy.met) == (3.0, True)
    del times[script.MPI]
    assert [outcome.met for outcome in script.judge({2: times})] == [None, None]


def test_a_program_that_fails_ends_the_run(script):
    with pytest.raises(SystemExit, match=r"ended with 3\nwrong"):
        script.run(["sh", "-c", "echo wrong >&2; exit 3"])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpicxx") is None, reason="needs Open MPI: mpicxx was not found")
def test_both_programs_run(script, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "LEVEL", "-O0")
    args = ["--world", "2", "-e", "1M", "--turns", "1", "--build", str(tmp_path)]
    assert script.main([*args, "--json", str(tmp_path / "run.json")]) in (0, 3)
    assert str(tmp_path) not in (tmp_path / "run.json").read_text()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line[:1] == " "]
    assert {len(row) - (row[1] != "barrier") for row in rows} == {7}
    assert all("-" not in row for row in rows)
