"""Checks that the compiled part fits the torch and the Python that import it.

The build records its torch and Python. With another torch, the compiled part would crash or compute
nonsense, so the import is refused in one sentence that says what to do. Loads no compiled module.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import sysconfig
from collections.abc import Mapping
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

OLDEST_TORCH = (2, 11)


def build_info() -> dict[str, Any]:
    """Return the record of the build: the torch and CUDA that it is for, its compiler, and so on.

    Empty when pycollect was never built here.

    >>> sorted(build_info())  # doctest: +NORMALIZE_WHITESPACE
    ['architectures', 'commit', 'compiler', 'cuda', 'cxx11_abi', 'debug', 'python', 'switches',
     'torch']
    """
    try:
        found = import_module(f"pycollect._build_info_{_python()}").BUILD
    except ModuleNotFoundError:
        return {}
    return dict(found)


def check() -> None:
    """Raise ImportError unless the compiled part was built for the torch that is installed.

    >>> check()
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(_newer_torch("none", "")) from None
    found = {
        "torch": str(torch.__version__),
        "cxx11_abi": bool(torch.compiled_with_cxx11_abi()),
        "cuda": torch.version.cuda,
    }
    compiled = importlib.util.find_spec("pycollect._C") is not None
    sentence = mismatch(build_info() if compiled else {}, found)
    if sentence is not None:
        raise ImportError(sentence)


def mismatch(build: Mapping[str, Any], torch: Mapping[str, Any]) -> str | None:
    """Return one sentence on why `build` cannot run with `torch`, or None when it can.

    Both map "torch" to a version, "cxx11_abi" to a bool, "cuda" to a version or None. `build` is
    empty if pycollect was never built here.

    >>> torch = {"torch": "2.13.1+cpu", "cxx11_abi": True, "cuda": None}
    >>> mismatch({"torch": "2.13.0", "cxx11_abi": True, "cuda": None}, torch)
    """
    has = torch["torch"]
    if _release(has) < OLDEST_TORCH:
        return _newer_torch(has, " --upgrade")
    if not build:
        here = Path(__file__).parent
        why = f"the compiled part of pycollect is missing in {here} for this Python"
    elif _interface(build["torch"]) != _interface(has):
        why = f"pycollect was built against torch {build['torch']}, but {has} is installed"
    elif build["cxx11_abi"] != torch["cxx11_abi"]:
        why = "pycollect and the installed torch were built with different C++ ABIs (CXX11)"
    elif build["cuda"] is not None and _major(build["cuda"]) != _major(torch["cuda"]):
        cuda = torch["cuda"] or "no CUDA"
        why = f"pycollect was built for CUDA {build['cuda']}, but the installed torch has {cuda}"
    else:
        return None
    rebuilt = f"rebuild it: {rebuild_command()}"
    if build and _checkout() is None and _interface(build["torch"]) != _interface(has):
        wanted = build["torch"].partition("+")[0]
        return f"{why}; install that torch: {_install()} torch=={wanted}, or {rebuilt}"
    return f"{why}; {rebuilt}"


def _newer_torch(has: str, upgrade: str) -> str:
    oldest = ".".join(map(str, OLDEST_TORCH))
    return (
        f"pycollect needs torch {oldest} or newer and {has} is installed; "
        f"run: {_install()}{upgrade} torch, and then {rebuild_command()}"
    )


def rebuild_command() -> str:
    """Return the command that rebuilds pycollect against the installed torch.

    An environment without pip is taken for one of uv, which hides the installed torch from an
    isolated build.
    """
    source = "<pycollect's source>" if _checkout() is None else f"-e {_checkout()}"
    if _has_pip():
        return f"{_install()} --no-deps --force-reinstall {source}"
    build = f"{_install()} --no-build-isolation --no-deps --reinstall {source}"
    return f"{_install()} setuptools ninja && {build}"


def _checkout() -> Path | None:
    """Return the source folder from which this runs, or None if pycollect is installed."""
    root = Path(__file__).parents[1]
    return root if (root / "setup.py").exists() else None


def _has_pip() -> bool:
    return PathFinder.find_spec("pip") is not None  # importlib.util would run setuptools' hooks


def _install() -> str:
    if _has_pip():
        return f"{sys.executable} -m pip install"
    return f"uv pip install --python {sys.executable}"


def _python() -> str:
    """Return this Python's tag in module names, such as "cpython_312_x86_64_linux_gnu"."""
    return str(sysconfig.get_config_var("EXT_SUFFIX")).split(".")[1].replace("-", "_")


def _release(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise ImportError(f"pycollect cannot read the version of torch, {version!r}")
    return int(match[1]), int(match[2])


def _interface(version: str) -> object:
    """Return the part of the torch version that must match: the minor of a release, else all."""
    released = re.fullmatch(r"\d+\.\d+(\.\d+)*(\+\w+)?", version) is not None
    return _release(version) if released else version


def _major(cuda: str | None) -> str | None:
    return None if cuda is None else cuda.partition(".")[0]
