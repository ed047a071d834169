"""Builds and runs the GPU programs of bench/native, with nvcc and without torch."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pycollect._command import Interruption

from . import environment, scripts
from .output import write_json

# Exit status of these programs without a GPU: a skipped test in automake.
NO_GPU = 77
# Architecture to build for without a GPU: that of the H100 and the H200.
_ARCHITECTURE = "sm_90"
_FLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xcompiler", "-Wall,-Wextra,-fopenmp")


Finding = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]


class CannotRun(Exception):
    """The program needs nvcc or a GPU, which is missing; the message is one sentence."""


def architecture() -> str:
    """Return nvcc's name for the architecture of the first GPU."""
    if not torch.cuda.is_available():
        return _ARCHITECTURE
    major, minor = torch.cuda.get_device_capability(0)
    return f"sm_{major}{minor}"


def build(sources: Sequence[Path], program: Path) -> Path:
    """Compile and link `program`, unless it is newer than all files in the sources' folders.

    Raises:
        CannotRun: without nvcc.
        RuntimeError: if nvcc fails, with its messages.
    """
    inputs = [file for source in sources for file in source.parent.iterdir() if file.is_file()]
    if program.exists() and all(f.stat().st_mtime < program.stat().st_mtime for f in inputs):
        return program
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise CannotRun("there is no nvcc on the path; it is needed to build the program")
    program.parent.mkdir(parents=True, exist_ok=True)
    command = [nvcc, *_FLAGS, f"-arch={architecture()}", *map(str, sources)]
    done = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvcc ended with {done.returncode}\n{done.stderr}")
    return program


def output_of(program: Path, arguments: Sequence[object], seconds: float) -> str:
    """Run `program` to its end and return its output.

    Raises:
        CannotRun: without a GPU, with the program's message.
        RuntimeError: if it fails without output, or takes longer than `seconds`.
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


def findings(program: Path, arguments: Sequence[object], seconds: float) -> Iterator[Finding]:
    """Run `program` and yield the JSON object of each line of output as it arrives.

    Raises:
        CannotRun: without a GPU, with the program's message.
        RuntimeError: if it fails, or is killed after `seconds`.
    """
    command = [str(program), *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        timer = threading.Timer(seconds, child.kill)
        timer.start()
        try:
            last_line = ""
            for line in child.stdout:
                last_line = line.strip()
                if last_line.startswith("{"):
                    yield json.loads(last_line)
            errors = child.stderr.read().strip()
        finally:
            timer.cancel()
            child.kill()
    if child.returncode == NO_GPU:
        raise CannotRun(last_line)
    if child.returncode:
        raise RuntimeError(f"{program.name} ended with {child.returncode}: {errors or last_line}")


@dataclass(frozen=True)
class Probe:
    """A program that runs once and prints many results; `show(findings, every)` prints them."""

    name: str
    about: str
    sources: Sequence[Path]
    show: Callable[[Sequence[Finding], bool], None]
    seconds: float = 120.0


def _arguments(probe: Probe, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"{probe.name}.py", description=probe.about)
    add = parser.add_argument
    add("--all", action="store_true", help="every result, not only the best and the library's")
    limit = f"time limit of the program ({probe.seconds:g})"
    add("--seconds", type=float, default=probe.seconds, help=limit)
    add("--program", type=Path, help="a program that is already built")
    add("--build", type=Path, default=ROOT / "build" / "native", help="folder to build it in")
    add("--json", metavar="FILE", help="write all results there")
    return scripts.parse(parser, argv)


def run_probe(probe: Probe, argv: Sequence[str] | None) -> int:
    """Build and run a probe, show its results, also of a failed run; return the exit status."""
    return scripts.run(probe.name, lambda: _run(probe, argv))


def _run(probe: Probe, argv: Sequence[str] | None) -> int:
    args = _arguments(probe, argv)
    about = environment.describe(shlex.join(sys.orig_argv))
    print(*environment.header(about), sep="\n", flush=True)
    found: list[Finding] = []
    failure = ""
    interruption = Interruption()
    try:
        with interruption:
            program = args.program or build(probe.sources, args.build / probe.name)
            found.extend(findings(program, [], args.seconds))
    except CannotRun as error:
        print(f"bench/{probe.name}.py: {error}")
        return NO_GPU
    except RuntimeError as error:
        failure = str(error)
    probe.show(found, args.all)
    if failure:
        print(f"# FAILED: {failure}")
    content = {"environment": about, "failure": failure or None, "findings": found}
    write_json(args.json, content, interruption)
    interruption.reraise(args.json)
    return 1 if failure or any(f.get("wrong") for f in found) else 0
