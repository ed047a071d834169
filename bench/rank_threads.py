"""Measure ranks as threads against ranks as processes: worlds, all_reduce, small test cases.

`python bench/rank_threads.py` takes some minutes, most of them for the start of processes;
`--quick` takes about 20 seconds. With `--device cuda:0` all ranks use that GPU. The exit status is
1 if something fails on threads, and with --targets 3 if a target is missed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

import pycollect
from pycollect._command import Interruption
from pycollect._sizes import parse_size
from pycollect_bench import environment, rank_threads, scripts, table
from pycollect_bench.options import list_of, one_of
from pycollect_bench.output import keep_json, write_json
from pycollect_bench.record import target_record
from pycollect_bench.targets import Outcome, status

PEERS = ("gloo", "pycollect")
# Values of the options that are not given, without and with --quick. A world of processes takes
# seconds to start, so a quick run has few of them, and small ones.
USUAL: dict[str, Any] = {
    "world": 4,
    "sizes": [4, 64 << 10, 1 << 20, 16 << 20],
    "peers": list(PEERS),
    "rounds": 3,
    "seconds": 5.0,
}
QUICK: dict[str, Any] = {
    "world": 2,
    "sizes": [4, 1 << 20],
    "peers": ["gloo"],
    "rounds": 1,
    "seconds": 0.5,
}


def peers_of(text: str) -> list[str]:
    return [] if text == "none" else list_of(one_of(PEERS))(text)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    parts = rank_threads.PARTS
    what = f"comma-separated, of {', '.join(parts)} (all)"
    add("--parts", type=list_of(one_of(parts)), default=list(parts), help=what)
    add("--world", type=int, help="ranks (4; quick: 2)")
    add("--sizes", type=list_of(parse_size), help="of all_reduce (4,64K,1M,16M; quick: 4,1M)")
    add("--device", default="cpu", help="of all ranks: cpu, or a GPU such as cuda:0 (cpu)")
    peers = "backends of the processes that run whole worlds, or none (gloo,pycollect; quick: gloo)"
    add("--peers", type=peers_of, help=peers)
    add("--rounds", type=int, help="worlds of processes of each program and peer (3; quick: 1)")
    add("--seconds", type=float, help="time for each size of all_reduce, about (5; quick: 0.5)")
    add("-n", "--iterations", type=int, help="timed batches of each size (by time, if not given)")
    add("--quick", action="store_true", help="less of everything, and three of the test cases")
    add("--targets", action="store_true", help="check the speed targets of this device")
    add("--json", metavar="FILE", help="all results, in medians and their spread")
    args = scripts.parse(parser, argv)
    for name, value in (QUICK if args.quick else USUAL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def only_device(text: str) -> torch.device:
    """Return the device of all ranks.

    Raises:
        ValueError: if it does not exist, as every GPU on a machine without one.
    """
    found = pycollect.devices(text)
    if len(found) != 1:
        raise ValueError(f"--device {text} names {len(found)} devices; all ranks share one")
    return found[0]


def main(argv: Sequence[str] | None = None) -> int:
    return scripts.run("rank_threads", lambda: compare(argv))


def compare(argv: Sequence[str] | None) -> int:
    args = arguments(argv)
    device = only_device(args.device)
    about = environment.describe(shlex.join(sys.orig_argv))
    before = environment.Load.now()
    print(*environment.header(about), sep="\n")
    print(f"# {args.world} ranks on {device}", flush=True)
    results = rank_threads.Results(args.peers)

    def content(outcomes: Sequence[Outcome] = ()) -> dict[str, Any]:
        found = {"world": args.world, "device": str(device), **results.record()}
        noise = environment.noise(before, environment.Load.now(), [])
        targets = [target_record(outcome) for outcome in outcomes]
        return {"environment": about, "noise": noise, "rank_threads": found, "targets": targets}

    with Interruption() as interruption:
        rank_threads.measure(args, device, results, partial(keep_json, args.json, content))
    if results.failure:
        print(f"# FAILED: {results.failure}")
    outcomes = results.judge(device.type == "cuda") if args.targets else []
    if outcomes:
        print(*table.target_lines(outcomes), sep="\n")
    record = content(outcomes)
    print(*environment.footer(record["noise"]), sep="\n")
    write_json(args.json, record, interruption)
    interruption.reraise(args.json)
    return status(outcomes, results.failed)


if __name__ == "__main__":
    sys.exit(main())
