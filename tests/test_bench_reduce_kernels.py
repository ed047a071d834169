"""The benchmarks of the fold kernel's constants and of the pinned ring: their tables and files."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from test_bench_gpu import script

from pycollect_bench import nvcc

ABOUT = {"question": "about", "gpu": "GH999", "multiprocessors": 7, "l2": 1000}
CASE = {"dtype": "float32", "world": 4, "bytes": 1 << 20}
SHAPE = {"width": 16, "in_flight": 8, "blocks_per_sm": 3, "waves": 4, "library": True}


def variant(us: float, wrong: int = 0, **more: object) -> dict[str, object]:
    timed = {"us": us, "memcpy_us": 4.0, "wrong": wrong}
    return {"question": "variant", **CASE, **SHAPE, **timed, **more}


CACHED = {"question": "l2", **CASE, **SHAPE, "hot_us": 4.0, "cold_us": 8.0}
CACHED |= {"memcpy_hot_us": 2.0, "memcpy_cold_us": 8.0}


def program(tmp_path: Path, *lines: object, end: str = "") -> Path:
    made = tmp_path / "reduce_kernels"
    text = "".join(
        f"echo '{line if isinstance(line, str) else json.dumps(line)}'\n" for line in lines
    )
    made.write_text(f"#!/bin/sh\n{text}{end}\n")
    made.chmod(0o755)
    return made


def run(tmp_path: Path, made: Path, *more: str) -> tuple[int, dict[str, object]]:
    path = tmp_path / "folds.json"
    status = script("reduce_kernels").main(["--program", str(made), "--json", str(path), *more])
    return status, json.loads(path.read_text()) if path.exists() else {}


def test_the_best_variant_and_the_librarys_are_printed(tmp_path, capsys):
    others = [variant(5.0, library=False, waves=1), variant(9.0, library=False, waves=2)]
    made = program(tmp_path, ABOUT, variant(6.0), *others, CACHED)
    assert run(tmp_path, made)[0] == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" float32")]
    assert [row.split()[7:] for row in rows[:2]] == [
        ["1", "5.00", "1678", "80", "1.00", "0"],
        ["4", "6.00", "1398", "67", "0.83", "0", "library"],
    ]
    assert rows[2].split()[-3:] == ["2.00", "50", "100"]
    run(tmp_path, made, "--all")
    assert capsys.readouterr().out.count("\n float32") == 4


def test_launches_are_printed_by_the_bytes_of_their_arguments(tmp_path, capsys):
    found = {"question": "args", "bytes": 512, "issue_us": 2.0, "us": 1.25}
    assert run(tmp_path, program(tmp_path, found))[0] == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["512", "2.00", "1.25"]


def test_wrong_elements_fail_the_run_and_are_shown(tmp_path, capsys):
    bad = variant(9.0, wrong=3, library=False)
    assert run(tmp_path, program(tmp_path, variant(6.0), bad))[0] == 1
    assert " 3\n" in capsys.readouterr().out


def test_results_before_a_failure_are_kept(tmp_path, capsys):
    made = program(tmp_path, ABOUT, variant(6.0), end="echo out of memory >&2; exit 1")
    status, record = run(tmp_path, made)
    assert status == 1
    assert record["findings"] == [ABOUT, variant(6.0)]
    assert record["failure"] == "reduce_kernels ended with 1: out of memory"
    assert "# FAILED: reduce_kernels ended with 1: out of memory" in capsys.readouterr().out


def test_a_program_is_killed_at_the_time_limit(tmp_path):
    made = program(tmp_path, variant(6.0), end="exec sleep 60")
    status, record = run(tmp_path, made, "--seconds", "0.3")
    assert status == 1
    assert record["findings"] == [variant(6.0)]
    assert record["failure"].startswith("reduce_kernels ended with -9")


def test_without_a_gpu_the_reason_is_printed(tmp_path, capsys):
    made = program(tmp_path, "there is no GPU to fold on here: none", end="exit 77")
    assert run(tmp_path, made) == (77, {})
    assert (
        "bench/reduce_kernels.py: there is no GPU to fold on here: none\n"
        in capsys.readouterr().out
    )


def test_without_nvcc_the_reason_is_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(nvcc.shutil, "which", lambda name: None)
    assert script("reduce_kernels").main(["--build", str(tmp_path)]) == 77
    assert "there is no nvcc on the path" in capsys.readouterr().out


def test_the_best_ring_and_the_librarys_are_printed(tmp_path, capsys):
    ring = {"question": "ring", "enters": True, "bytes": 1 << 20, "pieces": 4, "piece": 2 << 20}
    ring |= {"us": 200.0, "pinned_us": 50.0, "pageable_us": 300.0, "library": True}
    others = [ring | {"us": us, "library": False, "piece": 1 << 20} for us in (100.0, 150.0)]
    made = program(tmp_path, ring, *others)
    assert script("pinned_ring").main(["--program", str(made)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" to the GPU")]
    assert [row.split()[-4:] for row in rows] == [
        ["10.49", "50", "3.00", "1.00"],
        ["25", "1.50", "0.50", "library"],
    ]
    script("pinned_ring").main(["--program", str(made), "--all"])
    assert capsys.readouterr().out.count("\n to the GPU") == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reduce_kernels", "pinned_ring"])
def test_the_program_compiles(name, tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    made = nvcc.build(script(name).SOURCES, tmp_path / name)
    ended = subprocess.run([made], capture_output=True, check=False, timeout=120)
    assert ended.returncode in (0, 77)


def test_compiler_errors_are_reported(tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    source = tmp_path / "main.cu"
    source.write_text("int main() { return x; }")
    with pytest.raises(RuntimeError, match=r'(?s)nvcc ended with .*"x" is undefined'):
        nvcc.build([source], tmp_path / "made" / "x")
