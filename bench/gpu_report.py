"""Build, test and measure on a GPU that is there for ten minutes: the quick and decisive first.

OUT_FOLDER/report.jsonl gets a line after every case, so a run that is cut off keeps what it had;
report.log has the whole output, CASE.json a benchmark's results. After a failed build nothing else
runs. tests/gpu_tests.txt has the tests. COMMIT=... tells a copy without git's folder its commit.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
STAGES = ("build", "call", "smoke", "lists", "threads", "processes", "step", "tests")
# Exit status of a case that was stopped at its time limit, as that of `timeout`, and of a benchmark
# that missed a speed target, which is no failure.
STOPPED, MISSED = 124, 3
# Seconds from a case's end signal to its kill: a benchmark waits 30 s for hanging ranks.
GRACE = 40
CALL = """import torch, pycollect
tensors = [torch.full((8,), rank + 1.0, device={device!r}) for rank in range(4)]
pycollect.all_reduce(tensors)
print(tensors)
assert all((t == 10).all() for t in tensors)"""
ALL_REDUCE = "allreduce_bandwidth --targets"
SWEEP = f"{ALL_REDUCE} --seconds 1.5"
LENET = "train --models lenet --worlds 4 --seconds 10 --no-ddp --targets"
TINY = "-b 4K -e 4K -n 1 -w 1"
# Stage, name, limit in seconds, script with arguments, and those that a rehearsal adds; the last of
# an option counts.
BENCHMARKS = (
    ("lists", "lists-float32", 90, f"{SWEEP} -b 4K -e 256M --world 4,8", f"{TINY} --world 2"),
    ("lists", "lists-bfloat16", 50, f"{SWEEP} -d bfloat16 -b 4K -e 256M -f 16 --world 4", TINY),
    ("threads", "threads", 50, f"{ALL_REDUCE} --threads 4 -b 64K -f 16 -e 16M", TINY),
    ("processes", "processes", 110, f"{SWEEP} --processes 4 -b 4 -e 64M -f 64", TINY),
    ("step", "step", 40, LENET, "--batch 8 -n 1"),
)
# GPU tests fail without a GPU, a job that hangs ends, and a build is for this GPU alone.
ENVIRON = {"PYCOLLECT_REQUIRE_CUDA": "1", "PYCOLLECT_TEST_SECONDS": "35"}
ENVIRON |= {"PYTHONUNBUFFERED": "1", "TORCH_CUDA_ARCH_LIST": ""}
ENVIRON |= {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


class Case(NamedTuple):
    stage: str
    name: str
    limit: float
    command: list[str]


def all_cases(out: Path, rehearse: bool) -> list[Case]:
    """Return the cases of all stages, in order."""
    device = "cpu" if rehearse else "cuda:0"
    build = [PYTHON, "setup.py", "build_ext", "--help" if rehearse else "--inplace"]
    found = [
        Case("build", "build", 330, build),
        Case("build", "info", 60, [PYTHON, "-m", "pycollect.cli", "info"]),
        Case("call", "call", 60, [PYTHON, "-c", CALL.format(device=device)]),
    ]
    for stage, name, limit, words, tiny in BENCHMARKS:
        script, *options = f"{words} {tiny * rehearse} --devices {device}".split()
        command = [PYTHON, f"bench/{script}.py", *options, "--json", str(out / f"{name}.json")]
        # The limits are for a machine with a GPU: a rehearsal runs anywhere, beside other work.
        found.append(Case(stage, name, 4 * limit if rehearse else limit, command))
    tests = [PYTHON, "-m", "pytest", "-q", "-rfEs", "--tb=short", "-p", "no:cacheprovider"]
    tests += ["--maxfail=20", "-m", "cuda and not slow", *["--collect-only"] * rehearse]
    text = (ROOT / "tests/gpu_tests.txt").read_text()
    for line in (text if find_spec("xdist") else text.replace(" -n 6 ", " ")).splitlines():
        if words := shlex.split(line, comments=True):
            found.append(Case(words[0], words[1], float(words[2]), tests + words[3:]))
    return sorted(found, key=lambda case: STAGES.index(case.stage))


def run(case: Case, limit: float, log: IO[bytes]) -> int:
    """Run the case for at most `limit` seconds, with its output in the log; return its status.

    Processes that it leaves behind would use the GPU during the next case, and are killed.
    """
    environ = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **ENVIRON}  # Gloo looks up no host's name
    options = {"cwd": ROOT, "env": environ, "stdin": subprocess.DEVNULL, "start_new_session": True}
    child = subprocess.Popen(case.command, stdout=log, stderr=subprocess.STDOUT, **options)
    try:
        return child.wait(limit)
    except subprocess.TimeoutExpired:
        # pytest prints its failures at SIGINT; a benchmark writes its results at SIGTERM.
        child.send_signal(signal.SIGINT if "pytest" in case.command else signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)
        return STOPPED
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            child.wait(5)


def first_line(command: str) -> str:
    done = subprocess.run(f"timeout 30 {command}", shell=True, cwd=ROOT, capture_output=True)
    return done.stdout.decode().partition("\n")[0]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("out", metavar="OUT_FOLDER", type=Path, help="is made if it is missing")
    add("stages", metavar="STAGE", nargs="*", help=f"of {', '.join(STAGES)} (all)")
    add("--seconds", type=float, default=540, help="limit of all stages (540)")
    add("--rehearse", action="store_true", help="without a GPU: tiny sizes, tests collected only")
    args = parser.parse_args(argv)
    if unknown := set(args.stages) - set(STAGES):
        parser.error(f"no such stage: {', '.join(unknown)}; there are {', '.join(STAGES)}")
    args.out.mkdir(parents=True, exist_ok=True)
    deadline, failed = time.monotonic() + args.seconds, list[str]()
    gpu = first_line("nvidia-smi --query-gpu=name,driver_version --format=csv,noheader")
    commit = os.environ.get("COMMIT") or first_line("git describe --always --dirty --exclude=*")
    about = {"gpu": gpu or "no GPU", "commit": commit}
    for case in all_cases(args.out.resolve(), args.rehearse):
        if case.stage not in (args.stages or STAGES) or failed[:1] == ["build"]:
            continue
        begin, left = time.monotonic(), deadline - time.monotonic()
        with (args.out / "report.log").open("ab+") as log:
            log.write(f"== {case.name}: {shlex.join(case.command)}\n".encode())
            log.flush()
            start = log.tell()
            status = run(case, min(case.limit, left), log) if left > 1 else STOPPED
            log.seek(start)
            lines = log.read().decode(errors="replace").splitlines()[-12:]
        record = {**case._asdict(), "seconds": round(time.monotonic() - begin, 1), "status": status}
        with (args.out / "report.jsonl").open("a") as file:
            file.write(json.dumps({**record, **about, "output": lines}) + "\n")
        failed += [case.name] * (status not in (0, MISSED))
        print(f"== {case.name}: status {status}, {record['seconds']} s", *lines, sep="\n")
    print("failed:", ", ".join(failed) or "nothing", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
