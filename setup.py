"""Builds pycollect._C from csrc/ with ninja, against the torch that is installed.

In place, which an editable install is too, also pycollect._testing.

The decisions are in build_backend/, the metadata in pyproject.toml. Switches: PYCOLLECT_CUDA=0/1,
TORCH_CUDA_ARCH_LIST, PYCOLLECT_UNITY=0, PYCOLLECT_DEBUG=1, PYCOLLECT_WERROR=1, MAX_JOBS=n,
CXX=compiler, CPPFLAGS, CXXFLAGS, LDFLAGS.
"""

import sys
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_backend"))  # absent when setup.py is run by hand
import pycollect_native as native  # noqa: E402

native.require_setuptools(setuptools.__version__)  # pyproject.toml would be a riddle to older ones

import pycollect_configure as configure  # noqa: E402
import pycollect_make as make  # noqa: E402

# A source distribution has the plain version in its name, and so has what is built from it.
LABELLED = "sdist" not in sys.argv and not (ROOT / "PKG-INFO").exists()


class BuildModule(build_ext):
    """Has ninja build the module, and puts it where setuptools wants it."""

    def run(self) -> None:
        with native.in_one_sentence(), make.alone(ROOT):
            found = configure.configure(ROOT, testing=bool(self.inplace))
            make.make(ROOT, found.build, found.jobs, found.architectures, found.title)
            module = Path(self.get_ext_fullpath("pycollect._C"))
            if found.build.testing:
                doubles = module.with_name(module.name.replace("_C", "_testing", 1))
                make.put(ROOT / found.build.testing_module, doubles)
            make.place(ROOT / found.build.module, module, native.build_info_text(found.info))


setup(
    version=configure.version(ROOT, labelled=LABELLED),
    ext_modules=[Extension("pycollect._C", [])],
    cmdclass={"build_ext": BuildModule},
)
