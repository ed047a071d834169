"""What a run gives: its result, log, picture and progress bar, and the table of a comparison."""

import io
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train_cases import noise

from pycollect.train import (
    Data,
    OutputError,
    compare_reductions,
    digits,
    init_lenet,
    lenet,
    train,
)
from pycollect.train import output as log_module
from pycollect.train.__main__ import main
from pycollect.train.output import Log, ProgressPrinter, plot
from pycollect.train.results import PARTS, RunResult, StepRecord, StepSeconds

DATA = noise()


def run(**options: Any) -> RunResult:
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    chosen = {"lr": 0.1, "data": DATA, "epochs": 2, "quiet": True, "model": model, **options}
    return train("cpu*2", 16, **chosen)


def lines(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def few(classes: int, examples: int | None = None) -> Data:
    """The first examples of the first classes of the digits."""
    train, test = (
        (X[y < classes][:examples], y[y < classes][:examples])
        for X, y in (digits().train, digits().test)
    )
    return Data("few digits", train, test, classes=digits().classes)


def test_lenet_learns_three_classes() -> None:
    result = train("cpu*2", 8, 0.3, data=few(3), epochs=8, quiet=True)
    assert result.accuracy >= 0.9
    assert result.epochs[-1].loss < 0.3 < result.epochs[0].loss
    assert [epoch.number for epoch in result.epochs] == list(range(1, 9))


def test_the_loss_is_the_mean_per_example() -> None:
    """Also of an epoch whose last batch is smaller, and without a change of the parameters."""
    data = few(10, 40)
    X, y = data.train
    expected = nn.functional.cross_entropy(lenet(X, init_lenet(0)), y)
    result = train("cpu*3", 30, 1e-30, data=data, epochs=1, quiet=True)
    assert result.epochs[0].loss == pytest.approx(float(expected), abs=1e-5)


def test_the_log_has_every_step_and_epoch_and_documents_all_fields(tmp_path: Path) -> None:
    files = {"log": tmp_path / "run.jsonl", "checkpoint": tmp_path / "run.pt"}
    result = run(weights="3,1", **files)
    found = lines(files["log"])
    order = ["start", *["step"] * 3, "epoch", *["step"] * 3, "epoch", "end"]
    assert [line["event"] for line in found] == order
    start, first, *_, epoch, end = found
    assert (start["batch_size"], start["lr"], start["devices"]) == (16, 0.1, ["cpu", "cpu"])
    assert (start["data"], start["model"], start["parameters"]) == ("noise", "Sequential", 111)
    assert (first["epoch"], first["step"], first["shares"]) == (1, 1, [12, 4])
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


def test_long_epochs_are_logged_while_they_run(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    class Watching(nn.Linear):
        seen = 0

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if self.training:
                Watching.seen = path.read_text().count('"event": "step"')
            return super().forward(input.flatten(1))

    many = DATA.train[0].repeat(3, 1, 1, 1), DATA.train[1].repeat(3)
    train("cpu", 1, data=many, model=Watching(36, 3), epochs=1, log=path, quiet=True)
    assert 50 <= Watching.seen < 123


def test_the_error_that_stops_a_run_is_logged_and_raised(tmp_path: Path) -> None:
    class Broken(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("it broke")

    with pytest.raises(RuntimeError, match="it broke"):
        run(model=Broken(36, 3), log=tmp_path / "run.jsonl")
    assert lines(tmp_path / "run.jsonl")[-1] == {"event": "stopped", "why": "it broke"}
    with pytest.raises(KeyError, match="why"), Log("/dev/full"):  # although the log fails, too
        raise KeyError("why")


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


def test_a_run_that_ends_in_nan_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    arguments = ["--data", "digits", "--epochs", "1", "--devices", "cpu", "--lr", "1e30"]
    assert main([*arguments, "--log", str(path)]) == 0
    error = capsys.readouterr().err
    assert error.startswith("warning: the loss is nan from step ")
    assert lines(path)[-2]["loss"] is None  # JSON has no NaN
    assert f"warning: {lines(path)[-1]['diverged']}; a smaller learning rate may help\n" == error
    assert main([*arguments, "--compare"]) == 0
    assert capsys.readouterr().err.count("warning: the loss is nan from") == 2


def result_of(*steps: StepRecord) -> RunResult:
    """A result with these steps, and a model with a buffer of integers."""
    return replace(run(epochs=1), steps=steps, modules=[nn.BatchNorm1d(1)])


def test_only_the_end_of_a_run_counts_as_divergence() -> None:
    """A loss may be nan for a while and recover; the last update alone may ruin the model."""
    losses = {(1, 1): 1.0, (1, 2): math.nan, (2, 1): math.inf, (2, 2): 1.0}
    steps = [
        StepRecord(*number, 8, loss, 0.1, StepSeconds(), (4, 4)) for number, loss in losses.items()
    ]
    result = result_of(*steps)
    assert result.divergence == ""
    assert result_of(*steps[:3]).divergence == "the loss is nan from step 2 of epoch 1 to the end"
    nn.init.constant_(result.module.weight, math.inf)
    assert "not finite" in result.divergence


def test_typical_times_leave_the_first_step_out() -> None:
    for times, typical in (((100.0, 2.0, 4.0, 3.0), 3), ((100.0,), 100), ((), 0)):
        seconds = [StepSeconds(compute=time) for time in times]
        result = result_of(*(StepRecord(1, 1, 8, 1.0, 0.1, s, (4, 4)) for s in seconds))
        assert result.parts["compute"] == typical


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_picture_is_drawn(tmp_path: Path, ending: str) -> None:
    """Also of losses that are not finite, and of a name with bytes that are no letters."""
    path = tmp_path / f"run.{ending}"
    result = run(plot=path, data=replace(DATA, name="\udcff \u00fc $_{"), lr=1e30)
    content = path.read_bytes()
    assert content.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending])
    if ending == "svg":
        for text in (b"training loss", b"test accuracy", b"epoch", b"time (ms)", b"reduction"):
            assert b"<!-- " + text in content
    plot([replace(result, steps=[])] * 2, path)


def test_there_is_a_bar_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_READ_INTERVAL", 60.0)
    for terminal, quiet in ((True, False), (True, True), (False, False)):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda to=terminal: to)
        monkeypatch.setattr(sys, "stderr", stream)
        with ProgressPrinter(quiet).bar("epoch 7", images=64, done=32) as advance:
            advance(16, lambda: 2.345)
            time.sleep(0.11)  # the bar is drawn at most ten times a second
            advance(16, lambda: pytest.fail("each read of a loss waits for the GPU"))
        for text in ("epoch 7", "64/64", "images/s", "loss 2.345"):
            assert (text in stream.getvalue()) == (terminal and not quiet)


def test_a_comparison_trains_both_on_the_same_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "both.svg"
    comparison = compare_reductions("cpu*3", 16, 0.3, data=few(10, 40), epochs=2, plot=path)
    naive, ours = comparison.run_results
    for result, name in ((naive, "naive"), (ours, "pycollect")):
        assert (len(result.steps), len(result.modules)) == (2 * 3, 3)
        assert min(result.reduce_seconds, result.step_seconds, result.epoch_seconds) > 0
        assert f"<!-- {name} -->" in path.read_text()
    *runs, head, first, second, verdict = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" ")[2] for line in runs[::5]] == ["naive", "pycollect"]
    assert [runs[i].split(",")[0] for i in (1, 2, 6, 7)] == ["epoch 1", "epoch 2"] * 2
    columns = (f"{what} (ms) ratio" for what in ("reduction", "step", "epoch"))
    assert head.split() == f"median of {' '.join(columns)} test acc".split()
    baseline, other = ([float(n) for n in line.split()[1:]] for line in (first, second))
    assert baseline[1:6:2] == [1, 1, 1]
    for column in (0, 2, 4):
        ratio = baseline[column] / other[column]
        assert other[column + 1] == pytest.approx(ratio, rel=0.1, abs=0.02)
    assert (verdict, comparison.identical) == ("parameters after 6 steps: the same bits", True)
    with torch.no_grad():
        list(ours.modules[2].parameters())[7][0] += 2**-10
    assert not comparison.identical
    verdict = "parameters after 6 steps, against naive: pycollect by up to 9.8e-04 different"
    assert str(comparison).splitlines()[-1] == verdict
    with pytest.raises(ValueError, match="the runs have 3 and 2 ranks, which cannot be compared"):
        ours.difference(replace(ours, modules=ours.modules[:2]))
    others = {"resume": "a.pt", "shards": 2, "reduce": "naive", "compile": True}
    for name, value in others.items():
        with pytest.raises(ValueError, match=f"a comparison does not support {name}"):
            compare_reductions(data="digits", **{name: value})
