"""`train` on GPUs: ranks that share a GPU, with the CPU, captured, prefetched, continued."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pycollect.train import Data, RunResult, train
from pycollect.train.records import same_bits

pytestmark = pytest.mark.cuda
GENERATOR = torch.Generator().manual_seed(3)
X, Y = torch.randn(70, 1, 6, 6, generator=GENERATOR), torch.arange(70) % 3
DATA = Data("noise", (X[:60], Y[:60]), (X[60:], Y[60:]))


@pytest.fixture(autouse=True)
def whole_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off TF32, torch's default for convolutions: it differs from the CPU by far more."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def net(*, drawn: bool = False) -> nn.Module:
    torch.manual_seed(5)
    middle = [nn.BatchNorm2d(4), nn.Dropout(0.3)] if drawn else [nn.ReLU()]
    return nn.Sequential(nn.Conv2d(1, 4, 3), *middle, nn.Flatten(), nn.Linear(64, 3))


def run(devices: Any = "cuda:0*2", **options: Any) -> RunResult:
    usual = {"data": DATA, "model": net(), "momentum": 0.9, "epochs": 2, "deterministic": True}
    return train(devices, 16, 0.05, quiet=True, **usual | options)


def assert_close(a: RunResult, b: RunResult) -> None:
    for mine, theirs in zip(a.parameters, b.parameters, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs.cpu(), rtol=0, atol=1e-4)
    assert a.losses == pytest.approx(b.losses, abs=1e-4)


def test_a_gpu_trains_as_the_cpu() -> None:
    assert_close(run(), run("cpu*2"))


def test_a_gpu_and_the_cpu_train_together() -> None:
    result = run(["cuda:0", "cpu"], weights="80,20", prefetch=2)
    assert result.steps[0].shares == (13, 3)
    assert_close(result, run("cpu*2", weights="80,20"))


@pytest.mark.parametrize(
    ("name", "value"),
    [("prefetch", 0), ("prefetch", 5), ("overlap", False), ("reduce", "naive"), ("exact_times", 1)],
)
def test_speed_options_do_not_change_the_bits(name: str, value: Any) -> None:
    result, other = run(), run(**{name: value})
    assert result.losses == other.losses
    assert all(map(same_bits, result.parameters, other.parameters))


def test_the_captured_step_trains_as_the_eager_step() -> None:
    assert_close(run(graph=True), run())


def test_a_run_is_continued_with_the_same_bits(tmp_path: Path) -> None:
    whole = run(model=net(drawn=True), epochs=3)
    run(model=net(drawn=True), epochs=1, checkpoint=tmp_path / "run.pt")
    torch.cuda.manual_seed_all(99)
    continued = run(model=net(drawn=True), epochs=3, resume=tmp_path / "run.pt")
    assert whole.losses == continued.losses
    assert all(map(same_bits, whole.parameters, continued.parameters))


def test_times_are_exact_on_request() -> None:
    steps = run(exact_times=True).steps
    assert all(step.seconds.compute > 0 for step in steps)
    assert all(step.seconds.reduction > 0 for step in run(exact_times=True, overlap=False).steps)
