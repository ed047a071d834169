"""bench/executor_bandwidth.py: its parser and its targets, and the programs that it builds."""

import os
import shutil
import subprocess

import pytest
from test_bench_gpu import BENCH, script

from pycollect_bench import mpi
from pycollect_bench.processes import worker_pool

OPEN, INTEL = (implementation.name for implementation in mpi.IMPLEMENTATIONS)
INTEL_VERSION = "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44)"


@pytest.fixture
def executor():
    return script("executor_bandwidth")


def install(folder, monkeypatch, *launchers):
    """Make a folder with programs, (name, text of --version), and append it to PATH."""
    folder.mkdir()
    for name, text in (*launchers, ("mpicxx", "")):
        (folder / name).write_text(f"#!/bin/sh\necho '{text}'\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{folder}")


def test_output_is_read(executor):
    text = "  bytes us GB/s\n      4 0.50 0.01\n 1048576 100.00 10.49\n barrier 0.25\n"
    assert executor.medians(text) == {4: 5e-7, 1 << 20: 1e-4, executor.BARRIER: 2.5e-7}


def test_targets_take_the_worst_median(executor):
    times = {
        executor.COPY: {4: [1.0, 1.0, 1.0], 1 << 20: [1.0, 2.0, 1.0], executor.BARRIER: [2.0] * 3},
        executor.ZERO_COPY: {4: [9.0] * 3, 1 << 20: [1.0, 1.0, 1.0]},
        OPEN: {4: [0.9, 5.0, 0.8], 1 << 20: [3.0, 3.0, 3.0], executor.BARRIER: [3.0] * 3},
        INTEL: {4: [2.0] * 3, 1 << 20: [2.0] * 3, executor.BARRIER: [1.0] * 3},
    }
    own, zero_copy, own_intel, zero_copy_intel = executor.judge({2: times})
    assert (own.measured, own.met, own.where) == (0.9, False, "2 ranks, 4 B")
    assert (zero_copy.measured, zero_copy.met) == (3.0, True)
    assert (own_intel.measured, own_intel.where) == (0.5, "2 ranks, barrier")
    assert (zero_copy_intel.measured, zero_copy_intel.met) == (2.0, False)
    del times[OPEN], times[INTEL]
    assert [outcome.met for outcome in executor.judge({2: times})] == [None] * 4


def test_a_program_that_fails_ends_the_run(executor):
    with pytest.raises(SystemExit, match=r"ended with 3\nwrong"):
        executor.run(["sh", "-c", "echo wrong >&2; exit 3"])


def test_mpi_is_found_by_its_version_in_any_folder_of_the_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/no/such/folder")
    assert mpi.find_all() == []
    monkeypatch.setattr(worker_pool, "find_spec", lambda name: name)
    assert worker_pool.why_no_mpi() == "Open MPI was not found"
    install(tmp_path / "other", monkeypatch, ("mpirun", "HYDRA build details"))
    intel = tmp_path / "intel"
    install(intel, monkeypatch, ("mpirun", INTEL_VERSION), ("mpiexec.hydra", INTEL_VERSION))
    assert list(map(str, mpi.find_all())) == ["Intel MPI 2021.18.1"]
    install(tmp_path / "open", monkeypatch, ("mpirun", "mpirun (Open MPI) 4.1.4"))
    assert list(map(str, mpi.find_all())) == ["Open MPI 4.1.4", "Intel MPI 2021.18.1"]
    (tmp_path / "open" / "mpicxx").unlink()
    assert [found.name for found in mpi.find_all()] == [INTEL]


def test_mpi_commands_have_what_the_launch_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    found = mpi.InstalledMpi(mpi.OPEN_MPI, "4.1.4", tmp_path)
    few, many = found.launch_command(2), found.launch_command(3)
    assert few[0] == str(tmp_path / "mpirun")
    assert "--allow-run-as-root" in few
    assert many[len(few) :] == ["--mca", "mpi_yield_when_idle", "1"]
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    assert "--allow-run-as-root" not in found.launch_command(2)
    intel = mpi.InstalledMpi(mpi.INTEL_MPI, "2021.18.1", tmp_path / "bin")
    variables = ["env", f"I_MPI_ROOT={tmp_path}", "I_MPI_FABRICS=shm"]
    assert intel.launch_command(2)[:4] == [*variables, str(tmp_path / "bin" / "mpiexec.hydra")]
    compiled = intel.compile_command(["-O0"], tmp_path / "a.cpp", tmp_path / "a")
    assert compiled[:3] == variables
    assert compiled[3:] == f"{tmp_path}/bin/mpicxx -O0 {tmp_path}/a.cpp -o {tmp_path}/a".split()


def test_the_program_compiles():
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    done = subprocess.run(
        ["g++", *flags, BENCH / "native" / "allreduce.cpp"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("implementation", mpi.IMPLEMENTATIONS, ids=[OPEN, INTEL])
def test_the_program_of_each_mpi_runs(implementation, executor, tmp_path, monkeypatch):
    found = mpi.find(implementation)
    if found is None:
        pytest.skip(f"needs {implementation.title} in PATH, see bench/README.md")
    monkeypatch.setattr(executor, "LEVEL", "-O0")
    program = executor.build_peer(found, tmp_path)
    times = executor.medians(executor.run([*found.launch_command(2), program, "1"]))
    assert {executor.BARRIER, 4, 1 << 20} <= times.keys()


@pytest.mark.slow
def test_the_programs_run(executor, tmp_path, capsys, monkeypatch):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    monkeypatch.setattr(executor, "LEVEL", "-O0")
    args = ["--world", "2", "-e", "1M", "--turns", "1", "--build", str(tmp_path)]
    assert executor.main([*args, "--json", str(tmp_path / "run.json")]) in (0, 3)
    assert str(tmp_path) not in (tmp_path / "run.json").read_text()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line[:1] == " "]
    assert {len(row) - (row[1] != "barrier") for row in rows} == {10}
    missing = len(mpi.IMPLEMENTATIONS) - len(mpi.find_all())
    # A peer's time and the two ratios to it.
    assert {row.count("-") for row in rows} == {3 * missing}
