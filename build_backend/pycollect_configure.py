"""Determines the build from the machine, torch, the compilers and the environment variables."""

from __future__ import annotations

import os
import platform
import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pycollect_native as native
import pycollect_ninja as ninja
import pycollect_toolkit as toolkit


@dataclass(frozen=True)
class Configuration:
    """A build, the number of its parallel jobs, its title and its record."""

    build: ninja.Build
    jobs: int  # compilers that run at the same time
    architectures: int  # number of GPU architectures that kernels are compiled for
    title: str
    info: dict[str, Any]


def find_torch() -> ModuleType | None:
    """Return the installed torch, or None if there is none."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            native.stop(f"torch is installed but cannot be imported: {error}")
        return None
    return torch


def version(root: Path, labelled: bool) -> str:
    """Return the version; `labelled` adds torch and CUDA, as in "0.1.0+torch2.15.cu132"."""
    found = re.search(r'__version__ = "(.+)"', (root / "pycollect" / "_version.py").read_text())
    assert found is not None
    torch = find_torch() if labelled else None
    if torch is None:  # metadata can be made without torch
        return found[1]
    cuda = None if _why_no_cuda(root, torch) else torch.version.cuda
    return f"{found[1]}+{native.local_version(str(torch.__version__), cuda)}"


def configure(root: Path, testing: bool) -> Configuration:
    """Return the configuration of a build; stop with one sentence if it is impossible.

    `testing` adds the module of test doubles and probes, which only the tests of a checkout use.
    """
    torch = find_torch()
    if torch is None:
        native.stop(
            f"building needs torch; install it first: {sys.executable} -m pip install torch"
        )
    native.require_torch(str(torch.__version__))
    native.require_ninja(os.environ)
    native.require_python_headers(sysconfig.get_path("include"))
    compiler = native.require_compiler(os.environ)
    no_cuda = _why_no_cuda(root, torch)
    architectures = _architectures(torch) if no_cuda is None else []
    targets = toolkit.described(architectures)
    cores = len(os.sched_getaffinity(0))
    jobs, torch_jobs = native.jobs(os.environ, cores, native.available_bytes())
    cxx11_abi = bool(torch.compiled_with_cxx11_abi())
    build = ninja.Build(
        root=root,
        compiler=_compiler(compiler, cxx11_abi),
        torch=_torch(torch),
        kernels=_kernels(architectures) if no_cuda is None else None,
        unity=native.switch(os.environ, "PYCOLLECT_UNITY", "1"),
        torch_jobs=torch_jobs,
        testing=testing,
    )
    cuda = f"CUDA for {', '.join(targets)}" if no_cuda is None else f"without CUDA: {no_cuda}"
    info = {
        "torch": str(torch.__version__),
        "cxx11_abi": cxx11_abi,
        "cuda": torch.version.cuda if no_cuda is None else None,
        "architectures": targets,
        "compiler": compiler,
        "python": platform.python_version(),
        "debug": native.switch(os.environ, "PYCOLLECT_BUILD_DEBUG", "0"),
        "switches": {name: os.environ[name] for name in native.SWITCHES if os.environ.get(name)},
        "commit": native.commit(root),
    }
    numbers = [target for target in targets if target.startswith("sm_")]
    title = f"torch {torch.__version__} ({cuda})"
    return Configuration(build, jobs, max(1, len(numbers)), title, info)


def _why_no_cuda(root: Path, torch: ModuleType) -> str | None:
    home = toolkit.find_toolkit(os.environ)
    return native.why_no_cuda(
        os.environ.get("PYCOLLECT_CUDA"),
        kernels=bool(ninja.kernel_sources(root)),
        torch_cuda=torch.version.cuda,
        toolkit_cuda=home and toolkit.read_version(home),
    )


def _architectures(torch: ModuleType) -> list[str]:
    """Return nvcc's -gencode flags: by TORCH_CUDA_ARCH_LIST, for the GPUs, or the default."""
    if os.environ.get("TORCH_CUDA_ARCH_LIST"):
        from torch.utils.cpp_extension import _get_cuda_arch_flags

        try:
            return list(_get_cuda_arch_flags())
        except ValueError as error:
            native.stop(f"TORCH_CUDA_ARCH_LIST is {os.environ['TORCH_CUDA_ARCH_LIST']!r}: {error}.")
    home = toolkit.find_toolkit(os.environ)
    assert home is not None
    gpus = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    present = [10 * major + minor for major, minor in gpus]
    return toolkit.choose_architectures(toolkit.list_architectures(home), present)


def _compiler(name: str, cxx11_abi: bool) -> ninja.Compiler:
    cxx = native.launcher(os.environ) + native.compiler_command(os.environ)
    abi = [] if cxx11_abi else ["-D_GLIBCXX_USE_CXX11_ABI=0"]
    flags, links = native.flags(os.environ) + abi, native.link_flags(os.environ)
    return ninja.Compiler(cxx, name, flags, native.torch_flags(), links)


def _torch(torch: ModuleType) -> ninja.Torch:
    source = (torch.version.git_version or "")[:8]  # distinguishes nightlies and local builds
    return ninja.Torch(
        name=f"torch{torch.__version__}-{source}",
        root=Path(str(torch.__file__)).parent,
        python=sys.implementation.cache_tag,
        python_include=sysconfig.get_path("include"),
    )


def _kernels(architectures: list[str]) -> ninja.Kernels:
    home = toolkit.find_toolkit(os.environ)
    assert home is not None
    nvcc = [*native.launcher(os.environ), str(Path(home) / "bin" / "nvcc")]
    flags = native.kernel_flags(os.environ, architectures)
    settings = [f"{name}={os.environ[name]}" for name in toolkit.VARIABLES if name in os.environ]
    return ninja.Kernels(nvcc, [toolkit.read_version(home), *settings], flags, Path(home))
