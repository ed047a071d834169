"""docs/inference.md: a model decodes the same bits on any number of ranks."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import BACKEND, OURS
from sites import slow_on_processes
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

import pycollect as pc
from pycollect import threads

pytestmark = pytest.mark.skipif(not OURS, reason="gloo promises no order of sums")
DOCUMENT = Path(__file__).resolve().parent.parent / "docs/inference.md"
PARTS = HEADS = 8  # a head in each part
HIDDEN, INNER, VOCAB, LAYERS, STEPS = 128, 344, 256, 2, 32  # 43 of INNER in each part
HEAD = HIDDEN // HEADS
FIRST = (7, 200)  # tokens of two sequences
# Weights of a layer: rows, columns, and the dimension that is divided.
WEIGHTS = dict.fromkeys("qkv", (HIDDEN, HIDDEN, 0)) | {"o": (HIDDEN, HIDDEN, 1)}
WEIGHTS |= {"gate": (INNER, HIDDEN, 0), "up": (INNER, HIDDEN, 0), "down": (HIDDEN, INNER, 1)}


def layers_of_document() -> str:
    """The section's program up to its process group."""
    section = DOCUMENT.read_text().partition("## The same bits at any degree")[2]
    found = re.search(r"^```python\n(.*?)^dist.init_process_group", section, re.M | re.S)
    assert found
    return found[1]


class Llama:
    """A decoder of random weights, divided as in the document. It goes by parts."""

    def __init__(self, layers: str, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        made: dict[str, Any] = {}
        exec(layers, made)
        generator = torch.Generator().manual_seed(0)

        def divided(rows: int, columns: int, dim: int) -> Any:
            weight = torch.randn(rows, columns, generator=generator) / columns**0.5
            if dim:
                return made["RowParallel"](weight.to(dtype), PARTS, group)
            own = made["own_parts"](weight.to(dtype), 0, PARTS, group)
            return lambda x: [linear(x, part) for part in own]

        self.embedding = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
        self.layers = [{n: divided(*w) for n, w in WEIGHTS.items()} for _ in range(LAYERS)]
        self.head = divided(VOCAB, HIDDEN, 0)
        shape = LAYERS, 2, PARTS // group.size(), len(FIRST), 1, STEPS, HEAD
        self.caches = torch.empty(shape, dtype=dtype)
        angles = torch.outer(torch.arange(STEPS), 1e4 ** -(torch.arange(0, HEAD, 2) / HEAD))
        self.cos, self.sin = (x.repeat(1, 2).to(dtype) for x in (angles.cos(), angles.sin()))
        self.group = group.group_name

    def step(self, tokens: Tensor, at: int) -> Tensor:
        """Return the logits after the tokens at a position."""
        x = self.embedding[tokens]
        for layer, cache in zip(self.layers, self.caches, strict=True):
            y = rms_norm(x, (HIDDEN,))
            heads = zip(*(layer[name](y) for name in "qkv"), *cache, strict=True)
            x = x + layer["o"]([self.attention(at, *head) for head in heads])
            y = rms_norm(x, (HIDDEN,))
            gated = zip(layer["gate"](y), layer["up"](y), strict=True)
            x = x + layer["down"]([silu(gate) * up for gate, up in gated])
        logits = torch.cat(self.head(rms_norm(x, (HIDDEN,))), -1)
        return torch.ops.pycollect.group_all_gather(logits.t().contiguous(), self.group).t()

    def attention(self, at: int, q: Tensor, k: Tensor, v: Tensor, *cache: Tensor) -> Tensor:
        """Attention of a head; `cache` has its keys and values."""
        for stored, new in zip(cache, (self.rotated(k, at), v), strict=True):
            stored[:, 0, at] = new
        keys, values = (stored[:, :, : at + 1] for stored in cache)
        query = self.rotated(q, at).view(-1, 1, 1, HEAD)
        return scaled_dot_product_attention(query, keys, values).view(-1, HEAD)

    def rotated(self, x: Tensor, at: int) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * self.cos[at] + torch.cat((-high, low), -1) * self.sin[at]


@torch.inference_mode()
def decode(_: Any, layers: str, dtype: torch.dtype, order: str = "tree") -> tuple[Tensor, Tensor]:
    """Return the tokens, each the likeliest after the ones before it, and all logits."""
    torch.set_num_threads(1)
    group = dist.new_group(backend=BACKEND, pg_options=pc.distributed.options(order=order))
    model, tokens, logits = Llama(layers, dtype, group), [torch.tensor(FIRST)], []
    for at in range(STEPS):
        logits.append(model.step(tokens[-1], at))
        tokens.append(logits[-1].argmax(-1))
    dist.destroy_process_group(group)
    return torch.stack(tokens), torch.stack(logits)


@functools.cache
def on_one_rank(layers: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    (found,) = threads.launch(lambda rank, world: decode(None, layers, dtype), 1)
    return found


def same(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
ON_8 = pytest.param(8, marks=slow_on_processes)


@both_dtypes
@pytest.mark.parametrize("world", [1, 2, 4, ON_8])
def test_a_model_decodes_the_same_bits_on_any_number_of_ranks(pools, world, dtype):
    layers = layers_of_document()
    wanted = on_one_rank(layers, dtype)
    assert wanted[1].isfinite().all()
    assert len(wanted[0].unique()) > 8
    for found in pools(world).run(decode, layers, dtype):
        assert same(found, wanted)


@both_dtypes
def test_in_rank_order_or_rounded_the_bits_are_others(dtype):
    """In float32 the order makes the difference; sums of few bfloat16 are often exact, so there
    the partial sums are rounded."""
    layers, order = layers_of_document(), "rank"
    if dtype == torch.bfloat16:
        rounded = layers.replace(", dtype=torch.float32", "")
        assert rounded != layers
        layers, order = rounded, "tree"
    wanted = on_one_rank(layers, dtype)
    for found in threads.launch(lambda rank, world: decode(None, layers, dtype, order), 4):
        assert not same(found, wanted)
