"""A Llama-shaped decoder with random weights and a KV cache, undivided or one rank's part of it.

Column-parallel projections (q, k, v, gate, up, head) have a part of their outputs on each rank,
row-parallel ones (o, down) a part of their inputs, so that their outputs are summed over the ranks.
With experts, each rank has some of them, and the ranks exchange the tokens that chose them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

dist: Any = import_module("torch.distributed")  # without types: its functions are replaced
# Of two names of a gather, the newer one: if torch has it, its older name warns at every call.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
HEAD = 64  # elements of a head
CHOSEN = 2  # experts of a token
EXPERTS = 8
# Dimension along which the ranks divide the weights of a module; the others are on every rank.
# Those without _proj are of experts.
DIVIDED = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"), 0)
DIVIDED |= dict.fromkeys(("gate", "up", "down"), 0) | dict.fromkeys(("o_proj", "down_proj"), 1)


@dataclass(frozen=True)
class Case:
    """A model ("llama", or "moe" with experts), and the batch of sequences that it decodes.

    There are twice as many query heads as key and value heads.
    """

    model: str
    hidden: int
    dtype: str
    batch: int
    layers: int
    vocab: int
    prompt: int
    tokens: int

    @property
    def moe(self) -> bool:
        """Whether the feed-forward network consists of experts."""
        return self.model == "moe"

    @property
    def kv_heads(self) -> int:
        """The number of key heads, and of value heads."""
        return self.hidden // HEAD // 2

    @property
    def inner(self) -> int:
        """Llama's inner size of the feed-forward network, which the experts of a token share."""
        return self.hidden * 11 // 4 // (CHOSEN if self.moe else 1)


class Collectives:
    """The collectives that a model calls: none, or with a group those of its experts.

    With `all_reduce`, which sums a tensor in place, its other layers call theirs as well; without
    it they are divided by another library, if at all. `sums` returns the tensor of a shape.
    """

    def __init__(
        self,
        group: Any = None,
        all_reduce: Callable[[Tensor], object] | None = None,
        sums: Callable[[tuple[int, ...]], Tensor] | None = None,
    ) -> None:
        self._group, self._all_reduce, self._sums = group, all_reduce, sums
        self.rank = dist.get_rank(group) if group else 0
        self.world = dist.get_world_size(group) if group else 1
        self.parts = self.world if all_reduce else 1  # of a linear layer

    def summed(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """Return `linear(x)`, summed over the ranks."""
        if self._sums:
            found = self._sums((*x.shape[:-1], linear.out_features))
            torch.mm(x.flatten(0, -2), linear.weight.t(), out=found.flatten(0, -2))
        else:
            found = linear(x)
        if self._all_reduce:
            self._all_reduce(found)
        return found

    def gathered(self, x: Tensor) -> Tensor:
        """Return the ranks' parts of a linear layer, concatenated along the last dimension."""
        return torch.cat(tuple(self.concatenated(x.unsqueeze(0))), -1) if self._all_reduce else x

    def concatenated(self, x: Tensor) -> Tensor:
        """Return the ranks' tensors, concatenated along the first dimension."""
        if not self._group:
            return x
        found = x.new_empty(self.world * x.shape[0], *x.shape[1:])
        getattr(dist, GATHER)(found, x, group=self._group)
        return found

    def exchange(self, output: Tensor, given: Tensor, *parts: list[int]) -> None:
        """Send parts of `given` to the ranks, and receive `output` from them.

        `parts` are the numbers of rows from and to each rank, if they are not equal.
        """
        if self._group:
            dist.all_to_all_single(output, given, *parts, group=self._group)
        else:
            output.copy_(given)


def weights(case: Case, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
    """Return the rank's part of random weights by name; they do not depend on the world."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, parameter in Llama(case, Collectives()).named_parameters():
        values = torch.ones(parameter.shape)
        if parameter.dim() > 1:  # of variance 1 / inputs, so that activations keep their scale
            most = (3 / parameter.shape[-1]) ** 0.5
            values.uniform_(-most, most, generator=generator)
        module = name.removesuffix(".weight").rpartition(".")[2]
        if module in DIVIDED:
            values = values.tensor_split(world, DIVIDED[module])[rank]
        found[name] = values.to(getattr(torch, case.dtype)).contiguous()
    return found


linear = partial(nn.Linear, bias=False)


class Llama(nn.Module):
    """The decoder; the collectives divide its linear layers and its experts.

    Its weights have no memory until they are loaded.
    """

    def __init__(self, case: Case, calls: Collectives) -> None:
        super().__init__()
        self.case, self.calls = case, calls
        with torch.device("meta"):
            self.embed_tokens = nn.Embedding(case.vocab, case.hidden)
            self.layers = nn.ModuleList(Layer(case, calls) for _ in range(case.layers))
            self.norm = nn.RMSNorm(case.hidden, eps=1e-5)
            self.lm_head = linear(case.hidden, case.vocab // calls.parts)

    def load(self, weights: Mapping[str, Tensor]) -> Llama:
        """Use these weights and empty caches; return the model."""
        self.load_state_dict(weights, assign=True)
        self._caches = [Cache(self.case, self.calls.world) for _ in self.layers]
        return self

    def forward(self, ids: Tensor, at: int) -> Tensor:
        """Return the logits (batch, vocab) after the last of `ids` (batch, steps).

        The first of them is at position `at`.
        """
        x = self.embed_tokens(ids)
        for layer, cache in zip(self.layers, self._caches, strict=True):
            x = layer(x, at, cache)
        return self.calls.gathered(self.lm_head(self.norm(x[:, -1])))


class Layer(nn.Module):
    """Attention and a feed-forward network, each with a sum over the ranks at its end."""

    def __init__(self, case: Case, calls: Collectives) -> None:
        super().__init__()
        hidden, keys = case.hidden, case.kv_heads * HEAD // calls.parts
        self.calls = calls
        self.input_layernorm = nn.RMSNorm(hidden, eps=1e-5)
        self.q_proj = linear(hidden, 2 * keys)
        self.k_proj = linear(hidden, keys)
        self.v_proj = linear(hidden, keys)
        self.o_proj = linear(2 * keys, hidden)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=1e-5)
        self.mlp = MoE(case, calls) if case.moe else MLP(case, calls)

    def forward(self, x: Tensor, at: int, cache: Cache) -> Tensor:
        batch, steps, _ = x.shape
        y = self.input_layernorm(x)
        q, k, v = (
            each(y).view(batch, steps, -1, HEAD).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        keys, values = cache.extended(cache.rotated(k, at), v, at)
        mixed = F.scaled_dot_product_attention(
            cache.rotated(q, at), keys, values, is_causal=steps > 1, enable_gqa=True
        )
        x = x + self.calls.summed(self.o_proj, mixed.transpose(1, 2).flatten(2))
        fed: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + fed


class MLP(nn.Module):
    """The dense feed-forward network: SwiGLU."""

    def __init__(self, case: Case, calls: Collectives) -> None:
        super().__init__()
        inner, self.calls = case.inner // calls.parts, calls
        self.gate_proj = linear(case.hidden, inner)
        self.up_proj = linear(case.hidden, inner)
        self.down_proj = linear(inner, case.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.calls.summed(self.down_proj, F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """The feed-forward network of experts.

    Each rank routes its share of the tokens: it sends them to the ranks of their experts by an
    uneven all_to_all, gets the results by another one, and gathers the other ranks' shares.
    """

    def __init__(self, case: Case, calls: Collectives) -> None:
        super().__init__()
        self.calls = calls
        self.router = linear(case.hidden, EXPERTS)
        own = EXPERTS // calls.world  # experts of this rank
        self.gate = nn.Parameter(torch.empty(own, case.inner, case.hidden))
        self.up = nn.Parameter(torch.empty(own, case.inner, case.hidden))
        self.down = nn.Parameter(torch.empty(own, case.hidden, case.inner))

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
        outputs = self._fed(inputs, of_rank.repeat_interleave(received))
        returned = torch.empty_like(rows)
        calls.exchange(returned, outputs, sends, receives)
        parts = returned * shares.flatten()[order].unsqueeze(1).to(x.dtype)
        own = torch.zeros_like(tokens).index_add_(0, order // CHOSEN, parts)
        return calls.concatenated(own).view_as(x)

    def _fed(self, rows: Tensor, expert: Tensor) -> Tensor:
        """Return each row's output by SwiGLU; `expert` has the number of its expert."""
        outputs = torch.empty_like(rows)
        for e, (gate, up, down) in enumerate(zip(self.gate, self.up, self.down, strict=True)):
            mine = (expert == e).nonzero().squeeze(1)
            if len(mine):
                x = rows[mine]
                outputs[mine] = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        return outputs


class Cache:
    """Keys and values of one layer on one of `parts` ranks, and the rotations of the positions."""

    def __init__(self, case: Case, parts: int) -> None:
        dtype, positions = getattr(torch, case.dtype), case.prompt + case.tokens + 1
        shape = 2, case.batch, case.kv_heads // parts, positions, HEAD
        self._keys, self._values = torch.empty(shape, dtype=dtype)
        angles = torch.outer(torch.arange(positions), 1e4 ** -(torch.arange(0, HEAD, 2) / HEAD))
        self._cos, self._sin = (x.repeat(1, 2).to(dtype) for x in (angles.cos(), angles.sin()))

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
