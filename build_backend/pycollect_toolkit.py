"""Finds the CUDA toolkit and chooses its target architectures; calls nvcc, but no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

OLDEST_CAPABILITY = 75
USUAL = (80, 90)  # without a GPU: A100 and H100; each costs a minute on one core
VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN")  # nvcc reads them itself


def find_toolkit(environ: Mapping[str, str]) -> str | None:
    """Return the root of the toolkit, or None: CUDA_HOME, CUDA_PATH, or the root that nvcc reports.

    The folder of nvcc on PATH is not used, because it may be a wrapper outside of the toolkit.
    """
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if (Path(environ.get(name) or "/nowhere") / "bin" / "nvcc").exists():
            return environ[name]
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    if nvcc is None:
        return None
    done = subprocess.run([nvcc, "--dryrun", "none.cu"], capture_output=True, text=True)
    here = re.search(r"^#\$ _HERE_=(.+)$", done.stdout + done.stderr, re.MULTILINE)
    return str(Path(here[1].strip()).parent) if here else None


def read_version(toolkit: str) -> str:
    """Return the toolkit's version, such as "13.0.88"."""
    nvcc = str(Path(toolkit) / "bin" / "nvcc")
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    return version[1] if version else text


def list_architectures(toolkit: str) -> list[int]:
    """Return the compute capabilities that nvcc supports, times ten."""
    nvcc = str(Path(toolkit) / "bin" / "nvcc")
    text = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout
    return sorted({int(n) for n in re.findall(r"compute_(\d+)\b", text)})


def choose_architectures(known: Iterable[int], present: Iterable[int]) -> list[str]:
    """Return nvcc's -gencode flags for the GPUs that are present, or else for the usual ones.

    Code for one capability runs on all later ones of the same generation. For other generations the
    driver compiles PTX, once per machine, at the first use of a kernel.
    """
    usable = sorted(n for n in set(known) if n >= OLDEST_CAPABILITY)
    here = sorted({max((n for n in usable if n <= gpu), default=0) for gpu in present} - {0})
    chosen = here or [n for n in USUAL if n in usable] or usable[:1]
    ptx = {chosen[-1], usable[0]} if not here else {chosen[-1]}
    flags = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in chosen]
    return flags + [f"-gencode=arch=compute_{n},code=compute_{n}" for n in sorted(ptx)]


def described(flags: Iterable[str]) -> list[str]:
    """Return the targets of nvcc's -gencode flags: sm_90 is code, compute_90 is PTX.

    >>> described(["-gencode=arch=compute_90,code=sm_90"])
    ['sm_90']
    """
    return [flag.rpartition("code=")[2] for flag in flags]
