"""bench/gpu_report.sh on a machine without a GPU: its stages, its records, and printed skips."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable

import pytest
from gpu_machine import CONTENT, SCRIPT, Machine

STAGES = ("first", "speed", "test", "dist", "bench", "questions", "sanitize", "slow")


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_stage_leaves_its_log_and_the_record(machine):
    status, output = machine.run("bench")
    assert status == 0, output
    record = machine.record()
    assert record == machine.record(machine.results)
    assert (record["gpu"], record["driver"]) == ("NVIDIA H200", "580.159.04")
    assert (record["torch"], record["cuda"]) == ("2.11.0+cu130", "13.0")
    assert all(run["content"] == json.loads(CONTENT) for run in record["runs"].values())
    lines = (machine.results / "h200.json").read_text().splitlines()
    assert lines.count('     {"a": {"b": 1}}') == len(record["runs"])  # a row has a line here too
    run = record["runs"]["copies"]
    assert run["status"] == 0
    assert run["last_line"].startswith("ran: bench/copy_bandwidth.py --devices cpu")
    assert "copy_bandwidth.py" in run["command"]
    log = (machine.out / "bench.log").read_text()
    assert all(f"== {name} [at most" in log for name in record["runs"])
    assert sorted(path.name for path in machine.out.iterdir()) == ["bench.log", "h200.json"]
    assert "copies: status 0, " in output


def test_a_later_stage_adds_to_the_record(machine):
    machine.run("bench")
    status, output = machine.run("build")
    assert status == 0, output
    runs = machine.record(machine.results)["runs"]
    assert {"build", "info", "copies"} < set(runs)
    assert "--no-build-isolation --no-deps -e ." in runs["build"]["command"]


def test_the_stages_run_what_decides_first(machine):
    names = list(machine.commands("first"))
    assert names[:4] == ["build", "info", "one_call", "smoke-lists"]
    assert len(names[3:-1]) >= 5
    assert all(name.startswith("smoke-") for name in names[3:-1])
    assert names[-1] == "gpu_waits"
    names = list(machine.commands("speed"))
    assert names[:4] == ["all_reduce-float32", "dist-targets", "rank_threads", "train_step"]
    assert list(machine.commands("dist"))[:2] == ["dist-values", "dist-streams"]
    assert [*machine.commands(), *machine.commands("build")][:2] == ["build", "info"]
    _, output = machine.run("--dry-run", "all")
    begun = [stage for line in output.splitlines() for stage in STAGES if f"== {stage} on" in line]
    assert begun == list(STAGES)


def test_nothing_else_runs_without_a_build(machine):
    machine.set_python("pip install")
    status, output = machine.run("first")
    assert status == 1
    assert "FAILED: build status 1" in output
    assert list(machine.record()["runs"]) == ["build"]


def test_a_stage_builds_what_a_fresh_machine_lacks(machine):
    machine.set_python(built=1)
    status, output = machine.run("questions")
    assert status == 0, output
    assert list(machine.record()["runs"])[:3] == ["build", "info", "gpu_waits-all"]
    machine.set_python("pip install", built=1)
    assert machine.run("bench")[0] == 1
    assert "copies" not in machine.record()["runs"]


def test_a_killed_stage_leaves_what_it_had(machine):
    """The whole process group is killed, as on a machine that is taken away."""
    machine.set_python("overlap.py", "exec sleep 60")
    command, environ = machine.command("bench")
    killed = subprocess.Popen(
        command, env=environ, stdout=subprocess.DEVNULL, start_new_session=True
    )
    log = machine.out / "bench.log"
    until(lambda: log.exists() and "ran: bench/overlap.py" in log.read_text())
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    runs = machine.record()["runs"]
    assert runs["copies"]["status"] == 0
    assert runs["overlap"]["status"] is None
    assert json.loads((machine.out / "overlap.json").read_text()) == json.loads(CONTENT)


@pytest.mark.parametrize("how", ["", "setsid "], ids=["same group", "own group"])
def test_a_process_that_is_left_behind_delays_nothing(machine, how):
    """It has inherited the pipe to the log."""
    machine.set_python("copy_bandwidth.py", f"{how}sleep 50 & sleep 0.2")
    begin = time.monotonic()
    status, output = machine.run("bench")
    assert status == 0, output
    assert time.monotonic() - begin < 30


def test_the_results_of_a_stopped_benchmark_are_kept(machine):
    """A benchmark that needs some time after SIGTERM gets it."""
    stopped = """trap 'echo "{\\"late\\": 1}" >"$last"; exit 143' TERM; sleep 60 & wait"""
    machine.set_python("copy_bandwidth.py", stopped)
    machine.run("bench", LIMIT=3)
    run = machine.record()["runs"]["copies"]
    assert run["content"] == {"late": 1}
    assert run["status"] == 124


def test_a_stopped_test_run_prints_its_failures(machine):
    machine.set_python("test_cuda_streams.py", "trap 'echo 2 failed; exit 2' INT; sleep 60 & wait")
    machine.run("test", LIMIT=3)
    assert machine.record()["runs"]["test-streams"]["last_line"] == "2 failed"


def test_a_measurement_that_cannot_run_is_a_printed_skip(machine):
    machine.set_python("gpu_waits.py", "exit 77")
    status, output = machine.run("questions")
    assert status == 0, output
    assert "SKIPPED: gpu_waits-all: ran: bench/gpu_waits.py --world 2" in output
    runs = machine.record()["runs"]
    assert {name: run["status"] for name, run in runs.items()} == {
        "gpu_waits-all": 77,
        "reduce_kernels": 0,
        "pinned_ring": 0,
    }


def test_a_failure_is_recorded_and_the_next_step_runs(machine):
    machine.set_python("overlap.py", "exit 7")
    status, output = machine.run("bench")
    assert status == 1
    assert "FAILED: overlap status 7" in output
    assert "gpu_report: failed: overlap" in output
    runs = machine.record()["runs"]
    assert runs["overlap"]["status"] == 7
    assert runs["reduce_scatter"]["status"] == 0


def test_a_missed_target_is_not_a_failure(machine):
    machine.set_python("--targets", "exit 3")
    status, _ = machine.run("speed")
    assert status == 0
    assert machine.record()["runs"]["all_reduce-float32"]["status"] == 3


def test_a_stage_ends_with_its_time(machine):
    machine.set_python("bench/", "exec sleep 60")
    status, output = machine.run("speed", LIMIT=3)
    assert status == 1
    assert "FAILED: all_reduce-float32 status 124" in output
    assert "FAILED: dist-targets no time left" in output
    assert machine.record()["runs"]["all_reduce-float32"]["status"] == 124


def test_all_stages_end_with_their_time(machine):
    machine.set_python("gpu_waits.py", "exec sleep 60")
    status, output = machine.run("questions", "bench", TOTAL=4)
    assert status == 1
    assert "FAILED: gpu_waits-all status 124" in output
    assert "FAILED: reduce_kernels no time left" in output
    assert "FAILED: copies no time left" in output


def test_a_missing_sanitizer_is_a_printed_skip(machine):
    status, output = machine.run("sanitize")
    assert status == 0
    assert "SKIPPED: sanitize: there is no compute-sanitizer" in output


def test_a_sanitizer_that_refuses_the_device_is_a_printed_skip(machine):
    refuses = "#!/bin/sh\necho '========= Error: Device not supported'\nexit 1\n"
    machine.fake("compute-sanitizer", refuses)
    status, output = machine.run("sanitize")
    assert status == 0
    assert "SKIPPED: sanitize: compute-sanitizer does not run here" in output
    assert "Device not supported" in output


def test_a_sanitizer_that_hangs_is_a_printed_skip(machine):
    machine.fake("compute-sanitizer", "#!/bin/sh\nexec sleep 60\n")
    status, output = machine.run("sanitize", LIMIT=3)
    assert status == 0
    assert "SKIPPED: sanitize: compute-sanitizer does not run here: it hangs" in output


def test_an_error_of_the_sanitizer_fails(machine):
    finds = '#!/bin/sh\ncase "$*" in *memcheck*) exit 99 ;; esac\n'
    machine.fake("compute-sanitizer", finds)
    status, output = machine.run("sanitize")
    assert status == 1
    runs = machine.record()["runs"]
    assert [runs[f"sanitize-{tool}"]["status"] for tool in ("memcheck", "initcheck")] == [99, 0]
    assert "FAILED: sanitize-memcheck" in output


def test_a_dry_run_runs_nothing(machine):
    status, output = machine.run("--dry-run", "all")
    assert status == 0
    assert "ran:" not in output
    assert not list(machine.results.iterdir())


def test_a_machine_without_a_driver_still_has_a_record(machine):
    (machine.fakes / "nvidia-smi").unlink()
    status, output = machine.run("build")
    assert status == 0, output
    assert machine.record(machine.results, "no-gpu")["gpu"] == "no GPU"


def test_unknown_stages_are_refused(machine):
    status, output = machine.run("biuld")
    assert status == 2
    assert "usage:" in output


def test_the_script_is_clean():
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck")
    done = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
