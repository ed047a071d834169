"""Helpers for the build tests: a tiny C++ project, and a folder that imitates a torch install."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

BACKEND = Path(__file__).parents[1] / "build_backend"
SOURCES = {
    "plan/plan.h": "int half();\n",
    "plan/plan.cpp": '#include "plan.h"\nint half() { return 21; }\n',
    "cpu/cpu.cpp": "int unused() { return 0; }\n",
    "torch/one.cpp": "#include <torch/fake.h>\nnamespace { int own() { return FAKE; } }\n"
    "int one() { return own(); }\n",
    "torch/no_cuda.cpp": "int none() { return 0; }\n",
    "torch/c10d/two.cpp": '#include <torch/fake.h>\n#include "../../plan/plan.h"\n'
    'int one();\nextern "C" int answer() { return one() * half(); }\n',
}
LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python")
# A compiler wrapper: it logs its arguments, and stops halfway if the file `pause` exists.
COMPILER = """#!/bin/sh
echo "$*" >> "{root}/compiled"
if [ -e "{root}/pause" ]; then
  for word; do [ "$before" = -o ] && echo half > "$word"; before=$word; done
  touch "{root}/paused"
  sleep 20  # usually ended by ninja at once; a build ends only after its compilers
fi
exec g++ "$@"
"""
MAKE = """
import importlib, pickle, sys
sys.path.insert(0, {backend!r})
import pycollect_make as make
from pathlib import Path
build = pickle.loads(bytes.fromhex({build!r}))
with make.build_lock(build.root):
    make.make(build.root, build, 2, 1, "a test")
"""


def module(name: str) -> ModuleType:
    """Import a module of the build backend, which otherwise only pip has on its path."""
    if str(BACKEND) not in sys.path:
        sys.path.insert(0, str(BACKEND))
    return importlib.import_module(f"pycollect_{name}")


def fake_torch(folder: Path) -> Path:
    (folder / "include" / "torch").mkdir(parents=True)
    (folder / "include" / "torch" / "fake.h").write_text("#define FAKE 2\n")
    (folder / "lib").mkdir()
    for library in LIBRARIES:
        empty = ["g++", "-shared", "-x", "c++", "/dev/null"]
        subprocess.run([*empty, "-o", str(folder / "lib" / f"lib{library}.so")], check=True)
    return folder


def small_project(tmp_path: Path) -> Any:
    """Write the small project into a folder with a space in its name, and return its build."""
    ninja = module("ninja")
    root = tmp_path / "a project"
    for name, text in SOURCES.items():
        (root / "csrc" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "csrc" / name).write_text(text)
    compiler = tmp_path / "c++"
    compiler.write_text(COMPILER.format(root=tmp_path))
    compiler.chmod(0o755)
    return ninja.Build(
        root=root,
        compiler=ninja.Compiler([str(compiler)], "1.0", ["-fPIC", "-O0", "-DA='a b'"]),
        torch=ninja.Torch(
            "torch1.0", fake_torch(tmp_path / "here" / "torch"), "cpython-1", "/none"
        ),
        kernels=None,
    )


def answer(build: Any) -> int:
    """Call the built module in a new process; this process would keep the first version loaded."""
    code = f"import ctypes; print(ctypes.CDLL({str(build.root / build.module)!r}).answer())"
    libraries = {"LD_LIBRARY_PATH": str(build.torch.root / "lib")}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, env=libraries
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def pending_steps(build: Any) -> dict[str, int]:
    """Write the build files and return the numbers of steps that ninja would run now."""
    build.write()
    return dict(module("make").pending(build.root, build))


def make(build: Any) -> None:
    module("make").make(build.root, build, 2, 1, "a test")


@contextlib.contextmanager
def building(build: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a process that builds, in a session of its own, as a shell starts a job."""
    code = MAKE.format(backend=str(BACKEND), build=pickle.dumps(build).hex())
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        kill(child.pid)
        child.communicate()


def kill(session: int, name: str = "") -> None:
    """Kill the processes of a session; with `name`, only those whose name contains it."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            before, _, after = (folder / "stat").read_text().rpartition(")")
            if int(after.split()[3]) == session and name in before.partition("(")[2]:
                os.kill(int(folder.name), signal.SIGKILL)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was not created within 60 s"
        time.sleep(0.01)
