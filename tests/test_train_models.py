"""LeNet and ResNet-18: shapes, initial values, and the same bits for the same seed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from train_cases import same_bits

from pycollect.train import MODELS, LeNet, init_lenet, lenet, resnet18


@pytest.mark.parametrize("name", MODELS)
def test_the_same_seed_gives_the_same_bits(name: str) -> None:
    build = MODELS[name]
    state = torch.random.get_rng_state()
    first = build(in_channels=3, num_classes=4, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(1)
    assert same_bits(first, build(in_channels=3, num_classes=4, seed=1))
    assert not same_bits(first, build(in_channels=3, num_classes=4, seed=2))
    assert first(torch.rand(2, 3, 28, 28)).shape == (2, 4)


def test_lenet_is_the_function_with_its_parameters() -> None:
    X = torch.rand(2, 1, 28, 28)
    assert torch.equal(LeNet(seed=5)(X), lenet(X, init_lenet(5)))
    assert all(map(torch.equal, LeNet(seed=5).parameters(), init_lenet(5)))
    with pytest.raises(ValueError, match="images of 28 x 28, not 32 x 30"):
        LeNet()(torch.rand(2, 1, 32, 30))


def test_resnet_is_the_chapters() -> None:
    net = resnet18()
    shapes = []
    for part in net.children():
        part.register_forward_hook(lambda m, inputs, out: shapes.append(tuple(out.shape[1:])))
    net(torch.rand(1, 1, 28, 28))
    image = [(64, 28, 28), (128, 14, 14), (256, 7, 7), (512, 4, 4)]
    assert shapes == [(64, 28, 28)] * 3 + image + [(512, 1, 1), (512,), (10,)]
    assert sum(p.numel() for p in net.parameters()) == 11_175_818
    convolutions = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 1 + 4 * 4 + 3
    assert not any(isinstance(m, nn.MaxPool2d) for m in net.modules())
    for layer in (*convolutions[1:], net.dense):
        assert isinstance(layer.weight, torch.Tensor)
        assert float(layer.weight.detach().std()) == pytest.approx(0.01, rel=0.05)
        assert abs(float(layer.weight.detach().mean())) < 1e-3
