"""The MPI implementations that programs are measured beside: what they are, and where.

An implementation is installed if a folder of PATH has its launcher, which names the implementation
in its `--version`, and a compiler wrapper. Each folder is searched, because several implementations
have programs of the same name.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_COMPILER = "mpicxx"


@dataclass(frozen=True)
class Implementation:
    """An MPI implementation; `name` is its candidate in results.

    `version` finds the version in the launcher's output. `options` are for each launch, `crowded`
    for one with more ranks than cores. `variables` are of the environment, in which {prefix} is the
    folder of the installation.
    """

    name: str
    title: str
    launcher: str
    version: str
    options: tuple[str, ...] = ()
    crowded: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()


OPEN_MPI = Implementation(
    name="open_mpi",
    title="Open MPI",
    launcher="mpirun",
    version=r"mpirun \(Open MPI\) (\S+)",
    options=("--oversubscribe", "--bind-to", "none", "--allow-run-as-root"),
    crowded=("--mca", "mpi_yield_when_idle", "1"),
)
# Its mpirun is a script that needs the other programs in PATH, its compiler wrapper I_MPI_ROOT.
# More ranks than cores need no option: yielding (I_MPI_THREAD_YIELD=2) took the same time, other
# modes took longer.
INTEL_MPI = Implementation(
    name="intel_mpi",
    title="Intel MPI",
    launcher="mpiexec.hydra",
    version=r"Intel\(R\) MPI Library .*Version (\S+)",
    variables=("I_MPI_ROOT={prefix}", "I_MPI_FABRICS=shm"),
)
IMPLEMENTATIONS = (OPEN_MPI, INTEL_MPI)


@dataclass(frozen=True)
class InstalledMpi:
    """An implementation, its version and the folder of its programs."""

    implementation: Implementation
    version: str
    folder: Path

    @property
    def name(self) -> str:
        """The name of its candidate in results."""
        return self.implementation.name

    def __str__(self) -> str:
        return f"{self.implementation.title} {self.version}"

    def compile_command(self, flags: Sequence[str], source: Path, program: Path) -> list[str]:
        """Return the command that compiles a C++ program."""
        return self._command(_COMPILER, *flags, str(source), "-o", str(program))

    def launch_command(self, world: int) -> list[str]:
        """Return the command that starts `world` ranks, without their program."""
        about = self.implementation
        crowded = about.crowded if world > len(os.sched_getaffinity(0)) else ()
        return self._command(about.launcher, *about.options, "-np", str(world), *crowded)

    def _command(self, program: str, *arguments: str) -> list[str]:
        prefix = str(self.folder.parent)
        variables = [word.format(prefix=prefix) for word in self.implementation.variables]
        return ["env", *variables, str(self.folder / program), *arguments]


def find(implementation: Implementation) -> InstalledMpi | None:
    """Return the first installation in PATH, or None."""
    for folder in map(Path, os.get_exec_path()):
        programs = [folder / implementation.launcher, folder / _COMPILER]
        if all(os.access(program, os.X_OK) for program in programs):
            found = re.search(implementation.version, _version_text(programs[0]))
            if found:
                return InstalledMpi(implementation, found[1], folder)
    return None


def find_all() -> list[InstalledMpi]:
    """Return the installed implementations."""
    return [found for found in map(find, IMPLEMENTATIONS) if found]


@cache
def _version_text(launcher: Path) -> str:
    command = [str(launcher), "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
