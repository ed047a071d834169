"""Whole builds of a small project: compiled and reused objects, interrupts, concurrent builds."""

import contextlib
import os
import pickle
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pycollect_make as make
import pycollect_ninja as ninja
import pytest

SOURCES = {
    "plan/plan.h": "int half();\n",
    "plan/plan.cpp": '#include "plan.h"\nint half() { return 21; }\n',
    "cpu/cpu.cpp": "int none() { return 0; }\n",
    "cuda/kernel.cu": "int kernel() { return 1; }\n",
    "torch/one.cpp": "#include <torch/fake.h>\nint one() { return FAKE; }\n",
    "torch/two.cpp": "int none();\nint two() { return none(); }\n",
    "torch/no_cuda.cpp": "int kernels() { return 0; }\n",
    "torch/cuda/with.cpp": "int kernel();\nint kernels() { return kernel(); }\n",
    "torch/c10d/three.cpp": "int two();\nint three() { return two(); }\n",
    "torch/c10d/four.cpp": '#include "../../plan/plan.h"\nint one();\nint three();\n'
    "int kernels();\n"
    'extern "C" int answer() { return one() * half() + three() + kernels(); }\n',
}
LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python", "cudart", "c10_cuda", "torch_cuda")
# A compiler that notes its arguments, and stops halfway if the file `pause` exists.
COMPILER = """#!/bin/bash
[ -e compiled ] && echo "$*" >> compiled
if [ -e pause ]; then
  for word; do [ "$before" = -o ] && echo half > "$word"; before=$word; done
  touch paused  # usually ended by ninja at once; a build ends only after its compilers
  for n in {1..100}; do [ -e pause ] && sleep 0.1; done
fi
exec g++ """
MAKE = """
import pickle, resource, sys
from pathlib import Path
import pycollect_make as make
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
build = pickle.loads(bytes.fromhex(sys.argv[1]))
make.make(build, build.root / "_C.cpython-1-linux.so")
"""
MODULE = "_C.cpython-1-linux.so"
WITH_US = {"PYTHONPATH": str(Path(make.__file__).parent)}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The built project, in a folder with a space in its name; it is copied for each test."""
    folder = tmp_path_factory.mktemp("project")
    root, torch = folder / "a project", folder / "torch"
    texts = {f"a project/csrc/{name}": text for name, text in SOURCES.items()}
    texts |= {"torch/include/torch/fake.h": "#define FAKE 2\n", "a project/compiled": ""}
    texts |= {"c++": COMPILER + '"$@"', "nvcc": COMPILER + '-x c++ "${@/#cu/c++}"'}
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (torch / "lib").mkdir()
    for library in LIBRARIES:
        out = torch / "lib" / f"lib{library}.so"
        subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", "-o", out], check=True)
    built = ninja.Build(
        root=root,
        title="a test",
        record={"torch": "1.0"},
        compiler=[str(folder / "c++")],
        compiler_version="1.0",
        flags=["-fPIC", "-O0", "-DA='a b'"],
        link_flags=[],
        torch=torch,
        torch_name="torch1.0",
        python="cpython-1",
        python_include="/none",
        jobs=(2, 1),
    )
    assert compile_all(built) == {"torch": 4, "core": 2, "link": 1}
    return built


@pytest.fixture
def build(project, tmp_path):
    shutil.copytree(project.root, tmp_path / "a project", symlinks=True)
    return replace(project, root=tmp_path / "a project")


def emptied(build):
    """The project as before its first build."""
    shutil.rmtree(build.root / "build")
    (build.root / "compiled").write_text("")
    return build


def compile_all(build):
    """Build, and count what the compilers were called for."""
    (build.root / "compiled").write_text("")
    make.make(build, build.root / MODULE)
    lines = (build.root / "compiled").read_text().splitlines()
    kinds = {"-shared": "link", ".cu ": "kernels", " -isystem ": "torch", "": "core"}
    return Counter(next(kind for part, kind in kinds.items() if part in line) for line in lines)


def answer(build):
    """Call the built module in a new process; this process would keep the first version loaded."""
    code = f"import ctypes; print(ctypes.CDLL({str(build.root / MODULE)!r}).answer())"
    libraries = {"LD_LIBRARY_PATH": str(build.torch / "lib")}
    return int(subprocess.check_output([sys.executable, "-S", "-c", code], env=libraries))


def elsewhere(build):
    """pip builds with a temporary torch, then with the same torch in the environment."""
    return replace(build, torch=shutil.copytree(build.torch, build.root / "temporary" / "torch"))


def with_kernels(build):
    nvcc = [str(Path(build.compiler[0]).with_name("nvcc")), "-fPIC"]
    return replace(build, nvcc=nvcc, nvcc_version="13", toolkit=build.root)


def edited(build, name="plan/plan.h", text="int half(); // edited\n"):
    time.sleep(0.01)  # the file system's clock must advance
    (build.root / "csrc" / name).write_text(text)
    return build


CHANGES = {
    "nothing": (lambda b: b, {}),
    "the same torch elsewhere": (elsewhere, {}),
    "another torch": (lambda b: replace(b, torch_name="torch2.0"), {"torch": 4}),
    "another Python": (lambda b: replace(b, python="cpython-2"), {"torch": 4}),
    "another compiler": (lambda b: replace(b, compiler_version="2.0"), {"torch": 4, "core": 2}),
    "other flags": (lambda b: replace(b, flags=["-fPIC"]), {"torch": 4, "core": 2}),
    "CUDA": (with_kernels, {"kernels": 1, "torch": 4}),
    "an object per file": (lambda b: replace(b, unity=False), {"torch": 5}),
    "a header": (edited, {"torch": 1, "core": 1}),
    "a new file": (lambda b: edited(b, "cpu/more.cpp", ""), {"core": 1}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_only_what_changed_is_compiled(build, what):
    change, steps = CHANGES[what]
    changed = change(build)
    assert compile_all(changed) == (steps and {**steps, "link": 1})
    assert answer(changed) == (43 if what == "CUDA" else 42)
    assert compile_all(changed) == {}
    assert {*compile_all(build)} <= {"link"}, "objects of several builds are kept side by side"


def test_a_build_announces_its_target(build, capsys, monkeypatch):
    monkeypatch.setenv("NINJA_STATUS", "%p ")
    with_cuda = with_kernels(emptied(build))
    compile_all(with_cuda)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pycollect: compiling 8 files for a test takes minutes (MAX_JOBS=2)")
    assert "PYCOLLECT_CUDA=0 leaves the kernels out" in line
    compile_all(with_cuda)
    compile_all(edited(with_cuda))  # one file with torch, and one without it
    assert capsys.readouterr().err == ""


def test_messages_reach_the_terminal_although_pip_captures_output():
    """Runs in a session of its own, whose controlling terminal is not its output."""
    code = "import fcntl, os, sys, termios, pycollect_make as make\nos.setsid()\n"
    code += "fcntl.ioctl(int(sys.argv[1]), termios.TIOCSCTTY, 0); make.notify('hello')"
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", code, str(theirs)]
    done = subprocess.run(
        command, pass_fds=[theirs], capture_output=True, text=True, env=os.environ | WITH_US
    )
    assert done.stderr == "pycollect: hello\n"
    assert "pycollect: hello" in os.read(ours, 1000).decode()
    os.close(ours)
    os.close(theirs)


@contextlib.contextmanager
def building(build, largest=resource.RLIM_INFINITY):
    """Start a process that builds, in a session of its own, as a shell starts a job."""
    command = [sys.executable, "-c", MAKE, pickle.dumps(build).hex(), str(largest)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    child = subprocess.Popen(command, env=os.environ | WITH_US, start_new_session=True, **pipes)
    try:
        yield child
    finally:
        kill(child.pid)
        child.communicate()


def kill(session):
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                os.kill(int(folder.name), signal.SIGKILL)


def wait_until_paused(build):
    for _ in range(6000):
        if (build.root / "paused").exists():
            return
        time.sleep(0.01)
    pytest.fail("no compiler was started within 60 s")


INTERRUPTS = {
    "Ctrl-C": lambda child: os.killpg(child.pid, signal.SIGINT),
    "SIGTERM alone": lambda child: child.terminate(),
    "killed": lambda child: kill(child.pid),  # as if the machine stops: no cleanup runs
}


@pytest.mark.parametrize("before", [emptied, pytest.param(edited, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", [*INTERRUPTS, "full disk"])
def test_the_next_build_completes_an_interrupted_one(build, how, before):
    before(build).write()  # the files of the build are larger than objects may be on a full disk
    if how in INTERRUPTS:
        (build.root / "pause").touch()
    with building(build, 600 if how == "full disk" else resource.RLIM_INFINITY) as child:
        if how in INTERRUPTS:
            wait_until_paused(build)
            INTERRUPTS[how](child)
        output = child.communicate(timeout=90)[0]
        assert child.returncode != 0, output
        assert "Traceback" not in output or "Ctrl-C" in how, output
    (build.root / "pause").unlink(missing_ok=True)
    compile_all(build)
    assert answer(build) == 42
    assert compile_all(build) == {}


def test_a_killed_link_is_not_taken_for_complete(build):
    """Both kinds of builds link the same file, each with a command that ninja has noted."""
    per_file = replace(build, unity=False)
    assert compile_all(per_file)["link"] == compile_all(build)["link"] == 1
    (build.root / "pause").touch()
    with building(per_file) as child:
        wait_until_paused(build)
        kill(child.pid)
    (build.root / "pause").unlink()
    compile_all(build)
    assert answer(build) == 42


def test_concurrent_builds_run_one_after_the_other(build):
    (emptied(build).root / "pause").touch()
    with building(build) as first:
        wait_until_paused(build)
        with building(build) as second:
            assert select.select([second.stdout], [], [], 30)[0], "no output"
            assert "another build is running" in second.stdout.readline()
            (build.root / "pause").unlink()
            assert first.wait(60) == second.wait(60) == 0
    assert answer(build) == 42
    assert len((build.root / "compiled").read_text().splitlines()) == 4 + 2 + 1


def installed(build, text, largest=1 << 20):
    """Install a module and its record where files have a largest size; return what is there."""
    (build.root / build.folder / "_C.so").write_text(text * 1000)
    module = build.root / "package" / MODULE
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, limits[1]))
    with contextlib.suppress(KeyboardInterrupt, OSError):
        make.install(replace(build, record={"torch": text}), module)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return {
        path.name: "old" if "old" in path.read_text() else "new" for path in module.parent.iterdir()
    }


@pytest.mark.parametrize(
    ("fault", "left"),
    [("none", ["new", "new"]), ("full disk", ["old", "old"]), (0, ["old"]), (1, ["new"])],
)
def test_a_module_has_its_own_record_or_none(build, monkeypatch, fault, left):
    """Also where Ctrl-C comes before a file is moved: a module without a record is not imported."""
    names = [MODULE, "_build_info_cpython_1_linux.py"]
    assert installed(build, "old") == dict.fromkeys(names, "old")
    real, moves = Path.replace, iter(range(2))

    def interrupted(path, target):
        if next(moves) == fault:
            raise KeyboardInterrupt
        return real(path, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    found = installed(build, "new", 1500 if fault == "full disk" else 1 << 20)
    assert found == dict(zip(names, left, strict=False))
