"""The measured variants of a model: the list, and how each is made on one rank.

A variant is undivided, on rank 0 alone; divided by DTensor's parallelize_module; divided plainly,
by a model that calls its collectives itself; or a model of transformers with its `tp_plan="auto"`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Replicate

import pycollect

from . import hf_model
from .collectives import Collectives, OfExperts, Plain, Stamps, ZeroCopy
from .llama import Cache, Llama, Shape, weights

GLOO, OURS = "gloo", "pycollect"
# The calls of a decoder: the logits (batch, vocab) after some tokens that begin at a position.
Decoder = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Parts:
    """The parts of a model on one rank, shared by all variants, and the rank's groups."""

    shape: Shape
    dtype: torch.dtype
    batch: int
    weights: Mapping[str, Tensor]
    groups: Mapping[str, Any]
    stamps: Stamps

    def decoder(self, model: Llama, parts: int) -> Decoder:
        """Return the decoder of a model, with caches for the heads of this rank."""
        shape = self.shape
        caches = [
            Cache(self.batch, shape.kv_heads // parts, shape.positions, self.dtype)
            for _ in range(shape.layers)
        ]
        return lambda ids, at: model(ids, at, caches)

    def empty(self, calls: Collectives, parts: int) -> Llama:
        """Return the model without memory."""
        with torch.device("meta"):
            return Llama(self.shape, calls, parts)


@dataclass(frozen=True)
class Variant:
    """A variant: its backend, how it is made, and the variant of gloo to which it is compared.

    `context` is entered while it runs. `more_calls` is the number of collectives of a token besides
    those of the model here. With a `client`, that package makes the model, and it is
    measured only on request, and without experts.
    """

    name: str
    make: Callable[[Parts, str], Decoder]
    backend: str = ""
    against: str = ""
    context: Callable[[Stamps, str], AbstractContextManager[None]] = lambda *_: nullcontext()
    client: str = ""
    more_calls: int = 0


def undivided(parts: Parts, backend: str) -> Decoder:
    """Make the whole model; a rank that does not run it returns no logits."""
    model = parts.empty(Collectives(), 1)
    model.load_state_dict(weights(parts.shape, parts.dtype), assign=True)
    return parts.decoder(model, 1)


def dtensor(parts: Parts, backend: str) -> Decoder:
    """Divide the model by parallelize_module, and give each DTensor its part of the weights."""
    group = parts.groups[backend]
    # DTensor's caches are shared by meshes that are equal, whatever their groups: without the name
    # all models would use the first one's group.
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(backend,))
    model = parts.empty(OfExperts(group, parts.stamps), 1)
    column, row = ColwiseParallel, RowwiseParallel
    plan: dict[str, ParallelStyle] = {
        f"layers.*.{name}": column() for name in ("q", "k", "v", "feed.gate", "feed.up")
    }
    plan |= {f"layers.*.{name}": row() for name in ("o", "feed.down")}
    plan["head"] = column(output_layouts=Replicate())
    if parts.shape.moe:
        plan = {path: style for path, style in plan.items() if "feed" not in path}
    parallelize_module(model, mesh, plan, src_data_rank=None)
    own = {}
    for name, parameter in model.named_parameters():
        part = parts.weights[name]
        if isinstance(parameter, DTensor):
            part = DTensor.from_local(part, mesh, parameter.placements, run_check=False)
        own[name] = part
    model.load_state_dict(own, assign=True)
    return parts.decoder(model, dist.get_world_size(group))


def plain(
    parts: Parts,
    backend: str,
    all_reduce: Callable[[Any], Callable[[Tensor], object]],
    symmetric: bool = False,
) -> Decoder:
    """Divide the model by hand; `all_reduce(group)` returns the call that sums in place."""
    group = parts.groups[backend]
    given = group, parts.stamps, all_reduce(group)
    calls = Plain(*given)
    if symmetric:
        calls = ZeroCopy(*given, pycollect.SymmetricAllocator(group).empty)
    model = parts.empty(calls, calls.world)
    model.load_state_dict(parts.weights, assign=True)
    return parts.decoder(model, calls.world)


def of_torch(group: Any) -> Callable[[Tensor], object]:
    """Return dist.all_reduce of this group."""
    return partial(dist.all_reduce, group=group)


def direct(group: Any) -> Callable[[Tensor], object]:
    """Return the operator for this group, which passes by torch.distributed's Python."""
    operator, name = torch.ops.pycollect.group_all_reduce_.default, group.group_name
    return lambda tensor: operator(tensor, "sum", name)


def transformers(parts: Parts, backend: str) -> Decoder:
    """Let transformers make and divide the model."""
    whole = weights(parts.shape, parts.dtype)
    return hf_model.decoder(parts.shape, parts.dtype, whole, backend)


ALONE = "alone"
_DTENSOR = partial(Variant, make=dtensor, against="dtensor:gloo", context=Stamps.of_libraries)
_PLAIN = partial(Variant, against="plain:gloo")
_CLIENT = partial(
    Variant,
    make=transformers,
    against="transformers:gloo",
    context=Stamps.of_libraries,
    client="transformers",
    more_calls=1,  # it divides the embedding, too
)
VARIANTS = (
    Variant(ALONE, undivided),
    _DTENSOR("dtensor:gloo", backend=GLOO),
    _DTENSOR("dtensor:pycollect", backend=OURS),
    _PLAIN("plain:gloo", partial(plain, all_reduce=of_torch), GLOO),
    _PLAIN("plain:pycollect", partial(plain, all_reduce=of_torch), OURS),
    _PLAIN("plain:direct", partial(plain, all_reduce=direct), OURS),
    _PLAIN("plain:zero-copy", partial(plain, all_reduce=direct, symmetric=True), OURS),
    _CLIENT("transformers:gloo", backend=GLOO),
    _CLIENT("transformers:pycollect", backend=OURS),
)
