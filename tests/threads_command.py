"""Runs scripts with `python -m pycollect.threads`, in a process with torch imported."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from programs import run

TIMEOUT = 120  # generous, because the machine may be busy
COMMAND = [sys.executable, "-m", "pycollect.threads"]
BEGIN = """\
import os, sys, time
import torch, torch.distributed as dist
def start(): dist.init_process_group("pycollect")
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
"""


def written(folder: Path, text: str, name: str = "program.py") -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return str(path)


def ran(*arguments: str, nproc: int = 2, **more: object) -> subprocess.CompletedProcess[str]:
    return run([*COMMAND, "--nproc", str(nproc), *arguments], timeout=TIMEOUT, **more)


def ran_text(folder: Path, text: str, *arguments: str, nproc: int = 2, options: tuple = ()):
    program = written(folder, BEGIN + textwrap.dedent(text))
    return ran(*options, program, *arguments, nproc=nproc)


def assert_printed(ended: subprocess.CompletedProcess[str], *lines: str) -> None:
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    assert ended.stdout.splitlines() == list(lines)
