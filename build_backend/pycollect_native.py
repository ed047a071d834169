"""The decisions of the native build, as functions of what they are told: tests can ask them.

Which files, CUDA or not, which compiler, how many jobs, and what is recorded about the build.
Compiles nothing itself: setup.py does, with torch's BuildExtension.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

OLDEST_TORCH = (2, 11)
OLDEST_SETUPTOOLS = 77  # the first with `license = "..."` as an SPDX expression
ROOMS = (
    "plan",
    "algorithms",
    "cpu",
    "cuda",
    "shm",
    "slabs",
    "sim",
    "torch",
    "torch/c10d",
    "torch/c10d/devices",
    "torch/c10d/fakes",
)
ONLY_WITHOUT_CUDA = "no_cuda.cpp"
ONLY_WITH_CUDA = ("csrc/cuda/*.cu", "csrc/torch/cuda/*.cpp")

# torch's own headers need about this much memory for each compiler that reads them.
BYTES_PER_JOB = 2 << 30

# What csrc uses of C++20 and of GNU C++; the first compiler that accepts it is g++ 11. No clang
# does: it lacks __builtin_shuffle, and the pragmas that give an instruction set its own file.
PROBE = """
#include <concepts>
#include <source_location>
#include <span>
template <std::integral T> constexpr T twice(T x) { return x + x; }
struct Two { int a = 1, b = 2; };
static_assert(twice(2) == 4 && Two{.b = 3}.b == 3);
enum class Kind { one };
constexpr Kind kind() { using enum Kind; return one; }
const char* file(std::source_location at = std::source_location::current()) {
  return at.file_name();
}
typedef int Four __attribute__((vector_size(16)));
Four swapped(Four x) { return __builtin_shuffle(x, Four{1, 0, 3, 2}); }
"""


def stop(sentence: str) -> NoReturn:
    """End the build with one sentence and no traceback."""
    raise SystemExit(f"pycollect: {sentence}")


def sources(root: Path, cuda: bool) -> list[str]:
    """Return the source files below `root`, relative to it: a new file needs no other edit."""
    found = [path for room in ROOMS for path in sorted((root / "csrc" / room).glob("*.cpp"))]
    if cuda:
        found = [path for path in found if path.name != ONLY_WITHOUT_CUDA]
        found += [path for pattern in ONLY_WITH_CUDA for path in sorted(root.glob(pattern))]
    return [str(path.relative_to(root)) for path in found]


def decide_cuda(
    asked: str | None, *, kernels: bool, torch_cuda: str | None, toolkit: str | None
) -> bool:
    """Say whether to build the CUDA part: never asks for a GPU, only for what compiles.

    `asked` is PYCOLLECT_CUDA, `kernels` whether csrc/cuda has any, `torch_cuda` the CUDA version
    of the torch that is built against, `toolkit` the folder of the CUDA toolkit.
    """
    if asked not in (None, "", "0", "1"):
        stop(f"PYCOLLECT_CUDA is {asked!r}; set it to 0 or 1, or leave it out.")
    if asked == "0":
        return False
    missing = None
    if not kernels:
        missing = "this version has no CUDA kernels (csrc/cuda/*.cu)"
    elif torch_cuda is None:
        missing = "the installed torch is a CPU-only torch"
    elif toolkit is None:
        missing = "no CUDA toolkit was found (put nvcc on PATH or set CUDA_HOME)"
    if asked == "1" and missing is not None:
        stop(f"PYCOLLECT_CUDA=1 asks for a CUDA build, but {missing}.")
    return missing is None


def flags(environ: Mapping[str, str]) -> list[str]:
    """Return the compiler's flags; no contraction: an FMA would lose the contract's bits."""
    chosen = ["-std=c++20", "-ffp-contract=off", "-Wall", "-Wextra", "-fvisibility=hidden"]
    # Without it at::parallel_for, a template in torch's headers, runs serially in silence. Not for
    # the linker: the threads must come from the one OpenMP library that torch has loaded.
    chosen.append("-fopenmp")
    if environ.get("PYCOLLECT_DEBUG") == "1":
        chosen += ["-O0", "-g", "-UNDEBUG", "-D_GLIBCXX_ASSERTIONS"]
    else:
        chosen += ["-O3", "-g0"]  # Python's own flags often hold -g: twice the time and 50 MB
    if environ.get("PYCOLLECT_WERROR") == "1":
        chosen.append("-Werror")
    return chosen


def kernel_flags(environ: Mapping[str, str], architectures: list[str]) -> list[str]:
    """Return nvcc's flags; `architectures` is empty when TORCH_CUDA_ARCH_LIST decides."""
    chosen = ["-std=c++20", "-fmad=false", "-Xcompiler=-fvisibility=hidden", *architectures]
    chosen.append("--expt-relaxed-constexpr")  # what both sides compute is written once, constexpr
    chosen += ["-O0", "-g"] if environ.get("PYCOLLECT_DEBUG") == "1" else ["-O3"]
    if environ.get("PYCOLLECT_WERROR") == "1":
        chosen.append("-Werror=all-warnings")
    return chosen


def torch_release(version: str) -> tuple[int, int]:
    """Return (2, 13) for "2.13.0+cpu"."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        stop(f"cannot read the version of torch, {version!r}.")
    return int(match[1]), int(match[2])


def require_torch(version: str) -> None:
    """Stop the build when this torch is older than the oldest one supported."""
    if torch_release(version) < OLDEST_TORCH:
        oldest = "{}.{}".format(*OLDEST_TORCH)
        stop(
            f"torch {oldest} or newer is needed and {version} is installed; "
            f"upgrade it first: {sys.executable} -m pip install --upgrade torch"
        )


def require_setuptools(version: str) -> None:
    """Stop the build when setuptools cannot read pyproject.toml."""
    if int(version.partition(".")[0]) < OLDEST_SETUPTOOLS:
        stop(
            f"setuptools {OLDEST_SETUPTOOLS} or newer is needed and {version} is installed; "
            f"upgrade it: {sys.executable} -m pip install --upgrade setuptools"
        )


def require_ninja(environ: dict[str, str]) -> None:
    """Stop the build without ninja; finds the one of an environment that is not activated."""
    scripts = sysconfig.get_path("scripts")
    search = environ.get("PATH", os.defpath)
    if shutil.which("ninja", path=search) is None:
        environ["PATH"] = os.pathsep.join([search, scripts])
        if shutil.which("ninja", path=scripts) is None:
            stop(f"ninja was not found; install it: {sys.executable} -m pip install ninja")


def require_compiler(environ: Mapping[str, str]) -> str:
    """Stop the build unless the C++ compiler understands C++20; return the compiler's name."""
    command = shlex.split(environ.get("CXX", "c++"))
    wanted = "g++ 11 or newer (CXX names another one than c++)"
    try:
        version = subprocess.run([*command, "--version"], capture_output=True, text=True)
        probe = [*command, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
        tried = subprocess.run(probe, input=PROBE, capture_output=True, text=True)
    except OSError:
        stop(f"no C++ compiler was found under the name {shlex.join(command)!r}; install {wanted}.")
    name = (version.stdout.splitlines() or [shlex.join(command)])[0]
    if tried.returncode != 0:
        stop(f"the C++ compiler ({name}) lacks GNU C++20, as g++ 11 has it; install {wanted}.")
    return name


def jobs(cores: int, available_bytes: int | None) -> int:
    """Return how many compilers to run at once: one a core, but only as many as memory holds."""
    if available_bytes is None:
        return max(1, cores)
    return max(1, min(cores, available_bytes // BYTES_PER_JOB))


def available_bytes() -> int | None:
    """Return the free memory of this machine in bytes, or None where it cannot be read."""
    try:
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None


def commit(root: Path) -> str | None:
    """Return the commit of the checkout, "-dirty" when it was edited, or None outside of one."""
    if not (root / ".git").exists():
        return None
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        described = subprocess.run(describe, capture_output=True, text=True)
    except OSError:
        return None
    return described.stdout.strip() or None


def build_info_text(build: Mapping[str, Any]) -> str:
    """Return the source of pycollect/_build_info.py."""
    lines = [
        f"    {json.dumps(name)}: {json.dumps(value) if isinstance(value, str) else value},"
        for name, value in build.items()
    ]
    head = '"""What this build was made with; written by setup.py, read by pycollect._compat."""'
    return "\n".join([head, "", "BUILD = {", *lines, "}", ""])
