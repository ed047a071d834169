"""Standard output that fails, and bad environment variables: one sentence of error, or silence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_letter_that_the_output_has_not_is_escaped(tmp_path: Path, encoding: str) -> None:
    """The work is done when the line is printed: it must not end in an error."""
    folder = tmp_path / "gr\udcfc\u00fcn"  # a letter, and a byte that is not valid UTF-8
    folder.mkdir()
    calls = "from pycollect.train import Data, train; import torch; from torch import nn\n"
    calls += "data = torch.zeros(2, 1), torch.tensor([0, 1]); data = Data('\u00fc', data, data)\n"
    calls += "train('cpu', data=data, model=nn.Linear(1, 2), epochs=1)"
    for command in (
        [*CLI, "plan", "all_reduce", "2", "--plot", str(folder / "plan.svg")],
        [*CLI, "bench", "-e", "4K", "--world", "2", "-n", "1", "--json", str(folder / "run.json")],
        [sys.executable, "-c", calls],
    ):
        environ = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT, env=environ)
        assert (done.returncode, done.stderr) == (0, b""), command
    assert len(list(folder.iterdir())) == 2
