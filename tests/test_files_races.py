"""Output paths that become special files while a command works, and logs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_files import COMMANDS, script, unix_socket

from pycollect import _files
from pycollect.train.__main__ import main as train_main

ONE_EPOCH = ["--data", "digits", "--epochs", "1", "--batch-size", "256"]
SHORT = ["--models", "lenet", "--worlds", "1", "--batch", "8", "-n", "1", "-w", "1", "--no-ddp"]
WRITERS: dict[str, Callable[[str], int]] = {
    **{name: COMMANDS[name] for name in ("bench-json", "bench-plot", "plan-plot")},
    "train-checkpoint": lambda file: train_main([*ONE_EPOCH, "--checkpoint", file]),
    "train-plot": lambda file: train_main([*ONE_EPOCH, "--plot", file]),
    "train.py-plot": lambda file: script("train").main([*SHORT, "--no-loading", "--plot", file]),
}

CHECKS = {"plan-plot": 2}  # the command and the method both check


@pytest.mark.parametrize("name", WRITERS)
def test_a_path_that_became_a_socket_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The path changes right after the command has checked it."""
    path = tmp_path / "result.png"
    checks = CHECKS.get(name, 1)
    check = _files.tempfile.TemporaryFile

    def check_and_change(**where: Any) -> Any:
        nonlocal checks
        checks -= 1
        if checks == 0:
            unix_socket(path)
        return check(**where)

    monkeypatch.setattr(_files.tempfile, "TemporaryFile", check_and_change)
    with pytest.raises(SystemExit) as stop:
        sys.exit(WRITERS[name](str(path)))
    assert stop.value.code == 2
    assert "is a socket" in capsys.readouterr().err.splitlines()[-1]
    assert path.is_socket()


@pytest.mark.parametrize(("make", "message"), [(unix_socket, "a socket"), (Path.mkdir, "a folder")])
def test_a_log_to_a_socket_or_folder_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[Path], None],
    message: str,
) -> None:
    make(tmp_path / "log")
    with pytest.raises(SystemExit):
        train_main(["--data", "digits", "--log", str(tmp_path / "log")])
    assert capsys.readouterr().err.endswith(f"file, and {tmp_path}/log is {message}\n")
