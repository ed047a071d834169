"""Interrupted commands: one line or silence, measured rows are kept, no process is left.

Every test starts a program, because a signal may arrive at any time: while it measures, imports
torch, or waits for its own processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from programs import Program, run

ROOT = Path(__file__).parents[1]
# Generous, because the machine may be busy.
TIMEOUT = 300
SHORT_TIMEOUT = 20  # in s; the rest of the work would take far longer
MODULE = [sys.executable, "-m"]
TRAIN = [*MODULE, "pycollect.train", "--data", "digits", "--devices", "cpu*2"]
CLI = [*MODULE, "pycollect"]
# Far more sizes than are measured before the signal comes.
BENCH = ["-b", "4K", "-e", "1G", "-f", "2", "--world", "2", "--seconds", "0.05"]


def bench_script(name: str) -> list[str]:
    return [sys.executable, str(ROOT / "bench" / f"{name}.py")]


@contextmanager
def started(command: list[str], imports: bool = False, **more: Any) -> Iterator[Any]:
    """A program in its own process group, as from a terminal; the group is killed in the end.

    With `imports` the program also imports torch, instead of starting with torch loaded.
    """
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    if imports:
        started = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
    else:
        started = Program(command, **pipes)
    with started as process:
        try:
            yield process
        finally:
            if group(process):
                os.killpg(process.pid, signal.SIGKILL)


def group(process: Any) -> list[int]:
    """The processes of the program's group that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(of) == process.pid and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def wait_for_line(process: Any, begin: str, end: str = "") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(begin) and line.rstrip().endswith(end):
            return
    assert process.stderr is not None
    pytest.fail(f"no line begins with {begin!r}; {process.stderr.read()}")


def interrupt(process: Any, number: int = signal.SIGINT) -> str:
    """Send a signal to the whole group, as a terminal does; return the standard error."""
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert_group_is_empty(process)
    return errors


def assert_group_is_empty(process: Any) -> None:
    """Assert that the group is empty; multiprocessing's resource tracker ends a little later."""
    deadline = time.monotonic() + SHORT_TIMEOUT
    while group(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group(process) == []


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_rows_measured_so_far_are_kept(tmp_path: Path, number: int, status: int) -> None:
    path = tmp_path / "run.json"
    with started([*CLI, "bench", *BENCH, "--json", str(path)]) as process:
        wait_for_line(process, "     2        8192")
        errors = interrupt(process, number)
    assert errors == f"interrupted; the partial results are in {path}\n"
    assert process.returncode == status
    run = json.loads(path.read_text())
    assert run["interrupted"] is True
    assert [case["bytes"] for case in run["cases"]][:2] == [4096, 8192]
    assert run["cases"][0]["rows"]


def test_a_run_that_ends_by_itself_is_not_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    command = [*CLI, "bench", "-e", "4K", "--world", "2", "-n", "1", "-w", "1", "--json", path]
    assert run(command, timeout=TIMEOUT).returncode == 0
    assert json.loads(path.read_text())["interrupted"] is False


def test_processes_of_the_benchmark_end_with_it(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    processes = ["--processes", "2", "--peers", "none", "--json", str(path)]
    with started([*CLI, "bench", *BENCH, *processes]) as process:
        wait_for_line(process, "     2        8192")
        assert len(group(process)) == 3
        errors = interrupt(process)
    assert errors == f"interrupted; the partial results are in {path}\n"
    assert process.returncode == 130
    run = json.loads(path.read_text())
    assert (run["interrupted"], run["failure"]) == (True, None)
    assert [case["bytes"] for case in run["cases"]][:2] == [4096, 8192]


@pytest.mark.slow
def test_starting_processes_end_silently(tmp_path: Path) -> None:
    with started([*CLI, "bench", *BENCH, "--processes", "3", "--peers", "none"]) as process:
        wait_for_line(process, "#world")
        deadline = time.monotonic() + TIMEOUT
        while len(group(process)) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        errors = interrupt(process)
    assert (process.returncode, errors) == (130, "interrupted\n")


SCRIPTS: dict[str, tuple[list[str], str, str]] = {
    "allreduce_bandwidth": (BENCH, "     2        8192", "cases"),
    "copy_bandwidth": (
        ["-b", "1K", "-e", "1G", "-f", "2", "--seconds", "0.05"],
        " scatter",
        "copies",
    ),
    "overlap": (
        ["--size", "30", "--products", "2", "--repeats", "1", "--world", "1000000"],
        "one",
        "overlap",
    ),
    "train": (
        ["--models", "lenet", "--batch", "8", "--seconds", "0.05"],
        "# lenet, 1 rank",
        "training",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_keeps_its_rows(tmp_path: Path, name: str) -> None:
    arguments, begin, key = SCRIPTS[name]
    path = tmp_path / "run.json"
    with started([*bench_script(name), *arguments, "--json", str(path)]) as process:
        wait_for_line(process, begin)
        errors = interrupt(process)
    assert errors == f"interrupted; the partial results are in {path}\n"
    assert process.returncode == 130
    run = json.loads(path.read_text())
    assert run["interrupted"] is True
    assert len(run[key]) >= 1


def test_a_step_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    command = [*bench_script("train_step"), "--batch", "8", "--seconds", "600", "--json", path]
    with started(list(map(str, command))) as process:
        wait_for_line(process, "# command")
        errors = interrupt(process)
    assert (process.returncode, errors, path.exists()) == (130, "interrupted\n", False)


def has_loaded(process: Any, library: str) -> bool:
    try:
        return library in Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return False


COMMANDS = {
    "train": TRAIN,
    "cli": [*CLI, "info"],
    "script": bench_script("train_step"),
    "installed": [str(Path(sys.executable).with_name("pycollect")), "info"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_while_torch_is_imported(name: str) -> None:
    if name == "installed" and not Path(COMMANDS[name][0]).exists():
        pytest.skip("the command pycollect is not installed beside this Python")
    with started(COMMANDS[name], imports=True) as process:
        deadline = time.monotonic() + TIMEOUT
        while not has_loaded(process, "libtorch_cpu") and time.monotonic() < deadline:
            time.sleep(0.001)
        assert process.poll() is None
        errors = interrupt(process)
    assert process.returncode == 130
    assert errors in ("", "interrupted\n")


def test_signal_handlers_of_the_calling_program_are_unchanged(tmp_path: Path) -> None:
    """Neither import nor a benchmark call changes the signal handlers of the calling program."""
    program = tmp_path / "mine.py"
    program.write_text(
        "import signal\nbefore = [signal.getsignal(n) for n in (2, 15)]\n"
        f"import sys; sys.path.insert(0, {str(ROOT / 'bench')!r})\n"
        "import pycollect_bench as bench\n"
        "assert [signal.getsignal(n) for n in (2, 15)] == before\n"
        "assert bench.main(['-e', '4K', '--world', '2', '-n', '1', '-w', '1']) == 0\n"
        "assert [signal.getsignal(n) for n in (2, 15)] == before\n"
    )
    ended = run([sys.executable, program], timeout=TIMEOUT)
    assert (ended.returncode, ended.stderr) == (0, "")


def receives_sigint(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    lines = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
    masked = int(lines["SigBlk"], 16) | int(lines["SigIgn"], 16)
    return not masked >> (signal.SIGINT - 1) & 1


MEASURED = ["--models", "lenet", "--worlds", "2", "--batch", "6", "-n", "1", "--no-loading"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [[*TRAIN, "--epochs", "1", "--compare", "ddp,naive"], [*bench_script("train"), *MEASURED]],
    ids=["train", "bench"],
)
def test_ranks_ignore_ctrl_c(command: list[str]) -> None:
    """A rank that starts Python would otherwise print a traceback on Ctrl-C."""
    with started(command, stdout=subprocess.DEVNULL) as process:
        children: set[int] = set()
        deadline = time.monotonic() + TIMEOUT
        while len(children) < 3 and time.monotonic() < deadline:  # two ranks, a resource tracker
            time.sleep(0.01)
            children = set(group(process)) - {process.pid}
        assert len(children) >= 3
        assert not any(map(receives_sigint, children))
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("training", [True, False], ids=["training", "importing"])
def test_processes_of_a_comparison_end_with_it(number: int, training: bool) -> None:
    """A terminal sends Ctrl-C to all processes; other signals go to the started one only."""
    with started([*TRAIN, "--epochs", "3", "--compare", "ddp,naive"]) as process:
        wait_for_line(process, *(("epoch 1", "(ddp)") if training else ("epoch 3", "(naive)")))
        deadline = time.monotonic() + TIMEOUT
        while len(group(process)) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)  # two ranks and the resource tracker
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        _, errors = process.communicate(timeout=TIMEOUT)  # until all processes with the pipe end
        assert_group_is_empty(process)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    if training or number == signal.SIGINT:  # ranks receiving data may report it
        assert errors == ("interrupted\n" if number == signal.SIGINT else "")
