"""bench/gpu_report.sh on a machine without a GPU: its stages, its records, and printed skips.

nvidia-smi, compute-sanitizer and Python are fakes on PATH. The benchmarks get the script's
arguments in this process instead of one process each, and the CPU replaces the GPU.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import programs
import pytest
from test_bench_gpu import script

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "bench" / "gpu_report.sh"
SMI = "#!/bin/sh\necho 'NVIDIA H200, 580.159.04'\n"
TOOLS = ("bash", "cat", "dirname", "env", "git", "grep", "head", "mkdir", "rm", "sh", "sleep")
TOOLS += ("tail", "tee", "timeout", "tr")
# JSON that the fake benchmarks write.
CONTENT = '{"schema": 2, "rows": [{"a": {"b": 1}}]}'
# A fake Python, which runs the commands that the script itself needs, and prints all others.
PYTHON = f"""#!/bin/sh
case "$1" in
  -c) echo 2.11.0+cu130 13.0; exit ;;
  - | bench/merge_results.py) exec {sys.executable} "$@" ;;
esac
echo "ran: $*"
case "$*" in *"--json "*) echo '{{content}}' >"$OUT/.content.json" ;; esac
case "$*" in *"{{failing}}"*) exit {{status}} ;; esac
"""


@pytest.fixture
def machine(tmp_path):
    """A function that runs the script with fakes on PATH, and returns exit status and output."""
    fakes = tmp_path / "bin"
    fakes.mkdir()
    # PATH has no folder of CUDA, so that the script finds the fakes.
    for tool in TOOLS:
        (fakes / tool).symlink_to(shutil.which(tool))

    def run(*stages, python="/nowhere/python", limit=60, **more):
        for name, text in more.items():
            path = fakes / name.replace("_", "-")
            path.write_text(text)
            path.chmod(0o755)
        kept = {k: v for k, v in os.environ.items() if k not in ("OUT", "CUDA_HOME")}
        settings = {"PATH": str(fakes), "PYTHON": str(python), "OUT": str(tmp_path / "out")}
        settings |= {"RESULTS": str(tmp_path / "results"), "DEVICES": "cpu", "QUICK": "1"}
        settings |= {"LIMIT": str(limit), "CUDA_HOME": str(tmp_path)}
        done = subprocess.run(
            [SCRIPT, *stages], env=kept | settings, capture_output=True, text=True, timeout=120
        )
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.fixture
def fake_python(tmp_path):
    def write(failing="no such command", status=1):
        path = tmp_path / "python"
        path.write_text(PYTHON.format(content=CONTENT, failing=failing, status=status))
        path.chmod(0o755)
        return path

    return write


def record_of(folder):
    return json.loads((folder / "h200.json").read_text())


def test_a_stage_leaves_its_log_and_the_record(machine, fake_python, tmp_path):
    status, output = machine("bench", python=fake_python(), nvidia_smi=SMI)
    assert status == 0, output
    record = record_of(tmp_path / "out")
    assert record == record_of(tmp_path / "results")
    assert (record["gpu"], record["driver"]) == ("NVIDIA H200", "580.159.04")
    assert (record["torch"], record["cuda"]) == ("2.11.0+cu130", "13.0")
    names = ["all_reduce-float32", "all_reduce-bfloat16", "copies", "overlap", "train_step"]
    assert list(record["runs"])[:5] == names
    assert all(run["content"] == json.loads(CONTENT) for run in record["runs"].values())
    lines = (tmp_path / "results" / "h200.json").read_text().splitlines()
    assert lines.count('     {"a": {"b": 1}}') == len(record["runs"])  # a row has a line here too
    run = record["runs"]["copies"]
    assert run["status"] == 0
    assert run["last_line"].startswith("ran: bench/copy_bandwidth.py --devices cpu")
    assert "copy_bandwidth.py" in run["command"]
    log = (tmp_path / "out" / "bench.log").read_text()
    assert all(f"== {name} [at most" in log for name in record["runs"])


@pytest.fixture
def contents(machine, fake_python, tmp_path, monkeypatch):
    """A function that returns the JSON output of a stage's benchmarks, by name of the run."""
    monkeypatch.chdir(ROOT)
    programs.fork_ranks(monkeypatch)

    def of(stage):
        _, output = machine("--dry-run", stage, python=fake_python(), nvidia_smi=SMI)
        found = {}
        for line in output.splitlines():
            name, _, command = line.partition(f": {tmp_path / 'python'} bench/")
            if not command:
                continue
            file, *arguments = shlex.split(command)
            assert script(Path(file).stem).main(arguments) in (0, 3), line
            found[name] = json.loads((tmp_path / "out" / ".content.json").read_text())
            assert found[name]["schema"] == 2
        return found

    return of


@pytest.mark.slow
def test_the_benchmarks_accept_the_scripts_arguments(contents):
    found = contents("bench")
    assert len(found) == 11
    assert found["copies"]["copies"]
    assert found["overlap"]["overlap"]
    assert found["train_step"]["steps"]
    assert found["train"]["training"]
    assert {case["dtype"] for case in found["all_reduce-bfloat16"]["cases"]} == {"bfloat16"}


@pytest.mark.slow
def test_the_benchmark_of_threads_accepts_the_scripts_arguments(contents):
    found = contents("threads")
    assert found["rank_threads"]["rank_threads"]["all_reduce"]


def test_a_later_stage_adds_to_the_record(machine, fake_python, tmp_path):
    machine("bench", python=fake_python(), nvidia_smi=SMI)
    status, output = machine("build", python=fake_python(), nvidia_smi=SMI)
    assert status == 0, output
    runs = record_of(tmp_path / "results")["runs"]
    assert {"build", "info", "copies"} < set(runs)
    assert "--no-build-isolation --no-deps -e ." in runs["build"]["command"]


def test_cuda_tests_run_first(machine, fake_python, tmp_path):
    status, output = machine("test", python=fake_python(), nvidia_smi=SMI)
    assert status == 0, output
    runs = record_of(tmp_path / "out")["runs"]
    assert list(runs) == [
        "test-cuda",
        "test-cuda-matrix",
        "test-cuda-slow",
        "test-others",
        "test-emulated",
    ]
    assert "tests/test_cuda_streams.py" in runs["test-cuda"]["command"]
    assert "tests/test_cuda_all_reduce.py" in runs["test-cuda-matrix"]["command"]
    assert "tests/test_cuda_all_reduce.py" not in runs["test-cuda"]["command"]
    assert "--ignore=tests/test_cuda_streams.py" in runs["test-others"]["command"]


def test_the_dist_stage_has_tests_and_benchmarks(machine, fake_python, tmp_path):
    status, output = machine("dist", python=fake_python(), nvidia_smi=SMI, limit=400)
    assert status == 0, output
    runs = record_of(tmp_path / "out")["runs"]
    assert list(runs) == ["dist-some", "dist-all_reduce", "dist-train", "dist-worlds"]
    assert "dist-some [at most 130 s]" in output
    assert "dist-all_reduce [at most 180 s]" in output
    assert " --processes 2 " in runs["dist-all_reduce"]["command"]
    assert "tests/test_cuda_dist_matrix.py" in runs["dist-some"]["command"]
    assert "--models lenet --worlds 2" in runs["dist-train"]["command"]


def test_every_cuda_test_belongs_to_one_stage(machine, fake_python, tmp_path):
    stages = ("test", "dist-test", "dist-memory", "dist-faults", "dist-slow")
    status, output = machine(*stages, python=fake_python(), nvidia_smi=SMI)
    assert status == 0, output
    runs = record_of(tmp_path / "out")["runs"].values()
    words = [word for run in runs for word in run["command"].split()]
    for file in sorted(path.name for path in (ROOT / "tests").glob("test_cuda_*.py")):
        # Most files have quick and slow tests; the lifecycle file runs twice in the last stage.
        alone = file.startswith("test_cuda_dist_") and file != "test_cuda_dist_lifecycle.py"
        times = 1 if alone else 2
        assert words.count(f"tests/{file}") == times, file


def test_every_part_of_a_test_selection_selects_a_test(machine, fake_python, monkeypatch):
    monkeypatch.chdir(ROOT)
    tools = {"nvidia_smi": SMI, "compute_sanitizer": "#!/bin/sh\n"}
    _, output = machine("--dry-run", "all", python=fake_python(), **tools)
    commands = [shlex.split(line) for line in output.splitlines() if " -m pytest " in line]
    selections = [words for words in commands if "-k" in words]
    assert len(selections) == 6
    listed = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", ""]
    done = programs.run([*listed, *sorted(ROOT.glob("tests/test_cuda_*.py"))], timeout=120)
    ids = [line for line in done.stdout.splitlines() if "::" in line]
    for words in selections:
        paths = tuple(word for word in words if word.startswith("tests"))
        names = [name for name in ids if name.startswith(paths)]
        for part in set(words[words.index("-k") + 1].split()) - {"and", "or", "not"}:
            assert any(part in name for name in names), part


@pytest.mark.slow
def test_the_dist_benchmarks_accept_the_scripts_arguments(contents):
    found = contents("dist")
    assert list(found) == ["dist-all_reduce", "dist-train", "dist-worlds"]
    rows = found["dist-all_reduce"]["cases"][0]["rows"]
    assert {row["clock"] for row in rows} == {"wall", "return", "gpu"}
    names = [row["way"] for row in found["dist-train"]["training"][0]["rows"]]
    assert "DDP, gloo" in names


def test_a_measurement_that_cannot_run_is_a_printed_skip(machine, fake_python, tmp_path):
    status, output = machine("questions", python=fake_python("gpu_waits.py", 77), nvidia_smi=SMI)
    assert status == 0, output
    assert "SKIPPED: gpu_waits: ran: bench/gpu_waits.py --world 2" in output
    runs = record_of(tmp_path / "out")["runs"]
    assert {name: run["status"] for name, run in runs.items()} == {
        "gpu_waits": 77,
        "reduce_kernels": 0,
        "pinned_ring": 0,
        "graph_replay": 0,
    }


def test_a_failure_is_recorded_and_the_next_step_runs(machine, fake_python, tmp_path):
    status, output = machine("bench", python=fake_python("overlap.py", 7), nvidia_smi=SMI)
    assert status == 1
    assert "FAILED: overlap status 7" in output
    assert "gpu_report: failed: overlap" in output
    runs = record_of(tmp_path / "out")["runs"]
    assert runs["overlap"]["status"] == 7
    assert runs["reduce_scatter"]["status"] == 0


def test_a_missed_target_is_not_a_failure(machine, fake_python, tmp_path):
    status, _ = machine("bench", python=fake_python("--targets", 3), nvidia_smi=SMI)
    assert status == 0
    assert record_of(tmp_path / "out")["runs"]["all_reduce-float32"]["status"] == 3


def test_a_stage_ends_with_its_time(machine, tmp_path):
    slow = tmp_path / "slow"
    fake = PYTHON.format(content=CONTENT, failing="no such command", status=0)
    slow.write_text(fake + "sleep 60\n")
    slow.chmod(0o755)
    status, output = machine("bench", python=slow, nvidia_smi=SMI, limit=3)
    assert status == 1
    assert "FAILED: all_reduce-float32 status 124" in output
    assert "FAILED: copies no time left in this stage" in output
    assert record_of(tmp_path / "out")["runs"]["all_reduce-float32"]["status"] == 124


def test_a_missing_sanitizer_is_a_printed_skip(machine, fake_python):
    status, output = machine("sanitize", python=fake_python(), nvidia_smi=SMI)
    assert status == 0
    assert "SKIPPED: sanitize: there is no compute-sanitizer" in output


def test_a_sanitizer_that_refuses_the_device_is_a_printed_skip(machine, fake_python):
    refuses = "#!/bin/sh\necho '========= Error: Device not supported'\nexit 1\n"
    tools = {"nvidia_smi": SMI, "compute_sanitizer": refuses}
    status, output = machine("sanitize", python=fake_python(), **tools)
    assert status == 0
    assert "SKIPPED: sanitize: compute-sanitizer does not run here" in output
    assert "Device not supported" in output


def test_a_sanitizer_that_hangs_is_a_printed_skip(machine, fake_python):
    tools = {"nvidia_smi": SMI, "compute_sanitizer": "#!/bin/sh\nexec sleep 60\n"}
    status, output = machine("sanitize", python=fake_python(), limit=3, **tools)
    assert status == 0
    assert "SKIPPED: sanitize: compute-sanitizer does not run here: it hangs" in output


def test_an_error_of_the_sanitizer_fails(machine, fake_python, tmp_path):
    finds = '#!/bin/sh\ncase "$*" in *memcheck*) exit 99 ;; esac\n'
    tools = {"nvidia_smi": SMI, "compute_sanitizer": finds}
    status, output = machine("sanitize", python=fake_python(), **tools)
    assert status == 1
    runs = record_of(tmp_path / "out")["runs"]
    assert [runs[f"sanitize-{tool}"]["status"] for tool in ("memcheck", "initcheck")] == [99, 0]
    assert "FAILED: sanitize-memcheck" in output


def test_a_dry_run_runs_nothing(machine, fake_python, tmp_path):
    status, output = machine("--dry-run", "all", python=fake_python("bench"), nvidia_smi=SMI)
    assert status == 0
    assert "ran:" not in output
    assert not list((tmp_path / "results").iterdir())
    for name in ("build: ", "test-cuda: ", "copies: ", "dist-all_reduce: ", "gpu_waits: "):
        assert f"\n{name}" in output or f"== {name}" in output


def test_a_machine_without_a_driver_still_has_a_record(machine, fake_python, tmp_path):
    status, output = machine("build", python=fake_python())
    assert status == 0, output
    assert json.loads((tmp_path / "results" / "no-gpu.json").read_text())["gpu"] == "no GPU"


def test_unknown_stages_are_refused(machine):
    status, output = machine("biuld")
    assert status == 2
    assert "usage:" in output


def test_the_script_is_clean():
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck")
    done = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
