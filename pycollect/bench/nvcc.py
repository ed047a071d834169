"""Programs of bench/native that need a GPU: built by nvcc where there is one, outside of torch."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

# What automake calls a skipped test, and these programs exit with where there is no GPU.
NO_GPU = 77
# Where no GPU says what it is: that of the H100 and the H200.
_ARCHITECTURE = "sm_90"
_FLAGS = ("-std=c++20", "-O3", "-Xcompiler", "-Wall,-Wextra")


class CannotRun(Exception):
    """There is no compiler, or no GPU: one sentence."""


def architecture() -> str:
    """Return what nvcc calls the first GPU."""
    if not torch.cuda.is_available():
        return _ARCHITECTURE
    major, minor = torch.cuda.get_device_capability(0)
    return f"sm_{major}{minor}"


def build(sources: Sequence[Path], program: Path, flags: Sequence[str] = ()) -> Path:
    """Compile and link `program`, unless it is newer than everything beside its sources.

    Raises:
        CannotRun: without nvcc.
        RuntimeError: with what nvcc says.
    """
    made_of = [file for source in sources for file in source.parent.iterdir() if file.is_file()]
    if program.exists() and all(f.stat().st_mtime < program.stat().st_mtime for f in made_of):
        return program
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise CannotRun("there is no nvcc on the path, which builds the program")
    program.parent.mkdir(parents=True, exist_ok=True)
    command = [nvcc, *_FLAGS, *flags, f"-arch={architecture()}", *map(str, sources)]
    done = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvcc ended with {done.returncode}\n{done.stderr}")
    return program


def lines_of(program: Path, arguments: Sequence[object], seconds: float) -> str:
    """Run it to its end and return what it printed.

    Raises:
        CannotRun: where there is no GPU, with the program's sentence.
        RuntimeError: if it fails or takes longer.
    """
    command = [str(program), *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{program.name} did not end within {seconds:g} s") from None
    if done.returncode == NO_GPU:
        raise CannotRun(done.stdout.strip())
    if done.returncode and not done.stdout:
        raise RuntimeError(f"{program.name} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout
