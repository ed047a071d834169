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

from pycollect.train import (
    CheckpointError,
    Data,
    Options,
    ReplicaTrainer,
    RunResult,
    checkpoint,
    load_model,
    train,
)
from pycollect.train.__main__ import main
from pycollect.train.interrupt import Interrupt, Stopped
from pycollect.train.run_result import same_bits

GENERATOR = torch.Generator().manual_seed(3)
X, Y = torch.randn(50, 1, 6, 6, generator=GENERATOR), torch.arange(50) % 3
DATA = Data("noise", (X[:40], Y[:40]), (X[40:], Y[40:]))
OPTIONS: dict[str, Any] = {"data": DATA, "momentum": 0.9, "weight_decay": 1e-3, "quiet": True}


def net() -> nn.Module:
    """A network with state of every kind: each rank's batch statistics, and random dropout."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.3), nn.Flatten(), nn.Linear(64, 3)
    )


def run(**options: Any) -> RunResult:
    return train("cpu*2", 8, 0.05, **{"model": net(), **OPTIONS, **options})


def state(path: Path) -> list[Tensor]:
    """Return all tensors of a checkpoint, in order."""
    found: list[Tensor] = []

    def visit(value: object) -> None:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict):
            for key in value:
                visit(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                visit(item)

    visit(checkpoint.load(path)["run"])
    return found


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Send SIGINT to this process at the interrupt check of that number."""
    count = 0
    check = Interrupt.check

    def interrupted(self: Interrupt) -> None:
        nonlocal count
        count += 1
        if count == steps:
            os.kill(os.getpid(), signal.SIGINT)
        check(self)

    monkeypatch.setattr(Interrupt, "check", interrupted)


def assert_same_run(a: RunResult, b: RunResult, files: tuple[Path, Path]) -> None:
    assert a.losses == b.losses
    assert [(e.loss, e.accuracy) for e in a.epochs] == [(e.loss, e.accuracy) for e in b.epochs]
    assert all(map(same_bits, a.parameters, b.parameters))
    tensors = [state(file) for file in files]
    assert len(tensors[0]) == len(tensors[1]) > 15
    assert all(map(same_bits, *tensors))


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_run_is_continued_with_the_same_bits(tmp_path: Path, epochs: int) -> None:
    whole, part = tmp_path / "whole.pt", tmp_path / "part.pt"
    unbroken = run(epochs=3, checkpoint=whole)
    run(epochs=epochs, checkpoint=part)
    torch.manual_seed(99)  # the process's own random state must not matter
    continued = run(epochs=3, resume=part, checkpoint=part, prefetch=2)
    assert_same_run(unbroken, continued, (whole, part))


@pytest.mark.parametrize("steps", [2, 5, 6, 8, 11])
def test_ctrl_c_stops_between_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Stops within an epoch of 5 steps, after its last step, and after its evaluation."""
    whole, part = tmp_path / "whole.pt", tmp_path / "part.pt"
    unbroken = run(epochs=3, checkpoint=whole)
    with monkeypatch.context() as patch:
        stop_after(patch, steps)
        with pytest.raises(Stopped):
            run(epochs=3, checkpoint=part)
    assert_same_run(unbroken, run(epochs=3, resume=part, checkpoint=part), (whole, part))


def test_dropout_and_momentum_are_in_the_state(tmp_path: Path) -> None:
    """The tests above depend on each state: spoiling a single one changes the bits."""
    run(epochs=1, checkpoint=tmp_path / "part.pt")
    loaded = checkpoint.load(tmp_path / "part.pt")
    whole = run(epochs=2)
    for spoil in (
        lambda c: c["engine"].update(generators={}),
        lambda c: c["engine"]["replicas"]["optimizer"]["state"][0]["momentum_buffer"].zero_(),
        lambda c: c["engine"]["replicas"]["buffers"][1]["1.running_mean"].add_(1),
    ):
        spoiled = checkpoint.load(tmp_path / "part.pt")
        spoil(spoiled["run"])
        checkpoint.save(tmp_path / "spoiled.pt", spoiled)
        run(epochs=2, resume=tmp_path / "spoiled.pt", checkpoint=tmp_path / "after.pt")
        whole_state = run(epochs=2, resume=tmp_path / "part.pt", checkpoint=tmp_path / "good.pt")
        assert whole_state.losses == whole.losses
        pairs = zip(state(tmp_path / "after.pt"), state(tmp_path / "good.pt"), strict=True)
        assert not all(same_bits(a, b) for a, b in pairs)
    assert loaded["settings"]["lr"] == 0.05


def test_measured_shares_are_continued(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    first = run(epochs=2, weights="auto", checkpoint=path)
    kept = checkpoint.load(path)["run"]["engine"]["auto"]
    assert kept["step"] == len(first.steps) == 10
    continued = run(epochs=3, resume=path, checkpoint=path)
    assert continued.settings.weights == "auto"
    assert [step.shares for step in continued.steps[:10]] == [step.shares for step in first.steps]
    assert checkpoint.load(path)["run"]["engine"]["auto"]["step"] == 15


def test_measured_shares_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.pt"
    monkeypatch.setattr(ReplicaTrainer, "rank_seconds", lambda self: [0.001, 0.003])
    first = run(epochs=3, weights="auto", checkpoint=path)
    assert len({step.shares for step in first.steps if step.examples == 8}) > 1
    monkeypatch.setattr(ReplicaTrainer, "rank_seconds", lambda self: [0.003, 0.001])
    again = run(epochs=3, replay_shares=path)
    assert [step.shares for step in again.steps] == [step.shares for step in first.steps]
    assert all(map(same_bits, first.parameters, again.parameters))
    other = run(epochs=3, weights="auto")
    assert [step.shares for step in other.steps] != [step.shares for step in first.steps]
    with pytest.raises(ValueError, match="exclude each other: choose one"):
        run(weights="1,2", replay_shares=path)
    run(epochs=1, checkpoint=path)
    with pytest.raises(CheckpointError, match=r"run\.pt holds no measured shares"):
        run(replay_shares=path)


def test_omitted_options_come_from_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    first = run(epochs=1, seed=7, drop_last=True, checkpoint=path)
    again = train(model=net(), data=DATA, epochs=2, resume=path, quiet=True)
    assert again.settings == Options(**{**vars(first.settings), "epochs": 2})
    assert len(again.epochs) == 2
    assert len(train(model=net(), data=DATA, resume=path, quiet=True).epochs) == 1  # as before
    if not torch.cuda.is_available():
        again = train(model=net(), data=DATA, num_gpus=2, resume=path, quiet=True)
        assert again.settings == first.settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 0.5}, r"cannot be continued with other settings: .*momentum 0\.9, not 0\.5"),
        ({"seed": 1}, "seed 0, not 1"),
        ({"drop_last": True}, "drop last False, not True"),
        ({"microbatch": 4, "shuffle": False}, "microbatch None, not 4; shuffle True, not False"),
        ({"weights": "80,20"}, r"weights None, not \(80.0, 20.0\)"),
        ({"data": Data("noise", (X, Y), (X, Y))}, "training examples 40, not 50"),
        ({"model": nn.Sequential(nn.Flatten(), nn.Linear(36, 3))}, "parameters 243, not 111"),
        ({"model": "resnet18"}, "model Sequential, not resnet18"),
    ],
)
def test_different_settings_are_named(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    run(epochs=1, checkpoint=tmp_path / "run.pt")
    with pytest.raises((CheckpointError, ValueError), match=message):
        run(resume=tmp_path / "run.pt", **options)


def test_different_ranks_batch_and_rate_are_named(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    run(epochs=1, checkpoint=path)
    with pytest.raises(CheckpointError) as caught:
        train("cpu*3", 16, 0.1, model=net(), resume=path, **OPTIONS)
    for text in ("batch size 8, not 16", "lr 0.05, not 0.1", "['cpu', 'cpu'], not ['cpu', 'cpu',"):
        assert text in str(caught.value)
    with pytest.raises(ValueError, match="used data of its caller"):
        train(model=net(), resume=path, quiet=True)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def older(path: Path) -> None:
    state = checkpoint.load(path)
    torch.save({**state, "version": 0}, path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut, "is not a checkpoint, or is damaged"),
        (flip, "is not a checkpoint, or is damaged"),
        (lambda path: path.write_bytes(b""), "is not a checkpoint, or is damaged"),
        (lambda path: path.write_text("hello"), "is not a checkpoint, or is damaged"),
        (lambda path: path.unlink(), "there is no checkpoint"),
        (lambda path: torch.save({"lr": 1}, path), "was not written by pycollect.train"),
        (lambda path: torch.save(nn.Linear(1, 1), path), "it holds more than tensors, numbers"),
        (
            lambda path: torch.save({"format": "pycollect.train", "version": 1}, path),
            "it lacks set",
        ),
        (lambda path: (path.unlink(), os.mkfifo(path)), "run.pt is a FIFO"),
        (lambda path: (path.unlink(), path.mkdir()), "run.pt is a folder"),
        (lambda path: (path.unlink(), path.symlink_to(path)), "Too many levels of symbolic links"),
        (older, "has the layout 0, and this version reads 1"),
    ],
)
def test_a_bad_file_is_one_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], object],
    message: str,
) -> None:
    path = tmp_path / "run.pt"
    run(epochs=1, checkpoint=path)
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


def test_an_unwritable_path_is_refused_at_once(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "run.pt", "does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            run(checkpoint=path)


def test_the_command_is_interrupted_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    command = [sys.executable, "-m", "pycollect.train", "--data", "digits", "--devices", "cpu*2"]
    with Program([*command, "--checkpoint", path], stdout=-1, stderr=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("LeNet")
        assert process.stdout.readline().startswith("epoch 1")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (
        130,
        f"interrupted; continue with --resume {path} --checkpoint {path}\n",
    )
    epochs = len(checkpoint.load(path)["run"]["epochs"])
    arguments = ["--resume", str(path), "--epochs", str(epochs + 1)]
    assert main(arguments) == 0


def test_a_new_run_starts_with_the_parameters_of_another(tmp_path: Path) -> None:
    """With other ranks, rate, momentum and data; the user's module stays as it is."""
    path, model = tmp_path / "run.pt", net()
    first = run(epochs=1, checkpoint=path)
    before = [tensor.clone() for tensor in model.state_dict().values()]
    options = {"data": (X, Y), "test_data": (X, Y), "momentum": 0.5, "epochs": 1, "quiet": True}
    again = train("cpu*3", 16, 1e-30, model=model, init_from=path, **options)
    for mine, theirs in zip(again.parameters, first.parameters, strict=True):
        assert same_bits(mine, theirs)  # the steps were too small to change a bit
    assert len(again.steps) == 4
    assert all(map(same_bits, model.state_dict().values(), before))


def test_the_parameters_go_into_a_trainer_of_ones_own(tmp_path: Path) -> None:
    path, model = tmp_path / "run.pt", net()
    first = run(epochs=1, checkpoint=path)
    load_model(path, model)
    expected = first.module.state_dict()
    for name, tensor in model.state_dict().items():
        assert same_bits(tensor, expected[name])
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


def test_the_refusal_names_the_way_to_take_the_parameters(tmp_path: Path) -> None:
    run(epochs=1, checkpoint=tmp_path / "run.pt")
    with pytest.raises(CheckpointError, match=r"init_from \(--init-from\) starts a new run"):
        train("cpu*3", 8, 0.05, model=net(), resume=tmp_path / "run.pt", **OPTIONS)


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
