"""What pip does and leaves: source archives, wheels, and the check at import.

The wheel is made of the objects of the tested build: nothing is compiled. .ci/run does whole
installs from nothing.
"""

import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

import pycollect_backend as backend
import pytest
import torch

import pycollect
from pycollect import _build_check

ROOT = Path(__file__).parents[1]
PACKAGE = f"pycollect-{pycollect.__version__}"
IGNORED = (".git", "*.egg-info", ".*_cache", ".venv", ".hypothesis", "data", "dist", "__pycache__")
BUILT = ("_C.*.so", "_testing.*.so", "_build_info_*.py", "native-*", "lib.*", "bdist.*", "wheels")
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
BACKEND = "import sys; sys.path.insert(0, 'build_backend'); import pycollect_backend as backend\n"


def run(command, cwd, fails=False, **more):
    """Run Python in a session of its own, without a terminal, with the tested build's switches."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYCOLLECT_")}
    environ.pop("TORCH_CUDA_ARCH_LIST", None)
    environ |= _build_check.build_info()["switches"] | more
    command = [sys.executable, *command]
    done = subprocess.run(command, cwd=cwd, env=environ, start_new_session=True, **PIPES)
    assert (done.returncode != 0) == fails, done.stdout
    return done.stdout


def test_torch_is_required_only_if_the_target_has_none(monkeypatch, tmp_path):
    """Imitates pip's build isolation, which removes site-packages from sys.path."""
    monkeypatch.setattr(sys, "path", ["/first"])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(backend, "target_sites", lambda: [str(tmp_path)])
    assert backend.get_requires_for_build_wheel() == [backend.TORCH]
    (tmp_path / "torch").mkdir()  # an uninstall leaves an empty folder
    assert backend.get_requires_for_build_editable() == [backend.TORCH]
    (tmp_path / "torch" / "__init__.py").touch()
    assert backend.get_requires_for_build_wheel() == backend.get_requires_for_build_editable() == []
    assert backend.get_requires_for_build_sdist() == []
    assert sys.path[0] == "/first"  # packages of the isolated environment still come first


def test_the_source_archive_has_all_that_a_build_needs(tmp_path):
    copy, source = tmp_path / "copy", tmp_path / PACKAGE
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("build", *IGNORED))
    run(["-c", BACKEND + "backend.build_sdist('..')"], copy)
    shutil.unpack_archive(f"{source}.tar.gz", tmp_path)
    files = {str(path.relative_to(source)) for path in source.rglob("*.*")}
    wanted = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.*") if p.suffix != ".md"}
    assert wanted | {"build_backend/pycollect_backend.py", "pycollect/py.typed"} <= files
    assert not {name for name in files if name.endswith(".so") or "_build_info" in name}
    # A build from the archive has the version in the archive's name.
    assert run(["setup.py", "--version"], source).split()[-1] == pycollect.__version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel that is made where torch is hidden, as `pip wheel` does by default."""
    if not (ROOT / "build" / ".ninja_log").exists():
        pytest.skip("needs the objects of a build in this checkout")
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(*IGNORED, *BUILT)
    copy = shutil.copytree(ROOT, folder / "pycollect", symlinks=True, ignore=ignored)
    for name in ("setuptools", "_distutils_hack", "ninja"):
        origin = Path(importlib.util.find_spec(name).origin).parent
        for path in (origin, *origin.parent.glob(f"{name}-*.dist-info")):
            (folder / path.name).symlink_to(path)
    code = "import sys; sys.path = [p for p in sys.path if '-packages' not in p]\n"
    code += "from importlib.util import find_spec; assert not find_spec('torch')\n"
    code += f"sys.path.append('..')\n{BACKEND}"
    code += "metadata = backend.prepare_metadata_for_build_wheel('build')\n"
    code += "made = backend.build_wheel('build', None, 'build/' + metadata)\n"
    code += "assert made.startswith(metadata.removesuffix('.dist-info') + '-cp')"
    assert "ninja: no work to do." in run(["-c", code], copy, PYTHONNOUSERSITE="1")
    (found,) = copy.glob("build/*.whl")
    return found


def test_wheels_are_made_one_after_the_other(tmp_path):
    """They share folders of setuptools, and the first step of one empties them."""
    (tmp_path / "build").mkdir()
    (tmp_path / "setup.py").write_text("raise SystemExit('begun')")
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'build_backend')!r})\n"
    code += "import pycollect_backend as backend; backend.build_wheel('build')"
    with open(tmp_path / "build" / ".wheel-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        child = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, **PIPES)
        assert "another build is running" in child.stdout.readline()
    assert "begun" in child.communicate(timeout=60)[0]


def test_a_wheels_name_has_torch_cuda_and_python(wheel):
    cuda = _build_check.build_info()["cuda"]
    local = "torch{}.{}.".format(*torch.__version__.split(".")[:2])
    local += f"cu{cuda.replace('.', '')}" if cuda else "cpu"
    python = "cp{}{}".format(*sys.version_info)
    assert wheel.name.startswith(f"{PACKAGE}+{local}-{python}-{python}-")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert not [name for name in names if "testing" in name or name.startswith(("csrc", "tests"))]
    assert {"pycollect/__init__.py", "pycollect/py.typed", "pycollect/_C.pyi"} <= {*names}
    assert [name for name in names if name.startswith("pycollect/_build_info_cpython")]


def test_a_wheel_installs_without_a_compiler_and_refuses_another_torch(wheel, tmp_path):
    pip = ["-m", "pip", "install", "--no-deps", "--target", "installed", str(wheel)]
    run(pip, tmp_path, CXX="/nowhere/c++", PATH="/nowhere")
    installed = str(tmp_path / "installed")
    code = "import torch, pycollect as pc; print(pc.__file__)\n"
    code += "print(pc.all_reduce([torch.ones(2), torch.ones(2)]) or 'summed')"
    output = run(["-c", code], tmp_path, PYTHONPATH=installed).split()
    assert output == [f"{installed}/pycollect/__init__.py", "summed"]
    (tmp_path / "torch.py").write_text(
        "class version: cuda = None\n__version__ = '2.99.0+cpu'\n"
        "def compiled_with_cxx11_abi(): return True\n"
    )
    sentence = run(["-c", "import pycollect"], tmp_path, fails=True, PYTHONPATH=installed)
    built = _build_check.build_info()["torch"]
    assert f"ImportError: pycollect was built against torch {built}, but 2.99.0+cpu is" in sentence
    public = built.partition("+")[0]
    assert f"install that torch: {sys.executable} -m pip install torch=={public}" in sentence


def test_the_metadata_name_the_version_the_torch_and_the_command():
    public, _, local = metadata.version("pycollect").partition("+")
    assert pycollect.__version__ == public
    assert re.fullmatch(r"torch\d[\w.]*\.(cpu|cu\d+)", local)
    (command,) = metadata.entry_points(group="console_scripts", name="pycollect")
    assert callable(command.load())


@pytest.mark.parametrize("pip", [True, False], ids=["pip", "uv"])
@pytest.mark.parametrize(
    ("build", "torch", "expected"),
    [
        (("2.13.0", True, None), ("2.13.1", True, None), None),
        (("2.13.0+cpu", True, None), ("2.13.0+cu130", True, "13.0"), None),
        (("2.15.0", True, "13.2"), ("2.15.1", True, "13.0"), None),
        (("2.13.0", True, None), ("2.14.0", True, None), "against torch 2.13.0, but 2.14.0"),
        (("2.13.0", True, None), ("2.9.1", True, None), "needs torch 2.11 or newer and 2.9.1"),
        (("2.13.0", True, None), ("2.13.0", False, None), "C++ ABI"),
        (("2.13.0", True, "13.0"), ("2.13.0", True, "12.8"), "CUDA 13.0"),
        (("2.13.0", True, "13.0"), ("2.13.0", True, None), "no CUDA"),
        (("2.16.0.dev1", True, None), ("2.16.0.dev2", True, None), "built against"),
        ((), ("2.13.0", True, None), "the compiled part of pycollect is missing"),
    ],
)
def test_other_builds_are_refused_in_one_sentence(build, torch, expected, pip, monkeypatch):
    if not pip:
        monkeypatch.setattr(sys, "path", [])
    keys = ("torch", "cxx11_abi", "cuda")
    sentence = _build_check.mismatch(*(dict(zip(keys, x, strict=False)) for x in (build, torch)))
    if expected is None:
        assert sentence is None
        return
    assert expected in sentence
    assert "\n" not in sentence
    assert (f"{sys.executable} -m pip install" if pip else "uv pip install") in sentence
    assert ("--no-build-isolation" in sentence) != pip
    assert str(ROOT) in sentence


def test_import_without_the_compiled_part_raises(tmp_path):
    """Without its finder, which would still find the compiled part, of an editable install."""
    ignored = shutil.ignore_patterns(*BUILT)
    shutil.copytree(ROOT / "pycollect", tmp_path / "pycollect", ignore=ignored)
    code = "import sys; sys.meta_path = [f for f in sys.meta_path if 'Editable' not in str(f)]\n"
    output = run(["-c", code + "import pycollect"], tmp_path, fails=True, PYTHONPATH=".")
    assert "ImportError: the compiled part of pycollect is missing" in output
