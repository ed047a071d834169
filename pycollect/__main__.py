"""The command `python -m pycollect`: the same as `pycollect`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
