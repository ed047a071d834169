"""The decisions of the native build, as functions of their arguments, so that tests can call them.

CUDA or not, the compiler and its flags, the number of jobs, the version, and the build's record.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NoReturn

OLDEST_TORCH = (2, 11)
OLDEST_SETUPTOOLS = 77  # the first with `license = "..."` as an SPDX expression
# The most memory that a compiler needs, for an ordinary file and for one that includes torch.
BYTES_PER_JOB = 1 << 29
BYTES_PER_TORCH_JOB = 3 << 30

SWITCHES = ("PYCOLLECT_CUDA", "PYCOLLECT_BUILD_DEBUG", "PYCOLLECT_UNITY", "PYCOLLECT_WERROR")
SWITCHES += ("TORCH_CUDA_ARCH_LIST",)  # recorded; others may contain a user's folders
LAUNCHERS = ("ccache", "sccache", "distcc", "icecc")  # commands before a compiler's name

# The parts of C++20 and GNU C++ that csrc uses. g++ accepts them since version 11. clang does not:
# it lacks __builtin_shuffle, and the pragmas that select a file's instruction set.
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


@contextlib.contextmanager
def in_one_sentence() -> Iterator[None]:
    """End the build with the system's message if a file operation in this context fails."""
    try:
        yield
    except OSError as error:
        stop(f"the build failed: {error}.")


def words(environ: Mapping[str, str], name: str) -> list[str]:
    """Return the words of a variable with the syntax of a shell."""
    try:
        return shlex.split(environ.get(name) or "")
    except ValueError as error:
        stop(f"{name} is {environ[name]!r}: {str(error).lower()}.")


def switch(environ: Mapping[str, str], name: str, default: str) -> bool:
    """Return whether a switch is on; its value is 0, 1 or missing."""
    value = environ.get(name) or default
    if value not in ("0", "1"):
        stop(f"{name} is {value!r}; set it to 0 or 1, or unset it.")
    return value == "1"


def why_no_cuda(
    setting: str | None, *, kernels: bool, torch_cuda: str | None, toolkit_cuda: str | None
) -> str | None:
    """Return why the CUDA part is omitted, or None if it is built; a GPU is not needed for it.

    `setting` is PYCOLLECT_CUDA, `kernels` whether csrc/cuda has any, `torch_cuda` the CUDA version
    of the installed torch, `toolkit_cuda` that of the CUDA toolkit.
    """
    if not switch({"PYCOLLECT_CUDA": setting or "1"}, "PYCOLLECT_CUDA", "1"):
        return "PYCOLLECT_CUDA is 0"
    missing = None
    if not kernels:
        missing = "this version has no CUDA kernels (csrc/cuda/*.cu)"
    elif torch_cuda is None:
        missing = "the installed torch is a CPU-only torch"
    elif toolkit_cuda is None:
        missing = "no CUDA toolkit was found (put nvcc on PATH or set CUDA_HOME)"
    elif toolkit_cuda.partition(".")[0] != torch_cuda.partition(".")[0]:
        stop(
            f"torch is for CUDA {torch_cuda} and the CUDA toolkit is {toolkit_cuda}; set CUDA_HOME "
            "to a matching toolkit, or omit the CUDA part with PYCOLLECT_CUDA=0."
        )
    if setting == "1" and missing is not None:
        stop(f"PYCOLLECT_CUDA=1 asks for a CUDA build, but {missing}.")
    return missing


def flags(environ: Mapping[str, str]) -> list[str]:
    """Return the compiler's flags. Contraction is off, because an FMA would change results' bits.

    Python's own flags are omitted, because they differ between Pythons.
    """
    chosen = words(environ, "CPPFLAGS") + words(environ, "CXXFLAGS")
    chosen += ["-std=c++20", "-fPIC", "-fwrapv", "-ffp-contract=off", "-fvisibility=hidden"]
    chosen += ["-Wall", "-Wextra"]
    if switch(environ, "PYCOLLECT_BUILD_DEBUG", "0"):
        chosen += ["-O0", "-g", "-UNDEBUG", "-D_GLIBCXX_ASSERTIONS"]
    else:
        chosen += ["-O3", "-g0", "-DNDEBUG"]  # -g doubles the time and adds 50 MB
    if switch(environ, "PYCOLLECT_WERROR", "0"):
        chosen.append("-Werror")
    return chosen


def torch_flags() -> list[str]:
    """Return the additional flags of files that include torch.

    Without OpenMP, at::parallel_for, a template in torch's headers, silently runs serially. The
    linker does not get the flag: threads must come from the one library that torch has loaded.
    """
    return ["-fopenmp"]


def link_flags(environ: Mapping[str, str]) -> list[str]:
    """Return the linker's flags, with CXXFLAGS for instrumentation such as --coverage."""
    return words(environ, "CXXFLAGS") + words(environ, "LDFLAGS")


def kernel_flags(environ: Mapping[str, str], architectures: list[str]) -> list[str]:
    """Return nvcc's flags; `architectures` are its -gencode flags."""
    chosen = ["-std=c++20", "-fmad=false", *architectures]
    chosen += ["-Xcompiler=-fPIC", "-Xcompiler=-fvisibility=hidden"]
    chosen.append("--expt-relaxed-constexpr")  # device code calls the host's constexpr functions
    chosen += (
        ["-O0", "-g"] if switch(environ, "PYCOLLECT_BUILD_DEBUG", "0") else ["-O3", "-DNDEBUG"]
    )
    if switch(environ, "PYCOLLECT_WERROR", "0"):
        chosen.append("-Werror=all-warnings")
    compiler = [w for w in words(environ, "CXX") if Path(w).name not in LAUNCHERS]
    if compiler:
        chosen += [f"-ccbin={compiler[0]}", *(f"-Xcompiler={word}" for word in compiler[1:])]
    return chosen


def torch_release(version: str) -> tuple[int, int]:
    """Return the release of a version, such as (2, 13) for "2.13.0+cpu"."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        stop(f"cannot read the version of torch, {version!r}.")
    return int(match[1]), int(match[2])


def require_torch(version: str) -> None:
    """Stop the build if this torch is older than the oldest supported one."""
    if torch_release(version) < OLDEST_TORCH:
        oldest = "{}.{}".format(*OLDEST_TORCH)
        stop(
            f"torch {oldest} or newer is needed and {version} is installed; "
            f"upgrade it first: {sys.executable} -m pip install --upgrade torch"
        )


def require_setuptools(version: str) -> None:
    """Stop the build if setuptools cannot read pyproject.toml."""
    if int(version.partition(".")[0]) < OLDEST_SETUPTOOLS:
        stop(
            f"setuptools {OLDEST_SETUPTOOLS} or newer is needed and {version} is installed; "
            f"upgrade it: {sys.executable} -m pip install --upgrade setuptools"
        )


def require_ninja(environ: MutableMapping[str, str]) -> None:
    """Put ninja on the path; stop the build if there is none.

    The Python package precedes the system's ninja: releases do not trust each other's records, so a
    later build with the package would recompile everything.
    """
    search = environ.get("PATH", os.defpath)
    for folder in _folders_of_ninja():
        if shutil.which("ninja", path=folder) is not None:
            environ["PATH"] = os.pathsep.join([folder, search])
            return
    if shutil.which("ninja", path=search) is None:
        stop(f"ninja was not found; install it: {sys.executable} -m pip install ninja")


def _folders_of_ninja() -> list[str]:
    try:
        from ninja import BIN_DIR
    except ImportError:
        return [sysconfig.get_path("scripts")]  # the environment may not be activated
    return [BIN_DIR]


def compiler_command(environ: Mapping[str, str]) -> list[str]:
    """Return the C++ compiler's command."""
    return words(environ, "CXX") or ["c++"]


def require_compiler(environ: Mapping[str, str]) -> str:
    """Stop the build unless the C++ compiler understands C++20; return the compiler's name."""
    command = compiler_command(environ)
    wanted = "g++ 11 or newer (CXX selects another compiler than c++)"
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


def launcher(environ: Mapping[str, str]) -> list[str]:
    """Return ["ccache"] if it is installed and works; its folder may not be writable."""
    command = compiler_command(environ)
    if Path(command[0]).name in LAUNCHERS or not shutil.which("ccache", path=environ.get("PATH")):
        return []
    with tempfile.TemporaryDirectory() as folder:
        empty = ["ccache", *command, "-c", "-x", "c++", os.devnull, "-o", f"{folder}/empty.o"]
        done = subprocess.run(empty, capture_output=True)
    return ["ccache"] if done.returncode == 0 else []


def require_python_headers(include: str) -> None:
    """Stop the build if Python's headers are missing."""
    if not Path(include, "Python.h").exists():
        stop(
            f"Python's headers are not in {include}; install them (on Debian and Ubuntu: apt "
            "install python3-dev)."
        )


def jobs(environ: Mapping[str, str], cores: int, available: int | None) -> tuple[int, int]:
    """Return the number of parallel compilers, and how many of them may compile files with torch.

    The number is MAX_JOBS or one per core, limited by `available` bytes of memory.
    """
    most = cores
    if environ.get("MAX_JOBS"):
        if not environ["MAX_JOBS"].isdecimal() or int(environ["MAX_JOBS"]) == 0:
            stop(f"MAX_JOBS is {environ['MAX_JOBS']!r}; set it to a whole number of at least 1.")
        most = int(environ["MAX_JOBS"])
    if available is None:
        return most, most
    at_once = max(1, min(most, available // BYTES_PER_JOB))
    return at_once, max(1, min(at_once, available // BYTES_PER_TORCH_JOB))


def available_bytes() -> int | None:
    """Return this machine's available memory in bytes, or None if it cannot be read."""
    try:
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None


def local_version(torch: str, cuda: str | None) -> str:
    """Return the local part of a build's version, after "+": the torch and CUDA of the build.

    >>> local_version("2.15.0+cu132", "13.2"), local_version("2.16.0.dev20261101+cpu", None)
    ('torch2.15.cu132', 'torch2.16.0.dev20261101.cpu')
    """
    public = torch.partition("+")[0]
    released = re.fullmatch(r"\d+(\.\d+)*", public) is not None
    release = "{}.{}".format(*torch_release(torch)) if released else re.sub(r"\W", ".", public)
    return f"torch{release}." + (f"cu{cuda.replace('.', '')}" if cuda else "cpu")


def commit(root: Path) -> str | None:
    """Return the commit of the checkout, with "-dirty" if edited, or None outside of one."""
    if not (root / ".git").exists():
        return None
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        described = subprocess.run(describe, capture_output=True, text=True)
    except OSError:
        return None
    return described.stdout.strip() or None


def build_info_text(build: Mapping[str, Any]) -> str:
    """Return the source of pycollect/_build_info_*.py."""
    lines = [f"    {name!r}: {value!r}," for name, value in build.items()]
    head = '"""The record of this build; written by setup.py, read by pycollect._build_check."""'
    return "\n".join([head, "", "BUILD = {", *lines, "}", ""])
