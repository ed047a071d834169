"""A Llama-shaped decoder with random weights and a KV cache, undivided or one rank's part of it.

Column-parallel projections (q, k, v, gate, up, head) have a part of their outputs on each rank,
row-parallel ones (o, down) a part of their inputs, so that their outputs are summed over the ranks.
With experts, each rank has some of them, and the ranks exchange the tokens that chose them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .collectives import Collectives

HEAD = 64  # elements of a head
CHOSEN = 2  # experts of a token
EXPERTS = 8
# Dimension along which the ranks divide the weights of a module; the others are on every rank.
DIVIDED = {"q": 0, "k": 0, "v": 0, "gate": 0, "up": 0, "head": 0, "experts": 0, "o": 1, "down": 1}


@dataclass(frozen=True)
class Shape:
    """The shape of a model: twice as many query heads as key and value heads, Llama's inner size.

    With experts, two of them share the inner size of the dense model.
    """

    hidden: int
    layers: int
    vocab: int
    positions: int
    moe: bool = False

    @property
    def kv_heads(self) -> int:
        """The number of key and value heads, and the most ranks that can divide the model."""
        return self.hidden // HEAD // 2

    @property
    def inner(self) -> int:
        """The inner size of the feed-forward network, or of an expert."""
        return self.hidden * 11 // 4 // (CHOSEN if self.moe else 1)

    @property
    def collectives(self) -> int:
        """The collectives of a token in the divided model."""
        of_feed = 4 if self.moe else 1  # three exchanges and a gather, or a sum
        return self.layers * (1 + of_feed) + 1


def weights(shape: Shape, dtype: torch.dtype, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
    """Return the rank's part of random weights by name; they do not depend on the world."""
    with torch.device("meta"):
        whole = Llama(shape, Collectives(), 1)
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, parameter in whole.named_parameters():
        values = torch.ones(parameter.shape)
        if parameter.dim() > 1:  # of variance 1 / inputs, so that activations keep their scale
            most = (3 / parameter.shape[-1]) ** 0.5
            values.uniform_(-most, most, generator=generator)
        module = name.split(".")[-2]
        if module in DIVIDED:
            values = values.tensor_split(world, DIVIDED[module])[rank]
        found[name] = values.to(dtype).contiguous()
    return found


class Llama(nn.Module):
    """The decoder; its linear layers are divided by `parts`, its experts by the collectives."""

    def __init__(self, shape: Shape, calls: Collectives, parts: int) -> None:
        super().__init__()
        self.calls = calls
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, calls, parts) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.head = nn.Linear(shape.hidden, shape.vocab // parts, bias=False)

    def forward(self, ids: Tensor, at: int, caches: list[Cache]) -> Tensor:
        """Return the logits (batch, vocab) after the last of `ids` (batch, steps).

        The first of them is at position `at`.
        """
        x = self.embed(ids)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, at, cache)
        return self.calls.gathered(self.head(self.norm(x[:, -1])))


class Layer(nn.Module):
    """Attention and a feed-forward network, each with a sum over the ranks at its end."""

    def __init__(self, shape: Shape, calls: Collectives, parts: int) -> None:
        super().__init__()
        hidden, keys = shape.hidden, shape.kv_heads * HEAD
        self.calls = calls
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.q = nn.Linear(hidden, 2 * keys // parts, bias=False)
        self.k = nn.Linear(hidden, keys // parts, bias=False)
        self.v = nn.Linear(hidden, keys // parts, bias=False)
        self.o = nn.Linear(2 * keys // parts, hidden, bias=False)
        self.feed_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.feed = MoE(shape, calls) if shape.moe else MLP(shape, calls, parts)

    def forward(self, x: Tensor, at: int, cache: Cache) -> Tensor:
        batch, steps, _ = x.shape
        y = self.norm(x)
        q, k, v = (
            each(y).view(batch, steps, -1, HEAD).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        keys, values = cache.extended(cache.rotated(k, at), v, at)
        mixed = F.scaled_dot_product_attention(
            cache.rotated(q, at), keys, values, is_causal=steps > 1, enable_gqa=True
        )
        x = x + self.calls.summed(self.o, mixed.transpose(1, 2).flatten(2))
        fed: Tensor = self.feed(self.feed_norm(x))
        return x + fed


class MLP(nn.Module):
    """The dense feed-forward network: SwiGLU."""

    def __init__(self, shape: Shape, calls: Collectives, parts: int) -> None:
        super().__init__()
        self.calls = calls
        self.gate = nn.Linear(shape.hidden, shape.inner // parts, bias=False)
        self.up = nn.Linear(shape.hidden, shape.inner // parts, bias=False)
        self.down = nn.Linear(shape.inner // parts, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.calls.summed(self.down, F.silu(self.gate(x)) * self.up(x))


class MoE(nn.Module):
    """The feed-forward network of experts.

    Each rank routes its share of the tokens: it sends them to the ranks of their experts by an
    uneven all_to_all, gets the results by another one, and gathers the other ranks' shares.
    """

    def __init__(self, shape: Shape, calls: Collectives) -> None:
        super().__init__()
        self.calls = calls
        self.router = nn.Linear(shape.hidden, EXPERTS, bias=False)
        self.experts = Experts(shape, EXPERTS // calls.world)

    def forward(self, x: Tensor) -> Tensor:
        calls, world = self.calls, self.calls.world
        tokens = x.flatten(0, 1).chunk(world)[calls.rank]
        shares, chosen = self.router(tokens).float().softmax(-1).topk(CHOSEN)
        order = chosen.flatten().argsort(stable=True)  # places of (token, expert), by expert
        sent = chosen.flatten().bincount(minlength=EXPERTS)
        received = torch.empty_like(sent)
        calls.exchange(received, sent)
        sends, receives = (n.view(world, -1).sum(1).tolist() for n in (sent, received))
        rows = tokens[order // CHOSEN]
        inputs = rows.new_empty(sum(receives), rows.shape[1])
        calls.exchange(inputs, rows, receives, sends)
        of_rank = torch.arange(EXPERTS // world).repeat(world)
        outputs = self.experts(inputs, of_rank.repeat_interleave(received))
        returned = torch.empty_like(rows)
        calls.exchange(returned, outputs, sends, receives)
        parts = returned * shares.flatten()[order].unsqueeze(1).to(x.dtype)
        own = torch.zeros_like(tokens).index_add_(0, order // CHOSEN, parts)
        return calls.concatenated(own).view_as(x)


class Experts(nn.Module):
    """The experts of a rank: SwiGLU, with a weight for each."""

    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(number, shape.inner, shape.hidden))
        self.up = nn.Parameter(torch.empty(number, shape.inner, shape.hidden))
        self.down = nn.Parameter(torch.empty(number, shape.hidden, shape.inner))

    def forward(self, rows: Tensor, expert: Tensor) -> Tensor:
        """Return each row's output; `expert` has the number of each row's expert."""
        outputs = torch.empty_like(rows)
        for e, (gate, up, down) in enumerate(zip(self.gate, self.up, self.down, strict=True)):
            mine = (expert == e).nonzero().squeeze(1)
            if len(mine):
                x = rows[mine]
                outputs[mine] = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        return outputs


class Cache:
    """Keys and values of one layer, and the rotations of the positions."""

    def __init__(self, batch: int, heads: int, positions: int, dtype: torch.dtype) -> None:
        self._keys, self._values = torch.empty(2, batch, heads, positions, HEAD, dtype=dtype)
        angles = torch.outer(torch.arange(positions), 1e4 ** -(torch.arange(0, HEAD, 2) / HEAD))
        self._cos, self._sin = (
            part.repeat(1, 2).to(dtype) for part in (angles.cos(), angles.sin())
        )

    def rotated(self, x: Tensor, at: int) -> Tensor:
        """Return `x` (batch, heads, steps, HEAD), whose steps begin at position `at`, rotated."""
        here = slice(at, at + x.shape[2])
        low, high = x.chunk(2, -1)
        return x * self._cos[here] + torch.cat((-high, low), -1) * self._sin[here]

    def extended(self, keys: Tensor, values: Tensor, at: int) -> tuple[Tensor, Tensor]:
        """Store the steps from position `at` on; return all steps up to the last of them."""
        end = at + keys.shape[2]
        self._keys[:, :, at:end], self._values[:, :, at:end] = keys, values
        return self._keys[:, :, :end], self._values[:, :, :end]
