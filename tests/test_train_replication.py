"""Copies of a module for every rank: shared parameters stay shared, and nothing else is shared."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from train_cases import CPU, difference, replicas_of, same_bits

from pycollect.train import replicate_module


class Everything(nn.Module):
    """Tied and frozen parameters, buffers of many kinds, and attributes that are not tensors."""

    kept: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("kept", torch.arange(3.0).to(torch.bfloat16), persistent=False)
        self.register_buffer("nothing", None)
        self.again = self.count
        self.notes = {"names": ["a"]}
        self.frozen.weight_decay = 0.0  # type: ignore[attr-defined]


def test_the_whole_module_is_copied_for_every_rank() -> None:
    module = Everything().eval()
    module.conv.train()
    for copy in replicate_module(module, [CPU] * 3):
        assert isinstance(copy, Everything)
        assert same_bits(copy, module)
        assert copy.out.weight is copy.embed.weight
        assert copy.again is copy.count
        assert [p.requires_grad for p in copy.parameters()] == [False, True, True, True]
        assert copy.frozen.weight_decay == 0.0  # type: ignore[attr-defined]
        assert copy.conv.weight.is_contiguous(memory_format=torch.channels_last)
        assert (copy.count.dtype, copy.kept.dtype) == (torch.int64, torch.bfloat16)
        assert torch.equal(copy.kept, module.kept)
        assert copy.notes == module.notes
        assert copy.notes is not module.notes
        assert [m.training for m in copy.modules()] == [m.training for m in module.modules()]


def test_replicas_share_no_memory() -> None:
    modules = [m := Everything(), *replicate_module(m, [CPU] * 2)]
    tensors = [t for module in modules for t in [*module.parameters(), *module.buffers()]]
    assert len({t.data_ptr() for t in tensors}) == len(tensors) == 3 * 7


def test_a_recurrent_network_uses_its_own_weights() -> None:
    module = nn.LSTM(2, 3)
    (copy,) = replicate_module(module, [CPU])
    X = torch.randn(4, 1, 2)
    with torch.no_grad():
        module.weight_ih_l0.zero_()
    assert not torch.equal(copy(X)[0], module(X)[0])
    copy(X)[0].sum().backward()
    assert all(param.grad is not None for param in copy.parameters())
    assert all(param.grad is None for param in module.parameters())


def test_parametrized_weights_are_computed_from_the_copy() -> None:
    module = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    (copy,) = replicate_module(module, [CPU])
    copy(torch.ones(1, 2)).sum().backward()
    assert all(param.grad is not None for param in copy.parameters())
    assert all(param.grad is None for param in module.parameters())


def test_gradients_are_not_copied() -> None:
    module = nn.Linear(2, 2)
    module(torch.ones(1, 2)).sum().backward()
    (copy,) = replicate_module(module, [CPU])
    assert copy.weight.grad is None
    assert module.weight.grad is not None


def test_a_parameter_without_a_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="send one batch through the module first"):
        replicate_module(nn.LazyLinear(2), [CPU])


@pytest.mark.parametrize("overlap", [False, True])
def test_channels_last_trains_as_contiguous(overlap: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    X, y = torch.rand((6, 3, 9, 9), generator=generator), torch.arange(6)
    ranks = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(1)
        module = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(200, 6)
        )
        replicas = replicas_of(module.to(memory_format=memory_format), 2, 0.1, overlap=overlap)
        for _ in range(3):
            replicas.step(X.to(memory_format=memory_format), y)
        ranks.append(replicas.modules)
    assert difference(ranks[0][0], module) > 0.01
    assert difference(ranks[0][1], ranks[1][1]) < 1e-5
    weight = ranks[1][0].get_parameter("2.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last)
