"""`python -m pycollect.train`: trains LeNet on the command line, see --help."""

import sys
from collections.abc import Sequence

from .compare import compare
from .fashion import DataError
from .options import parser
from .report import Report
from .settings import Choice
from .trainer import run

INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; give the exit code: 0, 2 for bad input, 130 after Ctrl-C."""
    command = parser()
    args = command.parse_args(arguments)
    choice = Choice(
        args.devices, args.batch_size, args.lr, args.epochs, args.seed, args.data, args.data_dir
    )
    report = Report()
    try:
        try:
            data, settings, notice = choice.prepare()
        except ValueError as error:
            command.error(str(error))
        if notice:
            report.line(notice)
        if args.compare:
            compare(data, settings, report)
        else:
            run(data, settings, args.reduce, report)
    except DataError as error:
        print(f"{command.prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
