"""Interrupted commands: one line or silence, measured rows are kept, no process is left.

Cases start a program, because a signal may arrive at any time: while it measures, or waits for its
own processes.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from programs import Program

import allreduce_bandwidth as bench
from pycollect._command import Interruption, interrupts_kept_from_children

ROOT = Path(__file__).parents[1]
TIMEOUT = 300  # generous, because the machine may be busy
SHORT_TIMEOUT = 20  # in s; the rest of the work would take far longer
CLI = [sys.executable, "-m", "pycollect"]
QUICK = ["-e", "4K", "--world", "2", "-n", "1", "-w", "1"]


def script(name):
    return [sys.executable, str(ROOT / "bench" / f"{name}.py")]


@contextmanager
def started(command):
    """A program in its own process group, as from a terminal; the group is killed in the end."""
    with Program(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            if group(process):
                os.killpg(process.pid, signal.SIGKILL)


def group(process):
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


def receives_ctrl_c(pid):
    """Python would print a traceback on Ctrl-C, also while it starts."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False  # has ended since the group was listed
    masks = re.findall(r"^Sig(?:Blk|Ign):\t(\w+)$", status, re.MULTILINE)
    return not any(int(mask, 16) >> (signal.SIGINT - 1) & 1 for mask in masks)


def wait_until(ready, seconds=TIMEOUT):
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def interrupt(process, number=signal.SIGINT):
    """Send a signal, Ctrl-C to the whole group as a terminal does; return the standard error."""
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    _, errors = process.communicate(timeout=TIMEOUT)  # until all processes with the pipe end
    wait_until(lambda: not group(process), SHORT_TIMEOUT)  # multiprocessing's tracker ends later
    return errors


# Far more sizes than are measured before the signal comes.
MANY = ["-b", "4K", "-e", "1G", "-f", "2", "--seconds", "0.05"]
BENCH, TWO = [*CLI, "bench", *MANY], ["--world", "2"]
PROCESSES = [*BENCH, "--peers", "none", "--processes"]
LENET = ["--models", "lenet", "--batch", "8"]
ALONE = [*LENET, "--no-ddp", "--seconds", "0.05"]
ONCE = [*LENET, "--worlds", "2", "-n", "1"]
INT, TERM = signal.SIGINT, signal.SIGTERM
# The command, the begin and end of the line to wait for and the number of processes that run then,
# the signal, the status, the kept list of results and its least length.
CASES = {
    "bench": ([*BENCH, *TWO], "      2        8192", "", 1, INT, 130, "cases", 2),
    "bench, SIGTERM": ([*BENCH, *TWO], "      2        8192", "", 1, TERM, 143, "cases", 2),
    "processes": ([*PROCESSES, "2"], "      2        8192", "", 3, INT, 130, "cases", 2),
    "copies": ([*script("copies"), *MANY], " scatter", "", 1, INT, 130, "cases", 1),
    "training": ([*script("train"), *ALONE], "# step, lenet", "", 1, INT, 130, "cases", 1),
    "starting processes": ([*PROCESSES, "3"], "# world", "", 4, INT, 130, None, 0),
    "starting DDP": ([*script("train"), *ONCE], "#", "", 4, INT, 130, None, 0),
}
# In quick runs, test_bench.py interrupts copies and training, in the test's own process.
SLOW = ("starting", "copies", "training")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n.startswith(SLOW) else ()) for n in CASES]
)
def test_results_are_kept_and_no_process_is_left(tmp_path, name):
    command, begin, end, processes, number, status, key, least = CASES[name]
    path = tmp_path / "run.json"
    with started(command if key is None else [*command, "--json", str(path)]) as process:
        lines = iter(process.stdout.readline, "")
        assert any(line.startswith(begin) and line.rstrip().endswith(end) for line in lines)
        wait_until(lambda: len(group(process)) >= processes)
        children = {*group(process)} - {process.pid}
        assert not any(map(receives_ctrl_c, children))
        errors = interrupt(process, number)
    assert process.returncode == status
    kept = f"interrupted; the partial results are in {path}\n" if key else "interrupted\n"
    assert errors == kept
    assert path.exists() == bool(key)
    if key:
        results = json.loads(path.read_text())
        assert (results["interrupted"], results.get("failure")) == (True, None)
        assert len(results[key]) >= least


def test_signal_handlers_of_the_calling_program_are_unchanged(tmp_path):
    before, path = [signal.getsignal(n) for n in (INT, TERM)], tmp_path / "run.json"
    assert bench.main([*QUICK, "--json", str(path)]) == 0
    assert [signal.getsignal(n) for n in (INT, TERM)] == before
    assert json.loads(path.read_text())["interrupted"] is False


@pytest.mark.parametrize("number", [INT, TERM])
def test_signals_are_deferred_while_processes_start(number):
    """Another thread takes the signal, which is reported once all processes have been started."""
    end, whole = threading.Event(), False
    other = threading.Thread(target=end.wait)
    other.start()
    with Interruption() as interruption, interrupts_kept_from_children():
        os.kill(os.getpid(), number)
        time.sleep(0.1)
        whole = True
    end.set()
    other.join()
    assert whole
    assert interruption.number == number
