"""Which objects a build reuses, which it makes, and its message in advance."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from build_project import BACKEND, answer, make, module, small_project, todo, torch_at


@pytest.fixture
def build(tmp_path: Path) -> Any:
    return small_project(tmp_path)


@pytest.fixture
def made(build: Any) -> Any:
    make(build)
    assert answer(build) == 42
    return build


# What is compiled, and what is not


def test_nothing_is_made_twice(made: Any, tmp_path: Path):
    assert todo(made) == {}
    # pip builds with a temporary torch, then with the same torch at the environment's path.
    elsewhere = replace(made.torch, root=torch_at(tmp_path / "there" / "torch"))
    assert todo(replace(made, torch=elsewhere)) == {}
    make(replace(made, torch=elsewhere))
    assert answer(made) == 42


def test_a_copy_without_links_is_built(made: Any):
    link = made.root / made.torch_link
    link.unlink()
    shutil.copytree(made.torch.root, link)
    make(made)
    assert link.is_symlink()
    assert todo(made) == {}


def test_another_torch_compiles_its_own_part_alone(made: Any):
    other = replace(made, torch=replace(made.torch, name="torch2.0"))
    assert todo(other) == {"torch": 3, "link": 1}
    make(other)
    assert todo(made) == {}  # both builds are kept
    assert todo(other) == {}


def test_another_python_compiles_its_own_part_alone(made: Any):
    assert todo(replace(made, torch=replace(made.torch, python="cpython-2"))) == {
        "torch": 3,
        "link": 1,
    }


@pytest.mark.parametrize("changed", [{"version": "2.0"}, {"flags": ["-fPIC", "-O1"]}])
def test_another_compiler_compiles_all(made: Any, changed: dict[str, Any]):
    other = replace(made, compiler=replace(made.compiler, **changed))
    assert todo(other) == {"torch": 3, "core": 2, "link": 1}
    assert todo(made) == {}


def test_an_edit_compiles_what_reads_it(made: Any):
    time.sleep(0.01)  # the file system's clock must advance
    (made.root / "csrc/plan/plan.h").write_text("int half();  // edited\n")
    assert todo(made) == {"torch": 1, "core": 1, "link": 1}
    (made.root / "csrc/plan/more.cpp").write_text("int more() { return 0; }\n")
    assert todo(made) == {"torch": 1, "core": 2, "link": 1}
    make(made)
    (made.root / "csrc/plan/more.cpp").unlink()
    assert todo(made) == {"link": 1}


def test_parts_hold_every_file_that_includes_torch_once(made: Any):
    ninja = module("ninja")
    for room in ("torch", "torch/c10d"):
        for n in range(8):
            (made.root / "csrc" / room / f"file_{n}.cpp").write_text("")
    made.write()
    sources = ninja.torch_sources(made.root, cuda=False)
    parts = sorted((made.root / made.folder).glob("torch_*.cpp"))
    lines = [line for part in parts for line in part.read_text().splitlines()]
    assert len(parts) == ninja.TORCH_PARTS + 1  # one more: sources that depend on CUDA
    assert sorted(lines) == sorted(f'#include "{source}"' for source in sources)


def test_one_object_a_file_for_those_who_edit(made: Any):
    apart = replace(made, unity=False)
    assert todo(apart) == {"torch": 3, "link": 1}
    make(apart)
    assert answer(apart) == 42
    time.sleep(0.01)
    (made.root / "csrc/torch/one.cpp").touch()
    assert todo(apart) == {"torch": 1, "link": 1}


# The message in advance


def test_what_is_built_and_how_long_it_takes_is_said(build: Any, monkeypatch: pytest.MonkeyPatch):
    make = module("make")
    said: list[str] = []
    monkeypatch.setattr(make, "say", said.append)
    monkeypatch.setattr(make, "run", lambda *_: None)
    counted = {"torch": 4, "core": 76, "kernels": 9, "link": 1}
    monkeypatch.setattr(make, "pending", lambda *_: make.Counter(counted))
    make.make(build.root, build, 2, 2, "torch 2.15.0 (CUDA for sm_80, sm_90)")
    (line,) = said
    assert line.startswith("building for torch 2.15.0 (CUDA for sm_80, sm_90) with 2 compilers")
    assert "about" in line
    assert "PYCOLLECT_CUDA=0" in line
    assert "TORCH_CUDA_ARCH_LIST" in line
    counted.pop("kernels")
    make.make(build.root, build, 1, 1, "torch 2.15.0 (without CUDA: PYCOLLECT_CUDA is 0)")
    assert "with 1 compiler: " in said[1]
    assert "PYCOLLECT_CUDA=0" not in said[1]
    counted.clear()
    make.make(build.root, build, 1, 1, "nothing")
    assert len(said) == 2


def test_a_terminal_is_told_what_pip_keeps_back():
    """Runs in a session of its own, whose controlling terminal is not its output."""
    code = (
        "import fcntl, os, sys, termios\n"
        f"sys.path.insert(0, {str(BACKEND)!r})\n"
        "import pycollect_make as make\n"
        "os.setsid()\n"
        "fcntl.ioctl(int(sys.argv[1]), termios.TIOCSCTTY, 0)\n"
        "make.say('hello')\n"
    )
    ours, theirs = os.openpty()
    done = subprocess.run(
        [sys.executable, "-c", code, str(theirs)],
        pass_fds=[theirs],
        capture_output=True,
        text=True,
    )
    assert done.stderr == "pycollect: hello\n"
    assert "pycollect: hello" in os.read(ours, 1000).decode()
    os.close(ours)
    os.close(theirs)


def test_many_cores_wait_for_the_longest(build: Any):
    make, todo = module("make"), {"torch": 4, "core": 76, "link": 1}
    crowd = replace(build, torch_jobs=64)
    longest = make.SECONDS_OF_HEADERS + make.SECONDS_OF_TORCH / module("ninja").TORCH_PARTS
    assert make.seconds(build.root, crowd, make.Counter(todo), 1, 64) >= longest
    at_a_time = make.seconds(build.root, build, make.Counter(todo), 1, 64)
    assert at_a_time >= 4 * longest  # one job at a time, for lack of memory


def test_what_is_to_be_made_is_counted_whatever_ninja_is_told_to_print(
    build: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NINJA_STATUS", "%p ")
    assert todo(build) == {"torch": 3, "core": 2, "link": 1}


def test_nvcc_that_compiles_nothing_stops_the_build(build: Any):
    ninja = module("ninja")
    refuses = ["sh", "-c", "echo unsupported GNU version >&2; exit 1"]
    kernels = ninja.Kernels(refuses, ["1"], [], Path("/usr/local/cuda"))
    with pytest.raises(SystemExit, match=r"nothing here \(unsupported GNU version\).*CUDA=0"):
        module("make").require_nvcc(kernels)
    module("make").require_nvcc(replace(kernels, command=["true"]))
