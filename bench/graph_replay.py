"""Find the size below which replaying a CUDA graph beats the call: all_reduce on one GPU.

A single call is timed against a graph of one call, and a row of calls against a graph of the same
number of calls, until the GPU is done. Candidates take turns; ratios are medians. Without a GPU the
script prints one sentence and exits with status 77.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

import pycollect
from pycollect._command import Interruption
from pycollect._sizes import binary_size, size_argument, size_range
from pycollect._timing import Effort, Timing, host_time, interleave, median_ratio, ratios, repeated
from pycollect_bench import environment, gpu, scripts
from pycollect_bench.cases import COLLECTIVES, Workspace, sized_case
from pycollect_bench.nvcc import NO_GPU
from pycollect_bench.options import list_of
from pycollect_bench.output import keep_json, write_json
from pycollect_bench.record import rounds_record, timing_record

# Number of calls in a row, about that of a training step.
ROW = 20
# Least speedup at which a replay is worth the capture.
WORTH = 1.1
PAIRS = {"call": "replay", "row": "row in a graph"}


class Found(NamedTuple):
    world: int
    nbytes: int
    timings: dict[str, Timing]

    def ratios(self, eager: str) -> list[float]:
        """Return the eager time divided by the graph's, by round."""
        return ratios(self.timings[eager].rounds, self.timings[PAIRS[eager]].rounds)

    def ratio(self, eager: str) -> float:
        """Return the median over the rounds of the eager time divided by the graph's."""
        return median_ratio(self.timings[eager].rounds, self.timings[PAIRS[eager]].rounds)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("-b", "--minbytes", type=size_argument, default="4K", help="smallest size of a rank (4K)")
    add("-e", "--maxbytes", type=size_argument, default="64M", help="largest size of a rank (64M)")
    add("-f", "--stepfactor", type=int, default=4, help="from size to size (4)")
    add("--world", type=list_of(int), default="4,8", help="numbers of ranks (4,8)")
    add("--devices", default="cuda:0", help="the device of all ranks (cuda:0)")
    add("-n", "--iterations", type=int, help="timed calls of each (by time, if not given)")
    add("-w", "--warmup", type=int, default=3, help="calls before the first timed one (3)")
    add("--seconds", type=float, default=1.0, help="time for each size (1.0)")
    add("--json", metavar="FILE", help="all results, in medians and their spread")
    return scripts.parse(parser, argv)


def measure(world: int, nbytes: int, device: torch.device, effort: Effort) -> Found:
    """Time the four candidates in turns, on zeros, because sums do not change them."""
    workspace = Workspace(sized_case("all_reduce", nbytes, torch.float32, "sum", (device,) * world))
    call = COLLECTIVES["all_reduce"].call(workspace, {})
    call()
    workspace.synchronize()
    runs: dict[str, Callable[[], object]] = {
        "call": call,
        "replay": gpu.graph_of(call, 1),
        "row": repeated(call, ROW),
        "row in a graph": gpu.graph_of(call, ROW),
    }
    zeros = partial(workspace.rewrite, 0)
    samplers = {
        name: host_time(
            run, zeros, workspace.synchronize, calls_in_run=ROW if name.startswith("row") else 1
        )
        for name, run in runs.items()
    }
    return Found(world, nbytes, interleave(samplers, effort))


def line(found: Found) -> str:
    cells = "".join(f"{t.percentile(50) * 1e6:>15.2f}" for t in found.timings.values())
    won = "".join(f"{found.ratio(eager):>10.2f}" for eager in PAIRS)
    return f"{found.world:6} {binary_size(found.nbytes):>8}{cells}{won}"


def answers(all_found: Sequence[Found]) -> list[str]:
    """Return lines with the size up to which replays reach WORTH, per number of ranks and pair."""
    out = []
    for world in dict.fromkeys(found.world for found in all_found):
        for eager, graph in PAIRS.items():
            upto = 0
            for found in (f for f in all_found if f.world == world):
                if found.ratio(eager) < WORTH:
                    break
                upto = found.nbytes
            sizes = f"up to {binary_size(upto)}" if upto else "at no size"
            out.append(f"# {world} ranks: {graph} is {WORTH:g}x as fast as {eager} {sizes}")
    return out


def record(found: Found) -> dict[str, Any]:
    timings = {name: timing_record(timing) for name, timing in found.timings.items()}
    won = {eager: rounds_record(found.ratios(eager)) for eager in PAIRS}
    return {"world": found.world, "bytes": found.nbytes, "timings": timings, "ratios": won}


def main(argv: Sequence[str] | None = None) -> int:
    return scripts.run("graph_replay", lambda: compare(argv))


def compare(argv: Sequence[str] | None) -> int:
    args = arguments(argv)
    if args.devices.startswith("cuda") and not torch.cuda.is_available():
        print("bench/graph_replay.py: there is no GPU here to replay a graph on")
        return NO_GPU
    device = pycollect.devices(args.devices)[0]
    about = environment.describe(shlex.join(sys.orig_argv))
    print(*environment.header(about), sep="\n")
    print(f"# Microseconds per call until the GPU is done; row: {ROW} calls in a row")
    heads = "".join(f"{name:>15}" for way in PAIRS.items() for name in way)
    print(f"#world {'size':>8}{heads}{'x replay':>10}{'x graph':>10}", flush=True)
    effort, found = Effort(args.seconds, args.iterations, args.warmup), []

    def content() -> dict[str, Any]:
        return {"environment": about, "row": ROW, "replays": [record(one) for one in found]}

    with Interruption() as interruption:
        for world in args.world:
            for nbytes in size_range(args.minbytes, args.maxbytes, args.stepfactor):
                found.append(measure(world, nbytes, device, effort))
                print(line(found[-1]), flush=True)
                keep_json(args.json, content)
    print(*answers(found), sep="\n")
    write_json(args.json, content(), interruption)
    interruption.reraise(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
