"""Collectives for PyTorch that run where you are: many GPUs, many ranks on one GPU, or a CPU.

>>> import torch, pycollect as pc
>>> x = [torch.ones(2), torch.ones(2)]
>>> pc.all_reduce(x); x[1]
tensor([2., 2.])
"""

from ._build_check import check as _check

_check()

import atexit as _atexit  # noqa: E402

import torch.distributed as _dist  # noqa: E402

from . import _C, _fake_kernels, autograd, log  # noqa: E402, F401
from ._version import __version__  # noqa: E402
from .collectives import (  # noqa: E402
    Work,
    all_reduce,
    all_reduce_coalesced,
    barrier,
    broadcast,
    broadcast_coalesced,
    copy_,
    reduce,
    replicate,
    tree_sum,
)
from .collectives_along_dim import all_gather, all_to_all, gather, reduce_scatter, scatter  # noqa: E402
from .communicator import Communicator  # noqa: E402
from .devices import devices  # noqa: E402
from .errors import CollectiveError, Deadlock, PeerLost, Timeout  # noqa: E402
from .plans import CostModel, Plan, algorithms, plan  # noqa: E402

log.configure()
_atexit.register(_C.drain)  # frees the tensors of running collectives before torch ends

if _dist.is_available():  # not in every build of torch
    from . import _group_operators, distributed  # noqa: F401
    from .symmetric_memory import SymmetricAllocator, symmetric_empty

    distributed.register()

__all__ = [
    "CollectiveError",
    "Communicator",
    "CostModel",
    "Deadlock",
    "PeerLost",
    "Plan",
    "SymmetricAllocator",
    "Timeout",
    "Work",
    "__version__",
    "algorithms",
    "all_gather",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "autograd",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "copy_",
    "devices",
    "distributed",
    "gather",
    "plan",
    "reduce",
    "reduce_scatter",
    "replicate",
    "scatter",
    "symmetric_empty",
    "tree_sum",
]
