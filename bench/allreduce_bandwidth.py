"""Measure pycollect's collectives against plain torch and the memory limit.

Try `python bench/allreduce_bandwidth.py -e 16M --plot speed.png`, or `--processes 2,4` for
torch.distributed between processes against gloo, with `--devices cuda:0` between processes that
share a GPU; `--help` lists the options. The implementation is `pycollect_bench`.
"""

import sys

from pycollect_bench import main

if __name__ == "__main__":
    sys.exit(main())
