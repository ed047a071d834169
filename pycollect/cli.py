"""The command ``pycollect``: info, plan and bench, each described by its ``--help``.

bench works in a checkout only.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pycollect

from . import _C, _command, info
from ._plan_picture import check as check_plot
from ._sizes import size_argument


def _info(args: argparse.Namespace) -> int:
    found = info.describe()
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print(*info.lines(found), sep="\n")
    return 0


def _plan(args: argparse.Namespace) -> int:
    plan = pycollect.plan(
        args.collective,
        args.world,
        algorithm=args.algorithm,
        nbytes=args.bytes,
        root=args.root,
        pieces=args.pieces,
        in_place=False if args.out_of_place else None,
    )
    if args.plot:
        check_plot(plan.world, args.plot)
    print(plan)
    defect = plan.verify()
    print(f"verify   {defect or 'correct, no race, no deadlock'}")
    for model in [args.model] if args.model else _C.models():
        print(f"predict  {plan.predict(model) * 1e6:,.1f} us on {model}, one device per rank")
    if args.plot:
        plan.plot(args.plot, args.model or "nvlink")
        print(f"plot     {args.plot}")
    return 0 if defect is None else 1


def _add_bench(command: argparse.ArgumentParser) -> None:
    """Add the benchmark's arguments if this package is in a checkout; a wheel has no benchmark."""
    folder = Path(__file__).resolve().parents[1] / "bench"
    if not (folder / "pycollect_bench").is_dir():
        command.set_defaults(run=_no_bench)
        return
    sys.path.insert(0, str(folder))
    bench = importlib.import_module("allreduce_bandwidth").SCRIPT
    bench.add_to(command)
    command.set_defaults(run=lambda args: bench.run(args, shlex.join(sys.orig_argv)))


def _no_bench(args: argparse.Namespace) -> int:
    raise ValueError(
        "bench: the benchmarks are not part of an installed pycollect; run them from a checkout: "
        "python bench/allreduce_bandwidth.py"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pycollect", description="Collectives for PyTorch that run where you are."
    )
    parser.add_argument("--version", action="version", version=pycollect.__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(
        name: str, run: Callable[[argparse.Namespace], int], about: str
    ) -> Callable[..., object]:
        command = commands.add_parser(name, help=about, description=about)
        command.set_defaults(run=run)
        return command.add_argument

    option = add("info", _info, "Print versions, devices and settings, to paste into a report.")
    option("--json", action="store_true", help="as one JSON object")

    option = add("plan", _plan, "Print, verify and predict the plan of a collective.")
    option("collective", choices=_C.COLLECTIVES)
    option("world", type=int, help="number of ranks")
    option("-a", "--algorithm", help="its name (default: as pycollect.plan selects)")
    about = "of a rank's largest buffer, such as 64K (default: 1M)"
    option("-b", "--bytes", type=size_argument, default=1 << 20, help=about)
    option("--root", type=int, default=0, help="rank of broadcast, reduce, scatter or gather (0)")
    option("--pieces", type=int, default=4, help="pieces of a pipeline (4)")
    option("--out-of-place", action="store_true", help="outputs have memory of their own")
    option("--model", choices=list(_C.models()), help="machine to predict for")
    option("--plot", metavar="FILE", help="draw ranks against predicted time, as PNG or SVG")

    about = "Compare collectives with other implementations (in a checkout only)."
    command = commands.add_parser("bench", help=about, description=about)
    _add_bench(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default sys.argv's; return the exit status."""
    return _command.run("pycollect", lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
