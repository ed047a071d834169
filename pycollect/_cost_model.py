"""The speed of a machine, from which plans predict times."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from numbers import Real

from pycollect import _C
from pycollect.errors import shown


@dataclass(frozen=True)
class CostModel:
    """Describe the speed of a machine for ``Plan.predict``.

    alpha: seconds until a rank sees another rank's signal. port: bytes per second into a device,
    and as many out of it. memory: bytes per second of a device's memory, reads and writes
    together. bridge: bytes per second between the two halves of the world, each way; 0 (default)
    for no such limit. The machine has one device per rank.

    Raises TypeError for a value that is not a number, and ValueError for one that is infinite, NaN
    or negative, and for a port or memory of zero.

    The named models are "nvlink", CostModel(1.5e-6, 400e9, 3000e9), for eight GPUs behind a switch,
    and "pcie", CostModel(3e-6, 24e9, 800e9, 20e9), for two sockets with four GPUs each. For another
    machine, ``pycollect info --rates`` prints the rates of copies: port is that between two GPUs,
    and memory twice that within a GPU, as a copy reads and writes. It does not measure alpha.

    >>> import pycollect as pc
    >>> model = pc.CostModel(alpha=5e-6, port=12e9, memory=40e9)
    >>> pc.plan("all_reduce", 4, algorithm="chain").predict(model) > 0
    True
    """

    alpha: float
    port: float
    memory: float
    bridge: float = 0.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not is_number:
                raise TypeError(f"CostModel: {item.name} is {shown(value)}; pass a number")
            may_be_zero = item.name in ("alpha", "bridge")
            in_range = value >= 0 if may_be_zero else value > 0
            if not (in_range and value <= sys.float_info.max):
                least = "not negative" if may_be_zero else "above zero"
                unit = "seconds" if item.name == "alpha" else "bytes per second"
                raise ValueError(
                    f"CostModel: {item.name} is {value}; pass {unit}, finite and {least}"
                )


def figures_of(model: str | CostModel) -> _C.ModelTuple:
    if isinstance(model, str):
        known = _C.models()
        if model not in known:
            names = ", ".join(f"'{name}'" for name in known)
            raise ValueError(f"there is no model '{model}'; pass one of {names}, or a CostModel")
        return known[model]
    if not isinstance(model, CostModel):
        raise TypeError(f"model is a {type(model).__name__}; pass a name or a pycollect.CostModel")
    return (float(model.alpha), float(model.port), float(model.memory), float(model.bridge))
