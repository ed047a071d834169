"""Files that commands write: an existing path that is not a regular file is left as it is."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import programs
import pytest

import pycollect_bench as bench
from pycollect import _files, cli
from pycollect._files import OutputError, check_input, check_output_path, open_lines, replace, write
from pycollect.train import CheckpointError, checkpoint, train
from pycollect.train.__main__ import main as train_main

ROOT = Path(__file__).parents[1]
NOBODY = 65534


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    """A second /dev/null, so that the machine's own is never at risk."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root may make a device")


def unix_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path is at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def link_to_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("target"))
    path.symlink_to("target")


KINDS: dict[Callable[[Path], None], str] = {
    fifo: "is a FIFO",
    device: "is a device",
    unix_socket: "is a socket",
    Path.mkdir: "is a folder",
    link_to_fifo: "is a FIFO",
    lambda path: path.symlink_to(path): "Too many levels of symbolic links",
}
NAMES = ["fifo", "device", "socket", "folder", "link", "loop"]


def script(name: str) -> ModuleType:
    spec = spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RECORD = ROOT / "bench" / "results" / "cpu.json"
QUICK = ["-e", "4K", "--world", "2", "-n", "1", "-w", "1"]
COMMANDS: dict[str, Callable[[str], int]] = {
    "train-checkpoint": lambda file: train_main(["--data", "digits", "--checkpoint", file]),
    "train-plot": lambda file: train_main(["--data", "digits", "--plot", file]),
    "bench-json": lambda file: bench.main([*QUICK, "--json", file]),
    "bench-plot": lambda file: bench.main([*QUICK, "--plot", file]),
    "processes-json": lambda file: bench.main(["--processes", "2", *QUICK, "--json", file]),
    "cli-bench": lambda file: cli.main(["bench", *QUICK, "--json", file]),
    "plan-plot": lambda file: cli.main(["plan", "all_reduce", "2", "--plot", file]),
    "train.py-plot": lambda file: script("train").main(["--plot", file]),
    "plot_results": lambda file: int(script("plot_results").main([str(RECORD), file])),
    **{
        f"{name}.py-json": lambda file, name=name: script(name).main(["--json", file])
        for name in ("copy_bandwidth", "executor_bandwidth", "overlap", "train", "train_step")
    },
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("make", "message"), KINDS.items(), ids=NAMES)
def test_special_files_are_refused_before_any_work(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    make: Callable[[Path], None],
    message: str,
) -> None:
    path = tmp_path / "result.png"
    make(path)
    before = os.lstat(path)
    with pytest.raises(SystemExit) as stop:
        sys.exit(COMMANDS[command](str(path)))
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err.splitlines()[-1]
    assert "Traceback" not in captured.err
    after = os.lstat(path)
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_folder_is_reported_in_one_sentence(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        sys.exit(COMMANDS[command]("no/where.png"))
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no/where.png does not exist or is not writable (No such file" in captured.err


def test_write_access_is_tested_by_creating_a_file() -> None:
    """By its permissions /proc is writable for root, but no file can be created there."""
    with pytest.raises(ValueError, match=r"folder of the log /proc/run\.jsonl does not exist or"):
        check_output_path("log", "/proc/run.jsonl")


@pytest.fixture
def as_nobody() -> Iterator[None]:
    if os.geteuid():
        pytest.skip("only root can become another user")
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = Path(f"/tmp/pycollect-test-{os.getpid()}")
    folder.mkdir()
    (folder / "file").write_text("")
    (folder / "file").chmod(0o600)
    folder.chmod(0o777)
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def test_a_file_or_its_folder_must_be_writable(open_folder: Path, as_nobody: None) -> None:
    """A log is appended to an existing file; a checkpoint replaces it, which needs the folder."""
    path = open_folder / "file"
    check_output_path("checkpoint", path, moved=True)
    with pytest.raises(ValueError, match=r"the log .*file exists and is not writable"):
        check_output_path("log", path)
    os.seteuid(0)
    path.chmod(0o666)
    open_folder.chmod(0o755)
    os.seteuid(NOBODY)
    check_output_path("log", path)
    with pytest.raises(ValueError, match=r"the folder of the checkpoint .* not writable"):
        check_output_path("checkpoint", path, moved=True)


def test_checks_change_no_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for moved in (True, False):
        check_output_path("log", path, moved=moved)
    assert list(tmp_path.iterdir()) == []
    path.write_text("old")
    check_output_path("log", path)
    assert path.read_text() == "old"


@pytest.mark.parametrize("there", [True, False], ids=["file", "dangling"])
def test_a_link_stays_a_link(tmp_path: Path, there: bool) -> None:
    """The link is relative and leads to another folder: its target is written."""
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "run.pt", tmp_path / "run.pt"
    if there:
        target.write_text("old")
    link.symlink_to(Path("far", "run.pt"))
    check_output_path("checkpoint", link, moved=True)
    replace(link, lambda file: file.write(b"new"))
    assert (link.is_symlink(), target.read_text()) == (True, "new")
    target.unlink()
    check_output_path("JSON file", link)
    write("JSON file", link, "newer")
    assert (link.is_symlink(), target.read_text()) == (True, "newer")
    assert {path.name for path in tmp_path.rglob("*")} == {"far", "run.pt"}


def test_a_link_into_a_missing_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.pt").symlink_to("no/where")
    for moved in (True, False):
        with pytest.raises(ValueError, match=r"run\.pt does not exist or is not writable"):
            check_output_path("checkpoint", tmp_path / "run.pt", moved=moved)


def test_a_path_that_became_a_special_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="it is a FIFO"):
        checkpoint.save(path, {})
    with pytest.raises(OutputError, match="it is a FIFO"):
        write("JSON file", path, "{}")
    assert path.is_fifo()
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_name_of_maximal_length(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    replace(path, lambda file: file.write(b"whole"))
    assert path.read_bytes() == b"whole"


def test_a_log_can_be_read_from_a_fifo(tmp_path: Path) -> None:
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


def test_a_log_on_standard_output_is_appended(tmp_path: Path) -> None:
    code = "from pycollect.train.log import Log\nprint('first', flush=True)\n"
    code += "with Log('/dev/stdout') as log: log.write('second')\n"
    code += "print('third')"
    path = tmp_path / "out"
    with path.open("w") as out:
        assert not programs.run([sys.executable, "-c", code], stdout=out, timeout=120).returncode
    assert path.read_text() == 'first\n{"event": "second"}\nthird\n'


def test_inputs_must_be_regular_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no record"):
        check_input("record", tmp_path / "none")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="the record must be a regular file"):
        check_input("record", tmp_path / "fifo")


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "cannot be read"), ("[1]", "holds no JSON object"), ("\xff", "cannot be read")],
)
def test_an_invalid_record_is_reported_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    path, picture = tmp_path / "broken.json", tmp_path / "run.png"
    path.write_bytes(content.encode("latin1"))
    assert script("plot_results").main([str(path), str(picture)]) == 2
    error = capsys.readouterr().err
    assert f"the record {path}" in error
    assert message in error
    assert not picture.exists()


def test_a_picture_without_matplotlib_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"install pycollect\[train\]"):
        _files.check_picture(tmp_path / "run.png")
