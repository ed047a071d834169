"""Measure collectives between hosts: network namespaces of this machine, joined by limited links.

Peers are gloo on one group of all ranks and the composition of HSDP, beside pycollect where it has
such groups. Needs root, and iproute2. `python bench/hosts.py` takes about 6 minutes. The exit
status is 1 if a result is wrong or a rank fails.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from pycollect._command import Interruption
from pycollect._sizes import parse_size
from pycollect_bench import environment, hosts, scripts
from pycollect_bench.hosts.namespaces import why_no_namespaces
from pycollect_bench.hosts.report import LEAST
from pycollect_bench.options import list_of
from pycollect_bench.output import keep_json, write_json

SIZES = "1K,4K,16K,64K,256K,1M,4M,16M"
LISTS = ("ranks", "rates", "sizes", "dtypes", "peers")


def ranks_of(text: str) -> tuple[int, int]:
    """Return the numbers of hosts and of ranks on each host.

    >>> ranks_of("2x4")
    (2, 4)
    """
    numbers = text.split("x")
    if len(numbers) != 2 or not all(n.isascii() and n.isdigit() and int(n) for n in numbers):
        raise ValueError(f"{text!r} is not hosts x ranks of each host; give for example 2x4")
    if int(numbers[0]) < 2:
        raise ValueError(f"{text!r} has one host, and so no link")
    return int(numbers[0]), int(numbers[1])


def rate_of(text: str) -> float | None:
    """Return a rate in bits per second.

    >>> rate_of("2.5")
    2500000000.0
    """
    if text == "none":
        return None
    rate = float(text) * 1e9
    if not 1e6 <= rate <= 1e12:
        raise ValueError(f"{text!r} is not a rate from 0.001 to 1000 Gbit/s, or none")
    return rate


def dtype_of(text: str) -> torch.dtype:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{text!r} is not a torch dtype; give for example float32 or bfloat16")
    return dtype


def peer_of(text: str) -> str:
    if text not in hosts.PEERS:
        raise ValueError(f"{text!r} is not among {', '.join(hosts.PEERS)}")
    return text


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add_list(name: str, one: Callable[[str], Any], default: str, what: str) -> None:
        parse = list_of(one)
        about = f"{what} ({default})"
        parser.add_argument(name, nargs="+", type=parse, default=[parse(default)], help=about)

    add_list("--ranks", ranks_of, "2x2,2x4", "hosts x ranks of each host")
    add_list("--rates", rate_of, "1,10", "of the links, in Gbit/s, or none")
    add_list("--sizes", parse_size, SIZES, "bytes of a rank")
    add_list("--dtypes", dtype_of, "float32", "dtypes")
    add_list("--peers", peer_of, ",".join(hosts.PEERS), "candidates")
    add = parser.add_argument
    add("--collective", choices=list(LEAST), default="all_reduce", help="(all_reduce)")
    add("--seconds", type=float, default=5.0, help="time for each size, about (5)")
    add("-n", "--iterations", type=int, help="timed calls of each (by time, if not given)")
    add("--json", metavar="FILE", help="all results, in medians and their spread")
    args = scripts.parse(parser, argv)
    for name in LISTS:
        setattr(args, name, list(dict.fromkeys(chain(*getattr(args, name)))))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    return scripts.run("hosts", lambda: compare(argv))


def compare(argv: Sequence[str] | None) -> int:
    args = arguments(argv)
    if reason := why_no_namespaces():
        raise ValueError(reason)
    about = environment.describe(shlex.join(sys.orig_argv))
    before = environment.Load.now()
    print(*environment.header(about), sep="\n", flush=True)
    results = hosts.HostResults()

    def content() -> dict[str, Any]:
        noise = environment.noise(before, environment.Load.now(), results.cases())
        return {"environment": about, "noise": noise, "hosts": results.record()}

    with Interruption() as interruption:
        hosts.measure(args, results, partial(keep_json, args.json, content))
    if results.failure:
        print(f"# FAILED: {results.failure}")
    record = content()
    print(*environment.footer(record["noise"]), sep="\n")
    write_json(args.json, record, interruption)
    interruption.reraise(args.json)
    return int(results.failed)


if __name__ == "__main__":
    sys.exit(main())
