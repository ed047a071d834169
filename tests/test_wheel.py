"""Wheels, and builds that reuse all objects: with pip's temporary torch, and without it.

The objects are those of the tested build, in a copy of its checkout: nothing is compiled.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import pycollect
from pycollect import _build_check

ROOT = Path(__file__).parents[1]
LOCAL = "torch{}.{}.".format(*torch.__version__.split(".")[:2])


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, with the objects of its last build."""
    if not (ROOT / "build" / ".ninja_log").exists():
        pytest.skip("needs the objects of a build in this checkout")
    copy = tmp_path_factory.mktemp("wheel") / "pycollect"
    ignored = shutil.ignore_patterns(
        *(".git", "*.egg-info", ".*_cache", ".venv", ".hypothesis", "data", "dist", "__pycache__"),
        *("_C.*.so", "_testing.*.so", "_build_info_*.py", "native-*", "lib.*", "bdist.*", "wheels"),
    )
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    return copy


def environ(**more: str) -> dict[str, str]:
    """The environment of the tested build, as other switches give other objects."""
    from_here = {k: v for k, v in os.environ.items() if not k.startswith("PYCOLLECT_")}
    from_here.pop("TORCH_CUDA_ARCH_LIST", None)
    return from_here | _build_check.build_info()["switches"] | more


def run(command: list[str], cwd: Path, **more: str) -> str:
    """Run the command in a session of its own, without a terminal."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environ(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_nothing_is_compiled_twice(copy: Path, tmp_path: Path):
    """The first build is as by pip in an empty environment: with a torch for this build alone."""
    overlay = tmp_path / "site-packages"
    overlay.mkdir()
    for folder in map(Path, filter(os.path.isdir, sys.path)):
        if folder.name.endswith("-packages"):
            for package in folder.iterdir():
                if not (overlay / package.name).exists() and package.suffix != ".pth":
                    (overlay / package.name).symlink_to(package)
    build = "import sys; sys.path.insert(0, 'build_backend'); import pycollect_backend as backend\n"
    build += f"backend.build_editable({str(tmp_path)!r})\n"
    isolated = run([sys.executable, "-S", "-c", build], copy, PYTHONPATH=str(overlay))
    name = f"torch{torch.__version__}-*"  # builds for other torches may be here, too
    (link,) = (path for path in (copy / "build").glob(name) if path.is_symlink())
    assert link.readlink().parent == overlay  # the build used the temporary torch
    assert "ninja: no work to do." in isolated
    assert "ninja: no work to do." in run([sys.executable, "-c", build], copy)
    assert link.readlink() == Path(torch.__file__).parent
    assert len(list((copy / "pycollect").glob("_C*.so"))) == 1


@pytest.fixture(scope="module")
def wheel(copy: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", ".", "--no-build-isolation", "--no-deps"]
    made = run([*pip, "-v", "-w", "dist"], copy)
    assert "ninja: no work to do." in made
    (found,) = (copy / "dist").iterdir()
    return found


def test_a_wheels_name_has_torch_cuda_and_python(wheel: Path):
    cuda = _build_check.build_info()["cuda"]
    local = LOCAL + (f"cu{cuda.replace('.', '')}" if cuda else "cpu")
    python = "cp{}{}".format(*sys.version_info)
    assert wheel.name.startswith(f"pycollect-{pycollect.__version__}+{local}-{python}-{python}-")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert not [name for name in names if "testing" in name or name.startswith(("csrc", "tests"))]
    assert {"pycollect/__init__.py", "pycollect/py.typed"} <= {*names}
    assert [name for name in names if name.startswith("pycollect/_build_info_cpython")]


def test_a_wheel_is_made_where_torch_is_hidden(copy: Path, tmp_path: Path):
    """As `pip wheel` does by default: the metadata and the wheel must agree."""
    for name in ("setuptools", "_distutils_hack", "ninja"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent
        for found in (folder, *folder.parent.glob(f"{name}-*.dist-info")):
            (tmp_path / found.name).symlink_to(found)
    out = tmp_path / "out"
    out.mkdir()
    code = (
        "import sys\n"
        "sys.path = [p for p in sys.path if '-packages' not in p]\n"
        f"sys.path[:0] = [{str(copy / 'build_backend')!r}, {str(tmp_path)!r}]\n"
        "import pycollect_backend as backend\n"
        "assert not backend.torch_is_importable()\n"
        f"made = backend.prepare_metadata_for_build_wheel({str(out)!r})\n"
        f"wheel = backend.build_wheel({str(out)!r}, None, {str(out)!r} + '/' + made)\n"
        "print('metadata', made, wheel)\n"
    )
    output = run([sys.executable, "-c", code], copy, PYTHONNOUSERSITE="1")
    (line,) = (line for line in output.splitlines() if line.startswith("metadata "))
    _, metadata, wheel = line.split()
    assert wheel.startswith(metadata.removesuffix(".dist-info") + "-cp")
    assert LOCAL in wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel; no compiler is on PATH during the installation."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(target)]
    run([*pip, str(wheel)], target, CXX="/nowhere/c++", PATH="/nowhere")
    return target


def test_a_wheel_installs_without_a_compiler(installed: Path):
    code = "import torch, pycollect as pc; x = [torch.ones(2)] * 2; print(pc.__file__)\n"
    code += "print(pc.all_reduce([torch.ones(2), torch.ones(2)]) or 'summed')"
    output = run([sys.executable, "-c", code], installed, PYTHONPATH=str(installed)).splitlines()
    assert output == [str(installed / "pycollect" / "__init__.py"), "summed"]


def test_a_wheel_beside_another_torch_raises(installed: Path, tmp_path: Path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "from types import SimpleNamespace\n"
        "__version__ = '2.99.0+cpu'\n"
        "version = SimpleNamespace(cuda=None)\n"
        "def compiled_with_cxx11_abi(): return True\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", "import pycollect"],
        cwd=tmp_path,
        env=environ(PYTHONPATH=f"{tmp_path}:{installed}"),
        capture_output=True,
        text=True,
    )
    (sentence,) = (s for s in done.stderr.splitlines() if s.startswith("ImportError"))
    built = _build_check.build_info()["torch"]
    assert f"was built against torch {built}, but 2.99.0+cpu is installed" in sentence
    public = built.partition("+")[0]
    assert f"install that torch: {sys.executable} -m pip install torch=={public}" in sentence
