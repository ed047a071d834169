"""One thread per rank: `torch.distributed` programs with many ranks in one process.

>>> import torch, torch.distributed as dist
>>> from pycollect import threads
>>> def program(rank, world):
...     x = torch.full((2,), float(rank))
...     dist.all_reduce(x)
...     return x.tolist()
>>> threads.launch(program, 3)
[[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]

`python -m pycollect.threads --nproc 4 script.py` runs a script that is written for `torchrun`.
"""

from .launcher import launch

__all__ = ["launch"]
