"""A machine for bench/gpu_report.sh without a GPU: nvidia-smi and Python are fakes on PATH."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "bench" / "gpu_report.sh"
SMI = "#!/bin/sh\necho 'NVIDIA H200, 580.159.04'\n"
TOOLS = ("bash", "cat", "dirname", "env", "git", "grep", "head", "mkdir", "rm", "sh", "sleep")
TOOLS += ("setsid", "tail", "tee", "timeout", "tr")
# JSON that the fake benchmarks write.
CONTENT = '{"schema": 2, "rows": [{"a": {"b": 1}}]}'
# A fake Python, which runs the commands that the script itself needs, and prints all others.
PYTHON = f"""#!/bin/sh
case "$1$2" in
  "-cimport pycollect") exit {{built}} ;;
  -c*) echo 2.11.0+cu130 13.0; exit ;;
  -* | bench/merge_results.py*) [ "$1" = -m ] || exec {sys.executable} "$@" ;;
esac
echo "ran: $*"
for last; do :; done
case "$*" in *"--json "*) echo '{{content}}' >"$last" ;; esac
case "$*" in *"{{failing}}"*) {{then}} ;; esac
"""


class Machine:
    """Runs the script, and has the folders of its output."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.results = folder, folder / "out", folder / "results"
        self.python = folder / "python"
        self.fakes = folder / "bin"
        self.fakes.mkdir()
        # PATH has no folder of CUDA, so that the script finds the fakes.
        for tool in TOOLS:
            path = shutil.which(tool)
            assert path is not None
            (self.fakes / tool).symlink_to(path)
        self.fake("nvidia-smi", SMI)
        self.set_python()

    def fake(self, name: str, text: str) -> None:
        """Put a program on PATH."""
        path = self.fakes / name
        path.write_text(text)
        path.chmod(0o755)

    def set_python(self, failing: str = "no command", then: str = "exit 1", built: int = 0) -> None:
        """Make the fake Python; commands that contain `failing` run the shell code `then`."""
        self.python.write_text(
            PYTHON.format(content=CONTENT, failing=failing, then=then, built=built)
        )
        self.python.chmod(0o755)

    def command(self, *stages: str, **settings: object) -> tuple[list[str], dict[str, str]]:
        """The command and its environment."""
        kept = {k: v for k, v in os.environ.items() if k not in ("OUT", "CUDA_HOME")}
        kept |= {"PATH": str(self.fakes), "PYTHON": str(self.python), "OUT": str(self.out)}
        kept |= {"RESULTS": str(self.results), "DEVICES": "cpu", "QUICK": "1", "LIMIT": "60"}
        kept["CUDA_HOME"] = str(self.folder)
        return [str(SCRIPT), *stages], kept | {k: str(v) for k, v in settings.items()}

    def run(self, *stages: str, **settings: object) -> tuple[int, str]:
        """Run the script; return its exit status and its output."""
        command, environ = self.command(*stages, **settings)
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout + done.stderr

    def commands(self, *stages: str, **settings: object) -> dict[str, list[str]]:
        """The commands of these stages by name, each without its Python and what precedes it."""
        status, output = self.run("--dry-run", *stages, **settings)
        assert status == 0, output
        found: dict[str, list[str]] = {}
        for line in output.splitlines():
            name, _, command = line.partition(": ")
            if f" {self.python} " in f" {command}":
                assert name not in found, f"two steps are named {name}"
                words = shlex.split(command)
                found[name] = words[words.index(str(self.python)) + 1 :]
        return found

    def record(self, folder: Path | None = None, gpu: str = "h200") -> Any:
        """The record that the script left."""
        return json.loads(((folder or self.out) / f"{gpu}.json").read_text())
