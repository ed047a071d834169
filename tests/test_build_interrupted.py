"""Builds that are interrupted, and two builds at the same time: the next build is correct."""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from build_project import (
    answer,
    building,
    kill,
    make,
    module,
    pending_steps,
    small_project,
    wait_for,
)

RECORD = "_build_info_cpython_1_linux.py"


@pytest.fixture
def build(tmp_path: Path) -> Any:
    return small_project(tmp_path)


@pytest.mark.parametrize("edited", [False, True], ids=["at first", "after an edit"])
@pytest.mark.parametrize("how", ["Ctrl-C", "Ctrl-C alone", "SIGTERM alone", "killed"])
def test_interrupted_builds_are_completed_by_the_next(
    build: Any, tmp_path: Path, how: str, edited: bool
):
    if edited:
        make(build)
        time.sleep(0.01)
        for name in ("plan/plan.cpp", "torch/one.cpp", "torch/c10d/two.cpp"):
            (build.root / "csrc" / name).touch()
    (tmp_path / "pause").touch()
    with building(build) as child:
        wait_for(tmp_path / "paused")
        if how == "Ctrl-C alone":
            child.send_signal(signal.SIGINT)
        elif how == "SIGTERM alone":
            child.terminate()
        elif how == "Ctrl-C":
            os.killpg(child.pid, signal.SIGINT)
        if how == "killed":  # as if the machine stops: no cleanup runs
            kill(child.pid)
        output = child.communicate(timeout=90)[0]
        assert child.returncode != 0, output
    (tmp_path / "pause").unlink()
    make(build)
    assert answer(build) == 42
    assert pending_steps(build) == {}


def test_empty_objects_are_rebuilt(build: Any):
    """A file system may leave an empty object when the machine stops; the linker accepts it."""
    make(build)
    (one,) = (build.root / build.core).glob("plan-*.o")
    times = one.stat()
    one.write_bytes(b"")
    os.utime(one, ns=(times.st_atime_ns, times.st_mtime_ns))
    make(build)
    assert answer(build) == 42


def test_a_full_disk_is_an_error_and_leaves_no_partial_object(
    build: Any, capfd: pytest.CaptureFixture[str]
):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    build.write()
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))  # for all files: objects are larger
    try:
        with pytest.raises(SystemExit, match="the build failed"):
            module("make").run(build.root, build, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    make(build)
    assert answer(build) == 42


def first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    assert select.select([child.stdout], [], [], 30)[0], "no output"
    return child.stdout.readline()


def test_concurrent_builds_run_one_after_the_other(build: Any, tmp_path: Path):
    (tmp_path / "pause").touch()
    with building(build) as first:
        wait_for(tmp_path / "paused")
        (tmp_path / "pause").unlink()
        with building(build) as second:
            assert "another build is running" in first_line(second)
            kill(first.pid, "sleep")
            assert first.wait(60) == 0
            assert second.wait(60) == 0
    assert answer(build) == 42
    compiled = (tmp_path / "compiled").read_text().splitlines()
    assert len(compiled) == 3 + 2 + 1


def test_a_warning_is_printed_where_locking_is_impossible(
    build: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refused(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(module("make").fcntl, "flock", refused)
    with module("make").build_lock(build.root):
        make(build)
    assert "cannot be locked (Function not implemented); run one" in capsys.readouterr().err


def test_compiler_servers_do_not_hold_the_lock(build: Any, tmp_path: Path):
    """sccache starts a server with the first file that it compiles; the server keeps running."""
    (tmp_path / "sccache").symlink_to(build.compiler.command[0])
    compiler = replace(build.compiler, command=[str(tmp_path / "sccache")])
    make(replace(build, compiler=compiler))
    assert (tmp_path / "compiled").read_text().splitlines()[0] == "--start-server"


def test_compilers_that_outlive_their_build_hold_the_lock(build: Any, tmp_path: Path):
    (tmp_path / "pause").touch()
    with building(build) as first:
        wait_for(tmp_path / "paused")
        first.kill()  # only this process: ninja and the compilers go on
        with building(build) as second:
            assert "another build is running" in first_line(second)


# The module and its record


@pytest.fixture
def placed(tmp_path: Path) -> Path:
    (tmp_path / "built.so").write_bytes(b"old module" * 1000)
    at = tmp_path / "package" / "_C.cpython-1-linux.so"
    module("make").install_module(tmp_path / "built.so", at, "old record")
    return at


def pair(at: Path) -> tuple[bytes, str | None]:
    record = at.with_name(RECORD)
    return at.read_bytes()[:10], record.read_text() if record.exists() else None


def test_module_and_record_are_replaced(placed: Path, tmp_path: Path):
    assert pair(placed) == (b"old module", "old record")
    inode = placed.stat().st_ino
    module("make").install_module(tmp_path / "built.so", placed, "old record")
    assert placed.stat().st_ino == inode  # running programs that map it are unaffected
    (tmp_path / "built.so").write_bytes(b"new module" * 1000)
    module("make").install_module(tmp_path / "built.so", placed, "new record")
    assert pair(placed) == (b"new module", "new record")
    assert placed.stat().st_ino != inode
    assert {p.name for p in placed.parent.iterdir()} == {
        placed.name,
        "_build_info_cpython_1_linux.py",
    }


def test_a_full_disk_leaves_the_old_module_and_record(placed: Path, tmp_path: Path):
    (tmp_path / "built.so").write_bytes(b"new module" * 1000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            module("make").install_module(tmp_path / "built.so", placed, "new record")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert pair(placed) == (b"old module", "old record")
    assert {p.name for p in placed.parent.iterdir()} == {
        placed.name,
        "_build_info_cpython_1_linux.py",
    }


@pytest.mark.parametrize("after", [0, 1])
def test_an_interrupted_replacement_leaves_no_record(
    placed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
):
    (tmp_path / "built.so").write_bytes(b"new module" * 1000)
    left = [None] * after
    real = Path.replace

    def interrupted(self: Path, target: Path) -> Path:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return real(self, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        module("make").install_module(tmp_path / "built.so", placed, "new record")
    assert pair(placed)[1] is None  # at import that counts as a missing build


def test_each_python_has_a_record_of_its_own(placed: Path, tmp_path: Path):
    (tmp_path / "built.so").write_bytes(b"new module" * 1000)
    other = placed.with_name("_C.cpython-2-linux.so")
    module("make").install_module(tmp_path / "built.so", other, "new record")
    assert pair(placed) == (b"old module", "old record")
    assert other.with_name("_build_info_cpython_2_linux.py").read_text() == "new record"
