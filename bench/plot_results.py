"""Draw the picture of a result file: `python bench/plot_results.py bench/results/cpu.json cpu.png`.

The benchmark itself draws the same picture with --plot.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pycollect._files import check_input, check_picture
from pycollect_bench import result_format, scripts
from pycollect_bench.plot import plot
from pycollect_bench.tensor_parallel import picture as decoding
from pycollect_bench.training import picture as training

# What a record has, and how it is drawn.
DRAWN = {"cases": plot, "training": training.draw, "tensor_parallel": decoding.draw}


def main(argv: Sequence[str] | None = None) -> int:
    return scripts.run("plot_results", lambda: redraw(argv))


def redraw(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    of = "bench/allreduce_bandwidth.py, bench/train.py or bench/tensor_parallel.py"
    add("record", type=Path, help=f"the JSON file of {of}")
    add("picture", help="the picture to write (.png, .svg or .pdf)")
    args = parser.parse_args(argv)
    check_picture(args.picture)
    check_input("record", args.record)
    record = result_format.read("record", args.record)
    for key, draw in DRAWN.items():
        if key in record:
            draw(record, args.picture)
            return 0
    raise ValueError(f"the record {args.record} has none of {', '.join(DRAWN)} to draw")


if __name__ == "__main__":
    sys.exit(main())
