"""Which objects a build reuses and which it compiles, and the message that announces it."""

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
from build_project import BACKEND, answer, fake_torch, make, module, pending_steps, small_project


@pytest.fixture
def build(tmp_path: Path) -> Any:
    return small_project(tmp_path)


@pytest.fixture
def made(build: Any) -> Any:
    make(build)
    assert answer(build) == 42
    return build


# Compiled and reused objects


def test_nothing_is_compiled_twice(made: Any, tmp_path: Path):
    assert pending_steps(made) == {}
    # pip builds with a temporary torch, then with the same torch at the environment's path.
    elsewhere = replace(made.torch, root=fake_torch(tmp_path / "there" / "torch"))
    assert pending_steps(replace(made, torch=elsewhere)) == {}
    make(replace(made, torch=elsewhere))
    assert answer(made) == 42


def test_a_checkout_copied_without_links_is_built(made: Any):
    link = made.root / made.torch_link
    link.unlink()
    shutil.copytree(made.torch.root, link)
    make(made)
    assert link.is_symlink()
    assert pending_steps(made) == {}


def test_another_torch_recompiles_only_sources_that_include_torch(made: Any):
    other = replace(made, torch=replace(made.torch, name="torch2.0"))
    assert pending_steps(other) == {"torch": 3, "link": 1}
    make(other)
    assert pending_steps(made) == {}  # both builds are kept
    assert pending_steps(other) == {}


def test_another_python_recompiles_only_sources_that_include_torch(made: Any):
    assert pending_steps(replace(made, torch=replace(made.torch, python="cpython-2"))) == {
        "torch": 3,
        "link": 1,
    }


@pytest.mark.parametrize("changed", [{"version": "2.0"}, {"flags": ["-fPIC", "-O1"]}])
def test_another_compiler_recompiles_everything(made: Any, changed: dict[str, Any]):
    other = replace(made, compiler=replace(made.compiler, **changed))
    assert pending_steps(other) == {"torch": 3, "core": 2, "link": 1}
    assert pending_steps(made) == {}


def test_an_edit_recompiles_the_dependents(made: Any):
    time.sleep(0.01)  # the file system's clock must advance
    (made.root / "csrc/plan/plan.h").write_text("int half();  // edited\n")
    assert pending_steps(made) == {"torch": 1, "core": 1, "link": 1}
    (made.root / "csrc/plan/more.cpp").write_text("int more() { return 0; }\n")
    assert pending_steps(made) == {"torch": 1, "core": 2, "link": 1}
    make(made)
    (made.root / "csrc/plan/more.cpp").unlink()
    assert pending_steps(made) == {"link": 1}


def test_parts_hold_every_file_that_includes_torch_once(made: Any):
    ninja = module("ninja")
    for folder in ("torch", "torch/c10d"):
        for n in range(8):
            (made.root / "csrc" / folder / f"file_{n}.cpp").write_text("")
    made.write()
    sources = ninja.torch_sources(made.root, cuda=False)
    parts = sorted((made.root / made.folder).glob("torch_*.cpp"))
    lines = [line for part in parts for line in part.read_text().splitlines()]
    assert len(parts) == ninja.TORCH_PARTS + 1  # one more: sources that depend on CUDA
    assert sorted(lines) == sorted(f'#include "{source}"' for source in sources)


def test_without_unity_each_file_has_its_own_object(made: Any):
    separate = replace(made, unity=False)
    assert pending_steps(separate) == {"torch": 3, "link": 1}
    make(separate)
    assert answer(separate) == 42
    time.sleep(0.01)
    (made.root / "csrc/torch/one.cpp").touch()
    assert pending_steps(separate) == {"torch": 1, "link": 1}


# The announcement of a build


def test_the_build_announces_its_target_and_duration(build: Any, monkeypatch: pytest.MonkeyPatch):
    make = module("make")
    messages: list[str] = []
    monkeypatch.setattr(make, "notify", messages.append)
    monkeypatch.setattr(make, "run", lambda *_: None)
    counted = {"torch": 4, "core": 76, "kernels": 9, "link": 1}
    monkeypatch.setattr(make, "pending", lambda *_: make.Counter(counted))
    make.make(build.root, build, 2, 2, "torch 2.15.0 (CUDA for sm_80, sm_90)")
    (line,) = messages
    assert line.startswith("building for torch 2.15.0 (CUDA for sm_80, sm_90) with 2 compilers")
    assert "about" in line
    assert "PYCOLLECT_CUDA=0" in line
    assert "TORCH_CUDA_ARCH_LIST" in line
    counted.pop("kernels")
    make.make(build.root, build, 1, 1, "torch 2.15.0 (without CUDA: PYCOLLECT_CUDA is 0)")
    assert "with 1 compiler: " in messages[1]
    assert "PYCOLLECT_CUDA=0" not in messages[1]
    counted.clear()
    make.make(build.root, build, 1, 1, "nothing")
    assert len(messages) == 2


def test_messages_reach_the_terminal_although_pip_captures_output():
    """Runs in a session of its own, whose controlling terminal is not its output."""
    code = (
        "import fcntl, os, sys, termios\n"
        f"sys.path.insert(0, {str(BACKEND)!r})\n"
        "import pycollect_make as make\n"
        "os.setsid()\n"
        "fcntl.ioctl(int(sys.argv[1]), termios.TIOCSCTTY, 0)\n"
        "make.notify('hello')\n"
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


def test_the_longest_job_bounds_the_estimated_time(build: Any):
    make, pending_steps = module("make"), {"torch": 4, "core": 76, "link": 1}
    parallel = replace(build, torch_jobs=64)
    longest = make.SECONDS_OF_HEADERS + make.SECONDS_OF_TORCH / module("ninja").TORCH_PARTS
    assert make.seconds(build.root, parallel, make.Counter(pending_steps), 1, 64) >= longest
    at_a_time = make.seconds(build.root, build, make.Counter(pending_steps), 1, 64)
    assert at_a_time >= 4 * longest  # one job at a time, for lack of memory


def test_pending_steps_are_counted_with_any_ninja_status(
    build: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NINJA_STATUS", "%p ")
    assert pending_steps(build) == {"torch": 3, "core": 2, "link": 1}


def test_a_failing_nvcc_stops_the_build(build: Any):
    ninja = module("ninja")
    refuses = ["sh", "-c", "echo unsupported GNU version >&2; exit 1"]
    kernels = ninja.Kernels(refuses, ["1"], [], Path("/usr/local/cuda"))
    with pytest.raises(SystemExit, match=r"an empty file \(unsupported GNU version\).*CUDA=0"):
        module("make").require_nvcc(kernels)
    module("make").require_nvcc(replace(kernels, command=["true"]))
