"""Decisions of the build, without building, and the one sentence of an impossible build."""

import os
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pycollect_backend as backend
import pycollect_make as make
import pycollect_native as native
import pycollect_ninja as ninja
import pycollect_toolkit as toolkit
import pytest

from pycollect import _build_check

ROOT = Path(__file__).parents[1]


def script(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_oldest_torch_is_the_same_everywhere():
    assert native.OLDEST_TORCH == _build_check.OLDEST_TORCH
    assert backend.TORCH in (metadata.requires("pycollect") or [])
    assert f"oldest_torch={backend.TORCH.partition('>=')[2]}." in (ROOT / ".ci/run").read_text()


def test_every_source_is_compiled_and_only_csrc_torch_includes_torch():
    """Objects of the other folders are reused for every torch, and must not depend on one."""
    doubles, torch_doubles = ninja.testing_sources(ROOT)
    core = {*ninja.core_sources(ROOT), *doubles}
    torch = [{*ninja.torch_sources(ROOT, cuda), *torch_doubles} for cuda in (False, True)]
    sources = {path.relative_to(ROOT) for path in (ROOT / "csrc").rglob("*.cpp")}
    assert sources - core == torch[0] | torch[1]
    assert torch[0] - torch[1] == {Path("csrc/torch/no_cuda.cpp")}
    folders = {(ROOT / path).parent for path in core}
    for path in (path for folder in folders for path in folder.iterdir() if path.is_file()):
        for word in ("<torch", "<ATen", "<c10", "<pybind", "<Python.h", '"../torch/'):
            assert f"#include {word}" not in path.read_text(), path
    for path in (ROOT / "csrc").rglob("*.*"):
        assert "testing" in path.parts or "testing/" not in path.read_text(), path


def targets(*gpus):
    known = [50, 75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121]
    return toolkit.described(toolkit.choose_architectures(known, gpus))


ABLE = {"kernels": True, "torch_cuda": "13.2", "toolkit_cuda": "13.0.88"}
USUAL = {"-O3", "-ffp-contract=off"}
FLAGS = {"CPPFLAGS": "-I/a", "CXXFLAGS": "--coverage -O1", "LDFLAGS": "-L/b"}


@pytest.mark.parametrize(
    ("decided", "wanted"),
    [
        # Without a GPU: A100 and H100, and by PTX the oldest supported and all later ones.
        (targets, ["sm_80", "sm_90", "compute_75", "compute_90"]),
        (lambda: targets(89, 130), ["sm_89", "sm_121", "compute_121"]),
        (lambda: [native.why_no_cuda(setting, **ABLE) for setting in (None, "", "1")], [None] * 3),
        (lambda: native.why_no_cuda("0", **ABLE), "PYCOLLECT_CUDA is 0"),
        (lambda: native.jobs({}, 8, 8 << 30), (8, 2)),
        (lambda: native.jobs({}, 8, 1 << 20), (1, 1)),
        (lambda: native.jobs({"MAX_JOBS": "3"}, 8, None), (3, 3)),
        (lambda: USUAL - {*native.flags({})}, set()),
        (lambda: USUAL & {*native.flags({"PYCOLLECT_BUILD_DEBUG": "1"})}, {"-ffp-contract=off"}),
        (lambda: native.flags(FLAGS)[:3], ["-I/a", "--coverage", "-O1"]),
        (lambda: native.link_flags(FLAGS), ["--coverage", "-O1", "-L/b"]),
        (lambda: native.kernel_flags({"CXX": "ccache g++ -m64"}, [])[-2:],
         ["-ccbin=g++", "-Xcompiler=-m64"]),
        (lambda: native.local_version("2.15.0+cu132", "13.2"), "torch2.15.cu132"),
        (lambda: native.local_version("2.16.0.dev2+cpu", None), "torch2.16.0.dev2.cpu"),
    ],
)  # fmt: skip
def test_decisions(decided, wanted):
    assert decided() == wanted


def test_the_tools_are_found(tmp_path, monkeypatch):
    """nvcc may be a wrapper; some releases of ninja reject another's log and rebuild everything."""
    nvcc, package = tmp_path / "bin" / "nvcc", tmp_path / "package" / "ninja"
    script(nvcc, "echo '#$ _HERE_=/opt/cuda-13/bin' >&2")
    assert toolkit.find_toolkit({"PATH": str(nvcc.parent)}) == "/opt/cuda-13"
    assert toolkit.find_toolkit({"PATH": "", "CUDA_HOME": str(tmp_path)}) == str(tmp_path)
    assert toolkit.find_toolkit({"PATH": str(tmp_path)}) is None
    script(package, "")
    monkeypatch.setitem(sys.modules, "ninja", SimpleNamespace(BIN_DIR=str(package.parent)))
    environ = {"PATH": "/system"}
    native.require_ninja(environ)
    assert environ["PATH"] == f"{package.parent}{os.pathsep}/system"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for text, used in (('exec "$@"', ["ccache"]), ("exit 1", [])):  # as if HOME is not writable
        script(tmp_path / "ccache", text)
        assert native.launcher(os.environ) == used


def no_ninja(path, patch):
    patch.setitem(sys.modules, "ninja", None)
    patch.setattr(native.sysconfig, "get_path", lambda name: str(path))
    native.require_ninja({"PATH": ""})


def old_compiler(path, patch):
    text = '[ "$1" = --version ] && echo "old++ 4.2" && exit 0; exit 1'
    native.require_compiler({"CXX": script(path / "c++", text)})


def no_compiler(path, patch):
    patch.setenv("CXX", "no-such")
    backend.get_requires_for_build_wheel()  # before pip downloads torch


def bad_nvcc(path, patch):
    nvcc = script(path / "nvcc", "echo unsupported GNU version >&2; exit 1")
    make.require_nvcc(ninja.Kernels([nvcc], ["1"], [], path))


def cuda(setting, **lacking):
    return lambda *_: native.why_no_cuda(setting, **ABLE | lacking)


STOPS = {
    "PYCOLLECT_CUDA=1 asks .* no CUDA kernels": cuda("1", kernels=False),
    "PYCOLLECT_CUDA=1 asks .* CPU-only torch": cuda("1", torch_cuda=None),
    "PYCOLLECT_CUDA=1 asks .* no CUDA toolkit": cuda("1", toolkit_cuda=None),
    r"CUDA 13\.2 and the CUDA toolkit is 12\.8\.93; ": cuda(None, toolkit_cuda="12.8.93"),
    "PYCOLLECT_CUDA is 'yes'; set it to 0 or 1": cuda("yes"),
    "PYCOLLECT_WERROR is 'on'; set": lambda *_: native.flags({"PYCOLLECT_WERROR": "on"}),
    'CXXFLAGS is "\'": no closing quot': lambda *_: native.flags({"CXXFLAGS": "'"}),
    "MAX_JOBS is '-1'; set it to": lambda *_: native.jobs({"MAX_JOBS": "-1"}, 8, None),
    r"torch 2\.11 or newer is needed and 2\.9\.1": lambda *_: native.require_torch("2.9.1"),
    "setuptools 77 or newer is needed and 65": lambda *_: native.require_setuptools("65.5.0"),
    r"no C\+\+ compiler was found under the name 'no-such'": no_compiler,
    r"\(old\+\+ 4\.2\) lacks GNU C\+\+20.*install g\+\+ 11": old_compiler,
    r"nvcc cannot .* an empty file \(unsupported GNU version\)": bad_nvcc,
    "ninja was not found; install it": no_ninja,
    "apt install python3-dev": lambda path, _: native.require_python_headers(str(path)),
}


@pytest.mark.parametrize("sentence", STOPS)
def test_an_impossible_build_stops_with_one_sentence(sentence, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=f"^pycollect: .*{sentence}") as stopped:
        STOPS[sentence](tmp_path, monkeypatch)
    assert "\n" not in str(stopped.value)
