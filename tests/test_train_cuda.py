"""Replicas on GPUs: results as on the CPU, and the same bits with every reduction."""

from __future__ import annotations

import pytest
import torch
from sites import GPU
from train_cases import batches, difference, perceptron, replicas_of, same_bits, trained

from pycollect.train import MODELS, AutoShares, ReplicaTrainer, reduce_gradients_naive

pytestmark = pytest.mark.cuda

SIZES = [16, 16, 7, 3, 2, 16]


def places(world: int) -> dict[str, list[torch.device]]:
    """Virtual ranks on one GPU, ranks on all GPUs in turn, and a GPU together with the CPU."""
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return {
        "one GPU": [torch.device(GPU)] * world,
        "all GPUs": [gpus[rank % len(gpus)] for rank in range(world)],
        "GPU and CPU": [torch.device("cpu" if rank % 2 else GPU) for rank in range(world)],
    }


@pytest.mark.parametrize("place", ["one GPU", "all GPUs", "GPU and CPU"])
@pytest.mark.parametrize("microbatch", [None, 5])
def test_ranks_train_as_on_the_cpu(place: str, microbatch: int | None) -> None:
    wanted = trained(perceptron(), 3, SIZES)
    found = [
        trained(perceptron(), 3, SIZES, devices=places(3)[place], microbatch=microbatch, **how)
        for how in (
            {"overlap": False},
            {"overlap": True, "bucket_bytes": 1},
            {"overlap": True},
            {"overlap": False, "reduction": reduce_gradients_naive},
        )
    ]
    for replicas in found:
        mine = [module.cpu() for module in replicas.modules]
        assert difference(mine[0], wanted.modules[0]) < 1e-4
        assert all(same_bits(module, mine[0]) for module in mine)
        assert same_bits(mine[0], found[0].modules[0])


@pytest.mark.parametrize("name", MODELS)
def test_overlap_changes_no_bit_of_the_chapters_models(name: str) -> None:
    def run(overlap: bool) -> ReplicaTrainer:
        replicas = replicas_of(
            MODELS[name](), 2, 0.05, devices=places(2)["one GPU"], overlap=overlap
        )
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            X = torch.rand((8, 1, 28, 28), generator=generator)
            replicas.step(X, torch.randint(10, (8,), generator=generator))
        return replicas

    deterministic = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        plain, early = run(False), run(True)
    finally:
        torch.backends.cudnn.deterministic = deterministic
    for a, b in zip(plain.modules, early.modules, strict=True):
        assert same_bits(a.cpu(), b.cpu())


def test_a_step_runs_on_the_callers_stream() -> None:
    devices = places(2)["one GPU"]
    wanted = trained(perceptron(), 2, SIZES, devices=devices)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = replicas_of(perceptron(), 2, devices=devices, bucket_bytes=1)
        for X, y in batches(SIZES):
            torch.cuda._sleep(2_000_000)
            found.step(X, y)
    torch.cuda.current_stream().wait_stream(side)
    assert same_bits(found.modules[1].cpu(), wanted.modules[1].cpu())


def test_ranks_are_timed_on_their_devices() -> None:
    replicas = replicas_of(perceptron(), 2, devices=places(2)["GPU and CPU"])
    auto = AutoShares(2)
    for X, y in batches([32] * 12):
        replicas.step(X, y, shares=auto.shares(32))
        seconds = replicas.rank_seconds()
        assert min(seconds) > 0
        auto.observe(seconds)
    assert sum(auto.shares(32)) == 32


def test_batch_statistics_over_all_ranks_of_a_gpu() -> None:
    def module() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.BatchNorm1d(6), perceptron())

    found = trained(module(), 3, SIZES, devices=places(3)["one GPU"], sync_batchnorm=True)
    wanted = trained(module(), 3, SIZES, sync_batchnorm=True)
    assert difference(found.modules[0].cpu(), wanted.modules[0]) < 1e-3
