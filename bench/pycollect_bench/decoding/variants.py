"""The ways to make a model on one rank, by the names of the variants.

A variant is undivided, on rank 0 alone; divided by DTensor's parallelize_module; divided plainly,
by a model that calls its collectives itself; or a model of transformers with its `tp_plan="auto"`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, parallel

import pycollect

from .llama import DIVIDED, HEAD, Cache, Case, Collectives, Llama, weights, without_memory
from .stamps import Stamps, dist

ALONE, GLOO, OURS, CLIENT = "alone", "gloo", "pycollect", "transformers"
# The calls of a decoder: the logits (batch, vocab) after some tokens that begin at a position.
Decoder = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Parts:
    """What all variants of a case share on one rank: its part of the weights, and its groups."""

    case: Case
    weights: Mapping[str, Tensor]
    groups: Mapping[str, Any]
    stamps: Stamps


def _decoder(model: Llama, weights: Mapping[str, Tensor]) -> Decoder:
    model.load_state_dict(weights, assign=True)
    caches = [Cache(model.case, model.calls.world) for _ in model.layers]
    return lambda ids, at: model(ids, at, caches)


def undivided(parts: Parts, backend: str) -> Decoder:
    """Make the whole model."""
    return _decoder(without_memory(parts.case, Collectives()), weights(parts.case))


def dtensor(parts: Parts, backend: str) -> Decoder:
    """Divide the model by parallelize_module, and give each DTensor its part of the weights."""
    group = parts.groups[backend]
    # DTensor's caches are shared by meshes that are equal, whatever their groups: without the name
    # all models would use the first one's group.
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(backend,))
    model = without_memory(parts.case, Collectives(group))
    plan: dict[str, parallel.ParallelStyle] = {
        path: parallel.RowwiseParallel() if DIVIDED[name] else parallel.ColwiseParallel()
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and (name := path.rpartition(".")[2]) in DIVIDED
    }
    plan["lm_head"] = parallel.ColwiseParallel(output_layouts=Replicate())
    parallel.parallelize_module(model, mesh, plan, src_data_rank=None)
    own = dict(parts.weights)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            own[name] = DTensor.from_local(own[name], mesh, parameter.placements, run_check=False)
    return _decoder(model, own)


def plain(parts: Parts, backend: str, direct: bool = False, symmetric: bool = False) -> Decoder:
    """Divide the model by hand: with dist.all_reduce, or directly with the operator, which passes
    by torch.distributed's Python. `symmetric`: sums are in symmetric memory.
    """
    group, all_reduce, sums = parts.groups[backend], dist.all_reduce, None
    if direct:
        operator, name = torch.ops.pycollect.group_all_reduce_.default, group.group_name
        all_reduce = parts.stamps.timed(lambda tensor, group: operator(tensor, "sum", name))
    if symmetric:
        dtype = getattr(torch, parts.case.dtype)
        sums = cache(partial(pycollect.SymmetricAllocator(group).empty, dtype=dtype))
    calls = Collectives(group, partial(all_reduce, group=group), sums)
    return _decoder(without_memory(parts.case, calls), parts.weights)


def transformers(parts: Parts, backend: str) -> Decoder:
    """Let transformers make the model and divide it by its own plan."""
    library: Any = import_module(CLIENT)
    case, dtype = parts.case, getattr(torch, parts.case.dtype)
    config = library.LlamaConfig(
        hidden_size=case.hidden,
        intermediate_size=case.inner,
        num_hidden_layers=case.layers,
        num_attention_heads=2 * case.kv_heads,
        num_key_value_heads=case.kv_heads,
        head_dim=HEAD,
        vocab_size=case.vocab,
        rms_norm_eps=1e-5,
        dtype=dtype,
    )
    of_ranks = import_module("transformers.distributed").DistributedConfig(
        tp_plan="auto", tp_size=dist.get_world_size()
    )
    # Their names differ in that attention is a module.
    of_attention = partial(re.sub, r"\.([qkvo]_proj)", r".self_attn.\1")
    whole = {of_attention(f"model.{name}"): weight for name, weight in weights(case).items()}
    whole["lm_head.weight"] = whole.pop("model.lm_head.weight")
    library.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # that past_key_values gets another name
    _tell_meshes_apart()
    with mock.patch.object(
        dist, "init_device_mesh", partial(_mesh, dist.init_device_mesh, backend)
    ):
        model = library.LlamaForCausalLM.from_pretrained(
            None, config=config, state_dict=whole, distributed_config=of_ranks, dtype=dtype
        )
    seen: Any = None

    def logits(ids: Tensor, at: int) -> Tensor:
        nonlocal seen
        if at == 0:
            seen = library.DynamicCache(config=config)
        found: Tensor = model(ids, past_key_values=seen, use_cache=True, logits_to_keep=1).logits
        return found[:, -1]

    return logits


def _mesh(make: Callable[..., Any], backend: str, *args: Any, **kwargs: Any) -> Any:
    """Make a mesh with this backend for tensor parallelism.

    transformers takes the default group's backend, and here several backends take turns.
    """
    override = {"tp": backend} if "tp" in kwargs["mesh_dim_names"] else None
    return make(*args, **kwargs, backend_override=override)


@cache
def _tell_meshes_apart() -> None:
    """Make meshes of different groups unequal.

    DTensor's caches are shared by equal meshes, and transformers' meshes have equal names. Without
    this, all its models would use the first one's group.
    """
    equal = DeviceMesh.__eq__

    def equal_with_groups(mesh: Any, other: Any) -> bool:
        return equal(mesh, other) and mesh._dim_group_names == other._dim_group_names

    setattr(DeviceMesh, "__eq__", equal_with_groups)  # noqa: B010  # mypy allows no assignment


# How each variant is made, and its backend.
VARIANTS: dict[str, tuple[Callable[[Parts, str], Decoder], str]] = {
    ALONE: (undivided, ""),
    "dtensor:gloo": (dtensor, GLOO),
    "dtensor:pycollect": (dtensor, OURS),
    "plain:gloo": (plain, GLOO),
    "plain:pycollect": (plain, OURS),
    "plain:direct": (partial(plain, direct=True), OURS),
    "plain:zero-copy": (partial(plain, direct=True, symmetric=True), OURS),
    "transformers:gloo": (transformers, GLOO),
    "transformers:pycollect": (transformers, OURS),
}
