"""Training on GPUs: results as on the CPU, and the same bits with every option of speed."""

import os
import sys

import programs
import pytest
import torch
from sites import GPU
from torch import nn
from train_cases import (
    batches,
    difference,
    perceptron,
    replicas_of,
    same_bits,
    same_tensors,
    trained,
)

from pycollect.train import MODELS, AutoShares, Data, reduce_gradients_naive, train

pytestmark = pytest.mark.cuda

SIZES = [16, 16, 7, 3, 2, 16]
GENERATOR = torch.Generator().manual_seed(3)
X, Y = torch.randn(70, 1, 6, 6, generator=GENERATOR), torch.arange(70) % 3
DATA = Data("noise", (X[:60], Y[:60]), (X[60:], Y[60:]))


@pytest.fixture(autouse=True)
def whole_products(monkeypatch):
    """Switch off TF32, torch's default for convolutions: it differs from the CPU by far more."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


PLACES = {
    "one GPU": lambda rank: GPU,
    "all GPUs": lambda rank: f"cuda:{rank % torch.cuda.device_count()}",
    "GPU and CPU": lambda rank: "cpu" if rank % 2 else GPU,
}


def places(place, world):
    return [torch.device(PLACES[place](rank)) for rank in range(world)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("microbatch", [None, 5])
def test_ranks_train_as_on_the_cpu(place, microbatch):
    wanted = trained(perceptron(), 3, SIZES)
    found = [
        trained(perceptron(), 3, SIZES, devices=places(place, 3), microbatch=microbatch, **how)
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


def test_batch_statistics_over_all_ranks_of_a_gpu():
    norms = nn.Sequential(nn.BatchNorm2d(1), net())
    found, wanted = (
        run(devices, model=norms, sync_batchnorm=True) for devices in (f"{GPU}*3", "cpu*3")
    )
    assert difference(found.module.cpu(), wanted.module) < 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_overlap_changes_no_bit_of_the_chapters_models(name, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    devices = places("one GPU", 2)
    plain, early = (
        replicas_of(MODELS[name](), 2, 0.05, devices=devices, overlap=on) for on in (False, True)
    )
    for seed in range(3):
        images = torch.rand((8, 1, 28, 28), generator=torch.Generator().manual_seed(seed))
        for replicas in (plain, early):
            replicas.step(images, torch.arange(8))
    for a, b in zip(plain.modules, early.modules, strict=True):
        assert same_bits(a.cpu(), b.cpu())


def test_a_step_runs_on_the_callers_stream():
    devices = places("one GPU", 2)
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


def test_ranks_are_timed_on_their_devices():
    replicas, auto = replicas_of(perceptron(), 2, devices=places("GPU and CPU", 2)), AutoShares(2)
    for X, y in batches([32] * 12):
        replicas.step(X, y, shares=auto.shares(32))
        seconds = replicas.rank_seconds()
        assert min(seconds) > 0
        auto.observe(seconds)
    assert sum(auto.shares(32)) == 32


def net(*, drawn=False):
    torch.manual_seed(5)
    middle = [nn.BatchNorm2d(4), nn.Dropout(0.3)] if drawn else [nn.ReLU()]
    return nn.Sequential(nn.Conv2d(1, 4, 3), *middle, nn.Flatten(), nn.Linear(64, 3))


def run(devices=f"{GPU}*2", **options):
    usual = {"data": DATA, "model": net(), "momentum": 0.9, "epochs": 2, "deterministic": True}
    return train(devices, 16, 0.05, quiet=True, **usual | options)


@pytest.mark.parametrize(
    ("devices", "options", "shares"),
    [
        (f"{GPU}*2", {}, (8, 8)),
        ([GPU, "cpu"], {"weights": "80,20", "prefetch": 2}, (13, 3)),
        (f"{GPU}*2", {"graph": True}, (8, 8)),
    ],
)
def test_a_run_trains_as_on_the_cpu(devices, options, shares):
    result, other = run(devices, **options), run("cpu*2", weights=options.get("weights"))
    assert result.steps[0].shares == shares
    for mine, theirs in zip(result.parameters, other.parameters, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs.cpu(), rtol=0, atol=1e-4)
    assert result.losses == pytest.approx(other.losses, abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"prefetch": 0},
        {"prefetch": 5},
        {"overlap": False},
        {"reduce": "naive"},
        {"exact_times": True, "overlap": False},
    ],
)
def test_speed_options_do_not_change_the_bits(options):
    result, other = run(), run(**options)
    assert result.losses == other.losses
    assert all(map(same_tensors, result.parameters, other.parameters))
    times = [step.seconds for step in other.steps] if "exact_times" in options else []
    assert all(time.compute > 0 and time.reduction > 0 for time in times)


def test_a_run_is_continued_with_the_same_bits(tmp_path):
    whole = run(model=net(drawn=True), epochs=3)
    run(model=net(drawn=True), epochs=1, checkpoint=tmp_path / "run.pt")
    torch.cuda.manual_seed_all(99)
    continued = run(model=net(drawn=True), epochs=3, resume=tmp_path / "run.pt")
    assert whole.losses == continued.losses
    assert all(map(same_tensors, whole.parameters, continued.parameters))


def test_hidden_gpus_are_not_used():
    program = "import pycollect; print(len(pycollect.devices('cuda:*')))"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
    done = programs.run([sys.executable, "-c", program], timeout=100, env=environment)
    assert done.stdout == "1\n", done.stderr


def test_a_compiled_run_is_for_ranks_on_the_cpu():
    with pytest.raises(ValueError, match=r"compiled for ranks on the CPU, not on .*--graph captur"):
        run(compile=True)
