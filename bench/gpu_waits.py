"""Measure the ways in which processes on one GPU can wait for each other.

An exchange is the synchronisation of an all-reduce on one rank: all ranks signal rank 0, which sums
and signals back. Try `python bench/gpu_waits.py --world 2,4`. The script builds native/gpu_waits
with nvcc, and every experiment has a time limit. Without nvcc or a GPU it prints one sentence and
exits with status 77.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pycollect._command import Interruption
from pycollect._sizes import binary_size, parse_size
from pycollect_bench import environment, scripts
from pycollect_bench.nvcc import NO_GPU, ROOT, CannotRun, Finding, build, output_of
from pycollect_bench.options import list_of
from pycollect_bench.output import write_json

SOURCES = [ROOT / "bench" / "native" / "gpu_waits" / name for name in ("main.cpp", "cuda.cu")]
WAYS = {
    "device": "stream memory operations on the GPU's memory",
    "pinned": "stream memory operations on shared pinned memory",
    "slots-pinned": "the same, and kernels that copy to and from memory that all ranks reach",
    "engine-pinned": "the same, and these copies by a copy engine, which needs no context switch",
    "events": "interprocess events, with a handshake of the hosts",
    "host": "host waits: each host waits for its stream, then for the other hosts",
    "staged": "host staging: copies to pinned memory, and a sum by the host of rank 0",
}
# The pinned counter is first: pycollect's streams wait for such counters.
BLOCKED = {
    "blocked-pinned": "a counter in pinned memory",
    "blocked-device": "a counter in the GPU's memory",
}
# Seconds in addition to the program's own time limit, to start and to end its processes.
MARGIN = 75


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--world", type=list_of(int), default="2,4,8", help="numbers of processes (2,4,8)")
    add("--bytes", type=list_of(parse_size), default="4K,64K", help="sizes of a rank (4K,64K)")
    add("--rounds", type=int, default=500, help="exchanges that are timed one by one (500)")
    add("--seconds", type=float, default=15, help="time limit of each experiment (15)")
    add("--program", type=Path, help="a program that is already built")
    add("--build", type=Path, default=ROOT / "build" / "native", help="folder to build it in")
    add("--json", metavar="FILE", help="write all results there, after every experiment")
    return scripts.parse(parser, argv)


def experiment(
    program: Path, way: str, world: int, nbytes: int, args: argparse.Namespace
) -> Finding:
    """Run the program once and return its result, even of a failed run."""
    words = [way, world, nbytes, args.rounds, args.seconds]
    try:
        found: Finding = json.loads(output_of(program, words, args.seconds + MARGIN))
    except (RuntimeError, json.JSONDecodeError) as error:
        found = {"way": way, "world": world, "bytes": nbytes, "status": "failed"}
        found["failure"] = str(error)
    return found


def exchange_line(found: Finding) -> str:
    head = f"{found['world']:6} {binary_size(found['bytes']):>8} {found['way']:<13}"
    if "round_us" not in found:
        return f"{head} {found['status']}: {found.get('failure', 'a stream or a host hung')}"
    times = "".join(f"{found[key]:>11.2f}" for key in ("round_us", "round_p99_us", "batch_us"))
    return f"{head} {times} {found['wrong']:>7}"


def blocked_sentences(found: Finding) -> list[str]:
    """Return the result of a blocked-stream experiment as sentences."""
    where, others = BLOCKED[found["way"]], found["world"] - 1
    head = f"# {found['world']} processes, {others} with a stream that waits for {where}:"
    if "other_process_ran" not in found:
        why = found.get("failure", "the experiment hung elsewhere")
        return [f"{head} no answer, {found['status']}: {why}"]
    if not found["held"]:
        return [f"{head} no answer, the streams did not wait"]
    if not found["other_process_ran"]:
        return [f"{head} another process did NOT run until they were released"]
    own = "also ran" if found["own_second_stream_ran"] else "did NOT run"
    return [
        f"{head} another process ran; a kernel until done {found['free_us']:.1f} us before, "
        f"{found['beside_us']:.1f} us beside them, in a burst {found['free_burst_us']:.2f} and "
        f"{found['beside_burst_us']:.2f} us",
        f"#   a second stream of the waiting processes {own} ({found['second_us']:.0f} us)",
    ]


def fastest(exchanges: Sequence[Finding]) -> list[str]:
    """Return a line per world and size, with the way of the shortest exchange."""
    best: dict[tuple[int, int], Finding] = {}
    for found in exchanges:
        key = (found["world"], found["bytes"])
        if found.get("wrong") == 0 and (
            key not in best or found["round_us"] < best[key]["round_us"]
        ):
            best[key] = found
    return [
        f"# {world} processes, {binary_size(nbytes)}: {found['way']} ({WAYS[found['way']]}), "
        f"{found['round_us']:.2f} us"
        for (world, nbytes), found in best.items()
    ]


def is_bad(found: Finding) -> bool:
    return found["status"] == "failed" or found.get("wrong", 0) != 0


def run(program: Path, args: argparse.Namespace, keep: Callable[[Finding, str], None]) -> None:
    """Run all experiments, those on blocked streams first because they are the shortest."""
    for world in args.world:
        for way in BLOCKED:
            found = experiment(program, way, world, args.bytes[0], args)
            print(*blocked_sentences(found), sep="\n", flush=True)
            keep(found, "blocked")
    print(f"#world {'size':>8} {'way':<13} {'round us':>11}{'p99 us':>11}{'batch us':>11}  #wrong")
    for world in args.world:
        for nbytes in args.bytes:
            for way in WAYS:
                found = experiment(program, way, world, nbytes, args)
                print(exchange_line(found), flush=True)
                keep(found, "exchanges")


def main(argv: Sequence[str] | None = None) -> int:
    return scripts.run("gpu_waits", lambda: probe(argv))


def probe(argv: Sequence[str] | None) -> int:
    args = arguments(argv)
    about = environment.describe(shlex.join(sys.orig_argv))
    content: dict[str, Any] = {"environment": about, "ways": WAYS}
    content |= {"blocked": [], "exchanges": []}

    def keep(found: Finding, kind: str) -> None:
        content[kind].append(found)
        write_json(args.json, content, interruption)

    interruption = Interruption()
    try:
        program = args.program or build(SOURCES, args.build / "waits")
        output_of(program, ["host", 2, 8, 1, args.seconds], args.seconds + MARGIN)
    except CannotRun as error:
        print(f"bench/gpu_waits.py: {error}")
        return NO_GPU
    except RuntimeError as error:
        print(f"bench/gpu_waits.py: {error}")
        return 1
    print(*environment.header(about), sep="\n")
    print("# round: one exchange until the stream is done, on the slowest rank; batch: one of many")
    print("# in a row; #wrong: words that were not the sum when they were compared")
    with interruption:
        run(program, args, keep)
    if interruption:
        write_json(args.json, content, interruption)
        interruption.reraise(args.json)
    print(*fastest(content["exchanges"]), sep="\n")
    return 1 if any(map(is_bad, [*content["blocked"], *content["exchanges"]])) else 0


if __name__ == "__main__":
    sys.exit(main())
