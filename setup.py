"""Builds pycollect._C from csrc/ with ninja, against the torch that is installed.

The decisions are in build_backend/pycollect_native.py, the metadata in pyproject.toml. Switches:
PYCOLLECT_CUDA=0/1, PYCOLLECT_DEBUG=1, PYCOLLECT_WERROR=1, MAX_JOBS=n, CXX=compiler.
"""

import os
import platform
import sys
from pathlib import Path

import setuptools
from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_backend"))  # absent when setup.py is run by hand
import pycollect_native as native  # noqa: E402

native.require_setuptools(setuptools.__version__)  # pyproject.toml would be a riddle to older ones

try:
    import torch
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension
except ModuleNotFoundError as error:  # metadata and sdist can be made without torch
    if error.name != "torch":
        native.stop(f"torch is installed but cannot be imported: {error}")
    from setuptools.command.build_ext import build_ext as BuildExtension

    torch, CppExtension = None, Extension


class Build(BuildExtension):
    """torch's ninja build, after our checks; records what it was built with."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # A fixed folder (pip's is temporary): the next build compiles only what changed. One for
        # each torch, because ninja does not watch system headers.
        name = f"{sys.implementation.cache_tag}-torch{torch.__version__ if torch else 'less'}"
        self.build_temp = str(ROOT / "build" / name)

    def run(self) -> None:
        if torch is None:
            native.stop(
                f"building needs torch; install it first: {sys.executable} -m pip install torch"
            )
        native.require_torch(torch.__version__)
        native.require_ninja(os.environ)
        compiler = native.require_compiler(os.environ)
        cuda = native.decide_cuda(
            os.environ.get("PYCOLLECT_CUDA"),
            kernels=any((ROOT / "csrc" / "cuda").glob("*.cu")),
            torch_cuda=torch.version.cuda,
            toolkit=CUDA_HOME,
        )
        cores = len(os.sched_getaffinity(0))
        os.environ.setdefault("MAX_JOBS", str(native.jobs(cores, native.available_bytes())))
        try:
            super().run()
        except RuntimeError as error:  # the compiler's own messages are already printed
            native.stop(f"the build failed: {error}")
        self.write_build_info(compiler, cuda)

    def write_build_info(self, compiler: str, cuda: bool) -> None:
        build = {
            "torch": str(torch.__version__),
            "cxx11_abi": bool(torch.compiled_with_cxx11_abi()),
            "cuda": torch.version.cuda if cuda else None,
            "compiler": compiler,
            "python": platform.python_version(),
            "debug": os.environ.get("PYCOLLECT_DEBUG") == "1",
            "commit": native.commit(ROOT),
        }
        folder = Path(self.get_ext_fullpath("pycollect._C")).parent
        (folder / "_build_info.py").write_text(native.build_info_text(build))


def extension() -> Extension:
    """Return the one extension module; torch's are system headers: their warnings are not ours."""
    made = CppExtension("pycollect._C", native.sources(ROOT))
    made.extra_compile_args = native.flags(os.environ)
    made.extra_compile_args += [f"-isystem{folder}" for folder in made.include_dirs]
    made.include_dirs = []
    return made


setup(ext_modules=[extension()], cmdclass={"build_ext": Build})
