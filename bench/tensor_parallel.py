"""Measure tensor-parallel decoding of a Llama-shaped model with random weights, on processes.

The backends, and the ways to divide the model, take turns with the undivided model on one rank.
`python bench/tensor_parallel.py` takes about 7 minutes. The exit status is 1 if logits are wrong or
a rank fails, and with --targets 3 if a target is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from pycollect_bench import plot, report, runner
from pycollect_bench.decoding import ALONE, GLOO, TOLERANCE, VARIANTS
from pycollect_bench.llama import EXPERTS, HEAD, Case
from pycollect_bench.options import effort, list_of, one_of, positive
from pycollect_bench.ranks import Ranks
from pycollect_bench.report import Column, Table, Target, over, where
from pycollect_bench.runner import Item, Row, Script

MODELS = ("llama", "moe")
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
# What remains of a token is computing; what dtensor's is above plain's, DTensor's own work.
# error: of the logits: norm of the difference from one rank alone, divided by the norm.
# #wrong: 1 if it is too large."""


def share(part: str) -> Callable[[Row], float]:
    """Return the value of the percentage of a token that is `waiting` or `moving`."""
    return lambda row: 100 * row.numbers[part] / row.seconds


def of_calls(value: Callable[[Row], float]) -> Callable[[dict[str, Any], Row], float | None]:
    """Return the value of a column that only variants with collectives have."""
    return lambda about, row: value(row) if row.numbers["calls"] else None


TABLE = Table(
    LEGEND,
    (
        Column("variant", "name", width=-24),
        Column("tokens/s", lambda about, row: about["batch"] / row.seconds, width=9, digits=1),
        Column(f"x{GLOO}"),
        Column("first", unit="(ms)", width=8, digits=1, scale=1e3),
        Column("token", "time", "(ms)", 8, scale=1e3),
        Column("%wait", of_calls(share("waiting")), width=7, digits=1),
        Column("%move", of_calls(share("moving")), width=7, digits=1),
        Column(
            "us/call",
            of_calls(lambda row: row.numbers["moving"] / row.numbers["calls"]),
            width=7,
            digits=1,
            scale=1e6,
        ),
        Column("error", lambda about, row: f"{row.numbers['error']:.1e}", width=8),
        report.WRONG,
    ),
    title=lambda result: f"# {report.place(result.about)}",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument

    def add_list(name: str, one: Callable[[str], Any], default: str, what: str) -> None:
        parse = list_of(one)
        add(name, type=parse, default=parse(default), help=f"{what} ({default})")

    add_list("--models", one_of(MODELS), ",".join(MODELS), "dense, or a mixture of experts")
    add_list("--hidden", positive, "1024,512", "hidden sizes; experts: only the largest")
    add_list("--dtypes", one_of(TOLERANCE), ",".join(TOLERANCE), "dtypes")
    add_list("--batches", positive, "1,8", "sequences; experts: only the largest number")
    add_list("--ranks", positive, "2,4", "numbers of ranks")
    what = f"of {', '.join(VARIANTS)} (all)"
    add("--variants", type=list_of(one_of(VARIANTS)), default=list(VARIANTS), help=what)
    add("--layers", type=positive, default=8, help="layers (8)")
    add("--vocab", type=positive, default=8192, help="tokens of the vocabulary (8192)")
    add("--prompt", type=positive, default=32, help="tokens before the first new one (32)")
    add("--tokens", type=positive, default=6, help="tokens of a turn after the first new one (6)")


def check(args: argparse.Namespace) -> None:
    """Raise ValueError if these numbers of ranks cannot divide the models."""
    for case, ranks in product(cases(args), args.ranks):
        units = [case.vocab, *[EXPERTS, case.batch] * case.moe]
        if ranks == 1 or case.hidden % (2 * HEAD * ranks) or any(n % ranks for n in units):
            raise ValueError(f"--ranks {ranks} cannot divide {case.model} {case.hidden} evenly")


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
        with Ranks(world, "pycollect_bench.decoding:work", task) as ranks:
            for case in cases(args):
                yield ranks.ask(case)[0]


ONE = where(model=("llama",), batch=(1,))  # what targets are for
FASTER = "a token of hidden {} through DTensor, over gloo"
TARGETS = (
    Target(FASTER.format(1024), 2.0, DTENSOR, over(GLOO), where(ONE, hidden=(1024,))),
    Target(FASTER.format(512), 5.0, DTENSOR, over(GLOO), where(ONE, hidden=(512,))),
    Target("moving, of a token through DTensor", 1.0, DTENSOR, share("moving"), ONE, "<=", "%"),
)


LABELS = {ALONE: "one rank", "plain:direct": "operator", "plain:zero-copy": "zero-copy"}
COLOURS = {LABELS[ALONE]: plot.BASELINE, "computing": plot.COMPUTING}
COLOURS |= {"waiting": plot.WAITING, "moving": plot.MOVING}


def draw(record: dict[str, Any], path: str) -> None:
    """Write bars of a token's time to `path`: a row of panels per model, with its smallest batch,
    of which each has a number of ranks.
    """
    models: dict[tuple[str, int], dict[str, list[plot.Bar]]] = {}
    smallest: dict[tuple[str, int], int] = {}
    for case in sorted(record["cases"], key=lambda case: int(case["batch"])):
        model = case["model"], case["hidden"]
        if case["batch"] > smallest.setdefault(model, case["batch"]):
            continue
        title = "{model} {hidden}, batch {batch}, {world} ranks".format_map(case)
        bars = models.setdefault(model, {}).setdefault(title, [])
        for row in case["rows"]:
            name, token = row["name"], row["time"]["p50"] * 1e3
            parts = {part: row[part] * 1e3 for part in ("waiting", "moving")}
            own = token - sum(parts.values())
            text = f"{case['batch'] * 1e3 / token:.1f} tokens/s"
            if "speedup" in row and row["kind"] != runner.PEER:
                text += f", {row['speedup'][GLOO]:.1f}x gloo"
            label = LABELS.get(name, name.replace("dtensor", "DTensor").replace(":", ", "))
            parts = {label if name == ALONE else "computing": own, **parts}
            bars.append((f"{label}, {case['dtype']}", parts, text))
    plot.plot_bars(list(models.values()), COLOURS, "ms per token", record, path)


SCRIPT = Script(
    "tensor_parallel",
    __doc__,
    add_arguments,
    measure,
    10.0,
    1,
    check,
    targets=lambda args: TARGETS,
    draw=draw,
)
main = SCRIPT.main

if __name__ == "__main__":
    sys.exit(main())
