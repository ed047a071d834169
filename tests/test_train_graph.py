"""The training step as a CUDA graph; without a GPU a plain function stands in for the replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from sites import GPU, ON_GPU
from torch import Tensor, nn
from train_cases import difference, replicas_of, same_bits

from pycollect.train import GraphedStep, LeNet, init_lenet, lenet, replicate_params, train_batch
from pycollect.train.graph import Run, capture

DEVICES = ["cpu", pytest.param(GPU, marks=ON_GPU)]


@pytest.fixture(autouse=True)
def the_same_bits_of_every_run() -> Iterator[None]:
    """Some convolutions of cuDNN add in any order."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


def as_graph(run: Run) -> Run:
    """Call the function as often as a capture does; the replay is one more call."""
    for _ in range(3):
        run()
    return run


def how(device: str) -> Callable[[Run], Run]:
    return capture if device.startswith("cuda") else as_graph


def batch(seed: int, device: str, n: int = 10) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand((n, 1, 28, 28), generator=generator)
    return X.to(device), torch.randint(10, (n,), generator=generator).to(device)


def bits(replicas: list[list[Tensor]]) -> list[Tensor]:
    return [p.detach().view(torch.int32).cpu() for replica in replicas for p in replica]


@pytest.mark.parametrize("device", DEVICES)
def test_the_books_step_trains_the_same_bits(device: str) -> None:
    devices = [torch.device(device)] * 3
    eager, graphed = (replicate_params(init_lenet(), devices) for _ in range(2))
    step = GraphedStep.from_scratch(
        *batch(99, device), graphed, 0.1, model=lenet, capturing=how(device)
    )
    assert all(map(torch.equal, bits(eager), bits(graphed))), "capturing has changed the state"
    for seed in range(4):
        X, y = batch(seed, device)
        wanted = train_batch(X, y, eager, 0.1, model=lenet)
        assert list(map(float, step(X, y))) == list(map(float, wanted))
    assert all(map(torch.equal, bits(eager), bits(graphed)))


def with_statistics() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(1), LeNet(seed=1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("begun", [False, True])
def test_replicas_train_the_same_bits(device: str, begun: bool) -> None:
    devices = [torch.device(device)] * 3
    eager, graphed = (replicas_of(with_statistics(), 3, devices=devices) for _ in range(2))
    for replicas in (eager, graphed):
        if begun:
            replicas.step(*batch(98, device))
    shares = [5, 5, 0]
    step = GraphedStep.of(*batch(99, device), graphed, shares=shares, capturing=how(device))
    for a, b in zip(eager.modules, graphed.modules, strict=True):
        assert same_bits(a, b), "capturing has changed the state"
    for seed in range(4):
        X, y = batch(seed, device)
        wanted = eager.step(X, y, shares=shares)
        assert list(map(float, step(X, y))) == list(map(float, wanted))
    smaller = batch(7, device, n=4)
    assert list(map(float, graphed.step(*smaller))) == list(map(float, eager.step(*smaller)))
    step(X, y)
    eager.step(X, y, shares=shares)
    for a, b in zip(eager.modules, graphed.modules, strict=True):
        assert same_bits(a, b)
    assert difference(eager.modules[0].cpu(), with_statistics()) > 1e-3


def test_other_shapes_and_several_devices_are_refused() -> None:
    replicas = replicas_of(LeNet(), 2)
    step = GraphedStep.of(*batch(0, "cpu"), replicas, capturing=as_graph)
    with pytest.raises(ValueError, match=r"captured for batches of shape \(10, 1, 28, 28\)"):
        step(*batch(0, "cpu", n=11))
    elsewhere = [torch.zeros(1, device="meta"), torch.zeros(1)]
    with pytest.raises(ValueError, match="these ranks are on cpu, meta"):
        GraphedStep(*batch(0, "cpu"), replicas.step, lambda: elsewhere, capturing=as_graph)


@pytest.mark.parametrize(
    ("options", "what"),
    [({"exact_times": True}, "exact times"), ({"sync_batchnorm": True}, "batch statistics")],
)
def test_options_that_synchronise_with_the_host_are_refused(
    options: dict[str, Any], what: str
) -> None:
    with pytest.raises(ValueError, match=f"{what}.* cannot be captured"):
        GraphedStep.of(*batch(0, "cpu"), replicas_of(LeNet(), 2, **options), capturing=as_graph)


def test_other_threads_may_use_the_gpu_during_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """They load batches: `pin_memory` is forbidden to all threads in a capture of mode "global"."""
    modes = []

    def graph(_: object, *, capture_error_mode: str = "global") -> AbstractContextManager[None]:
        modes.append(capture_error_mode)
        return nullcontext()

    fakes = {"is_available": lambda: True, "Stream": MagicMock, "current_stream": MagicMock}
    fakes |= {"stream": lambda _: nullcontext(), "CUDAGraph": MagicMock, "graph": graph}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    capture(lambda: None)
    assert modes == ["thread_local"]


def test_ranks_on_the_cpu_are_refused() -> None:
    replicas = replicas_of(LeNet(), 2)
    with pytest.raises(ValueError, match="CUDA graph on a GPU, and these ranks are on cpu"):
        GraphedStep.of(*batch(0, "cpu"), replicas)
    assert same_bits(replicas.modules[0], LeNet())
