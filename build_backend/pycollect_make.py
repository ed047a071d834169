"""Runs a build: one at a time in a checkout, after saying what it is and how long it takes.

A build that is broken off, by a signal or a full disk, leaves nothing that a later one takes for
whole: ninja keeps a record of what has ended, and the module and the record of what it was built
for take the place of the old ones together.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pycollect_ninja as ninja
from pycollect_native import stop

# Seconds on one core of a small machine, for what is said beforehand.
SECONDS_OF_CORE = 1.2  # a file
SECONDS_OF_HEADERS = 9.0  # torch's, for each file that is compiled
SECONDS_OF_TORCH = 1.4  # each of our files behind them
SECONDS_OF_KERNELS = 5.5  # a file and an architecture
WORTH_SAYING = 20.0  # seconds

_held: list[int] = []  # the lock of this process, which both a wheel's build and its module take


@contextlib.contextmanager
def alone(root: Path) -> Iterator[None]:
    """Wait until no other process builds in this checkout, and keep others out.

    What is started meanwhile inherits the lock: a compiler that outlives this process still has it.
    """
    if _held:
        yield
        return
    (root / "build").mkdir(exist_ok=True)
    lock = os.open(root / "build" / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another build is at work in {root}; this one begins when that has ended")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            say(f"{root} cannot be locked ({error.strerror}): build once at a time there")
        _held.append(lock)
        yield
    finally:
        _held.clear()
        os.close(lock)


def say(sentence: str) -> None:
    """Write a line to whoever started the build, also through pip, which keeps its output back."""
    print(f"pycollect: {sentence}", file=sys.stderr, flush=True)
    if not sys.stderr.isatty():
        with contextlib.suppress(OSError, ValueError), open("/dev/tty", "w") as terminal:
            terminal.write(f"\npycollect: {sentence}\n")


def make(root: Path, build: ninja.Build, jobs: int, architectures: int, title: str) -> None:
    """Have ninja make what is missing, after a line that says how long that takes."""
    build.write()
    drop_empty(root, build)
    todo = pending(root, build)
    if build.kernels is not None and todo["kernels"]:
        require_nvcc(build.kernels)
    whole, rest = (seconds(root, build, todo, n, jobs) for n in (architectures, 0))
    if whole >= WORTH_SAYING:
        less = f"; PYCOLLECT_CUDA=0 leaves the kernels out: {minutes(rest)}" if rest < whole else ""
        less += ", TORCH_CUDA_ARCH_LIST=9.0 names the GPUs they are for" if less else ""
        at_once = "1 compiler" if jobs == 1 else f"{jobs} compilers at once (MAX_JOBS)"
        say(f"building for {title} with {at_once}: {minutes(whole)}{less}")
    run(root, build, jobs)


def pending(root: Path, build: ninja.Build) -> Counter[str]:
    """Return how many objects of each rule ninja would make now."""
    command = ["ninja", "-n", "-f", str(build.manifest)]
    environ = {**os.environ, "NINJA_STATUS": "[%f/%t] "}
    dry = subprocess.run(command, cwd=root, capture_output=True, text=True, env=environ)
    lines = [line.partition("] ")[2] for line in dry.stdout.splitlines() if line.startswith("[")]
    return Counter(line.partition(" ")[0] for line in lines)


def minutes(seconds: float) -> str:
    """Return "about 3 minutes"."""
    rounded = max(1, round(seconds / 60))
    return "about 1 minute" if rounded == 1 else f"about {rounded} minutes"


def seconds(
    root: Path, build: ninja.Build, todo: Counter[str], architectures: int, jobs: int
) -> float:
    """Return about how long this takes: no less than the longest, which has a core to itself."""
    sources = len(ninja.torch_sources(root, cuda=build.kernels is not None))
    sources += len(ninja.testing_sources(root)[1]) if build.testing else 0
    files = sources / ninja.TORCH_PARTS if build.unity else 1
    of_torch = SECONDS_OF_HEADERS + files * SECONDS_OF_TORCH
    of_kernels = architectures * SECONDS_OF_KERNELS
    torch, kernels = todo["torch"] * of_torch, todo["kernels"] * of_kernels
    longest = max(min(torch, of_torch), min(kernels, of_kernels))
    whole = (todo["core"] * SECONDS_OF_CORE + torch + kernels) / jobs
    return max(whole, torch / build.torch_jobs, longest)


def drop_empty(root: Path, build: ninja.Build) -> None:
    """Remove objects without a byte: a file system may leave them when the machine stops."""
    folders = {build.core, build.folder} | ({build.fatbins} if build.kernels else set())
    for path in (path for folder in folders for path in (root / folder).glob("*.o")):
        if path.stat().st_size == 0:
            path.unlink()


def require_nvcc(kernels: ninja.Kernels) -> None:
    """Stop the build, before the rest is compiled, where nvcc cannot compile anything."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*kernels.command, *kernels.flags, "-x", "cu", "-c", os.devnull]
        done = subprocess.run(
            [*command, "-o", f"{folder}/empty.o"], capture_output=True, text=True, errors="replace"
        )
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        stop(
            f"the CUDA compiler compiles nothing here ({said[:500]}); mend that, name another C++ "
            "compiler with CXX, or leave the CUDA part out with PYCOLLECT_CUDA=0."
        )


def run(root: Path, build: ninja.Build, jobs: int) -> None:
    """Have ninja make what is missing; stop when it cannot."""
    if Path(build.compiler.command[0]).name == "sccache":  # its server must not inherit the lock
        subprocess.run([build.compiler.command[0], "--start-server"], capture_output=True)
    command = ["ninja", "-f", str(build.manifest), "-j", str(jobs)]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # In a group of its own, so that it hears a Ctrl-C once, from here: a second one would end it
    # before it has ended its compilers.
    child = subprocess.Popen(command, cwd=root, pass_fds=_held, preexec_fn=os.setpgrp)
    try:
        status = child.wait()
    except BaseException:  # Ctrl-C: ninja takes away what is half done, and is given time for it
        child.send_signal(signal.SIGINT)
        child.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if status != 0:
        stop("the build failed; the compiler's own words are above.")


def put(built: Path, module: Path) -> None:
    """Put a module into a folder, whole or not at all."""
    if _same(module, built.read_bytes()):
        return
    new = module.with_name(f"{module.name}.new")
    try:
        shutil.copyfile(built, new)
        new.replace(module)
    finally:
        new.unlink(missing_ok=True)


def place(built: Path, module: Path, info: str) -> None:
    """Put a module and the record of its build into a folder, together or not at all."""
    # Each Python has its own module here, _C.cpython-312-x86_64-linux-gnu.so, and its own record.
    record = module.with_name(f"_build_info_{module.name.split('.')[1].replace('-', '_')}.py")
    if _same(record, info.encode()) and _same(module, built.read_bytes()):
        return
    module.parent.mkdir(parents=True, exist_ok=True)
    new_module, new_record = module.with_name("_C.new.so"), module.with_name("_build_info.new")
    try:
        shutil.copyfile(built, new_module)
        new_record.write_text(info)
        record.unlink(missing_ok=True)  # from here to the end there is a module that is not used
        new_module.replace(module)
        new_record.replace(record)
    finally:
        new_module.unlink(missing_ok=True)
        new_record.unlink(missing_ok=True)


def _same(path: Path, wanted: bytes) -> bool:
    return path.exists() and path.read_bytes() == wanted
