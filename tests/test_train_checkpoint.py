"""Checkpoints: a resumed run has the bits of an uninterrupted one; misfits are refused."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import Program
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pycollect.train import (
    CheckpointError,
    Data,
    ReplicaTrainer,
    RunResult,
    checkpoint,
    load_model,
    train,
)
from pycollect.train.__main__ import main
from pycollect.train.interrupt import Interrupt, Stopped
from pycollect.train.records import same_bits

GENERATOR = torch.Generator().manual_seed(3)
X, Y = torch.randn(50, 1, 6, 6, generator=GENERATOR), torch.arange(50) % 3
DATA = Data("noise", (X[:40], Y[:40]), (X[40:], Y[40:]))
HEAD = {"format": "pycollect.train"}
OPTIONS: dict[str, Any] = {"data": DATA, "momentum": 0.9, "weight_decay": 1e-3, "quiet": True}


def net() -> nn.Module:
    """A network with state of every kind: each rank's batch statistics, and random dropout."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.3), nn.Flatten(), nn.Linear(64, 3)
    )


def run(devices: str = "cpu*2", size: int = 8, lr: float = 0.05, **options: Any) -> RunResult:
    return train(devices, size, lr, **{"model": net(), **OPTIONS, **options})


def state(path: Path) -> list[Tensor]:
    """Return all tensors of a checkpoint, in order."""
    return [t for t in pytree.tree_leaves(checkpoint.load(path)["run"]) if isinstance(t, Tensor)]


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Send SIGINT to this process at the interrupt check of that number."""
    left, check = iter(range(steps - 1)), Interrupt.check

    def interrupted(self: Interrupt) -> None:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGINT)
        check(self)

    monkeypatch.setattr(Interrupt, "check", interrupted)


@pytest.mark.parametrize("stop", ["epoch 1", "epoch 2", 2, 5, 6, 8, 11])
def test_a_run_is_continued_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: Any
) -> None:
    """Stopped within an epoch of 5 steps, after its last step, after its evaluation, at its end."""
    files = whole, part = tmp_path / "whole.pt", tmp_path / "part.pt"
    a = run(epochs=3, checkpoint=whole)
    if isinstance(stop, str):
        run(epochs=int(stop[-1]), checkpoint=part)
    else:
        with monkeypatch.context() as patch:
            stop_after(patch, stop)
            with pytest.raises(Stopped):
                run(epochs=3, checkpoint=part)
    torch.manual_seed(99)  # the process's own random state must not matter
    b = run(epochs=3, resume=part, checkpoint=part, prefetch=2)
    assert a.losses == b.losses
    assert [(e.loss, e.accuracy) for e in a.epochs] == [(e.loss, e.accuracy) for e in b.epochs]
    assert all(map(same_bits, a.parameters, b.parameters))
    tensors = [state(file) for file in files]
    assert len(tensors[0]) == len(tensors[1]) > 15
    assert all(map(same_bits, *tensors))


def test_measured_shares_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shares(result: RunResult) -> list[tuple[int, ...]]:
        return [step.shares for step in result.steps]

    path, longer = tmp_path / "run.pt", tmp_path / "longer.pt"
    monkeypatch.setattr(ReplicaTrainer, "rank_seconds", lambda self: [0.001, 0.003])
    first = run(epochs=3, weights="auto", checkpoint=path)
    assert len({step.shares for step in first.steps if step.examples == 8}) > 1
    continued = run(epochs=4, resume=path, checkpoint=longer)
    assert continued.settings.weights == "auto"
    assert shares(continued)[:15] == shares(first)
    steps = [checkpoint.load(p)["run"]["engine"]["auto"]["step"] for p in (path, longer)]
    assert steps == [15, 20]


def test_omitted_options_come_from_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    first = run(epochs=1, seed=7, drop_last=True, checkpoint=path)
    own = {"model": net(), "data": DATA, "resume": path, "quiet": True}
    assert len(train(**own).epochs) == 1  # as before
    again = train(epochs=2, **own)
    assert again.settings.stored() == {**first.settings.stored(), "epochs": 2}
    assert len(again.epochs) == 2
    with pytest.raises(ValueError, match="used data of its caller"):
        train(model=net(), resume=path, quiet=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 0.5}, r"cannot be continued with other settings: .*momentum 0\.9, not 0\.5"),
        ({"seed": 1}, r"seed 0, not 1; init_from \(--init-from\) starts a new run from its param"),
        ({"microbatch": 4, "shuffle": False}, "microbatch None, not 4; shuffle True, not False"),
        ({"size": 16, "lr": 0.1}, "batch size 8, not 16; lr 0.05, not 0.1"),
        ({"devices": "cpu*3"}, r"kinds of devices \['cpu', 'cpu'\], not \['cpu', 'cpu', 'cpu'\]"),
        ({"data": Data("noise", (X, Y), (X, Y))}, "training examples 40, not 50"),
        ({"model": nn.Sequential(nn.Flatten(), nn.Linear(36, 3))}, "parameters 243, not 111"),
        ({"model": "resnet18"}, "model Sequential, not resnet18"),
    ],
)
def test_different_settings_are_named(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    run(epochs=1, checkpoint=tmp_path / "run.pt")
    with pytest.raises(CheckpointError, match=message):
        run(resume=tmp_path / "run.pt", **options)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "is damaged"),
        (flip, "is not a checkpoint, or is damaged"),
        (lambda path: path.write_bytes(b""), "is not a checkpoint, or is damaged"),
        (lambda path: path.unlink(), "there is no checkpoint"),
        (lambda path: torch.save({"lr": 1}, path), "was not written by pycollect.train"),
        (lambda path: torch.save(nn.Linear(1, 1), path), "it holds more than tensors, numbers"),
        (lambda path: torch.save({**HEAD, "version": checkpoint.VERSION}, path), "it lacks set"),
        (lambda path: torch.save({**HEAD, "version": 0}, path), "has the layout 0, and this vers"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "run.pt is a FIFO"),
        (lambda path: (path.unlink(), path.mkdir()), "run.pt is a folder"),
        (lambda path: (path.unlink(), path.symlink_to(path)), "Too many levels of symbolic links"),
    ],
)
def test_a_bad_file_is_one_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], object],
    message: str,
) -> None:
    path = tmp_path / "run.pt"
    checkpoint.save(path, {"settings": {}, "identity": {}, "source": None, "run": X})
    spoil(path)
    assert main(["--resume", str(path), "--data", "digits"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m pycollect.train: error: ")
    assert (error.count("\n"), str(path) in error, message in error) == (1, True, True)
    assert "\x1b" not in error  # torch's bold text


def test_a_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.pt"
    checkpoint.save(path, {"a": 1})
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"run\.pt cannot be written .*No space left"):
        checkpoint.save(path, {"a": 2})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(CheckpointError, match=r"cannot be written \(.*Not a directory"):
        checkpoint.save("/dev/full/run.pt", {})


def test_the_command_is_interrupted_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    command = [sys.executable, "-m", "pycollect.train", "--data", "digits", "--devices", "cpu*2"]
    with Program([*command, "--checkpoint", path], stdout=-1, stderr=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("LeNet")
        assert process.stdout.readline().startswith("epoch 1")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    expected = f"interrupted; continue with --resume {path} --checkpoint {path}\n"
    assert (process.returncode, errors) == (130, expected)
    epochs = len(checkpoint.load(path)["run"]["epochs"])
    assert main(["--resume", str(path), "--epochs", str(epochs + 1)]) == 0


def test_a_new_run_and_a_module_take_the_parameters_of_another(tmp_path: Path) -> None:
    """With other ranks, rate, momentum and data; the user's module stays as it is."""
    path, model = tmp_path / "run.pt", net()
    first = run(epochs=1, checkpoint=path)
    before = [tensor.clone() for tensor in model.state_dict().values()]
    options = {"data": (X, Y), "test_data": (X, Y), "momentum": 0.5, "epochs": 1, "quiet": True}
    again = train("cpu*3", 16, 1e-30, model=model, init_from=path, **options)
    assert all(map(same_bits, again.parameters, first.parameters))  # the steps were too small
    assert len(again.steps) == 4
    assert all(map(same_bits, model.state_dict().values(), before))
    load_model(path, model)
    assert all(map(same_bits, model.state_dict().values(), first.module.state_dict().values()))
    ReplicaTrainer(model, "cpu*3", optimizer=torch.optim.Adam).step(X, Y)


def test_parameters_of_another_model_are_named(tmp_path: Path) -> None:
    run(epochs=1, checkpoint=tmp_path / "run.pt")
    other = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    before = [tensor.clone() for tensor in other.state_dict().values()]
    message = (
        r"run\.pt holds another model \(Sequential\) than this Sequential: 0\.weight is "
        r"\[4, 1, 3, 3\] in the file and not there in the module, and \d+ more differ"
    )
    with pytest.raises(CheckpointError, match=message):
        run(model=other, init_from=tmp_path / "run.pt")
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "run.pt", other)
    assert all(map(same_bits, other.state_dict().values(), before))


def test_a_finished_run_says_that_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, copy = tmp_path / "run.pt", tmp_path / "copy.pt"
    first = run(epochs=2, checkpoint=path)
    again = run(epochs=1, resume=path, checkpoint=copy, quiet=False)
    text = "nothing is left to train: the run has had 2 epochs, of 1; pass more epochs to go on"
    assert text in capsys.readouterr().out.splitlines()
    assert all(map(same_bits, again.parameters, first.parameters))
    assert all(map(same_bits, state(path), state(copy)))
