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
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_backend"))  # absent when setup.py is run by hand
import pycollect_native as native  # noqa: E402

native.require_setuptools(setuptools.__version__)  # pyproject.toml would be a riddle to older ones

import pycollect_toolkit as toolkit  # noqa: E402

TOOLKIT = toolkit.find_toolkit(os.environ)
if TOOLKIT is not None:
    os.environ.setdefault("CUDA_HOME", TOOLKIT)  # torch would take the folder above nvcc's

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension
except ModuleNotFoundError as error:  # metadata and sdist can be made without torch
    if error.name != "torch":
        native.stop(f"torch is installed but cannot be imported: {error}")
    torch = None


def has_cuda() -> bool:
    """Decide whether the CUDA part is built."""
    return native.decide_cuda(
        os.environ.get("PYCOLLECT_CUDA"),
        kernels=any((ROOT / "csrc" / "cuda").glob("*.cu")),
        torch_cuda=torch.version.cuda,
        toolkit=TOOLKIT,
    )


def architectures() -> list[str]:
    """Return what nvcc is to compile for; nothing when the environment says it."""
    if os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return []
    gpus = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    present = [10 * major + minor for major, minor in gpus]
    chosen = toolkit.choose_architectures(toolkit.list_architectures(TOOLKIT), present)
    return toolkit.architecture_flags(chosen)


def extension(cuda: bool) -> Extension:
    """Return the one extension module; torch's are system headers: their warnings are not ours."""
    kind = CUDAExtension if cuda else CppExtension
    made = kind("pycollect._C", native.sources(ROOT, cuda))
    system = [f"-isystem{folder}" for folder in made.include_dirs]
    made.extra_compile_args = {"cxx": native.flags(os.environ) + system}
    if cuda:
        made.extra_compile_args["nvcc"] = native.kernel_flags(os.environ, architectures())
    made.include_dirs = []
    return made


class WithoutTorch(build_ext):
    """Says what is missing."""

    def run(self) -> None:
        native.stop(
            f"building needs torch; install it first: {sys.executable} -m pip install torch"
        )


def with_torch(cuda: bool) -> type:
    class Build(BuildExtension):
        """torch's ninja build, after our checks; records what it was built with."""

        def finalize_options(self) -> None:
            super().finalize_options()
            # A fixed folder (pip's is temporary): the next build compiles only what changed. One
            # for each torch, because ninja does not watch system headers.
            name = f"{sys.implementation.cache_tag}-torch{torch.__version__}"
            self.build_temp = str(ROOT / "build" / (f"{name}-cuda" if cuda else name))

        def run(self) -> None:
            native.require_torch(torch.__version__)
            native.require_ninja(os.environ)
            compiler = native.require_compiler(os.environ)
            cores = len(os.sched_getaffinity(0))
            os.environ.setdefault("MAX_JOBS", str(native.jobs(cores, native.available_bytes())))
            try:
                super().run()
            except RuntimeError as error:  # the compiler's own messages are already printed
                native.stop(f"the build failed: {error}")
            self.write_build_info(compiler)

        def write_build_info(self, compiler: str) -> None:
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

    return Build


if torch is None:
    setup(
        ext_modules=[Extension("pycollect._C", native.sources(ROOT, cuda=False))],
        cmdclass={"build_ext": WithoutTorch},
    )
else:
    CUDA = has_cuda()
    setup(ext_modules=[extension(CUDA)], cmdclass={"build_ext": with_torch(CUDA)})
