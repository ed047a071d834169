"""The installed package, and the check at import; .ci/run does whole installs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import pycollect
from pycollect import _build_check

ROOT = Path(__file__).parents[1]


def torch_of(version: str, *, abi: bool = True, cuda: str | None = None) -> dict[str, object]:
    return {"torch": version, "cxx11_abi": abi, "cuda": cuda}


# The installed package


def test_version_is_that_of_the_metadata():
    """The metadata's local version names torch and CUDA of the build, also after a rebuild."""
    public, _, local = metadata.version("pycollect").partition("+")
    assert pycollect.__version__ == public
    assert re.fullmatch(r"torch\d[\w.]*\.(cpu|cu\d+)", local)


def test_types_are_shipped():
    package = Path(pycollect.__file__).parent
    assert (package / "py.typed").is_file()
    assert (package / "_C.pyi").is_file()


def test_command_line_is_installed():
    (command,) = metadata.entry_points(group="console_scripts", name="pycollect")
    assert callable(command.load())


def test_build_info_matches_the_running_versions():
    import torch

    build = _build_check.build_info()
    assert build["torch"].split(".")[:2] == torch.__version__.split(".")[:2]
    assert build["compiler"]
    assert build["python"].split(".")[:2] == list(map(str, sys.version_info[:2]))


# The check at import


@pytest.mark.parametrize(
    ("build", "torch"),
    [
        (torch_of("2.13.0"), torch_of("2.13.1")),
        (torch_of("2.13.0+cpu"), torch_of("2.13.0+cu130", cuda="13.0")),
        (torch_of("2.15.0", cuda="13.2"), torch_of("2.15.1", cuda="13.0")),
        (torch_of("2.16.0.dev20261101+cpu"), torch_of("2.16.0.dev20261101+cpu")),
    ],
)
def test_matching_builds_are_accepted(build: dict[str, object], torch: dict[str, object]):
    assert _build_check.mismatch(build, torch) is None


@pytest.mark.parametrize(
    ("build", "torch", "expected"),
    [
        (torch_of("2.13.0"), torch_of("2.14.0"), "built against torch 2.13.0, but 2.14.0"),
        (torch_of("2.13.0"), torch_of("3.13.0"), "built against torch 2.13.0, but 3.13.0"),
        (torch_of("2.13.0"), torch_of("2.9.1"), "needs torch 2.11 or newer and 2.9.1"),
        (torch_of("2.13.0"), torch_of("2.13.0", abi=False), "C++ ABI"),
        (torch_of("2.13.0", cuda="13.0"), torch_of("2.13.0", cuda="12.8"), "CUDA 13.0"),
        (torch_of("2.13.0", cuda="13.0"), torch_of("2.13.0"), "no CUDA"),
        (torch_of("2.16.0.dev20261101"), torch_of("2.16.0.dev20261102"), "built against"),
        ({}, torch_of("2.13.0"), "the compiled part of pycollect is missing"),
    ],
)
def test_other_builds_are_refused_in_one_sentence(
    build: dict[str, object], torch: dict[str, object], expected: str
):
    sentence = _build_check.mismatch(build, torch)
    assert sentence is not None
    assert expected in sentence
    assert "\n" not in sentence
    assert f"{sys.executable} -m pip install" in sentence
    assert str(ROOT) in sentence


def test_without_pip_the_rebuild_command_uses_uv(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [])
    assert "uv pip install" in _build_check.rebuild_command()
    assert "--no-build-isolation" in _build_check.rebuild_command()


def test_import_refuses_a_build_for_another_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_build_check, "build_info", lambda: torch_of("2.10.0"))
    with pytest.raises(ImportError, match=r"built against torch 2\.10\.0"):
        _build_check.check()


def test_import_without_the_compiled_part_raises(tmp_path: Path):
    built = shutil.ignore_patterns("*.so", "_build_info_*.py", "__pycache__")
    shutil.copytree(ROOT / "pycollect", tmp_path / "pycollect", ignore=built)
    code = (  # without this an editable install would still find the compiled part
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'Editable' not in str(f)]\n"
        "import pycollect\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "ImportError: the compiled part of pycollect is missing" in done.stderr
