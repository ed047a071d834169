"""Output files of a run: the log's lines, the plot, the table of a comparison."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pycollect.train import (
    Data,
    Options,
    OutputError,
    ReductionComparison,
    RunResult,
    StepSeconds,
    train,
)
from pycollect.train import output as log_module
from pycollect.train.__main__ import main
from pycollect.train.curves import plot
from pycollect.train.output import Log
from pycollect.train.records import PARTS, EpochRecord, StepRecord, mean_loss

X, Y = torch.randn(21, 1, 4, 4, generator=torch.Generator().manual_seed(1)), torch.arange(21) % 3
DATA = Data("noise", (X, Y), (X, Y))


def run(**options: Any) -> Any:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    chosen = {"lr": 0.1, "data": DATA, "epochs": 2, "quiet": True, "model": model, **options}
    return train("cpu*2", 8, **chosen)


def lines(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def step(epoch: int, number: int, loss: float = 1.0, examples: int = 8) -> StepRecord:
    seconds = StepSeconds(compute=number, reduction=1.0)
    return StepRecord(epoch, number, examples, loss, 0.1 * number, seconds, (4, 4))


def result_of(
    reduce: str, epochs: list[EpochRecord], steps: list[StepRecord], *modules: nn.Module
) -> RunResult:
    devices = (torch.device("cpu"),)
    options = Options(devices=devices, batch_size=8, lr=0.1, epochs=2, reduce=reduce)
    return RunResult(options, epochs, steps, modules)


def test_the_log_has_every_step_and_epoch_and_documents_all_fields(tmp_path: Path) -> None:
    files = {"log": tmp_path / "run.jsonl", "checkpoint": tmp_path / "run.pt"}
    result = run(**files)
    found = lines(files["log"])
    order = ["start", *["step"] * 3, "epoch", *["step"] * 3, "epoch", "end"]
    assert [line["event"] for line in found] == order
    start, first, *_, epoch, end = found
    assert (start["batch_size"], start["lr"], start["devices"]) == (8, 0.1, ["cpu", "cpu"])
    assert (start["data"], start["model"], start["parameters"]) == ("noise", "Sequential", 51)
    assert (first["epoch"], first["step"], first["shares"]) == (1, 1, [4, 4])
    assert first["loss"] == result.losses[0]
    assert all(first[f"{part}_seconds"] >= 0 for part in PARTS)
    assert (epoch["epoch"], epoch["accuracy"]) == (2, result.accuracy)
    assert end["first_batch_seconds"] == result.first_batch > 0
    for line in (first, epoch, end):
        assert all(name in str(log_module.__doc__) for name in line.keys() - {"event"}), line
    run(epochs=3, resume=files["checkpoint"], **files)  # a run that goes on appends to its log
    events = [line["event"] for line in lines(files["log"])]
    assert events == [*order, "start", *["step"] * 3, "epoch", "end"]
    run(epochs=1, log=files["log"])
    assert len(lines(files["log"])) == 6  # a new run starts a new file


def test_the_error_that_stops_a_run_is_logged_and_raised(tmp_path: Path) -> None:
    class Broken(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("it broke")

    with pytest.raises(RuntimeError, match="it broke"):
        run(model=Broken(16, 3), log=tmp_path / "run.jsonl")
    assert lines(tmp_path / "run.jsonl")[-1] == {"event": "stopped", "why": "it broke"}
    with pytest.raises(KeyError, match="why"), Log("/dev/full"):  # although the log fails, too
        raise KeyError("why")


def test_a_run_that_ends_in_nan_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    arguments = ["--data", "digits", "--epochs", "1", "--devices", "cpu"]
    assert main([*arguments, "--log", str(path), "--lr", "1e30"]) == 0
    error = capsys.readouterr().err
    assert error.startswith("warning: the loss is nan from step ")
    assert lines(path)[-2]["loss"] is None  # JSON has no NaN
    assert f"warning: {lines(path)[-1]['diverged']}; a smaller learning rate may help\n" == error
    assert main([*arguments, "--log", str(path)]) == 0
    assert capsys.readouterr().err == ""
    assert lines(path)[-1]["diverged"] is None
    assert main([*arguments, "--lr", "1e30", "--compare"]) == 0
    warnings = capsys.readouterr().err.splitlines()
    assert [warning.partition(" from")[0] for warning in warnings] == [
        "warning: the loss is nan"
    ] * 2


def test_only_the_end_of_a_run_counts_as_divergence() -> None:
    """A loss may be nan for a while and recover; the last update alone may ruin the model."""
    steps = [step(1, 1), step(1, 2, math.nan), step(2, 1, math.inf), step(2, 2)]
    fine = nn.BatchNorm1d(1)  # with a buffer of integers
    assert result_of("naive", [], steps, fine).divergence == ""
    found = result_of("naive", [], steps[:3], fine).divergence
    assert found == "the loss is nan from step 2 of epoch 1 to the end"
    nn.init.constant_(fine.weight, math.inf)
    assert "not finite" in result_of("naive", [], steps, fine).divergence


def test_long_epochs_are_logged_while_they_run(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    class Watching(nn.Linear):
        seen = 0

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if self.training:
                Watching.seen = path.read_text().count('"event": "step"')
            return super().forward(input.flatten(1))

    many = X.repeat(6, 1, 1, 1), Y.repeat(6)
    data = Data("more", many, many)
    train("cpu", 1, data=data, model=Watching(16, 3), epochs=1, log=path, quiet=True)
    assert 50 <= Watching.seen < 126


def test_typical_times_leave_the_first_step_out() -> None:
    for steps, compute in (([(1, 100), (1, 2), (1, 4), (2, 3)], 3), ([(1, 100)], 100), ([], 0)):
        result = result_of("naive", [], [step(*numbers) for numbers in steps])
        assert result.parts["compute"] == compute
    assert mean_loss([step(1, 1, 2.0, 30), step(1, 2, 5.0, 10)]) == 2.75


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_picture_is_drawn(tmp_path: Path, ending: str) -> None:
    """Also of losses that are not finite, and of a name with bytes that are no letters."""
    path = tmp_path / f"run.{ending}"
    run(plot=path, data=replace(DATA, name="\udcff \u00fc $_{"), lr=1e30)
    content = path.read_bytes()
    assert content.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending])
    if ending == "svg":
        for text in (b"training loss", b"test accuracy", b"epoch", b"time (ms)", b"reduction"):
            assert b"<!-- " + text in content
    epoch = EpochRecord(1, 1.0, math.nan, 0.1)
    plot([result_of(name, [epoch], []) for name in ("naive", "pycollect")], path)


def test_a_full_disk_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log fails at its first line; the plot at the end, when all results have been printed."""
    with pytest.raises(OutputError, match=r"^the log /dev/full cannot be written \(No space left"):
        run(log="/dev/full")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    picture = str(tmp_path / "run.png")
    assert main(["--data", "digits", "--epochs", "1", "--plot", picture]) == 2
    out, err = capsys.readouterr()
    assert "test acc: " in out
    assert err == (
        f"python -m pycollect.train: error: the picture {picture} cannot be written (No space "
        "left on device)\n"
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((1, 1), "steps: the same bits"),
        ((1, 1 + 2**-20), "steps, against naive: pycollect by up to 9.5e-07 different"),
    ],
)
def test_a_comparison_says_how_much_runs_differ(values: tuple[float, ...], message: str) -> None:
    runs = []
    for name, value in zip(("naive", "pycollect"), values, strict=True):
        module = nn.Linear(1, 1)
        nn.init.constant_(module.weight, value)
        nn.init.zeros_(module.bias)
        runs.append(result_of(name, [EpochRecord(1, 1, 1, 1)], [step(1, 1)], module))
    assert message in str(ReductionComparison(runs)).splitlines()[-1]
