"""`python -m pycollect.train`: trains a model on the command line, see --help."""

import sys
from collections.abc import Sequence

from .checkpoint import CheckpointError
from .compare import run as run_comparison
from .data import DataError
from .job import prepare
from .options import choice, parser, running
from .report import Report
from .trainer import run

INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; give the exit code: 0, 2 for bad input, 130 after Ctrl-C."""
    command = parser()
    args = command.parse_args(arguments)
    report = Report()
    try:
        try:
            job, notice = prepare(choice(args), running(args))
        except ValueError as error:
            command.error(str(error))
        if notice:
            report.line(notice)
        if args.compare:
            run_comparison(job, args.compare, report)
        else:
            run(job, report)
    except (DataError, CheckpointError) as error:
        print(f"{command.prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        goes_on = f"; --resume {args.checkpoint} goes on from here" if args.checkpoint else ""
        print(f"interrupted{goes_on}", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
