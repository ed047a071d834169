"""Decisions of the build, tested without building."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from build_project import module

from pycollect import _build_check

ROOT = Path(__file__).parents[1]


@pytest.fixture
def native() -> ModuleType:
    return module("native")


@pytest.fixture
def ninja() -> ModuleType:
    return module("ninja")


@pytest.fixture
def toolkit() -> ModuleType:
    return module("toolkit")


def test_oldest_torch_is_the_same_everywhere(native: ModuleType):
    backend = module("backend")
    assert native.OLDEST_TORCH == _build_check.OLDEST_TORCH
    assert backend.TORCH in (metadata.requires("pycollect") or [])
    assert f"oldest_torch={backend.TORCH.partition('>=')[2]}." in (ROOT / ".ci/run").read_text()


def test_every_source_is_compiled(ninja: ModuleType, tmp_path: Path):
    core = ["plan/a.cpp", "plan/b.cpp", "cuda/x.cpp"]
    always = ["torch/m.cpp", "torch/c10d/staging/f.cpp"]
    doubles = ["testing/t.cpp", "testing/torch/u.cpp"]
    for name in [*core, *always, *doubles, "torch/no_cuda.cpp", "cuda/k.cu", "torch/cuda/d.cpp"]:
        (tmp_path / "csrc" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "csrc" / name).touch()

    def names(found: list[Path]) -> set[str]:
        return {str(path.relative_to("csrc")) for path in found}

    assert names(ninja.core_sources(tmp_path)) == set(core)
    assert names(ninja.kernel_sources(tmp_path)) == {"cuda/k.cu"}
    assert names(ninja.torch_sources(tmp_path, cuda=False)) == {*always, "torch/no_cuda.cpp"}
    assert names(ninja.torch_sources(tmp_path, cuda=True)) == {*always, "torch/cuda/d.cpp"}
    assert list(map(names, ninja.testing_sources(tmp_path))) == [{name} for name in doubles]


def test_every_source_of_the_repository_is_compiled(ninja: ModuleType):
    for cuda in (False, True):
        found = [*ninja.core_sources(ROOT), *ninja.torch_sources(ROOT, cuda)]
        found += [source for sources in ninja.testing_sources(ROOT) for source in sources]
        missing = set((ROOT / "csrc").rglob("*.cpp")) - {ROOT / path for path in found}
        of_cuda = {path for path in missing if path.parent.name == "cuda"}
        assert missing == ({ROOT / "csrc/torch/no_cuda.cpp"} if cuda else of_cuda)
        assert cuda or of_cuda


def test_only_csrc_torch_includes_torch(ninja: ModuleType):
    """Objects of the other folders are reused for every torch, and must not depend on one."""
    folders = [ROOT / "csrc" / name for name in (*ninja.CORE_FOLDERS, ninja.TESTING_FOLDER)]
    core = [path for folder in folders for path in folder.iterdir() if path.is_file()]
    assert len(core) > 100
    words = ("#include <torch", "#include <ATen", "#include <c10", "#include <pybind", "Python.h")
    for path in core:
        assert not [word for word in words if word in path.read_text()], path
        assert "../torch/" not in path.read_text(), path


def test_the_library_does_not_include_csrc_testing():
    for path in (ROOT / "csrc").rglob("*.*"):
        is_double = "testing" in path.relative_to(ROOT).parts
        assert is_double or "testing/" not in path.read_text(), path


def test_the_toolkit_is_found_through_nvcc(toolkit: ModuleType, tmp_path: Path):
    nvcc = tmp_path / "bin" / "nvcc"  # a wrapper; its toolkit is elsewhere
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho '#$ _HERE_=/opt/cuda-13/bin' >&2\n")
    nvcc.chmod(0o755)
    assert toolkit.find_toolkit({"PATH": str(nvcc.parent)}) == "/opt/cuda-13"
    assert toolkit.find_toolkit({"PATH": "", "CUDA_HOME": str(tmp_path)}) == str(tmp_path)
    assert toolkit.find_toolkit({"PATH": str(tmp_path)}) is None


def test_architectures_are_those_of_the_gpus_or_the_defaults(toolkit: ModuleType):
    known = [50, 75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121]

    def targets(*gpus: int) -> list[str]:
        return toolkit.described(toolkit.choose_architectures(known, gpus))

    # Without a GPU: A100 and H100, and by PTX the oldest supported and all later architectures.
    assert targets() == ["sm_80", "sm_90", "compute_75", "compute_90"]
    assert targets(90, 90) == ["sm_90", "compute_90"]
    assert targets(89, 130) == ["sm_89", "sm_121", "compute_121"]
    assert toolkit.choose_architectures(known, [80]) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_80,code=compute_80",
    ]
    assert toolkit.described(toolkit.choose_architectures([100, 120], [])) == [
        "sm_100",
        "compute_100",
    ]


def test_cuda_is_built_where_possible(native: ModuleType):
    able = {"kernels": True, "torch_cuda": "13.2", "toolkit_cuda": "13.0.88"}
    assert native.why_no_cuda(None, **able) is None
    assert native.why_no_cuda("", **able) is None
    assert native.why_no_cuda("1", **able) is None
    assert native.why_no_cuda("0", **able) == "PYCOLLECT_CUDA is 0"


@pytest.mark.parametrize(
    ("lacking", "sentence"),
    [
        ({"kernels": False}, "no CUDA kernels"),
        ({"torch_cuda": None}, "CPU-only torch"),
        ({"toolkit_cuda": None}, "no CUDA toolkit"),
    ],
)
def test_cuda_is_omitted_where_impossible(
    native: ModuleType, lacking: dict[str, object], sentence: str
):
    able = {"kernels": True, "torch_cuda": "13.0", "toolkit_cuda": "13.0.88"} | lacking
    assert sentence in native.why_no_cuda(None, **able)
    assert native.why_no_cuda("0", **able)
    with pytest.raises(SystemExit, match=f"PYCOLLECT_CUDA=1 asks for a CUDA build.*{sentence}"):
        native.why_no_cuda("1", **able)


def test_a_toolkit_for_another_cuda_stops_the_build(native: ModuleType):
    apart = {"kernels": True, "torch_cuda": "13.2", "toolkit_cuda": "12.8.93"}
    with pytest.raises(SystemExit, match=r"CUDA 13\.2 and the CUDA toolkit is 12\.8\.93; .*=0"):
        native.why_no_cuda(None, **apart)
    assert native.why_no_cuda("0", **apart)


def test_switches_accept_only_0_and_1(native: ModuleType):
    with pytest.raises(SystemExit, match="PYCOLLECT_CUDA is 'yes'; set it to 0 or 1"):
        native.why_no_cuda("yes", kernels=True, torch_cuda="13.0", toolkit_cuda="13.0")
    with pytest.raises(SystemExit, match="PYCOLLECT_WERROR is 'on'; set it to 0 or 1"):
        native.flags({"PYCOLLECT_WERROR": "on"})


def test_flags_follow_the_switches(native: ModuleType):
    assert {"-O3", "-ffp-contract=off"} <= set(native.flags({}))
    assert "-Werror" not in native.flags({})
    assert "-Werror" in native.flags({"PYCOLLECT_WERROR": "1"})
    assert {"-O0", "-g"} <= set(native.flags({"PYCOLLECT_BUILD_DEBUG": "1"}))
    assert "-O3" not in native.flags({"PYCOLLECT_BUILD_DEBUG": "1"})


def test_old_torch_stops_the_build(native: ModuleType):
    native.require_torch("2.11.0+cu130")
    with pytest.raises(SystemExit, match=r"torch 2\.11 or newer is needed and 2\.9\.1"):
        native.require_torch("2.9.1")


def test_old_setuptools_stops_the_build(native: ModuleType):
    native.require_setuptools("77.0.3")
    with pytest.raises(SystemExit, match=r"setuptools 77 or newer is needed and 65\.5\.0"):
        native.require_setuptools("65.5.0")


def test_missing_compiler_stops_the_build(native: ModuleType):
    with pytest.raises(SystemExit, match="no C\\+\\+ compiler was found under the name 'no-such'"):
        native.require_compiler({"CXX": "no-such"})


def test_old_compiler_stops_the_build(native: ModuleType, tmp_path: Path):
    old = tmp_path / "old++"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "old++ 4.2" && exit 0\nexit 1\n')
    old.chmod(0o755)
    with pytest.raises(SystemExit, match=r"\(old\+\+ 4\.2\) lacks GNU C\+\+20"):
        native.require_compiler({"CXX": str(old)})


def test_the_ninja_package_is_preferred_to_the_systems(
    native: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Some releases of ninja reject the log of another release and rebuild everything."""
    for folder in ("package", "system"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ninja").touch(mode=0o755)
    package, system = str(tmp_path / "package"), str(tmp_path / "system")
    monkeypatch.setitem(sys.modules, "ninja", SimpleNamespace(BIN_DIR=package))
    environ = {"PATH": system}
    native.require_ninja(environ)
    assert environ["PATH"] == f"{package}{os.pathsep}{system}"


def test_missing_ninja_stops_the_build(
    native: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setitem(sys.modules, "ninja", None)
    monkeypatch.setattr(native.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(SystemExit, match="ninja was not found"):
        native.require_ninja({"PATH": ""})
    (tmp_path / "ninja").touch(mode=0o755)
    for before in ("/nowhere", ""):
        environ = {"PATH": before}
        native.require_ninja(environ)
        assert environ["PATH"].startswith(str(tmp_path))


def test_jobs_fit_cores_and_memory(native: ModuleType):
    assert native.jobs({}, 8, 64 << 30) == (8, 8)
    assert native.jobs({}, 8, 8 << 30) == (8, 2)
    assert native.jobs({}, 8, 1 << 30) == (2, 1)
    assert native.jobs({}, 8, 1 << 20) == (1, 1)
    assert native.jobs({}, 4, None) == (4, 4)
    assert native.jobs({"MAX_JOBS": "3"}, 8, 64 << 30) == (3, 3)
    for bad in ("0", "-1", "many"):
        with pytest.raises(SystemExit, match=f"MAX_JOBS is '{bad}'"):
            native.jobs({"MAX_JOBS": bad}, 8, None)


def test_flags_of_the_environment_come_first(native: ModuleType):
    chosen = native.flags({"CXXFLAGS": "-march=native -O1"})
    assert chosen[:2] == ["-march=native", "-O1"]
    assert chosen.index("-O3") > 1


def test_the_local_version_names_torch_and_cuda(native: ModuleType):
    assert native.local_version("2.15.0+cu132", "13.2") == "torch2.15.cu132"
    assert native.local_version("2.15.1", None) == "torch2.15.cpu"
    assert native.local_version("2.16.0.dev20261101+cpu", None) == "torch2.16.0.dev20261101.cpu"
    assert native.local_version("2.16.0a0+gitabc", None) == "torch2.16.0a0.cpu"


def test_build_info_is_python(native: ModuleType):
    build = {"torch": "2.13.0+cpu", "cuda": None, "debug": False, "compiler": 'a "b"', "of": ["x"]}
    scope: dict[str, object] = {}
    exec(native.build_info_text(build), scope)
    assert scope["BUILD"] == build


def test_the_compiler_command_is_passed_to_nvcc(native: ModuleType):
    def host(cxx: str) -> list[str]:
        return [w for w in native.kernel_flags({"CXX": cxx}, []) if w[:4] in ("-ccb", "-Xco")][-2:]

    assert host("ccache g++-12")[-1] == "-ccbin=g++-12"
    assert host("g++ -m64") == ["-ccbin=g++", "-Xcompiler=-m64"]


def test_flags_are_passed_to_the_linker(native: ModuleType):
    environ = {"CPPFLAGS": "-I/a", "CXXFLAGS": "--coverage", "LDFLAGS": "-L/b"}
    assert native.link_flags(environ) == ["--coverage", "-L/b"]
    assert native.flags(environ)[:2] == ["-I/a", "--coverage"]
    with pytest.raises(SystemExit, match='CXXFLAGS is "\'": no closing quotation'):
        native.flags({"CXXFLAGS": "'"})


def test_ccache_is_used_where_it_works(native: ModuleType, tmp_path: Path):
    ccache = tmp_path / "ccache"
    ccache.write_text('#!/bin/sh\nexec "$@"\n')
    ccache.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environ = {"PATH": path}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", path)
        assert native.launcher(environ) == ["ccache"]
        assert native.launcher({**environ, "CXX": "sccache g++"}) == []
        ccache.write_text("#!/bin/sh\nexit 1\n")  # as when HOME is not writable
        assert native.launcher(environ) == []


def test_missing_headers_of_python_stop_the_build(native: ModuleType, tmp_path: Path):
    with pytest.raises(SystemExit, match="apt install python3-dev"):
        native.require_python_headers(str(tmp_path))


def test_file_errors_are_reported_in_one_sentence(native: ModuleType, tmp_path: Path):
    with (
        pytest.raises(SystemExit, match=r"pycollect: the build failed: .*nowhere"),
        native.in_one_sentence(),
    ):
        (tmp_path / "nowhere" / "file").write_text("")
