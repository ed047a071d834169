"""Runs a build: one at a time per checkout, after a line that says what is compiled.

An interrupted build, by a signal or a full disk, leaves nothing that a later one mistakes for
complete: ninja records finished outputs, and the module and the record of its build replace the old
ones together.
"""

import contextlib
import fcntl
import filecmp
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pycollect_ninja as ninja
from pycollect_configure import stop

SLOW_FILES = 3  # with torch or kernels, 10 to 40 s each: a build of fewer is not announced


def make(build: ninja.Build, module: Path) -> None:
    """Build what is missing with ninja, and put the module and its record in their places."""
    with locked(build.root / "build" / ".lock"):
        build.write()
        announce(build)
        run(build)
        install(build, module)


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold this file's lock, after waiting for a build that holds it."""
    file.parent.mkdir(exist_ok=True)
    with open(file, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            notify("another build is running in this checkout; this one waits until it has ended")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            notify(f"{file} cannot be locked ({error.strerror}); run one build at a time")
        yield


def notify(sentence: str) -> None:
    """Write a line to stderr, and to the terminal if stderr is captured, as pip does."""
    print(f"pycollect: {sentence}", file=sys.stderr, flush=True)
    if not sys.stderr.isatty():
        with contextlib.suppress(OSError, ValueError), open("/dev/tty", "w") as terminal:
            terminal.write(f"\npycollect: {sentence}\n")


def announce(build: ninja.Build) -> None:
    """Say what is compiled, unless that is short."""
    environ = os.environ | {"NINJA_STATUS": "[0]"}
    dry = subprocess.check_output([*build.ninja(), "-n"], cwd=build.root, text=True, env=environ)
    todo = [line for line in dry.splitlines() if line.startswith("[")]
    slow = sum(line.startswith(("[0]torch", "[0]kernels")) for line in todo)
    if slow < SLOW_FILES:
        return
    line = f"compiling {len(todo)} files for {build.title} takes minutes (MAX_JOBS={build.jobs[0]})"
    less = "; PYCOLLECT_CUDA=0 leaves the kernels out, TORCH_CUDA_ARCH_LIST=9.0 selects their GPUs"
    notify(line + (less if build.nvcc else ""))


def run(build: ninja.Build) -> None:
    """Run ninja; stop if the build fails."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # A separate process group, so that ninja gets a Ctrl-C only once, from here: a second SIGINT
    # would end it before its compilers.
    command = [*build.ninja(), "-j", str(build.jobs[0])]
    child = subprocess.Popen(command, cwd=build.root, preexec_fn=os.setpgrp)
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


def install(build: ninja.Build, module: Path) -> None:
    """Copy the modules and the record of their build to their places, all or none of them."""
    folder = build.root / build.folder
    # Each Python has its own module here, _C.cpython-312-x86_64-linux-gnu.so, and its own record.
    record = module.with_name(f"_build_info_{module.name.split('.')[1].replace('-', '_')}.py")
    text = folder / "record"
    head = '"""The record of this build; written by setup.py, read by pycollect._build_check."""'
    text.write_text(f"{head}\n\nBUILD = {dict(build.record)}\n")
    places = {folder / "_C.so": module, text: record}
    if build.testing:
        doubles = module.with_name(module.name.replace("_C", "_testing", 1))
        places = {folder / "_testing.so": doubles} | places
    if all(there.exists() and filecmp.cmp(made, there, False) for made, there in places.items()):
        return
    new = {there: there.with_name(f"{there.stem}.new{there.suffix}") for there in places.values()}
    try:
        for built, there in places.items():
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(built, new[there])
        record.unlink(missing_ok=True)  # a module without a record is not used
        for there, copy in new.items():
            copy.replace(there)
    finally:
        for copy in new.values():
            copy.unlink(missing_ok=True)
