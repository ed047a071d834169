"""bench/executor_bandwidth.py: its parser and its targets, and the programs that it builds."""

import shutil
import subprocess

import pytest
from test_bench_gpu import BENCH, script


@pytest.fixture
def executor():
    return script("executor_bandwidth")


def test_output_is_read(executor):
    text = "  bytes us GB/s\n      4 0.50 0.01\n 1048576 100.00 10.49\n barrier 0.25\n"
    assert executor.medians(text) == {4: 5e-7, 1 << 20: 1e-4, executor.BARRIER: 2.5e-7}


def test_targets_take_the_worst_median(executor):
    times = {
        executor.COPY: {4: [1.0, 1.0, 1.0], 1 << 20: [1.0, 2.0, 1.0], executor.BARRIER: [9.0] * 3},
        executor.ZERO_COPY: {4: [9.0] * 3, 1 << 20: [1.0, 1.0, 1.0]},
        executor.MPI: {4: [0.9, 5.0, 0.8], 1 << 20: [3.0, 3.0, 3.0], executor.BARRIER: [1.0] * 3},
    }
    own, zero_copy = executor.judge({2: times})
    assert (own.measured, own.met, own.where) == (0.9, False, "2 ranks, 4 B")
    assert (zero_copy.measured, zero_copy.met) == (3.0, True)
    del times[executor.MPI]
    assert [outcome.met for outcome in executor.judge({2: times})] == [None, None]


def test_a_program_that_fails_ends_the_run(executor):
    with pytest.raises(SystemExit, match=r"ended with 3\nwrong"):
        executor.run(["sh", "-c", "echo wrong >&2; exit 3"])


@pytest.mark.parametrize("program", ["allreduce.cpp", "gpu_waits/main.cpp"])
def test_the_programs_compile_without_a_gpu(program):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    done = subprocess.run(
        ["g++", *flags, BENCH / "native" / program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_programs_run(executor, tmp_path, capsys, monkeypatch):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    monkeypatch.setattr(executor, "LEVEL", "-O0")
    args = ["--world", "2", "-e", "1M", "--turns", "1", "--build", str(tmp_path)]
    assert executor.main([*args, "--json", str(tmp_path / "run.json")]) in (0, 3)
    assert str(tmp_path) not in (tmp_path / "run.json").read_text()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line[:1] == " "]
    assert {len(row) - (row[1] != "barrier") for row in rows} == {7}
    with_mpi = shutil.which("mpicxx") is not None
    missing = {row.count("-") for row in rows}
    assert missing == ({0} if with_mpi else {3})  # Open MPI's time and the two ratios to it
