"""Output of commands: files are written whole or left as they are; standard output may fail."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import programs
import pytest

import allreduce_bandwidth as bench
from pycollect import _command, _files, cli, log
from pycollect._files import check_input, check_output_path, open_lines, replace, write
from pycollect.train import train
from pycollect.train.__main__ import main as train_main

ROOT = Path(__file__).parents[1]
TIMEOUT = 300


def link_to_fifo(path):
    os.mkfifo(path.with_name("target"))
    path.symlink_to("target")


QUICK = ["-e", "4K", "--world", "2", "-n", "1", "-w", "1"]
TRAIN = ["--data", "digits", "--epochs", "1", "--batch-size", "256"]
RECORD = str(ROOT / "bench" / "results" / "cpu.json")
COMMANDS = {
    "bench-json": lambda file: bench.main([*QUICK, "--json", file]),
    "bench-plot": lambda file: bench.main([*QUICK, "--plot", file]),
    "plan-plot": lambda file: cli.main(["plan", "all_reduce", "2", "--plot", file]),
    "train-checkpoint": lambda file: train_main([*TRAIN, "--checkpoint", file]),
    "train-plot": lambda file: train_main([*TRAIN, "--plot", file]),
    "redraw": lambda file: bench.main(["--redraw", RECORD, "--plot", file]),
}
IN_THE_WAY = {
    "a FIFO": os.mkfifo,
    "is a FIFO": link_to_fifo,
    "a folder": Path.mkdir,
    "Too many levels of symbolic links": lambda path: path.symlink_to(path),
    "does not exist or is not writable": lambda path: path.symlink_to("no/where"),
}


def refused(command, path, capsys):
    """The last line of the error of a command that ends with status 2 and has no output."""
    with pytest.raises(SystemExit) as stop:
        sys.exit(COMMANDS[command](str(path)))
    captured = capsys.readouterr()
    assert (stop.value.code, "Traceback" in captured.err) == (2, False)
    return captured.out, captured.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "kind"),
    [*((c, "a FIFO") for c in COMMANDS), *(("bench-json", kind) for kind in [*IN_THE_WAY][1:])],
)
def test_special_files_are_refused_before_any_work(tmp_path, capsys, command, kind):
    path = tmp_path / "result.png"
    IN_THE_WAY[kind](path)
    before = os.lstat(path)
    output, error = refused(command, path, capsys)
    assert (output, kind in error) == ("", True)
    after = os.lstat(path)
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)
    missing = "no/where.png does not exist or is not writable (No such file"
    assert missing in refused(command, "no/where.png", capsys)[1]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_file_or_its_folder_must_be_writable():
    """A log is appended to an existing file; a checkpoint replaces it, which needs the folder."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder) / "file"
        path.write_text("")
        alone = 0o600, 0o777, False, "the log .*file exists and is not writable"
        beside = 0o666, 0o755, True, "the folder of the log .* not writable"
        for mode, folder_mode, moved, why in (alone, beside):
            path.chmod(mode)
            path.parent.chmod(folder_mode)
            os.seteuid(65534)
            try:
                check_output_path("log", path, moved=not moved)
                with pytest.raises(ValueError, match=why):
                    check_output_path("log", path, moved=moved)
            finally:
                os.seteuid(0)


@pytest.mark.parametrize("before", ["no file", "a file", "a link to a file", "a link"])
def test_a_file_is_written_whole_or_not_at_all(tmp_path, before):
    """A link, here a relative one to another folder, stays a link, and its target is written."""
    path = target = tmp_path / ("x" * 255)  # the longest name
    if "link" in before:
        target = tmp_path / "far" / "run.pt"
        target.parent.mkdir()
        path.symlink_to(Path("far", "run.pt"))
    if "a file" in before:
        target.write_text("old")
    names = {found.name for found in tmp_path.rglob("*")}

    def fails(file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    for moved in (True, False):
        check_output_path("log", path, moved=moved)
    with pytest.raises(OSError, match="No space"):
        replace(path, fails)
    assert {found.name for found in tmp_path.rglob("*")} == names
    assert "a file" not in before or target.read_text() == "old"
    for save in (
        lambda text: replace(path, lambda file: file.write(text.encode())),
        lambda text: write("JSON file", path, text),
    ):
        save("new")
        assert (path.is_symlink(), target.read_text()) == ("link" in before, "new")
        target.unlink()


def test_a_log_can_be_read_from_a_fifo(tmp_path):
    """Log lines arrive one by one; without a reader, opening fails instead of blocking."""
    path = tmp_path / "log"
    os.mkfifo(path)
    check_output_path("log", path, streamed=True)
    with pytest.raises(OSError, match="it has no reader; start the reader first"):
        open_lines(path, append=False)
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        with open_lines(path, append=False) as log:
            assert os.get_blocking(log.fileno())  # writes block for a slow reader
        train("cpu", data="digits", epochs=1, log=path, quiet=True)
        events = [json.loads(line)["event"] for line in reader.read().splitlines()]
    assert (events[0], events[-2:]) == ("start", ["epoch", "end"])


@pytest.mark.parametrize("content", ["{", "[1]", "\xff"])
def test_an_invalid_record_is_reported_in_one_sentence(tmp_path, capsys, content):
    path, picture = tmp_path / "broken.json", tmp_path / "run.png"
    path.write_bytes(content.encode("latin1"))
    assert bench.main(["--redraw", str(path), "--plot", str(picture)]) == 2
    message = "holds no JSON object" if content == "[1]" else "cannot be read"
    assert re.search(f"the record {path} .*{message}", capsys.readouterr().err)
    assert not picture.exists()


def test_paths_that_are_refused(tmp_path, monkeypatch):
    """By its permissions /proc is writable for root, but no file can be created there."""
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for check, message in (
        (lambda: check_output_path("log", "/proc/run.jsonl"), "folder of the log /proc/run.jsonl"),
        (lambda: check_input("record", tmp_path / "none"), "there is no record"),
        (lambda: check_input("record", tmp_path / "fifo"), "the record must be a regular file"),
        (lambda: _files.check_picture(tmp_path / "run.png"), r"install pycollect\[train\]"),
    ):
        with pytest.raises(ValueError, match=message):
            check()


# Standard output

SLOW = pytest.mark.slow
PYTHON = [sys.executable]
CLI = [*PYTHON, "-m", "pycollect"]
PROGRAMS = {
    "plan": [*CLI, "plan", "all_reduce", "8"],
    "bench": [*CLI, "bench", *QUICK],
    "train": [*PYTHON, "-m", "pycollect.train", "--devices", "cpu*2", *TRAIN],
    "script": [*PYTHON, str(ROOT / "bench" / "copies.py"), "-n", "1", "-e", "1M"],
}


def ended(command, stdout, **environ):
    more = {"stdout": stdout, "env": {**os.environ, **environ}}
    if any(name.startswith("PYTHON") for name in environ):  # which Python reads when it starts
        done = subprocess.run(command, stderr=-1, text=True, timeout=TIMEOUT, **more)
    else:
        done = programs.run(command, timeout=TIMEOUT, **more)
    return done.returncode, done.stderr


@pytest.mark.parametrize("fault", ["closed pipe", "full disk"])
@pytest.mark.parametrize(
    "name",
    ["plan", "bench", "unbuffered", *(pytest.param(n, marks=SLOW) for n in ("train", "script"))],
)
def test_failing_output_ends_the_command_with_one_sentence_or_silently(name, fault):
    """Unbuffered output fails at the write itself, and loses the data not written."""
    environ = {"PYTHONUNBUFFERED": "1"} if name == "unbuffered" else {}
    reader, stdout = os.pipe()
    os.close(reader)
    with os.fdopen(stdout, "w"), open("/dev/full", "w") as full:
        if fault == "full disk":
            os.dup2(full.fileno(), stdout)
        status, error = ended(PROGRAMS.get(name, PROGRAMS["plan"]), stdout, **environ)
    if fault == "closed pipe":
        assert (status, error) == (128 + signal.SIGPIPE, "")
    else:
        sentence = "standard output cannot be written (No space left on device)"
        assert (status, re.sub("^.*: error: ", "", error)) == (2, f"{sentence}\n")


def test_a_log_on_standard_output_is_appended(tmp_path):
    code = "from pycollect.train.output import Log\nprint('first', flush=True)\n"
    code += "with Log('/dev/stdout') as log: log.write('second')\nprint('third')"
    with (tmp_path / "out").open("w") as out:
        assert ended([*PYTHON, "-c", code], out.fileno()) == (0, "")
    assert (tmp_path / "out").read_text() == 'first\n{"event": "second"}\nthird\n'


def test_other_broken_pipes_are_ordinary_errors():
    def work():
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        _command.run("bench", work)


def test_an_invalid_variable_is_refused(monkeypatch):
    monkeypatch.setenv("PYCOLLECT_LOG", "loud")
    with pytest.raises(ValueError, match="PYCOLLECT_LOG is 'loud'; allowed are debug, info, w"):
        log.configure()


@pytest.mark.slow
def test_a_letter_that_the_output_has_not_is_escaped(tmp_path):
    """The work is done when the line is printed: it must not end in an error."""
    folder = tmp_path / "gr\udcfc\u00fcn"  # a letter, and a byte that is not valid UTF-8
    folder.mkdir()
    calls = "from pycollect.train import Data, train; import torch; from torch import nn\n"
    calls += "data = torch.zeros(2, 1), torch.tensor([0, 1]); data = Data('\u00fc', data, data)\n"
    calls += "train('cpu', data=data, model=nn.Linear(1, 2), epochs=1)"
    for command in (
        [*PROGRAMS["plan"], "--plot", str(folder / "plan.svg")],
        [*PYTHON, "-c", calls],
    ):
        assert ended(command, subprocess.DEVNULL, PYTHONIOENCODING="ascii") == (0, "")
    assert (folder / "plan.svg").exists()
