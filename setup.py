"""Builds pycollect._C from csrc/ with ninja, against the installed torch.

A build in place, as in an editable install, also builds pycollect._testing.

The decisions are in build_backend/, the metadata in pyproject.toml. Switches: PYCOLLECT_CUDA=0/1,
TORCH_CUDA_ARCH_LIST, PYCOLLECT_UNITY=0, PYCOLLECT_BUILD_DEBUG=1, PYCOLLECT_WERROR=1, MAX_JOBS=n,
CXX=compiler, CPPFLAGS, CXXFLAGS, LDFLAGS.
"""

import sys
from pathlib import Path

from setuptools import Extension, __version__, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_backend"))  # not on the path if setup.py is run directly
import pycollect_configure as configure  # noqa: E402
import pycollect_make as make  # noqa: E402

# The version of a source distribution, and of builds from it, has no label.
LABELLED = "sdist" not in sys.argv and not (ROOT / "PKG-INFO").exists()


class BuildModule(build_ext):
    """Builds the module with ninja, and copies it to the path that setuptools expects."""

    def run(self) -> None:
        build = configure.configure(ROOT, testing=bool(self.inplace))
        make.make(build, Path(self.get_ext_fullpath("pycollect._C")))


configure.require_setuptools(__version__)
setup(
    version=configure.version(ROOT, labelled=LABELLED),
    ext_modules=[Extension("pycollect._C", [])],
    cmdclass={"build_ext": BuildModule},
)
