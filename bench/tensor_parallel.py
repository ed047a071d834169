"""Measure tensor-parallel decoding of a Llama-shaped model with random weights, on processes.

The backends, and the ways to divide the model, take turns with the undivided model on one rank.
`python bench/tensor_parallel.py` takes about 7 minutes. The exit status is 1 if logits are wrong or
a rank fails, and with --targets 3 if a target is missed.
"""

from __future__ import annotations

import pycollect  # noqa: F401  # before torch, so that Ctrl-C prints no traceback

# isort: split
import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import product
from statistics import median_low
from typing import Any

from pycollect._timing import Timing
from pycollect_bench import report, runner
from pycollect_bench.decoding.llama import Case
from pycollect_bench.decoding.picture import draw
from pycollect_bench.decoding.rank import Measured
from pycollect_bench.decoding.stamps import divided
from pycollect_bench.decoding.variants import ALONE, CLIENT, GLOO, VARIANTS
from pycollect_bench.options import effort, list_of, one_of, positive, whole
from pycollect_bench.ranks import Ranks, RanksFailed
from pycollect_bench.report import Column, Table, Target, number, of_row, over, where
from pycollect_bench.runner import Item, Result, Row, Script

MODELS = ("llama", "moe")
# Largest error of a divided model's logits: other orders of sums, rounded in the model's dtype, and
# with experts tokens of which two experts are nearly equal. Without one sum it is about 1.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15}
PLAIN, DTENSOR = "plain:pycollect", "dtensor:pycollect"

LEGEND = """\
# A Llama-shaped model with random weights decodes; each rank is a process. alone: undivided on one
# rank with all cores; dtensor: divided by parallelize_module; plain: by a model that calls
# dist.all_reduce itself; zero-copy: on tensors of pycollect.symmetric_empty. All take turns; a turn
# is a prompt and some tokens of each sequence; medians over turns, ratios within rounds.
# tokens/s: of all sequences of the batch together. xgloo: the time of a token over gloo, divided
# the same way, by this time. first: ms until the token after the prompt. token: ms for each other.
# %wait: of the token, in collectives until the last rank has called them: other ranks compute.
# %move: the rest of the collectives, in the mean of the ranks; us/call: the same for each call.
# error: of the logits: norm of the difference from one rank alone, divided by the norm."""


def of_calls(head: str, value: Callable[[Row], float]) -> Column:
    """Return the column of a number that only variants with collectives have."""
    return Column(
        head, "", 7, lambda about, row: number(value(row) if row.numbers["calls"] else None, 1)
    )


TABLE = Table(
    LEGEND,
    (
        report.name("variant", 24),
        Column("tokens/s", "", 9, lambda about, row: number(about["batch"] / row.seconds, 1)),
        report.faster(GLOO),
        of_row("first", "first", "(ms)", 8, 1, 1e3),
        Column("token", "(ms)", 8, lambda about, row: number(row.seconds, 2, 1e3)),
        of_calls("%wait", lambda row: 100 * row.numbers["waiting"] / row.seconds),
        of_calls("%move", lambda row: 100 * row.numbers["moving"] / row.seconds),
        of_calls("us/call", lambda row: 1e6 * row.numbers["moving"] / row.numbers["calls"]),
        Column("error", "", 8, lambda about, row: f"{row.numbers['error']:.1e}"),
    ),
    title=lambda result: f"# {report.place(result.about)}",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument

    def add_list(name: str, one: Callable[[str], Any], default: str, what: str) -> None:
        parse = list_of(one)
        add(name, type=parse, default=parse(default), help=f"{what} ({default})")

    add_list("--models", one_of(MODELS), ",".join(MODELS), "dense, or a mixture of experts")
    add_list("--hidden", whole, "1024,512", "hidden sizes; experts: only the largest")
    add_list("--dtypes", one_of(TOLERANCE), ",".join(TOLERANCE), "dtypes")
    add_list("--batches", whole, "1,8", "sequences; experts: only the largest number")
    add_list("--ranks", whole, "2,4", "numbers of ranks")
    own = [name for name in VARIANTS if not name.startswith(CLIENT)]
    what = f"{', '.join(VARIANTS)} (all but {CLIENT}')"
    add("--variants", type=list_of(one_of(VARIANTS)), default=own, help=what)
    for name, usual, what in (
        ("--layers", 8, "layers"),
        ("--vocab", 8192, "tokens of the vocabulary"),
        ("--prompt", 32, "tokens before the first new one"),
        ("--tokens", 6, "tokens of a turn after the first new one"),
    ):
        add(name, type=positive, default=usual, help=f"{what} ({usual})")


def check(args: argparse.Namespace) -> None:
    """Raise ValueError if these numbers of ranks cannot divide the models."""
    for case, ranks in product(cases(args), args.ranks):
        for what, size in case.divided.items():
            if ranks == 1 or not size or size % ranks:
                model = f"{case.model} {case.hidden}"
                raise ValueError(f"--ranks {ranks} cannot divide the {size} {what} of {model}")


def cases(args: argparse.Namespace) -> list[Case]:
    """Return the cases of each world."""
    dense = product(["llama"], args.hidden, args.dtypes, args.batches)
    experts = product(["moe"], [max(args.hidden)], args.dtypes, [max(args.batches)])
    rest = args.layers, args.vocab, args.prompt, args.tokens
    return [Case(*key, *rest) for key in (*dense, *experts) if key[0] in args.models]


def measure(args: argparse.Namespace) -> Iterator[Item]:
    yield TABLE
    names = [name for name in VARIANTS if name in args.variants]
    task = names, effort(args, single_calls=True)
    for world in args.ranks:
        with Ranks(world, "pycollect_bench.decoding.rank:work", task) as ranks:
            for case in cases(args):
                yield result(case, ranks.ask(case))


def result(case: Case, of_ranks: Sequence[dict[str, Measured]]) -> Result:
    """Return the rows of a case, and what DTensor itself costs."""
    about = {**asdict(case), "world": len(of_ranks)}
    rows = {name: row(name, case, [mine[name] for mine in of_ranks]) for name in of_ranks[0]}
    for name, found in rows.items():
        gloo = rows.get(f"{name.partition(':')[0]}:{GLOO}")
        rows[name] = found.compared({GLOO: gloo.timing} if gloo else {})
    notes = [f"# WRONG: {name}" for name, found in rows.items() if found.wrong]
    if DTENSOR in rows and PLAIN in rows:
        computed = {
            n: r.seconds - r.numbers["waiting"] - r.numbers["moving"] for n, r in rows.items()
        }
        own = computed[DTENSOR] - computed[PLAIN]
        percent = 100 * own / rows[DTENSOR].seconds
        notes.append(f"# DTensor itself computes {own * 1e3:.2f} ms of a token, {percent:.0f} %")
    return Result(about, list(rows.values()), notes=tuple(notes))


def row(name: str, case: Case, of_ranks: Sequence[Measured]) -> Row:
    """Return the row of a variant: times of the slowest rank, and `waiting` and `moving` as parts
    of a token in the mean of the ranks.

    Raises:
        RanksFailed: if a token has not its number of calls, so that times are missing.
    """
    calls = case.collectives + name.startswith(CLIENT)  # it divides the embedding, too
    calls *= name != ALONE
    turns = list(zip(*(turns for turns, _ in of_ranks), strict=True))
    found = {len(one.calls) / case.tokens for turn in turns for one in turn}
    if found != {calls}:
        raise RanksFailed(f"{name} makes {found} collectives of a token, not {calls}")
    shares = zip(*(divided([one.calls for one in turn]) for turn in turns), strict=True)
    waiting, moving = (median_low(share) / case.tokens for share in shares)
    first = median_low(max(one.first for one in turn) for turn in turns)
    error, backend = max(error for _, error in of_ranks), VARIANTS[name][1]
    numbers = {"first": first, "waiting": waiting, "moving": moving, "calls": calls, "error": error}
    return Row(
        name,
        Timing(tuple((max(one.token for one in turn),) for turn in turns)),
        kind={"": ALONE, GLOO: runner.PEER}.get(backend, runner.OURS),
        wrong=int(error > TOLERANCE[case.dtype]),
        numbers=numbers,
    )


def moving(row: Row) -> float:
    """Return the percentage of a token that data move."""
    return 100 * row.numbers["moving"] / row.seconds


ONE = where(model=("llama",), batch=(1,))  # what targets are for
FASTER = "a token of hidden {} through DTensor, over gloo"
TARGETS = (
    Target(FASTER.format(1024), 2.0, DTENSOR, over(GLOO), where(ONE, hidden=(1024,))),
    Target(FASTER.format(512), 5.0, DTENSOR, over(GLOO), where(ONE, hidden=(512,))),
    Target("moving, of a token through DTensor", 1.0, DTENSOR, moving, ONE, "<=", "%"),
)


def targets(args: argparse.Namespace) -> Sequence[Target]:
    return TARGETS


SCRIPT = Script("tensor_parallel", __doc__, add_arguments, measure, 10.0, 1, check, targets, draw)
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
