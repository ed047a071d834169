"""The same model made by transformers, which divides it by its own plan, over a chosen backend."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .llama import HEAD, Shape

dist: Any = import_module("torch.distributed")  # torch has no type annotations for its meshes

# The names of modules in transformers' Llama.
_NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layers.norm": "input_layernorm",
    "layers.feed_norm": "post_attention_layernorm",
    **{f"layers.{name}": f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")},
    **{f"layers.feed.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def _their_name(name: str) -> str:
    """Return transformers' name of a weight.

    >>> _their_name("layers.3.feed.up.weight")
    'model.layers.3.mlp.up_proj.weight'
    """
    module, _, weight = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{_NAMES[module]}.{weight}"
    _, number, inner = module.split(".", 2)
    return f"model.layers.{number}.{_NAMES[f'layers.{inner}']}.{weight}"


def decoder(
    shape: Shape, dtype: torch.dtype, weights: Mapping[str, Tensor], backend: str
) -> Callable[[Tensor, int], Tensor]:
    """Return the decoder of a model with `tp_plan="auto"`; the weights are the undivided ones."""
    transformers: Any = import_module("transformers")
    config = transformers.LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=2 * shape.kv_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=HEAD,
        vocab_size=shape.vocab,
        rms_norm_eps=1e-5,
        dtype=dtype,
    )
    # Without tp_size, and without torchrun's WORLD_SIZE, the model would not be divided.
    parallel = import_module("transformers.distributed").DistributedConfig(
        tp_plan="auto", tp_size=dist.get_world_size()
    )
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # that past_key_values gets another name
    _tell_meshes_apart()
    with mock.patch.object(dist, "init_device_mesh", _mesh_over(backend)):
        model = transformers.LlamaForCausalLM.from_pretrained(
            None,
            config=config,
            state_dict={_their_name(name): weight for name, weight in weights.items()},
            distributed_config=parallel,
            dtype=dtype,
        )
    cache: Any = None

    def logits(ids: Tensor, at: int) -> Tensor:
        nonlocal cache
        if at == 0:
            cache = transformers.DynamicCache(config=config)
        found: Tensor = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return found[:, -1]

    return logits


def _mesh_over(backend: str) -> Callable[..., Any]:
    """Return init_device_mesh with this backend for tensor parallelism.

    transformers takes the default group's backend, and here several backends take turns.
    """
    make = dist.init_device_mesh

    def mesh(device: str, shape: tuple[int, ...], *, mesh_dim_names: tuple[str, ...]) -> Any:
        override = {"tp": backend} if "tp" in mesh_dim_names else None
        return make(device, shape, mesh_dim_names=mesh_dim_names, backend_override=override)

    return mesh


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
