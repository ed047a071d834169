"""The PEP 517 backend: setuptools, but builds against the torch of the target environment.

Under build isolation `requires = ["torch"]` would install a second torch and link against that one.
pip runs this file with the target's Python and hides only its site-packages, so this backend finds
them and puts them back on the path. It requires torch only if none is found there.
"""

import contextlib
import os
import shutil
import site
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

try:
    import pycollect_configure as configure  # needs ninja
    import pycollect_make as make
    import setuptools
    from setuptools import build_meta
    from setuptools.build_meta import *  # noqa: F403  hooks that need no change
except ImportError as error:
    raise SystemExit(
        f"pycollect: building without isolation needs setuptools and ninja ({error}); "
        f"install them: {sys.executable} -m pip install 'setuptools>=77' ninja"
    ) from None

configure.require_setuptools(setuptools.__version__)
TORCH = "torch>={}.{}".format(*configure.OLDEST_TORCH)


def target_sites() -> list[str]:
    """Return the site-packages of this Python's environment, also if build isolation hides them.

    site.getsitepackages() handles virtual environments, those with system packages, and Debian's
    dist-packages. The user's site-packages belong to every environment with system packages.
    """
    found = site.getsitepackages()
    if sys.base_prefix in site.PREFIXES:
        in_venv = sys.prefix != sys.base_prefix  # its own come first, as on an ordinary sys.path
        found.insert(int(in_venv), site.getusersitepackages())
    return [path for path in found if os.path.isdir(path)]


def find_torch() -> bool:
    """Make the target's torch importable; return whether there is one."""
    if not configure.torch_is_importable():
        for folder in target_sites():
            site.addsitedir(folder)  # after isolation's own folders; processes .pth files
    return configure.torch_is_importable()


find_torch()  # for every hook: torch is part of the version as well


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    configure.require_compiler(os.environ)  # before pip downloads gigabytes
    if not find_torch():
        return [TORCH]
    with contextlib.suppress(metadata.PackageNotFoundError):  # setup.py checks it then
        configure.require_torch(metadata.version("torch"))
    return []


get_requires_for_build_editable = get_requires_for_build_wheel


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    return []


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    with make.locked(Path("build", ".wheel-lock")):
        for leftover in Path("build").glob("lib*"):  # setuptools would package deleted modules
            shutil.rmtree(leftover)
        return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
