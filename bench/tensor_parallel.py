"""Measure tensor-parallel decoding of a Llama-shaped model with random weights, on processes.

The backends, and the ways to divide the model, take turns with the undivided model on one rank.
`python bench/tensor_parallel.py` takes about 7 minutes. The exit status is 1 if logits are wrong or
a rank fails, and with --targets 3 if a target is missed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from pycollect._command import Interruption
from pycollect_bench import environment, scripts, table
from pycollect_bench import tensor_parallel as decoding
from pycollect_bench.options import list_of, one_of, whole
from pycollect_bench.output import keep_json, write_json
from pycollect_bench.record import target_record
from pycollect_bench.targets import Outcome, status
from pycollect_bench.tensor_parallel.case import TOLERANCE
from pycollect_bench.tensor_parallel.llama import EXPERTS, HEAD
from pycollect_bench.tensor_parallel.picture import draw
from pycollect_bench.tensor_parallel.report import judge

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCE}


def hidden_size(text: str) -> int:
    hidden = whole(text)
    if hidden % (4 * HEAD):
        raise ValueError(f"{hidden} is not a multiple of {4 * HEAD}")
    return hidden


def dtype_of(text: str) -> torch.dtype:
    return DTYPES[one_of(DTYPES)(text)]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [variant.name for variant in decoding.VARIANTS]
    own = [variant.name for variant in decoding.VARIANTS if not variant.client]
    add = parser.add_argument

    def add_list(name: str, one: Callable[[str], Any], default: str, what: str) -> None:
        parse = list_of(one)
        add(name, type=parse, default=parse(default), help=f"{what} ({default})")

    models = decoding.MODELS
    add_list("--models", one_of(models), ",".join(models), "dense, or a mixture of experts")
    add_list("--hidden", hidden_size, "1024,512", "hidden sizes; experts: only the largest")
    add_list("--dtypes", dtype_of, ",".join(DTYPES), "dtypes")
    add_list("--batches", whole, "1,8", "sequences; experts: only the largest number")
    add_list("--ranks", whole, "2,4", "numbers of ranks")
    what = f"{', '.join(names)} (all but transformers')"
    add("--variants", type=list_of(one_of(names)), default=own, help=what)
    add("--layers", type=int, default=8, help="(8)")
    add("--vocab", type=int, default=8192, help="tokens of the vocabulary (8192)")
    add("--prompt", type=int, default=32, help="tokens before the first new one (32)")
    add("--tokens", type=int, default=6, help="tokens of a turn after the first new one (6)")
    add("--seconds", type=float, default=10.0, help="time for a case, with 7 turns at least (10)")
    add("-n", "--iterations", type=int, help="turns of each (by time, if not given)")
    add("--targets", action="store_true", help="check the speed targets")
    add("--json", metavar="FILE", help="all results, in medians and their spread")
    add("--plot", metavar="FILE", help="a picture: bars of the parts of a token's time")
    args = scripts.parse(parser, argv)
    for reason in wrong(args):
        parser.error(reason)
    return args


def wrong(args: argparse.Namespace) -> list[str]:
    """Return why these numbers of ranks cannot divide the models."""
    divided = [
        (f"{hidden // HEAD // 2} key heads (hidden {hidden})", hidden // HEAD // 2)
        for hidden in args.hidden
    ]
    divided += [(f"{args.vocab} tokens of the vocabulary", args.vocab)]
    if "moe" in args.models:
        divided += [(f"{EXPERTS} experts", EXPERTS)]
        divided += [(f"{max(args.batches)} sequences of experts", max(args.batches))]
    return [
        f"{ranks} ranks cannot divide {what} evenly" if ranks > 1 else "1 rank divides nothing"
        for ranks in args.ranks
        for what, number in divided
        if ranks == 1 or number % ranks
    ]


def main(argv: Sequence[str] | None = None) -> int:
    return scripts.run("tensor_parallel", lambda: compare(argv))


def compare(argv: Sequence[str] | None) -> int:
    args = arguments(argv)
    about = environment.describe(shlex.join(sys.orig_argv))
    before = environment.Load.now()
    print(*environment.header(about), sep="\n", flush=True)
    results = decoding.DecodingResults()

    def content(outcomes: Sequence[Outcome] = ()) -> dict[str, Any]:
        noise = environment.noise(before, environment.Load.now(), [])
        targets = [target_record(outcome) for outcome in outcomes]
        return {"environment": about, "noise": noise, **results.record(), "targets": targets}

    with Interruption() as interruption:
        decoding.measure(args, results, partial(keep_json, args.json, content))
    if results.failure:
        print(f"# FAILED: {results.failure}")
    outcomes = judge(results.cases) if args.targets else []
    if outcomes:
        print(*table.target_lines(outcomes), sep="\n")
    record = content(outcomes)
    print(*environment.footer(record["noise"]), sep="\n")
    write_json(args.json, record, interruption)
    if args.plot and results.cases:
        draw(record, args.plot)
    interruption.reraise(args.json)
    return status(outcomes, results.failed)


if __name__ == "__main__":
    sys.exit(main())
