"""The native build as a ninja file: its objects, their sources and their folders.

Objects without torch are stored by compiler and flags, so that another torch recompiles only the
rest. Sources with torch are compiled in a few files that include them, because torch's headers take
longer to read than all our code. Paths are relative to the checkout, and torch's is a link, so that
pip's temporary torch and the environment's torch have the same commands.
"""

from __future__ import annotations

import hashlib
import shlex
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

CORE_FOLDERS = (
    "plan",
    "algorithms",
    "cpu",
    "cuda",
    "group",
    "rank_executor",
    "hosts",
    "send_recv",
    "rank_threads",
    "analysis",
)
TORCH_FOLDERS = (
    "torch",
    "torch/c10d",
    "torch/c10d/staging",
    "torch/c10d/threads",
    "torch/c10d/hosts",
)
CUDA_FOLDER = "torch/cuda"
ONLY_WITHOUT_CUDA = "no_cuda.cpp"
# Files that register with Python and torch, once in a process.
ONLY_IN_MODULE = ("module.cpp", "ops.cpp", "group_operators.cpp")
# Test doubles and probes: a separate module that contains all other code as well.
TESTING_FOLDER = "testing"
TESTING_TORCH_FOLDER = "testing/torch"
TORCH_PARTS = 3  # each takes 9 s for torch's headers and a third of 60 s for our own code

COMPILED = ("-c", "$in", "-o", "$out", "-MMD", "-MF", "$out.d")
DEPENDENCIES = {"depfile": "$out.d", "deps": "gcc"}


@dataclass(frozen=True)
class Compiler:
    """The C++ compiler, with a launcher such as ccache if there is one."""

    command: Sequence[str]
    version: str
    flags: Sequence[str]
    torch_flags: Sequence[str] = ()  # additional flags of files that include torch
    link_flags: Sequence[str] = ()


@dataclass(frozen=True)
class Torch:
    """The torch of the build."""

    name: str  # differs if the headers may differ
    root: Path  # its current folder
    python: str  # cpython-312
    python_include: str


@dataclass(frozen=True)
class Kernels:
    """The compiler of the kernels."""

    command: Sequence[str]
    versions: Sequence[str]  # nvcc's version and the variables that it reads
    flags: Sequence[str]
    toolkit: Path


def core_sources(root: Path) -> list[Path]:
    """Return the C++ files that include no torch, relative to `root`."""
    return _files(root, CORE_FOLDERS, "*.cpp")


def torch_sources(root: Path, cuda: bool) -> list[Path]:
    """Return the C++ files that include torch, relative to `root`."""
    found = _files(root, TORCH_FOLDERS, "*.cpp")
    if not cuda:
        return found
    return [f for f in found if f.name != ONLY_WITHOUT_CUDA] + _files(root, (CUDA_FOLDER,), "*.cpp")


def testing_sources(root: Path) -> tuple[list[Path], list[Path]]:
    """Return the C++ files of the test doubles, without torch and with it, relative to `root`."""
    return _files(root, (TESTING_FOLDER,), "*.cpp"), _files(root, (TESTING_TORCH_FOLDER,), "*.cpp")


def kernel_sources(root: Path) -> list[Path]:
    """Return the CUDA files, relative to `root`."""
    return _files(root, ("cuda",), "*.cu")


@dataclass(frozen=True)
class Build:
    """One configuration: its ninja file, and the paths of its objects and modules."""

    root: Path
    compiler: Compiler
    torch: Torch
    kernels: Kernels | None
    unity: bool = True
    torch_jobs: int = 1  # files with torch that are compiled at the same time
    testing: bool = False  # also build the module of test doubles and probes

    @property
    def core(self) -> Path:
        """The folder of objects without torch."""
        key = _key(self.compiler.version, *self.compiler.command, *self.compiler.flags)
        return Path("build", f"core-{key}")

    @property
    def fatbins(self) -> Path:
        """The folder of the kernels' objects."""
        assert self.kernels is not None
        decisive = [*self.kernels.versions, *self.kernels.command, *self.kernels.flags]
        key = _key(self.compiler.version, *decisive)
        return Path("build", f"kernels-{key}")

    @property
    def folder(self) -> Path:
        """The folder of objects with torch, and of the modules."""
        rest = [self.fatbins.name] if self.kernels else []
        key = _key(self.core.name, *rest, *self.torch_flags(), *self.link_flags())
        return Path("build", f"{self.torch.name}-{self.torch.python}-{key}")

    @property
    def module(self) -> Path:
        return self.folder / "_C.so"

    @property
    def testing_module(self) -> Path:
        return self.folder / "_testing.so"

    @property
    def manifest(self) -> Path:
        return self.folder / "build.ninja"

    @property
    def torch_link(self) -> Path:
        return Path("build", self.torch.name)

    def torch_flags(self) -> list[str]:
        """Return the flags of files that include torch; foreign headers raise no warnings."""
        include = self.torch_link / "include"
        folders = [str(include), str(include / "torch/csrc/api/include"), self.torch.python_include]
        if self.kernels is not None and self.kernels.toolkit != Path("/usr"):  # searched by default
            folders.append(str(self.kernels.toolkit / "include"))
        system = [word for folder in folders for word in ("-isystem", folder)]
        return ["-I.", *self.compiler.torch_flags, *system]

    def link_flags(self) -> list[str]:
        libraries = ["c10", "torch", "torch_cpu", "torch_python"]
        flags = [*self.compiler.link_flags, f"-L{self.torch_link / 'lib'}"]
        if self.kernels is not None:
            folders = [self.kernels.toolkit / "lib64", self.kernels.toolkit / "lib"]
            flags += [f"-L{folder}" for folder in folders if folder.is_dir()][:1]
            libraries += ["cudart", "c10_cuda", "torch_cuda"]
        return [*flags, *(f"-l{library}" for library in libraries)]

    def write(self) -> None:
        """Write the ninja file and its inputs; an unchanged file keeps its modification time."""
        (self.root / self.folder).mkdir(parents=True, exist_ok=True)
        link = self.root / self.torch_link
        if not link.is_symlink() or link.readlink() != self.torch.root:
            if link.is_dir() and not link.is_symlink():  # the checkout was copied without links
                shutil.rmtree(link)
            link.unlink(missing_ok=True)
            link.symlink_to(self.torch.root)
        for part, sources in self._torch_parts().items():
            if self.unity:
                _write(self.root / part, "".join(f'#include "{s}"\n' for s in sources))
        _write(self.root / self.manifest, self.text())

    def text(self) -> str:
        """Return the content of the ninja file, with the slowest objects first."""
        cxx = [*self.compiler.command, *self.compiler.flags]
        link = [*self.compiler.command, "-shared", "$in", *self.link_flags(), "-o", "$out"]
        lines = ["ninja_required_version = 1.8", "builddir = build"]
        lines += ["pool torch", f"  depth = {self.torch_jobs}"]
        torch = [*cxx, *self.torch_flags(), *COMPILED]
        lines += _rule("torch", torch, **DEPENDENCIES, pool="torch")
        lines += _rule("core", [*cxx, *COMPILED], **DEPENDENCIES)
        lines += _rule("link", link)
        parts = self._torch_parts()
        made = {self._object(self.folder, source): source for source in parts}
        rules = dict.fromkeys(made, "torch")
        if self.kernels is not None:
            nvcc = [*self.kernels.command, *self.kernels.flags, *COMPILED]
            lines += _rule("kernels", nvcc, **DEPENDENCIES)
            fatbins = {self._object(self.fatbins, s): s for s in kernel_sources(self.root)}
            made |= fatbins
            rules |= dict.fromkeys(fatbins, "kernels")
        doubles, torch_doubles = testing_sources(self.root) if self.testing else ([], [])
        core = core_sources(self.root)
        made |= {self._object(self.core, source): source for source in core + doubles}
        lines += [_build(o, rules.get(o, "core"), [source]) for o, source in made.items()]
        only_testing = {*doubles, *torch_doubles}
        modules = {self.module: only_testing}
        if self.testing:
            modules[self.testing_module] = set(_only_in_module(self.root))
        for module, others in modules.items():
            objects = [o for o, s in made.items() if not others & {s, *parts.get(s, [])}]
            lines.append(_build(module, "link", sorted(objects)))
        return "\n".join([*lines, ""])

    def _torch_parts(self) -> dict[Path, list[Path]]:
        """Return each compiled file with the sources that it includes."""
        cuda = self.kernels is not None
        sources = torch_sources(self.root, cuda)
        doubles = testing_sources(self.root)[1] if self.testing else []
        if not self.unity:
            return {source: [source] for source in sources + doubles}
        # Parts are the same with and without CUDA, so that conflicts between files occur in both.
        beside = _files(self.root, (CUDA_FOLDER,), "*.cpp") if cuda else []
        beside += [source for source in sources if source.name == ONLY_WITHOUT_CUDA]
        registers = _only_in_module(self.root)
        sources = [source for source in sources if source not in beside + registers]
        names = [self.folder / f"torch_{n}.cpp" for n in range(min(TORCH_PARTS, len(sources)))]
        # Similar files are neighbours, so every part gets as many slow ones.
        parts = {name: sources[n :: len(names)] for n, name in enumerate(names)}
        parts |= {self.folder / "torch_cuda.cpp": beside}
        apart = {"module.cpp": registers, "testing.cpp": doubles}
        return parts | {self.folder / name: files for name, files in apart.items() if files}

    @staticmethod
    def _object(folder: Path, source: Path) -> Path:
        name = source.name if source.is_relative_to(folder) else "-".join(source.parts[1:])
        return folder / f"{name}.o"


def _only_in_module(root: Path) -> list[Path]:
    return [s for s in torch_sources(root, cuda=False) if s.name in ONLY_IN_MODULE]


def _files(root: Path, folders: Iterable[str], pattern: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((root / "csrc" / folder).glob(pattern))]
    return [path.relative_to(root) for path in found]


def _key(*decisive: str) -> str:
    return hashlib.sha256("\0".join(decisive).encode()).hexdigest()[:8]


def _rule(name: str, command: Iterable[str], **bindings: str) -> list[str]:
    words = [w if w in COMPILED else shlex.quote(w).replace("$", "$$") for w in command]
    bindings = {"command": " ".join(words), "description": f"{name} $out", **bindings}
    return [f"rule {name}", *(f"  {key} = {value}" for key, value in bindings.items())]


def _build(output: Path, rule: str, inputs: Iterable[Path]) -> str:
    return f"build {_escaped(output)}: {rule} {' '.join(map(_escaped, inputs))}"


def _escaped(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _write(path: Path, text: str) -> None:
    """Write a file if its text differs: ninja compares modification times."""
    if not path.exists() or path.read_bytes() != text.encode():
        path.write_text(text)
