"""Checkpoints: a resumed run has the bits of an uninterrupted one; misfits are refused."""

import copy
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import Program
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from train_cases import convolutional, noise, same_bits, same_tensors

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

DATA = noise()
HEAD = {"format": "pycollect.train"}
OPTIONS: dict[str, Any] = {"data": DATA, "momentum": 0.9, "weight_decay": 1e-3, "quiet": True}


class Noisy(torch.utils.data.Dataset[Any]):
    """Examples with random numbers, drawn when they are fetched."""

    classes = ("a", "b", "c")

    def __len__(self) -> int:
        return len(DATA.train[0])

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return DATA.train[0][i] + 0.1 * torch.rand(1, 6, 6), i % 3


def net() -> nn.Module:
    """A network with state of every kind: each rank's batch statistics, and random dropout."""
    return convolutional(nn.BatchNorm2d(4), nn.Dropout(0.3))


def run(devices: str = "cpu*2", size: int = 8, lr: float = 0.05, **options: Any) -> RunResult:
    return train(devices, size, lr, **{"model": net(), **OPTIONS, **options})


def stop_after(monkeypatch: pytest.MonkeyPatch, checks: int) -> None:
    """Send SIGTERM to this process at the interrupt check of that number."""
    numbers, check = itertools.count(1), Interrupt.check

    def interrupted(self: Interrupt) -> None:
        if next(numbers) == checks:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)  # the main thread runs its handler
        check(self)

    monkeypatch.setattr(Interrupt, "check", interrupted)


@pytest.mark.parametrize(
    ("stop", "options"),
    [
        (None, {}),  # ends after its first epoch
        (2, {}),
        (6, {"microbatch": 3}),  # after the last step
        (7, {"weights": "80,20"}),  # after the evaluation
        (10, {"prefetch": 2}),
        (10, {"weights": "auto"}),
        (9, {"data": Noisy(), "test_data": DATA.test, "prefetch": 0}),
        (10, {"sync_batchnorm": True}),  # two checks after each step: every rank is a thread
    ],
)
def test_a_run_is_continued_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int | None, options: dict[str, Any]
) -> None:
    """An epoch has 6 steps, after each of which the run may stop, as after its evaluation."""
    monkeypatch.setattr(ReplicaTrainer, "rank_seconds", lambda self: [0.001, 0.003])
    whole, part = tmp_path / "whole.pt", tmp_path / "part.pt"
    a = run(epochs=3, checkpoint=whole, **options)
    if stop is None:
        run(epochs=1, checkpoint=part, **options)
    else:
        with monkeypatch.context() as patch:
            stop_after(patch, stop)
            with pytest.raises(Stopped):
                run(epochs=3, checkpoint=part, **options)
    torch.manual_seed(99)  # the process's own random state must not matter
    b = run(epochs=3, resume=part, checkpoint=part, **options)
    assert a.losses == b.losses
    assert [step.shares for step in a.steps] == [step.shares for step in b.steps]
    assert len({step.shares for step in a.steps}) > 2 or options.get("weights") != "auto"
    assert [(e.loss, e.accuracy) for e in a.epochs] == [(e.loss, e.accuracy) for e in b.epochs]
    assert same_bits(a.module, b.module)
    stored = [checkpoint.load(path)["run"]["engine"] for path in (whole, part)]
    assert stored[0]["auto"] == stored[1]["auto"]
    tensors = [[t for t in pytree.tree_leaves(s) if isinstance(t, Tensor)] for s in stored]
    assert len(tensors[0]) == len(tensors[1]) > 15
    assert all(map(same_tensors, *tensors))


@pytest.mark.parametrize("worlds", [(2, 4), (4, 1), (1, 2)], ids=str)
def test_a_run_with_shards_is_continued_by_any_number_of_ranks(
    tmp_path: Path, worlds: tuple[int, int]
) -> None:
    """Statistics, random states, momentum and losses are those of a run without a change."""
    path, (before, after) = tmp_path / "run.pt", worlds
    shards: dict[str, Any] = {"shards": 4, "drop_last": True}
    wholes = [run(f"cpu*{world}", epochs=3, **shards) for world in worlds]
    run(f"cpu*{before}", epochs=1, checkpoint=path, **shards)
    torch.manual_seed(99)
    part = run(f"cpu*{after}", epochs=3, resume=path, checkpoint=path, **shards)
    assert len(checkpoint.load(path)["run"]["engine"]["replicas"]["buffers"]) == 4
    for whole in wholes:
        assert part.losses == whole.losses
        assert [e.accuracy for e in part.epochs] == [e.accuracy for e in whole.epochs]
        assert same_bits(part.module, whole.module)
    with pytest.raises(checkpoint.CheckpointError, match="shards 4, not 8"):
        run(resume=path, epochs=4, size=16, shards=8)


def test_omitted_options_come_from_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, copied = tmp_path / "run.pt", tmp_path / "copy.pt"
    first = run(epochs=2, seed=7, drop_last=True, checkpoint=path)
    own = {"model": net(), "data": DATA, "resume": path}
    again = train(checkpoint=copied, **own)  # of as many epochs
    text = "nothing is left to train: the run has had 2 epochs, of 2; pass more epochs to go on"
    assert text in capsys.readouterr().out.splitlines()
    assert same_bits(again.module, first.module)
    assert checkpoint.load(path)["run"]["steps"] == checkpoint.load(copied)["run"]["steps"]
    more = train(epochs=3, quiet=True, **own)
    assert more.settings.stored() == {**first.settings.stored(), "epochs": 3}
    assert len(more.epochs) == 3
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
        ({"data": Data("noise", DATA.test, DATA.test)}, "training examples 41, not 9"),
        ({"model": nn.Sequential(nn.Flatten(), nn.Linear(36, 3))}, "parameters 243, not 111"),
        ({"model": "resnet18", "drop_last": True}, "model Sequential, not resnet18"),
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
    checkpoint.save(path, {"settings": {}, "identity": {}, "source": None, "run": DATA.test})
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


@pytest.mark.parametrize("kept", [True, False])
def test_ctrl_c_ends_the_command_with_one_line(tmp_path: Path, kept: bool) -> None:
    """With a checkpoint the line says how to go on."""
    path = tmp_path / "run.pt"
    command = [sys.executable, "-m", "pycollect.train", "--data", "digits", "--devices", "cpu*2"]
    command += ["--checkpoint", str(path)] if kept else []
    with Program(command, stdout=-1, stderr=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("LeNet")
        assert not kept or process.stdout.readline().startswith("epoch 1")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    advice = f"; continue with --resume {path} --checkpoint {path}" if kept else ""
    assert (process.returncode, errors) == (130, f"interrupted{advice}\n")
    if kept:
        epochs = len(checkpoint.load(path)["run"]["epochs"]) + 1
        assert main(["--resume", str(path), "--epochs", str(epochs)]) == 0


def test_a_new_run_and_a_module_take_the_parameters_of_another(tmp_path: Path) -> None:
    """With other ranks, rate, momentum and data; the user's module stays as it is."""
    path, model, before = tmp_path / "run.pt", net(), net()
    first = run(epochs=1, checkpoint=path)
    X, y = DATA.test
    options = {"data": (X, y), "test_data": (X, y), "momentum": 0.5, "epochs": 1, "quiet": True}
    again = train("cpu*3", 4, 1e-30, model=model, init_from=path, **options)
    assert all(map(same_tensors, again.parameters, first.parameters))  # the steps were too small
    assert len(again.steps) == 3
    assert same_bits(model, before)
    load_model(path, model)
    assert same_bits(model, first.module)
    ReplicaTrainer(model, "cpu*3", optimizer=torch.optim.Adam).step(X, y)


def test_parameters_of_another_model_are_named(tmp_path: Path) -> None:
    path, other = tmp_path / "run.pt", nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    run(epochs=1, checkpoint=path)
    before = copy.deepcopy(other)
    message = (
        r"run\.pt holds another model \(Sequential\) than this Sequential: 0\.weight is "
        r"\[4, 1, 3, 3\] in the file and not there in the module, and \d+ more differ"
    )
    for call in (lambda: run(model=other, init_from=path), lambda: load_model(path, other)):
        with pytest.raises(CheckpointError, match=message):
            call()
    assert same_bits(other, before)
