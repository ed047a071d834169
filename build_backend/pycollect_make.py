"""Runs a build: one at a time per checkout, after a line with its title and estimated time.

An interrupted build, by a signal or a full disk, leaves nothing that a later one mistakes for
complete: ninja records finished outputs, and the module and the record of its build replace the old
ones together.
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

# Seconds on one core of a small machine, for the estimate of the build time.
SECONDS_OF_CORE = 1.2  # per file without torch
SECONDS_OF_HEADERS = 9.0  # torch's headers, per compiled file
SECONDS_OF_TORCH = 1.4  # per source file that includes torch, without the headers
SECONDS_OF_KERNELS = 5.5  # per file and architecture
SECONDS_TO_ANNOUNCE = 20.0  # a shorter build is not announced

_held: list[int] = []  # this process's lock; nested calls, as in a wheel's build, share it


@contextlib.contextmanager
def build_lock(root: Path) -> Iterator[None]:
    """Wait until no other process builds in this checkout, and lock it against others.

    Child processes inherit the lock, so a compiler that outlives this process still holds it.
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
            notify(f"another build is running in {root}; this one waits until it has ended")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            notify(f"{root} cannot be locked ({error.strerror}); run one build at a time there")
        _held.append(lock)
        yield
    finally:
        _held.clear()
        os.close(lock)


def notify(sentence: str) -> None:
    """Write a line to stderr, and to the terminal if stderr is captured, as pip does."""
    print(f"pycollect: {sentence}", file=sys.stderr, flush=True)
    if not sys.stderr.isatty():
        with contextlib.suppress(OSError, ValueError), open("/dev/tty", "w") as terminal:
            terminal.write(f"\npycollect: {sentence}\n")


def make(root: Path, build: ninja.Build, jobs: int, architectures: int, title: str) -> None:
    """Build all missing outputs with ninja, after a line with the estimated time."""
    build.write()
    drop_empty(root, build)
    todo = pending(root, build)
    if build.kernels is not None and todo["kernels"]:
        require_nvcc(build.kernels)
    whole, rest = (seconds(root, build, todo, n, jobs) for n in (architectures, 0))
    if whole >= SECONDS_TO_ANNOUNCE:
        less = f"; PYCOLLECT_CUDA=0 omits the kernels: {minutes(rest)}" if rest < whole else ""
        less += ", TORCH_CUDA_ARCH_LIST=9.0 selects their GPUs" if less else ""
        at_once = "1 compiler" if jobs == 1 else f"{jobs} compilers at once (MAX_JOBS)"
        notify(f"building for {title} with {at_once}: {minutes(whole)}{less}")
    run(root, build, jobs)


def pending(root: Path, build: ninja.Build) -> Counter[str]:
    """Return the number of objects that ninja would build now, by rule."""
    command = ["ninja", "-n", "-f", str(build.manifest)]
    environ = {**os.environ, "NINJA_STATUS": "[%f/%t] "}
    dry = subprocess.run(command, cwd=root, capture_output=True, text=True, env=environ)
    lines = [line.partition("] ")[2] for line in dry.stdout.splitlines() if line.startswith("[")]
    return Counter(line.partition(" ")[0] for line in lines)


def minutes(seconds: float) -> str:
    """Format seconds as in "about 3 minutes"."""
    rounded = max(1, round(seconds / 60))
    return "about 1 minute" if rounded == 1 else f"about {rounded} minutes"


def seconds(
    root: Path, build: ninja.Build, todo: Counter[str], architectures: int, jobs: int
) -> float:
    """Return the estimated seconds of a build: at least those of its longest file."""
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
    """Remove empty objects, which a file system may leave when the machine stops."""
    folders = {build.core, build.folder} | ({build.fatbins} if build.kernels else set())
    for path in (path for folder in folders for path in (root / folder).glob("*.o")):
        if path.stat().st_size == 0:
            path.unlink()


def require_nvcc(kernels: ninja.Kernels) -> None:
    """Stop the build, before anything is compiled, if nvcc cannot compile an empty file."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*kernels.command, *kernels.flags, "-x", "cu", "-c", os.devnull]
        done = subprocess.run(
            [*command, "-o", f"{folder}/empty.o"], capture_output=True, text=True, errors="replace"
        )
    if done.returncode != 0:
        output = " ".join((done.stderr or done.stdout).split())
        stop(
            f"nvcc cannot compile an empty file ({output[:500]}); repair it, choose another C++ "
            "compiler with CXX, or omit the CUDA part with PYCOLLECT_CUDA=0."
        )


def run(root: Path, build: ninja.Build, jobs: int) -> None:
    """Run ninja; stop if the build fails."""
    if Path(build.compiler.command[0]).name == "sccache":  # its server must not inherit the lock
        subprocess.run([build.compiler.command[0], "--start-server"], capture_output=True)
    command = ["ninja", "-f", str(build.manifest), "-j", str(jobs)]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # A separate process group, so that ninja gets a Ctrl-C only once, from here: a second SIGINT
    # would end it before its compilers.
    child = subprocess.Popen(command, cwd=root, pass_fds=_held, preexec_fn=os.setpgrp)
    try:
        status = child.wait()
    except BaseException:  # Ctrl-C: wait while ninja removes incomplete outputs
        child.send_signal(signal.SIGINT)
        child.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if status != 0:
        stop("the build failed; the compiler's messages are above.")


def install_file(built: Path, module: Path) -> None:
    """Copy a file to its place, completely or not at all."""
    if _same(module, built.read_bytes()):
        return
    new = module.with_name(f"{module.name}.new")
    try:
        shutil.copyfile(built, new)
        new.replace(module)
    finally:
        new.unlink(missing_ok=True)


def install_module(built: Path, module: Path, info: str) -> None:
    """Copy a module and the record of its build to their places, both or none."""
    # Each Python has its own module here, _C.cpython-312-x86_64-linux-gnu.so, and its own record.
    record = module.with_name(f"_build_info_{module.name.split('.')[1].replace('-', '_')}.py")
    if _same(record, info.encode()) and _same(module, built.read_bytes()):
        return
    module.parent.mkdir(parents=True, exist_ok=True)
    new_module, new_record = module.with_name("_C.new.so"), module.with_name("_build_info.new")
    try:
        shutil.copyfile(built, new_module)
        new_record.write_text(info)
        record.unlink(missing_ok=True)  # a module without a record is not used
        new_module.replace(module)
        new_record.replace(record)
    finally:
        new_module.unlink(missing_ok=True)
        new_record.unlink(missing_ok=True)


def _same(path: Path, wanted: bytes) -> bool:
    return path.exists() and path.read_bytes() == wanted
