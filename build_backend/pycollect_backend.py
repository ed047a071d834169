"""The PEP 517 backend: setuptools, but builds against the torch of the target environment.

Under build isolation `requires = ["torch"]` would install a second torch and link against that one.
pip runs this file with the target's Python and hides only its site-packages, so this backend finds
them and puts them back on the path. It requires torch only if none is found there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import site
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

try:
    from setuptools import build_meta
except ImportError:
    raise SystemExit(
        "pycollect: building without isolation needs setuptools and ninja; "
        f"install them: {sys.executable} -m pip install 'setuptools>=77' ninja"
    ) from None

import pycollect_make as make
import pycollect_native as native

TORCH = "torch>={}.{}".format(*native.OLDEST_TORCH)


def target_sites() -> list[str]:
    """Return the site-packages of this Python's environment, also if build isolation hides them.

    site.getsitepackages() handles virtual environments, those with system packages, and Debian's
    dist-packages. The user's site-packages belong to every environment with system packages.
    """
    found = site.getsitepackages()
    if sys.base_prefix in site.PREFIXES:
        after_venv = int(sys.prefix != sys.base_prefix)  # as on an ordinary sys.path
        found.insert(after_venv, site.getusersitepackages())
    return [path for path in found if os.path.isdir(path)]


def torch_is_importable() -> bool:
    """Return whether `import torch` finds a package, not just a folder that pip left behind."""
    importlib.invalidate_caches()
    spec = importlib.util.find_spec("torch")
    return spec is not None and spec.origin is not None


def find_torch() -> bool:
    """Make the target's torch importable; return whether there is one."""
    if not torch_is_importable():
        for folder in target_sites():
            site.addsitedir(folder)  # after isolation's own folders; processes .pth files
    return torch_is_importable()


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    native.require_compiler(os.environ)  # before pip downloads gigabytes
    if not find_torch():
        return [TORCH]
    with contextlib.suppress(metadata.PackageNotFoundError):  # setup.py checks it then
        native.require_torch(metadata.version("torch"))
    return []


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return get_requires_for_build_wheel(config_settings)


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    return []


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    find_torch()  # torch is part of the version
    return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: Any = None
) -> str:
    find_torch()
    return build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    find_torch()
    with native.in_one_sentence(), make.build_lock(Path.cwd()):
        for leftover in Path("build").glob("lib*"):  # setuptools would package deleted modules
            shutil.rmtree(leftover)
        return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    find_torch()
    with native.in_one_sentence(), make.build_lock(Path.cwd()):
        return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    return build_meta.build_sdist(sdist_directory, config_settings)
