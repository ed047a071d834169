"""Determines the build from the machine, torch, the compilers and the environment variables.

The decisions are functions of their arguments, so that tests can call them.
"""

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pycollect_ninja as ninja

OLDEST_TORCH = (2, 11)
OLDEST_SETUPTOOLS = 77
BYTES_PER_TORCH_JOB = 3 << 30  # the most memory that a compiler needs for a file with torch
MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # this machine's bytes
RECORDED = ("PYCOLLECT_CUDA", "PYCOLLECT_BUILD_DEBUG", "PYCOLLECT_UNITY", "PYCOLLECT_WERROR")
RECORDED += ("TORCH_CUDA_ARCH_LIST",)  # other variables may contain a user's folders
LAUNCHERS = ("ccache", "sccache", "distcc", "icecc")  # commands before a compiler's name
# Without a GPU: A100 and H100, for whose generations this code runs; the driver compiles PTX once
# per machine for the others, from the oldest supported one on. An architecture costs a minute.
USUAL_TARGETS = ("sm_80", "sm_90", "compute_75", "compute_90")
INSTALL = "install g++ 11 or newer (CXX selects another compiler than c++)"
# g++ accepts it since version 11. clang does not: it lacks __builtin_shuffle, and the pragmas that
# select a file's instruction set.
PROBE = """
#include <Python.h>
enum class Kind { one };
constexpr Kind kind() { using enum Kind; return one; }
typedef int Four __attribute__((vector_size(16)));
Four swapped(Four x) { return __builtin_shuffle(x, Four{1, 0, 3, 2}); }
"""


def stop(sentence: str) -> NoReturn:
    """End the build with one sentence and no traceback."""
    raise SystemExit(f"pycollect: {sentence}")


def torch_is_importable() -> bool:
    """Return whether `import torch` finds a package, not just a folder that pip left behind."""
    importlib.invalidate_caches()
    spec = importlib.util.find_spec("torch")
    return spec is not None and spec.origin is not None


def version(root: Path, labelled: bool) -> str:
    """Return the version; `labelled` adds torch and CUDA, as in "0.1.0+torch2.15.cu132"."""
    public = re.findall('= "(.+)"', (root / "pycollect" / "_version.py").read_text())[0]
    if not labelled or not torch_is_importable():  # metadata can be made without torch
        return public
    import torch

    no_cuda = why_no_cuda(os.environ, torch.version.cuda, find_toolkit(os.environ))
    return f"{public}+{local_version(torch.__version__, None if no_cuda else torch.version.cuda)}"


def local_version(torch: str, cuda: str | None) -> str:
    """Return the local part of a version, after "+": torch and CUDA, as in torch2.15.cu132."""
    public = torch.partition("+")[0]
    released = re.fullmatch(r"(\d+\.\d+)(\.\d+)*", public)
    release = released[1] if released else re.sub(r"\W", ".", public)
    return f"torch{release}." + (f"cu{cuda.replace('.', '')}" if cuda else "cpu")


def configure(root: Path, testing: bool) -> ninja.Build:
    """Return the build; stop with one sentence if it is impossible."""
    if not torch_is_importable():
        stop(f"building needs torch; install it first: {sys.executable} -m pip install torch")
    import torch

    environ = os.environ
    require_torch(str(torch.__version__))
    compiler = require_compiler(environ)
    no_cuda = why_no_cuda(environ, torch.version.cuda, toolkit := find_toolkit(environ))
    architectures = [] if no_cuda else choose_architectures(environ, torch)
    targets = [flag.rpartition("code=")[2] for flag in architectures]  # sm_, or compute_ for PTX
    cuda = f"CUDA for {', '.join(targets)}" if targets else f"without CUDA: {no_cuda}"
    old_abi = [] if torch.compiled_with_cxx11_abi() else ["-D_GLIBCXX_USE_CXX11_ABI=0"]
    nvcc_variables = sorted(item for item in environ.items() if item[0].startswith("NVCC_"))
    source = (torch.version.git_version or "")[:8]  # distinguishes nightlies and local builds
    return ninja.Build(
        root=root,
        title=f"torch {torch.__version__} ({cuda})",
        record=make_record(root, torch, compiler, targets),
        compiler=shlex.split(environ.get("CXX", "")) or ["c++"],
        compiler_version=compiler,
        flags=compiler_flags(environ) + old_abi,
        link_flags=shlex.split(f"{environ.get('CXXFLAGS', '')} {environ.get('LDFLAGS', '')}"),
        torch=Path(str(torch.__file__)).parent,
        torch_name=f"torch{torch.__version__}-{source}",
        python=str(sys.implementation.cache_tag),
        python_include=sysconfig.get_path("include"),
        nvcc=nvcc_command(environ, toolkit, architectures) if toolkit and targets else [],
        nvcc_version=str([nvcc_release(toolkit), *nvcc_variables]) if targets else "",
        toolkit=toolkit,
        unity=switch(environ, "PYCOLLECT_UNITY", "1"),
        jobs=limit_jobs(environ, len(os.sched_getaffinity(0)), MEMORY),
        testing=testing,
    )


def make_record(root: Path, torch: ModuleType, compiler: str, targets: list[str]) -> dict[str, Any]:
    """Return what pycollect._build_check reads and reports of a build."""
    return {
        "torch": str(torch.__version__),
        "cxx11_abi": bool(torch.compiled_with_cxx11_abi()),
        "cuda": torch.version.cuda if targets else None,
        "architectures": targets,
        "compiler": compiler,
        "python": platform.python_version(),
        "debug": switch(os.environ, "PYCOLLECT_BUILD_DEBUG", "0"),
        "switches": {name: os.environ[name] for name in RECORDED if os.environ.get(name)},
        "commit": commit(root),
    }


def switch(environ: Mapping[str, str], name: str, default: str) -> bool:
    """Return whether a switch is on; its value is 0, 1 or missing."""
    value = environ.get(name) or default
    if value not in ("0", "1"):
        stop(f"{name} is {value!r}; set it to 0 or 1, or unset it.")
    return value == "1"


def require_compiler(environ: Mapping[str, str]) -> str:
    """Stop the build unless the C++ compiler passes a test; return the compiler's name."""
    command = shlex.split(environ.get("CXX", "")) or ["c++"]
    probe = [*command, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    probe += ["-isystem", sysconfig.get_path("include")]
    try:
        version = subprocess.run([*command, "--version"], capture_output=True, text=True)
        tried = subprocess.run(probe, input=PROBE, capture_output=True, text=True)
    except OSError:
        stop(f"no C++ compiler was found under the name {shlex.join(command)!r}; {INSTALL}.")
    name = (version.stdout.splitlines() or [shlex.join(command)])[0]
    if tried.returncode != 0:
        errors = [line for line in tried.stderr.splitlines() if "error" in line]
        stop(
            f"the C++ compiler ({name}) fails a test of GNU C++20 and Python's headers "
            f"({(errors or ['no message'])[0]}); {INSTALL} and the headers (on Debian and Ubuntu: "
            "apt install python3-dev)."
        )
    return name


def compiler_flags(environ: Mapping[str, str]) -> list[str]:
    """Return the C++ compiler's flags, without Python's own: those differ between Pythons."""
    flags = [
        *shlex.split(environ.get("CPPFLAGS", "")),
        *shlex.split(environ.get("CXXFLAGS", "")),
        "-std=c++20",
        "-fPIC",
    ]
    flags += ["-ffp-contract=off"]  # an FMA would change results' bits
    flags += ["-fwrapv", "-fvisibility=hidden", "-Wall", "-Wextra"]
    if switch(environ, "PYCOLLECT_BUILD_DEBUG", "0"):
        flags += ["-O0", "-g", "-UNDEBUG", "-D_GLIBCXX_ASSERTIONS"]
    else:
        flags += ["-O3", "-g0", "-DNDEBUG"]  # -g doubles the time and adds 50 MB
    return flags + ["-Werror"] * switch(environ, "PYCOLLECT_WERROR", "0")


def require_setuptools(version: str) -> None:
    """Stop if setuptools would reject pyproject.toml, which it does with a page of JSON schema."""
    known = re.match(r"[1-9]\d*", version)  # setuptools without metadata calls itself 0.dev0
    if known and int(known[0]) < OLDEST_SETUPTOOLS:
        wanted = f"setuptools>={OLDEST_SETUPTOOLS}"
        stop(
            f"building needs {wanted} and {version} is installed; upgrade it: "
            f"{sys.executable} -m pip install '{wanted}'"
        )


def require_torch(version: str) -> None:
    """Stop the build if this torch is older than the oldest supported one."""
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_TORCH:
        stop(
            f"torch {'{}.{}'.format(*OLDEST_TORCH)} or newer is needed and {version} is installed; "
            f"upgrade it first: {sys.executable} -m pip install --upgrade torch"
        )


def find_toolkit(environ: Mapping[str, str]) -> Path | None:
    """Return the root of the CUDA toolkit: CUDA_HOME, CUDA_PATH, or what nvcc reports; or None.

    The folder of nvcc on PATH is not used, because it may be a wrapper outside of the toolkit.
    """
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if environ.get(name) and Path(environ[name], "bin", "nvcc").exists():
            return Path(environ[name])
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    if nvcc is None:
        return None
    done = subprocess.run([nvcc, "--dryrun", "none.cu"], capture_output=True, text=True)
    here = re.search(r"^#\$ _HERE_=(.+)$", done.stdout + done.stderr, re.MULTILINE)
    return Path(here[1].strip()).parent if here else None


def nvcc_release(toolkit: Path | None) -> str | None:
    """Return the toolkit's version, such as "13.0.88"."""
    command = [f"{toolkit}/bin/nvcc", "--version"]
    text = subprocess.run(command, capture_output=True, text=True).stdout if toolkit else ""
    found = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    return found[1] if found else None


def why_no_cuda(environ: Mapping[str, str], cuda: str | None, toolkit: Path | None) -> str | None:
    """Return why the CUDA part is left out, or None if it is built; a GPU is not needed for it."""
    if not switch(environ, "PYCOLLECT_CUDA", "1"):
        return "PYCOLLECT_CUDA is 0"
    missing = None
    if cuda is None:
        missing = "the installed torch is a CPU-only torch"
    elif toolkit is None:
        missing = "no CUDA toolkit was found (put nvcc on PATH or set CUDA_HOME)"
    elif (release := nvcc_release(toolkit) or "unknown").partition(".")[0] != cuda.partition(".")[
        0
    ]:
        stop(
            f"torch is for CUDA {cuda} and the CUDA toolkit is {release}; set CUDA_HOME "
            "to a matching toolkit, or omit the CUDA part with PYCOLLECT_CUDA=0."
        )
    if environ.get("PYCOLLECT_CUDA") == "1" and missing is not None:
        stop(f"PYCOLLECT_CUDA=1 asks for a CUDA build, but {missing}.")
    return missing


def choose_architectures(environ: Mapping[str, str], torch: ModuleType) -> list[str]:
    """Return nvcc's -gencode flags: by TORCH_CUDA_ARCH_LIST, for the visible GPUs, or the usual."""
    if not environ.get("TORCH_CUDA_ARCH_LIST") and torch.cuda.device_count() == 0:
        return [f"-gencode=arch=compute_{target[-2:]},code={target}" for target in USUAL_TARGETS]
    from torch.utils.cpp_extension import _get_cuda_arch_flags

    try:
        return list(_get_cuda_arch_flags())
    except ValueError as error:
        stop(f"TORCH_CUDA_ARCH_LIST is {environ.get('TORCH_CUDA_ARCH_LIST')!r}: {error}.")


def nvcc_command(environ: Mapping[str, str], toolkit: Path, architectures: list[str]) -> list[str]:
    """Return nvcc and its flags; stop the build if it refuses them or the C++ compiler."""
    command = [str(toolkit / "bin" / "nvcc"), "-std=c++20", "-fmad=false", *architectures]
    command += ["-Xcompiler=-fPIC", "-Xcompiler=-fvisibility=hidden"]
    command.append("--expt-relaxed-constexpr")  # device code calls the host's constexpr functions
    debug = switch(environ, "PYCOLLECT_BUILD_DEBUG", "0")
    command += ["-O0", "-g"] if debug else ["-O3", "-DNDEBUG"]
    command += ["-Werror=all-warnings"] * switch(environ, "PYCOLLECT_WERROR", "0")
    compiler = [
        word for word in shlex.split(environ.get("CXX", "")) if Path(word).name not in LAUNCHERS
    ]
    if compiler:
        command += [f"-ccbin={compiler[0]}", *(f"-Xcompiler={word}" for word in compiler[1:])]
    empty = [*command, "-E", "-x", "cu", os.devnull]
    done = subprocess.run(empty, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        output = " ".join((done.stderr or done.stdout).split())
        stop(
            f"nvcc cannot compile an empty file ({output[:500]}); repair it, choose another C++ "
            "compiler with CXX or GPUs with TORCH_CUDA_ARCH_LIST, or set PYCOLLECT_CUDA=0."
        )
    return command


def limit_jobs(environ: Mapping[str, str], cores: int, memory: int) -> tuple[int, int]:
    """Return the number of parallel compilers, and of those that may compile files with torch."""
    most = environ.get("MAX_JOBS") or str(cores)
    if not most.isdecimal() or int(most) == 0:
        stop(f"MAX_JOBS is {most!r}; set it to a whole number of at least 1.")
    return int(most), max(1, min(int(most), memory // BYTES_PER_TORCH_JOB))


def commit(root: Path) -> str | None:
    """Return the commit of the checkout, with "-dirty" if edited, or None outside of one."""
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    return subprocess.run(describe, capture_output=True, text=True).stdout.strip() or None
