"""The build's decisions and its backend, asked without building; whole installs are .ci/run's."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import torch

import pycollect
from pycollect import _compat

ROOT = Path(__file__).parents[1]
BACKEND = ROOT / "build_backend"


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BACKEND))
    return importlib.import_module("pycollect_native")


@pytest.fixture
def toolkit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BACKEND))
    return importlib.import_module("pycollect_toolkit")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BACKEND))
    return importlib.import_module("pycollect_backend")


def test_oldest_torch_is_the_same_everywhere(native: ModuleType, backend: ModuleType):
    assert native.OLDEST_TORCH == _compat.OLDEST_TORCH
    assert backend.TORCH in (metadata.requires("pycollect") or [])
    assert f"oldest_torch={backend.TORCH.partition('>=')[2]}." in (ROOT / ".ci/run").read_text()


# The backend


def test_torch_is_asked_for_only_when_the_target_has_none(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Isolation is faked as pip does it: the site-packages are taken off the path."""
    monkeypatch.setattr(sys, "path", [str(BACKEND)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    monkeypatch.setattr(sys, "meta_path", [importlib.machinery.PathFinder])
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(backend, "target_sites", lambda: [str(tmp_path)])

    assert backend.get_requires_for_build_wheel() == [backend.TORCH]
    (tmp_path / "torch").mkdir()  # what an uninstall leaves behind
    assert backend.get_requires_for_build_editable() == [backend.TORCH]
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch-2.12.0.dist-info").mkdir()
    version = tmp_path / "torch-2.12.0.dist-info" / "METADATA"
    version.write_text("Name: torch\nVersion: 2.12.0\n")
    assert backend.get_requires_for_build_wheel() == []
    assert backend.get_requires_for_build_editable() == []
    assert str(tmp_path) in sys.path
    assert sys.path[0] == str(BACKEND)  # what isolation offers still comes first
    assert backend.get_requires_for_build_sdist() == []

    version.write_text("Name: torch\nVersion: 2.9.1\n")
    with pytest.raises(SystemExit, match=r"torch 2\.11 or newer is needed and 2\.9\.1"):
        backend.get_requires_for_build_wheel()


def test_target_is_found_when_isolation_hides_it(tmp_path: Path):
    """A process of this environment without its site-packages, as pip starts one."""
    code = (
        "import sys\n"
        "sys.path = [p for p in sys.path if '-packages' not in p]\n"
        f"sys.path += [{str(BACKEND)!r}, {str(tmp_path)!r}]\n"
        "import pycollect_backend as backend\n"
        "print(backend.torch_is_importable(), backend.get_requires_for_build_wheel())\n"
        "import importlib.util; print(importlib.util.find_spec('torch').origin)\n"
    )
    for name in ("setuptools", "_distutils_hack"):
        shutil.copytree(Path(_origin(name)).parent, tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONNOUSERSITE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[:2] == ["False []", torch.__file__]


def _origin(name: str) -> str:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return spec.origin


def test_source_distribution_holds_what_a_build_needs(tmp_path: Path):
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns(".git", "build", "*.egg-info", ".*_cache", ".venv", "data")
    shutil.copytree(ROOT, copy, ignore=ignored)
    (copy / "pycollect" / "_C.cpython-00-none.so").touch()  # neither may travel
    (copy / "pycollect" / "_build_info.py").touch()
    code = f"import sys; sys.path.insert(0, {str(BACKEND)!r}); import pycollect_backend as backend"
    code += f"; backend.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, check=True)

    with tarfile.open(tmp_path / f"pycollect-{pycollect.__version__}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    native_code = [*(ROOT / "csrc").rglob("*.h"), *(ROOT / "csrc").rglob("*.cpp")]
    wanted = {str(path.relative_to(ROOT)) for path in native_code}
    wanted |= {"setup.py", "build_backend/pycollect_backend.py", "LICENSE", "pycollect/py.typed"}
    assert wanted <= names
    assert not {name for name in names if name.endswith(".so") or "_build_info" in name}


# The decisions of the build


def test_every_source_is_compiled(native: ModuleType, tmp_path: Path):
    rooms = {
        "always": ["plan/a.cpp", "plan/b.cpp", "cuda/x.cpp", "torch/m.cpp"],
        "without CUDA": ["torch/no_cuda.cpp"],
        "with CUDA": ["cuda/k.cu", "torch/cuda/d.cpp"],
    }
    for name in (name for names in rooms.values() for name in names):
        (tmp_path / "csrc" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "csrc" / name).touch()
    for cuda, also in ((False, "without CUDA"), (True, "with CUDA")):
        expected = [f"csrc/{name}" for name in rooms["always"] + rooms[also]]
        assert native.sources(tmp_path, cuda) == expected


def test_the_toolkit_is_where_nvcc_says(toolkit: ModuleType, tmp_path: Path):
    nvcc = tmp_path / "bin" / "nvcc"  # a wrapper, whose toolkit lies elsewhere
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho '#$ _HERE_=/opt/cuda-13/bin' >&2\n")
    nvcc.chmod(0o755)
    assert toolkit.find_toolkit({"PATH": str(nvcc.parent)}) == "/opt/cuda-13"
    assert toolkit.find_toolkit({"PATH": "", "CUDA_HOME": str(tmp_path)}) == str(tmp_path)
    assert toolkit.find_toolkit({"PATH": str(tmp_path)}) is None


def test_architectures_are_those_of_the_gpus_or_one_a_generation(toolkit: ModuleType):
    known = [50, 75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121]
    assert toolkit.choose_architectures(known, []) == [75, 80, 90, 100, 120]
    assert toolkit.choose_architectures(known, [90, 90]) == [90]
    assert toolkit.choose_architectures(known, [89, 130]) == [89, 121]
    assert toolkit.architecture_flags([80, 90])[1:] == [
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]


def test_cuda_is_built_where_it_can_be(native: ModuleType):
    able = {"kernels": True, "torch_cuda": "13.0", "toolkit": "/usr/local/cuda"}
    assert native.decide_cuda(None, **able)
    assert native.decide_cuda("", **able)
    assert native.decide_cuda("1", **able)
    assert not native.decide_cuda("0", **able)


@pytest.mark.parametrize(
    ("lacking", "sentence"),
    [
        ({"kernels": False}, "no CUDA kernels"),
        ({"torch_cuda": None}, "CPU-only torch"),
        ({"toolkit": None}, "no CUDA toolkit"),
    ],
)
def test_cuda_is_left_out_where_it_cannot_be(
    native: ModuleType, lacking: dict[str, object], sentence: str
):
    able = {"kernels": True, "torch_cuda": "13.0", "toolkit": "/usr/local/cuda"} | lacking
    assert not native.decide_cuda(None, **able)
    assert not native.decide_cuda("0", **able)
    with pytest.raises(SystemExit, match=f"PYCOLLECT_CUDA=1 asks for a CUDA build.*{sentence}"):
        native.decide_cuda("1", **able)


def test_cuda_switch_takes_no_other_word(native: ModuleType):
    with pytest.raises(SystemExit, match="PYCOLLECT_CUDA is 'yes'; set it to 0 or 1"):
        native.decide_cuda("yes", kernels=True, torch_cuda="13.0", toolkit="/usr/local/cuda")


def test_flags_follow_the_switches(native: ModuleType):
    assert {"-O3", "-ffp-contract=off"} <= set(native.flags({}))
    assert "-Werror" not in native.flags({})
    assert "-Werror" in native.flags({"PYCOLLECT_WERROR": "1"})
    assert {"-O0", "-g"} <= set(native.flags({"PYCOLLECT_DEBUG": "1"}))
    assert "-O3" not in native.flags({"PYCOLLECT_DEBUG": "1"})


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


def test_missing_ninja_stops_the_build(
    native: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(native.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(SystemExit, match="ninja was not found"):
        native.require_ninja({"PATH": ""})
    ninja = tmp_path / "ninja"
    ninja.touch(mode=0o755)
    environ = {"PATH": "/nowhere"}
    native.require_ninja(environ)
    assert environ["PATH"].endswith(str(tmp_path))


def test_jobs_fit_cores_and_memory(native: ModuleType):
    assert native.jobs(8, 64 << 30) == 8
    assert native.jobs(8, 5 << 30) == 2
    assert native.jobs(8, 1 << 20) == 1
    assert native.jobs(4, None) == 4


def test_build_info_is_python(native: ModuleType):
    build = {"torch": "2.13.0+cpu", "cuda": None, "debug": False, "compiler": 'a "b"'}
    scope: dict[str, object] = {}
    exec(native.build_info_text(build), scope)
    assert scope["BUILD"] == build
