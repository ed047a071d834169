"""The MPI implementations that programs are measured beside: what they are, and where.

An implementation is installed if a folder of PATH has its launcher, which names the implementation
in its `--version`, and a compiler wrapper. Each folder is searched, because several implementations
have programs of the same name.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

COMPILER = "mpicxx"


@dataclass(frozen=True)
class Mpi:
    """An MPI implementation; `name` is its candidate in results.

    `pattern` finds the version in the launcher's output. `options` are for each launch, `crowded`
    for one with more ranks than cores. `variables` are of the environment, in which {prefix} is the
    folder of the installation. One that is installed has its version and the folder of its
    programs.
    """

    name: str
    title: str
    launcher: str
    pattern: str
    options: tuple[str, ...] = ()
    crowded: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    version: str = ""
    folder: Path = Path()

    def __str__(self) -> str:
        return f"{self.title} {self.version}"

    def command(self, program: str, *arguments: str | Path) -> list[str]:
        """Return the command of one of its programs."""
        variables = [word.format(prefix=self.folder.parent) for word in self.variables]
        return ["env", *variables, *map(str, (self.folder / program, *arguments))]

    def launch_command(self, world: int) -> list[str]:
        """Return the command that starts `world` ranks, without their program."""
        crowded = self.crowded if world > len(os.sched_getaffinity(0)) else ()
        return self.command(self.launcher, *self.options, "-np", str(world), *crowded)


OPEN_MPI = Mpi(
    name="open_mpi",
    title="Open MPI",
    launcher="mpirun",
    pattern=r"mpirun \(Open MPI\) (\S+)",
    options=("--oversubscribe", "--bind-to", "none", "--allow-run-as-root"),
    crowded=("--mca", "mpi_yield_when_idle", "1"),
)
# Its mpirun is a script that needs the other programs in PATH, its compiler wrapper I_MPI_ROOT.
# More ranks than cores need no option: yielding (I_MPI_THREAD_YIELD=2) took the same time, other
# modes took longer.
INTEL_MPI = Mpi(
    name="intel_mpi",
    title="Intel MPI",
    launcher="mpiexec.hydra",
    pattern=r"Intel\(R\) MPI Library .*Version (\S+)",
    variables=("I_MPI_ROOT={prefix}", "I_MPI_FABRICS=shm"),
)
IMPLEMENTATIONS = (OPEN_MPI, INTEL_MPI)


@cache
def find(implementation: Mpi) -> Mpi | None:
    """Return the first installation in PATH, or None."""
    for folder in map(Path, os.get_exec_path()):
        launcher = folder / implementation.launcher
        if all(os.access(program, os.X_OK) for program in (launcher, folder / COMPILER)):
            command = [str(launcher), "--version"]
            told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            if found := re.search(implementation.pattern, told):
                return replace(implementation, version=found[1], folder=folder)
    return None


def find_all() -> list[Mpi]:
    """Return the installed implementations."""
    return [found for found in map(find, IMPLEMENTATIONS) if found]
