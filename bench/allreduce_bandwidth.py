"""Measure pycollect's collectives against plain torch and the memory's limit.

Try `python bench/allreduce_bandwidth.py -e 16M --plot speed.png`, or `--processes 2,4` for
torch.distributed between processes, beside gloo, and with `--devices cuda:0` of processes that
share a GPU; `--help` lists the options.
All of it is in `pycollect.bench`.
"""

import sys

from pycollect.bench import main

if __name__ == "__main__":
    sys.exit(main())
