"""Standard output that fails, and bad environment variables: one sentence of error, or silence."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import programs
import pytest
from test_interrupts import CLI, TIMEOUT, TRAIN, bench_script

from pycollect import _command

QUICK = ["bench", "-e", "4K", "--world", "2", "-n", "1", "-w", "1"]
COMMANDS = {
    "info": [*CLI, "info"],
    "plan": [*CLI, "plan", "all_reduce", "8"],
    "bench": [*CLI, *QUICK],
    "help": [*CLI, "--help"],
    "train": [*TRAIN, "--epochs", "1"],
    "script": [*bench_script("train_step"), "-n", "1", "-w", "1", "--batch", "8"],
}
# Unbuffered output fails at the write itself, and loses the data not written.
EACH = [*((name, "") for name in COMMANDS), ("plan", "1")]


def ended(command: list[str], stdout: int, **environ: str) -> tuple[int, str]:
    more = {"stdout": stdout, "env": {**os.environ, **environ}}
    if any(environ.values()):  # variables that Python or the import reads
        done = subprocess.run(command, stderr=-1, text=True, timeout=TIMEOUT, **more)
    else:
        done = programs.run(command, timeout=TIMEOUT, **more)
    return done.returncode, done.stderr


@pytest.fixture
def closed_pipe() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize(("name", "unbuffered"), EACH)
def test_a_closed_pipe_ends_the_command_silently(
    closed_pipe: int, name: str, unbuffered: str
) -> None:
    found = ended(COMMANDS[name], closed_pipe, PYTHONUNBUFFERED=unbuffered)
    assert found == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(("name", "unbuffered"), EACH)
def test_a_full_disk_is_reported_in_one_sentence(name: str, unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        status, error = ended(COMMANDS[name], full.fileno(), PYTHONUNBUFFERED=unbuffered)
    assert status == 2
    assert error.endswith(": error: standard output cannot be written (No space left on device)\n")
    assert error.count("\n") == 1


def test_other_broken_pipes_are_ordinary_errors() -> None:
    """A broken pipe other than that of standard output is an ordinary error."""

    def work() -> int:
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        _command.run("bench", work)


def test_an_invalid_variable_is_reported_in_one_sentence() -> None:
    found = ended([*CLI, "info"], subprocess.DEVNULL, PYCOLLECT_LOG="loud")
    sentence = "PYCOLLECT_LOG is 'loud'; allowed are debug, info, warning"
    assert found == (1, f"pycollect: error: {sentence}\n")
