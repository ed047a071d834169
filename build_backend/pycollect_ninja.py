"""The native build as a ninja file: its objects, their sources and their folders.

Objects without torch are stored by compiler and flags, so that another torch recompiles only the
rest. Sources with torch are compiled in a few files that include them, because torch's headers take
longer to read than all our code. Paths are relative to the checkout, and torch's is a link, so that
pip's temporary torch and the environment's torch have the same commands.
"""

import hashlib
import io
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ninja import BIN_DIR, Writer, escape

# Another release would distrust this one's log, so PATH is searched last.
NINJA = shutil.which("ninja", path=os.pathsep.join([BIN_DIR, os.environ.get("PATH", os.defpath)]))
if NINJA is None:
    raise ImportError("the package ninja has no program")
# Files that register with Python and torch, once in a process.
ONLY_IN_MODULE = ("module.cpp", "ops.cpp", "group_operators.cpp")
TORCH_PARTS = 3  # each takes 9 s for torch's headers and a third of 60 s for our own code


def kind_of(source: Path) -> str:
    """Return the part of the build to which a source file, a path that begins with csrc, belongs.

    "core" files and "kernels" include no torch. "registers" are in the module alone, the "doubles"
    only in that of test doubles and probes. One of "torch-cuda" and "no-cuda" is compiled.
    """
    folders = source.parts[1:-1]
    if source.suffix == ".cu":
        return "kernels"
    if "testing" in folders:
        return "torch-doubles" if "torch" in folders else "doubles"
    if "torch" not in folders:
        return "core"
    if "cuda" in folders or source.name == "no_cuda.cpp":
        return "torch-cuda" if "cuda" in folders else "no-cuda"
    return "registers" if source.name in ONLY_IN_MODULE else "torch"


def sources(root: Path, *kinds: str) -> list[Path]:
    """Return the source files of these kinds, relative to `root`."""
    found = sorted(path.relative_to(root) for path in (root / "csrc").rglob("*.c*"))
    return [path for path in found if path.suffix in (".cpp", ".cu") and kind_of(path) in kinds]


@dataclass(frozen=True)
class Build:
    """One configuration: the folders of its objects, and its ninja file in that of the modules."""

    root: Path
    title: str  # names torch and CUDA
    record: Mapping[str, object]  # for pycollect._build_check
    compiler: Sequence[str]  # its command
    compiler_version: str
    flags: Sequence[str]  # of every C++ file
    link_flags: Sequence[str]
    torch: Path  # the current folder of torch
    torch_name: str  # differs if torch's headers may differ
    python: str  # such as cpython-312
    python_include: str
    nvcc: Sequence[str] = ()  # the command that compiles a kernel with its flags; empty: no CUDA
    nvcc_version: str = ""  # and the variables that nvcc reads
    toolkit: Path | None = None  # of CUDA
    unity: bool = True
    jobs: tuple[int, int] = (1, 1)  # compilers at the same time, and those of files with torch
    testing: bool = False  # also build the module of test doubles, for a checkout's tests

    @property
    def core_folder(self) -> Path:
        return Path("build", f"core-{_key(self.compiler_version, *self.compiler, *self.flags)}")

    @property
    def kernel_folder(self) -> Path:
        key = _key(self.compiler_version, self.nvcc_version, *self.nvcc)
        return Path("build", f"kernels-{key}")

    @property
    def folder(self) -> Path:
        rest = [self.kernel_folder.name] if self.nvcc else []
        key = _key(self.core_folder.name, *rest, *self.torch_flags(), *self.torch_link_flags())
        return Path("build", f"{self.torch_name}-{self.python}-{key}")

    def torch_flags(self) -> list[str]:
        # Without OpenMP at::parallel_for, a template in torch's headers, silently runs serially. No
        # linker's flag: threads must come from the one library that torch has loaded.
        include = f"build/{self.torch_name}/include"
        folders = [include, f"{include}/torch/csrc/api/include", self.python_include]
        if self.nvcc and self.toolkit != Path("/usr"):  # searched by default
            folders.append(f"{self.toolkit}/include")
        return ["-I.", "-fopenmp", *(word for folder in folders for word in ("-isystem", folder))]

    def torch_link_flags(self) -> list[str]:
        flags = [*self.link_flags, f"-Lbuild/{self.torch_name}/lib"]
        flags += [f"-l{library}" for library in ("c10", "torch", "torch_cpu", "torch_python")]
        if self.nvcc:
            flags += [f"-L{self.toolkit}/lib64", f"-L{self.toolkit}/lib"]  # which one differs
            flags += ["-lcudart", "-lc10_cuda", "-ltorch_cuda"]
        return flags

    def ninja(self) -> list[str]:
        """Return the command that builds, in the folder `root`."""
        return [NINJA, "-f", f"{self.folder}/build.ninja"]

    def write(self) -> None:
        """Write the ninja file and its inputs; an unchanged input keeps its modification time."""
        (self.root / self.folder).mkdir(parents=True, exist_ok=True)
        link = self.root / "build" / self.torch_name
        if not link.is_symlink() or link.readlink() != self.torch:
            if link.is_dir() and not link.is_symlink():  # the checkout was copied without links
                shutil.rmtree(link)
            link.unlink(missing_ok=True)
            link.symlink_to(self.torch)
        text = io.StringIO()
        self._write_rules(Writer(text, width=1_000_000))
        self._write(self.folder / "build.ninja", text.getvalue())

    def _write_rules(self, writer: Writer) -> None:
        cxx = [*self.compiler, *self.flags]
        writer.variable("builddir", "build")
        writer.pool("torch", self.jobs[1])
        _write_compiler(writer, "torch", [*cxx, *self.torch_flags()], pool="torch")
        _write_compiler(writer, "core", cxx)
        _write_compiler(writer, "kernels", self.nvcc)
        link, flags = (escape(shlex.join(w)) for w in (self.compiler, self.torch_link_flags()))
        writer.rule(
            "link", f"{link} -shared $in {flags} -o $out.new && mv $out.new $out", "link $out"
        )
        made: dict[str, list[str]] = {}
        for kind, (rule, folder) in self._kinds().items():
            base, compiled = Path("csrc"), sources(self.root, kind)
            if rule == "torch" and self.unity:
                base, compiled = self.folder, self._join(kind, compiled)
            names = ["-".join(source.relative_to(base).parts) for source in compiled]
            made[kind] = [f"{folder}/{name}.o" for name in names]
            for built, source in zip(made[kind], compiled, strict=True):
                writer.build(built, rule, str(source))
        registers, doubles = made.pop("registers"), made.pop("doubles", [])
        doubles += made.pop("torch-doubles", [])
        shared = [built for objects in made.values() for built in objects]
        writer.build(f"{self.folder}/_C.so", "link", shared + registers)
        if self.testing:
            writer.build(f"{self.folder}/_testing.so", "link", shared + doubles)

    def _kinds(self) -> dict[str, tuple[str, Path]]:
        """Return rule and folder of each kind of object, the slowest first."""
        torch = ["torch", "torch-cuda" if self.nvcc else "no-cuda", "registers"]
        torch, core = (
            torch + ["torch-doubles"] * self.testing,
            ["core"] + ["doubles"] * self.testing,
        )
        kinds = dict.fromkeys(torch, ("torch", self.folder))
        kinds |= {"kernels": ("kernels", self.kernel_folder)} if self.nvcc else {}
        return kinds | dict.fromkeys(core, ("core", self.core_folder))

    def _join(self, kind: str, files: list[Path]) -> list[Path]:
        """Write files that include those with torch, and return their paths."""
        # Parts are the same with and without CUDA, so that conflicts between files occur in both.
        count = min(TORCH_PARTS, len(files)) if kind == "torch" else min(1, len(files))
        joined = [self.folder / f"{kind}_{n}.cpp" for n in range(count)]
        for n, path in enumerate(joined):
            # Similar files are neighbours, so every part gets as many slow ones.
            self._write(path, "".join(f'#include "{source}"\n' for source in files[n::count]))
        return joined

    def _write(self, path: Path, text: str) -> None:
        if not (self.root / path).exists() or (self.root / path).read_text() != text:
            (self.root / path).write_text(text)


def _key(*decisive: str) -> str:
    return hashlib.sha256("\0".join(decisive).encode()).hexdigest()[:8]


def _write_compiler(writer: Writer, name: str, command: Sequence[str], **more: str) -> None:
    """Write a rule that compiles one file and notes the headers that it reads."""
    line = f"{escape(shlex.join(command))} -c $in -o $out -MMD -MF $out.d"
    writer.rule(name, line, f"{name} $out", depfile="$out.d", deps="gcc", **more)
