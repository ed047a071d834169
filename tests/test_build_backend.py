"""The build backend as pip calls it, without building; .ci/run does whole installs."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
import torch
from build_project import BACKEND, module

import pycollect

ROOT = Path(__file__).parents[1]


@pytest.fixture
def backend() -> ModuleType:
    return module("backend")


def test_torch_is_required_only_if_the_target_has_none(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Imitates pip's build isolation, which removes site-packages from sys.path."""
    monkeypatch.setattr(sys, "path", [str(BACKEND)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    monkeypatch.setattr(sys, "meta_path", [importlib.machinery.PathFinder])
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(backend, "target_sites", lambda: [str(tmp_path)])

    assert backend.get_requires_for_build_wheel() == [backend.TORCH]
    (tmp_path / "torch").mkdir()  # an uninstall leaves an empty folder
    assert backend.get_requires_for_build_editable() == [backend.TORCH]
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch-2.12.0.dist-info").mkdir()
    version = tmp_path / "torch-2.12.0.dist-info" / "METADATA"
    version.write_text("Name: torch\nVersion: 2.12.0\n")
    assert backend.get_requires_for_build_wheel() == []
    assert backend.get_requires_for_build_editable() == []
    assert str(tmp_path) in sys.path
    assert sys.path[0] == str(BACKEND)  # packages of the isolated environment still come first
    assert backend.get_requires_for_build_sdist() == []

    version.write_text("Name: torch\nVersion: 2.9.1\n")
    with pytest.raises(SystemExit, match=r"torch 2\.11 or newer is needed and 2\.9\.1"):
        backend.get_requires_for_build_wheel()


def test_target_is_found_when_isolation_hides_it(tmp_path: Path):
    """Runs this environment's Python without its site-packages, as pip does."""
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


def test_the_source_distribution_contains_all_that_a_build_needs(tmp_path: Path):
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns(
        *(".git", "build", "*.egg-info", ".venv", "data"),
        *(".*_cache", ".hypothesis", "__pycache__"),  # other tests may be writing there
    )
    shutil.copytree(ROOT, copy, ignore=ignored)
    (copy / "pycollect" / "_C.cpython-00-none.so").touch()  # neither file may be in the archive
    (copy / "pycollect" / "_build_info_cpython_0.py").touch()
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

    shutil.unpack_archive(tmp_path / f"pycollect-{pycollect.__version__}.tar.gz", tmp_path)
    # A build from the archive has the version in the archive's name.
    version = [sys.executable, "setup.py", "--version"]
    source = tmp_path / f"pycollect-{pycollect.__version__}"
    ran = subprocess.run(version, cwd=source, capture_output=True, text=True, check=True)
    assert ran.stdout.split()[-1] == pycollect.__version__
