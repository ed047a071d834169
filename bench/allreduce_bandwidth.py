"""Measure collectives against plain torch, torch.distributed's backends, MPI, and the limit.

Without further options the ranks are a list of tensors in this process. With --processes, --threads
or --hosts they are processes, threads, or processes in network namespaces that stand for hosts,
each for the given numbers of ranks. Try `python bench/allreduce_bandwidth.py -e 16M --plot
speed.png`, or `--processes 2,4`, with `--devices cuda:0` between processes that share a GPU.

The exit status is 1 if a result is wrong or pycollect refuses a case, and with --targets 3 if a
target is missed. --coalesced and --overhead replace the sizes; --targets adds the cases that the
targets of lists and of processes need.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from pycollect._sizes import size_argument, size_range
from pycollect_bench import lists, peers, processes, rank_work, threads
from pycollect_bench.cases import COLLECTIVES, OPS
from pycollect_bench.lists import only_extras
from pycollect_bench.options import dtype, list_of, one_of, positive
from pycollect_bench.plot import plot
from pycollect_bench.ranks import threads_of
from pycollect_bench.runner import Script


class Kind(NamedTuple):
    """A kind of ranks: its module, peers and usual sizes, and the options that others have not."""

    module: ModuleType
    peers: Sequence[str]
    sizes: tuple[str, str, int]
    options: str


_USED = "collective dtype op devices targets plot torch_threads"
# By their option; "" is a list.
KINDS = {
    "": Kind(lists, peers.NAMES, ("4K", "128M", 4), f"{_USED} world algorithms coalesced overhead"),
    "processes": Kind(processes, rank_work.PEERS, ("4", "128M", 4), f"{_USED} backend"),
    "threads": Kind(threads, threads.PEERS, ("4", "64M", 64), "devices targets"),
    "hosts": Kind(processes, processes.HOST_PEERS, ("1K", "16M", 4), "collective dtype op rates"),
}
PEERS = tuple(dict.fromkeys(name for kind in KINDS.values() for name in kind.peers))
# Values of options that are not given.
USUAL: dict[str, Any] = {
    "collective": "all_reduce",
    "dtype": [torch.float32],
    "op": "sum",
    "world": [2, 4, 8],
    "backend": "pycollect",
    "rates": [1e9, 1e10],
}


def peers_of(text: str) -> list[str] | None:
    """Parse the names of peers; None stands for all that a case has."""
    named = {"all": None, "none": list[str]()}
    return named[text] if text in named else list_of(one_of((*PEERS, "all", "none")))(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is measured")
    add = what.add_argument
    add("--collective", choices=list(COLLECTIVES), help="(all_reduce)")
    add("-b", "--minbytes", type=size_argument, help="smallest size (4K; of other ranks 4 or 1K)")
    add(
        "-e", "--maxbytes", type=size_argument, help="largest size (128M; threads: 64M, hosts: 16M)"
    )
    add("-f", "--stepfactor", type=positive, help="from size to size (4; threads: 64)")
    dtypes, worlds = list_of(dtype), list_of(positive)
    add("-d", "--dtype", type=dtypes, help="one or more (float32)")
    add("-o", "--op", choices=list(OPS), help="the reduction (sum)")
    add("--world", type=worlds, help="numbers of ranks of a list (2,4,8)")
    add("--devices", help="devices of the ranks, in turn, as pycollect.devices reads them")
    add("--peers", type=peers_of, help=f"of {', '.join(PEERS)}; all or none (all)")
    kinds = parser.add_mutually_exclusive_group()
    add = kinds.add_argument
    add("--processes", type=worlds, metavar="N", help="ranks are processes: numbers of ranks")
    add("--threads", type=worlds, metavar="N", help="ranks are threads: numbers of ranks")
    shapes = list_of(processes.ranks_of)
    add("--hosts", type=shapes, metavar="HxR", help="H hosts of R processes each; needs root")
    add = parser.add_argument_group("for some kinds of ranks").add_argument
    add("--algorithms", help="lists: 'all' or names, besides the default choice")
    add("--coalesced", choices=["lenet"], help="lists: LeNet's gradients in one coalesced call")
    add("--overhead", action="store_true", help="lists: a call on 4 ranks of 4 elements")
    add("--backend", help="processes: of torch.distributed (pycollect)")
    rates = list_of(processes.rate_of)
    add("--rates", type=rates, help="hosts: of the links, Gbit/s or none (1,10)")
    add(
        "--torch-threads",
        type=positive,
        help="lists, processes: threads that torch may use in a process",
    )


def kind_of(args: argparse.Namespace) -> str:
    """Return the kind of ranks that the options name."""
    return next((kind for kind in KINDS if kind and getattr(args, kind)), "")


def check(args: argparse.Namespace) -> None:
    """Give values to options that were left out; raise ValueError for those that are wrong."""
    option = kind_of(args)
    kind, where = KINDS[option], f"with --{option}" if option else "on lists"
    for name in " ".join(kind.options for kind in KINDS.values()).split():
        if getattr(args, name) and name not in kind.options.split():
            raise ValueError(f"--{name.replace('_', '-')} has no effect {where}; leave it out")
    for name, value in USUAL.items():
        setattr(args, name, getattr(args, name) or value)
    begin, end, step = kind.sizes
    args.minbytes = args.minbytes or size_argument(begin)
    args.maxbytes = args.maxbytes or max(size_argument(end), args.minbytes)
    args.stepfactor = args.stepfactor or step
    size_range(args.minbytes, args.maxbytes, args.stepfactor)
    known = [name for name, spec in COLLECTIVES.items() if (spec.group if option else spec.lists)]
    for what, name, among in (
        ("collective", args.collective, known),
        *(("peer", name, kind.peers) for name in args.peers or ()),
    ):
        if name not in among:
            raise ValueError(f"{name!r} is not a {what} {where}; there are {', '.join(among)}")
    if args.plot and (args.collective == "barrier" or only_extras(args)):
        raise ValueError("--plot draws speed against size, and no sizes are measured")
    if args.torch_threads and not option:
        torch.set_num_threads(args.torch_threads)
    kind.module.check(args)


def about(args: argparse.Namespace) -> dict[str, Any]:
    """Return the requested collective and dtypes; the targets may have added other cases."""
    kind = kind_of(args)
    dtypes = [str(dtype).removeprefix("torch.") for dtype in args.dtype]
    found = {"collective": args.collective, "dtypes": dtypes, "ranks": kind or "list"}
    if kind in ("processes", "hosts"):
        worlds = args.processes or [hosts * ranks for hosts, ranks in args.hosts]
        threads = [args.torch_threads or threads_of(world) for world in worlds]
        found["threads"] = f"{' or '.join(map(str, dict.fromkeys(threads)))} a rank"
    return found


SCRIPT = Script(
    "allreduce_bandwidth",
    __doc__,
    add_arguments,
    measure=lambda args: KINDS[kind_of(args)].module.measure(args),
    check=check,
    targets=lambda args: KINDS[kind_of(args)].module.targets(args),
    draw=plot,
    about=about,
)
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
