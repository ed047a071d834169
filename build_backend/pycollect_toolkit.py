"""Where the CUDA toolkit is and what it is to compile for; asks nvcc, and never for a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

OLDEST_CAPABILITY = 75
EMBEDDED = {87, 88, 110}  # nobody trains on these boards; naming one compiles for it all the same


def find_toolkit(environ: Mapping[str, str]) -> str | None:
    """Return the root of the toolkit, or None: CUDA_HOME, CUDA_PATH, or what nvcc itself says.

    Not where nvcc lies: it may be a wrapper, and then nothing else is beside it.
    """
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if (Path(environ.get(name) or "/nowhere") / "bin" / "nvcc").exists():
            return environ[name]
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    if nvcc is None:
        return None
    told = subprocess.run([nvcc, "--dryrun", "none.cu"], capture_output=True, text=True)
    here = re.search(r"^#\$ _HERE_=(.+)$", told.stdout + told.stderr, re.MULTILINE)
    return str(Path(here[1].strip()).parent) if here else None


def list_architectures(toolkit: str) -> list[int]:
    """Return the compute capabilities that this nvcc knows, times ten."""
    nvcc = str(Path(toolkit) / "bin" / "nvcc")
    told = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout
    return sorted({int(n) for n in re.findall(r"compute_(\d+)\b", told)})


def choose_architectures(known: Iterable[int], present: Iterable[int]) -> list[int]:
    """Return what to compile for: the GPUs that are there, else the first of each generation.

    Code of one capability runs on all later ones of the same generation; for those to come the
    highest is kept as PTX, too.
    """
    usable = sorted(n for n in set(known) if n >= OLDEST_CAPABILITY)
    here = sorted({max((n for n in usable if n <= gpu), default=0) for gpu in present} - {0})
    if here:
        return here
    common = [n for n in usable if n not in EMBEDDED]
    return sorted({min(n for n in common if n // 10 == m) for m in {n // 10 for n in common}})


def architecture_flags(chosen: Iterable[int]) -> list[str]:
    """Return nvcc's flags for these capabilities, with PTX of the highest."""
    numbers = sorted(chosen)
    flags = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in numbers]
    return [*flags, f"-gencode=arch=compute_{numbers[-1]},code=compute_{numbers[-1]}"]
