"""Autograd and the parts of the trainer on a GPU: ranks that share it, and a rank on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from test_autograd import cases
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import pycollect as pc
from pycollect import autograd, threads
from pycollect.train import DataParallel, GluonTrainer, convert_sync_batchnorm

pytestmark = pytest.mark.cuda
DEVICES = ("cuda:0*2", ["cuda:0", "cpu"], ["cpu", "cuda:0", "cpu"])
close = partial(torch.testing.assert_close, check_device=False)


def on_devices(tensors: Sequence[Tensor], devices: object) -> list[Tensor]:
    ranks = pc.devices(devices)
    return [t.detach().to(ranks[i % len(ranks)]).requires_grad_() for i, t in enumerate(tensors)]


@pytest.mark.parametrize("devices", DEVICES, ids=str)
@pytest.mark.parametrize("name", cases(3))
def test_gradients(name: str, devices: object) -> None:
    call, shapes = cases(len(pc.devices(devices)))[name]
    tensors = on_devices([torch.randn(shape, dtype=torch.float64) for shape in shapes], devices)
    assert gradcheck(call, tensors, fast_mode=True)
    assert gradgradcheck(call, tensors, fast_mode=True)


def test_gradients_are_on_the_devices_of_their_tensors() -> None:
    weight = torch.ones(3, requires_grad=True)
    copies = autograd.replicate([weight], "cuda:0*2")
    torch.autograd.backward([c.sum() for [c] in copies])
    assert weight.grad.tolist() == [2, 2, 2]
    x = torch.ones(4, device="cuda:0", requires_grad=True)
    autograd.gather(autograd.scatter(x, ["cuda:0", "cpu"]), "cpu").sum().backward()
    assert x.grad.device == x.device


def test_backward_on_a_side_stream_is_ordered_behind_forward() -> None:
    x = [torch.randn(1 << 20, device="cuda:0", requires_grad=True) for _ in range(2)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(10):
        for t in x:
            t.grad = None
        with torch.cuda.stream(stream):
            busy = [t * 1 for t in x]
            for _ in range(20):
                busy = [t.sin() + t for t in busy]
            loss = autograd.all_reduce(busy)[0].sum()
            loss.backward()
        torch.cuda.current_stream().wait_stream(stream)
        again = [t.detach().clone().requires_grad_() for t in x]
        busy = list(again)
        for _ in range(20):
            busy = [t.sin() + t for t in busy]
        (busy[0] + busy[1]).sum().backward()
        close([t.grad for t in x], [t.grad for t in again])


@pytest.mark.parametrize("devices", DEVICES, ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_batch_norm_over_ranks(devices: object, memory_format: torch.memory_format) -> None:
    ranks = pc.devices(devices)
    shares = [4, 0, 3][: len(ranks)] if len(ranks) == 3 else [4, 3]
    layer = nn.BatchNorm2d(4).double()
    X = torch.randn(7, 4, 5, 3, dtype=torch.float64).to(memory_format=memory_format)
    whole, factor = X.clone().requires_grad_(), torch.randn_like(X)
    shards, factors = (on_devices(t.split(shares), devices) for t in (X, factor))

    def run(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mine = convert_sync_batchnorm(copy.deepcopy(layer).to(ranks[rank]))
        y = mine(x := shards[rank])
        (y * factors[rank]).sum().backward()
        return y.detach(), x.grad, mine.running_var

    found = threads.launch(run, len(ranks), device=ranks)
    expected = layer(whole)
    (expected * factor).sum().backward()
    parts = zip(found, expected.split(shares), whole.grad.split(shares), strict=True)
    for (y, dx, running_var), e, g in parts:
        close(y, e)
        close(dx, g)
        close(running_var, layer.running_var)


def test_batch_norm_over_ranks_under_autocast() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()).cuda()
    X = torch.randn(16, 3, 8, 8, device="cuda")

    def run(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
        mine = convert_sync_batchnorm(copy.deepcopy(net))
        with torch.autocast("cuda", torch.float16):
            y = mine(X.split(8)[rank])
        y.float().square().sum().backward()
        return y.detach(), mine[1].running_mean

    (_, mean), (last, _) = found = threads.launch(run, 2, device="cuda:0")
    with torch.autocast("cuda", torch.float16):
        expected = net(X)
    assert last.dtype == torch.float16
    close(torch.cat([y for y, _ in found]), expected, rtol=1e-2, atol=1e-2)
    close(mean, net[1].running_mean)


@pytest.mark.parametrize("devices", ["cuda:0*2", ["cuda:0", "cpu"], "cuda:0"], ids=str)
def test_data_parallel(devices: object) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).cuda().eval()
    X = torch.randn(7, 4, device="cuda")
    found = []
    for model in (net, DataParallel(net, devices), DataParallel(net, devices)):
        net.zero_grad()
        scores = model(X)
        assert scores.device == X.device
        scores.square().sum().backward()
        found.append([scores, *(p.grad.clone() for p in net.parameters())])
    close(found[1], found[0], rtol=0, atol=1e-4)
    assert all(map(torch.equal, found[1], found[2]))


def test_data_parallel_refuses_a_module_on_another_device() -> None:
    with pytest.raises(
        ValueError, match=r"is on cpu and rank 0 on cuda:0; move .*\.to\('cuda:0'\)"
    ):
        DataParallel(nn.Linear(2, 2), "cuda:0*2")(torch.ones(4, 2))


def test_trainer_on_a_gpu_and_the_cpu() -> None:
    nets = [nn.Linear(2, 1, bias=False).to(device) for device in pc.devices(["cuda:0", "cpu"])]
    for n in nets:
        nn.init.zeros_(n.weight)
        n(torch.ones(1, 2, device=n.weight.device)).sum().backward()
    GluonTrainer(nets, "sgd", {"learning_rate": 1.0}).step(2)
    assert all(n.weight.tolist() == [[-1, -1]] for n in nets)
