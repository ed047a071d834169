"""Decisions of the build, without building, and the one sentence of an impossible build."""

import re
import runpy
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pycollect_backend as backend
import pycollect_configure as configure
import pycollect_ninja as ninja
import pytest

from pycollect import _build_check

ROOT = Path(__file__).parents[1]


def script(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_oldest_torch_and_setuptools_are_the_same_everywhere():
    assert configure.OLDEST_TORCH == _build_check.OLDEST_TORCH
    assert backend.TORCH in (metadata.requires("pycollect") or [])
    assert f"oldest_torch={backend.TORCH.partition('>=')[2]}." in (ROOT / ".ci/run").read_text()
    text = (ROOT / "pyproject.toml").read_text() + Path(backend.__file__).read_text()
    assert {*re.findall(r"setuptools>=(\d*)", text)} == {str(configure.OLDEST_SETUPTOOLS)}


def test_every_source_is_compiled_and_only_csrc_torch_includes_torch():
    """Objects of the other folders are reused for every torch, and must not depend on one."""
    core = {*ninja.sources(ROOT, "core", "doubles")}
    torch = {*ninja.sources(ROOT, "torch", "registers", "torch-doubles", "torch-cuda", "no-cuda")}
    assert {path.relative_to(ROOT) for path in (ROOT / "csrc").rglob("*.cpp")} == core | torch
    assert ninja.sources(ROOT, "no-cuda") == [Path("csrc/torch/no_cuda.cpp")]
    assert {path.name for path in ninja.sources(ROOT, "registers")} == {*ninja.ONLY_IN_MODULE}
    assert {path.parent.name for path in ninja.sources(ROOT, "torch-cuda")} == {"cuda"}
    for path in (f for p in {(ROOT / p).parent for p in core} for f in p.iterdir() if f.is_file()):
        for word in ("<torch", "<ATen", "<c10", "<pybind", "<Python.h", '"../torch/'):
            assert f"#include {word}" not in path.read_text(), path
    for path in (ROOT / "csrc").rglob("*.*"):
        assert "testing" in path.parts or "testing/" not in path.read_text(), path


def toolkit(path, release="13.0.88", works="exit 0"):
    """A CUDA toolkit of this release; nvcc compiles nothing."""
    version = f'[ "$1" = --version ] && echo "cuda_13.0, V{release}" && exit 0'
    script(path / "bin" / "nvcc", f"{version}\n{works}")
    return path


def why_no_cuda(path, setting, cuda="13.2", **other):
    return configure.why_no_cuda({"PYCOLLECT_CUDA": setting}, cuda, toolkit(path, **other))


def targets(gpus=(), listed=None):
    """The targets of kernels with these GPUs, or of TORCH_CUDA_ARCH_LIST."""
    torch = SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: len(gpus)))
    flags = configure.choose_architectures({"TORCH_CUDA_ARCH_LIST": listed}, torch)
    return [flag.rpartition("code=")[2] for flag in flags]


USUAL = {"-O3", "-ffp-contract=off"}
FLAGS = {"CPPFLAGS": "-I/a", "CXXFLAGS": "--coverage -O1"}


@pytest.mark.parametrize(
    ("decided", "wanted"),
    [
        # Without a GPU: A100 and H100, and by PTX the oldest supported and all later ones.
        (lambda _: targets(), ["sm_80", "sm_90", "compute_75", "compute_90"]),
        (lambda path: [why_no_cuda(path, setting) for setting in ("", "1")], [None] * 2),
        (lambda path: why_no_cuda(path, "0"), "PYCOLLECT_CUDA is 0"),
        (lambda path: why_no_cuda(path, "", None), "the installed torch is a CPU-only torch"),
        (lambda _: [configure.limit_jobs({}, 8, m) for m in (8 << 30, 1 << 20)], [(8, 2), (8, 1)]),
        (lambda _: configure.limit_jobs({"MAX_JOBS": "3"}, 8, 64 << 30), (3, 3)),
        (lambda _: configure.require_setuptools("0.dev0+unknown"), None),
        (lambda _: USUAL - {*configure.compiler_flags({})}, set()),
        (lambda _: USUAL & {*configure.compiler_flags({"PYCOLLECT_BUILD_DEBUG": "1"})},
         {"-ffp-contract=off"}),
        (lambda _: configure.compiler_flags(FLAGS)[:3], ["-I/a", "--coverage", "-O1"]),
        (lambda path: configure.nvcc_command({"CXX": "ccache g++ -m64"}, toolkit(path), [])[-2:],
         ["-ccbin=g++", "-Xcompiler=-m64"]),
        (lambda _: configure.local_version("2.15.0+cu132", "13.2"), "torch2.15.cu132"),
        (lambda _: configure.local_version("2.16.0.dev2+cpu", None), "torch2.16.0.dev2.cpu"),
    ],
)  # fmt: skip
def test_decisions(decided, wanted, tmp_path):
    assert decided(tmp_path) == wanted


def test_the_kernels_are_for_the_visible_gpus_or_the_listed_ones(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda gpu: (8, gpu))
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: ["sm_75", "sm_90"])
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    with pytest.raises(SystemExit, match=r"TORCH_CUDA_ARCH_LIST is None: .*8\.1"):
        targets([80, 81])  # there is no GPU of this capability
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5 9.0+PTX")
    assert targets(listed="7.5 9.0+PTX") == ["sm_75", "compute_90", "sm_90"]


def test_the_cuda_toolkit_is_found(tmp_path):
    """nvcc may be a wrapper outside of it."""
    script(tmp_path / "bin" / "nvcc", "echo '#$ _HERE_=/opt/cuda-13/bin' >&2")
    assert configure.find_toolkit({"PATH": str(tmp_path / "bin")}) == Path("/opt/cuda-13")
    assert configure.find_toolkit({"PATH": "", "CUDA_HOME": str(tmp_path)}) == tmp_path


def old_compiler(path, patch):
    text = '[ "$1" = --version ] && echo "old++ 4.2" && exit 0; echo "a.h: error: b" >&2; exit 1'
    configure.require_compiler({"CXX": script(path / "c++", text)})


def no_compiler(path, patch):
    patch.setenv("CXX", "no-such")
    backend.get_requires_for_build_wheel()  # before pip downloads torch


def no_headers(path, patch):
    patch.setattr(configure.sysconfig, "get_path", lambda name: str(path))
    configure.require_compiler({})


def bad_nvcc(path, patch):
    configure.nvcc_command({}, toolkit(path, works="echo unsupported GNU version >&2; exit 1"), [])


def old_setuptools(file, patch):
    patch.setattr("setuptools.__version__", "65.5.0")
    runpy.run_path(str(file))


STOPS = {
    "PYCOLLECT_CUDA=1 asks .* CPU-only torch": lambda path, _: why_no_cuda(path, "1", None),
    "no CUDA toolkit": lambda *_: configure.why_no_cuda({"PYCOLLECT_CUDA": "1"}, "13.2", None),
    r"CUDA 13\.2 and .* is 12\.8\.93;": lambda path, _: why_no_cuda(path, "", release="12.8.93"),
    "PYCOLLECT_CUDA is 'yes'; set it to 0 or 1": lambda path, _: why_no_cuda(path, "yes"),
    "WERROR is 'on'; set it": lambda *_: configure.compiler_flags({"PYCOLLECT_WERROR": "on"}),
    "MAX_JOBS is '-1'; set it to": lambda *_: configure.limit_jobs({"MAX_JOBS": "-1"}, 8, 0),
    r"setuptools>=77 and 65\.5\.0": lambda _, patch: old_setuptools(ROOT / "setup.py", patch),
    r"setuptools>=77 and 65\.5\.0 is": lambda _, patch: old_setuptools(backend.__file__, patch),
    r"torch 2\.11 or newer is needed and 2\.9\.1": lambda *_: configure.require_torch("2.9.1"),
    r"no C\+\+ compiler was found under the name 'no-such'": no_compiler,
    r"\(old\+\+ 4\.2\) fails .*GNU C\+\+20 .*\(a.h: error: b\); install g\+\+ 11": old_compiler,
    r"Python\.h: No such file.*apt install python3-dev": no_headers,
    r"nvcc cannot .* an empty file \(unsupported GNU version\)": bad_nvcc,
}


@pytest.mark.parametrize("sentence", STOPS)
def test_an_impossible_build_stops_with_one_sentence(sentence, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=rf"^pycollect: .*{sentence}.*\Z"):
        STOPS[sentence](tmp_path, monkeypatch)
