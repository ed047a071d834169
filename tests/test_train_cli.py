"""`python -m pycollect.train` in a user's terminal: its lines, errors, Ctrl-C, the progress bar."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import programs
import pytest

from pycollect.train import DatasetUnavailable
from pycollect.train import datasets as fashion
from pycollect.train.__main__ import main
from pycollect.train.output import ProgressPrinter

EPOCH = re.compile(r"epoch \d+, time \d+\.\d sec, loss \d+\.\d{3}, test acc [01]\.\d\d")
SECONDS = r"\d+\.\d sec"
TIMES = re.compile(rf"first batch: {SECONDS}; epoch: {SECONDS}, {SECONDS} with data loading")
COMMAND = [sys.executable, "-m", "pycollect.train", "--data", "digits", "--devices", "cpu*2"]


def test_one_epoch_in_a_process(tmp_path: Path) -> None:
    """In addition: the digits need no torchvision, and without a terminal there is no bar."""
    (tmp_path / "torchvision.py").write_text("raise SystemExit('torchvision was imported')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [*COMMAND, "--epochs", "1", "--batch-size", "100"]
    done = programs.run(command, env={**os.environ, "PYTHONPATH": path}, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    header, epoch, times, last = done.stdout.splitlines()
    assert "digits (1442 train, 355 test)" in header
    assert "batch size 100, lr 0.3, epochs 1, seed 0, on [cpu, cpu]" in header
    assert EPOCH.fullmatch(epoch)
    assert TIMES.fullmatch(times)
    assert re.fullmatch(r"test acc: 0\.\d\d, \d+\.\d sec/epoch on \[cpu, cpu\]", last)


def test_ctrl_c_ends_with_one_line() -> None:
    with programs.Program(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("LeNet")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "interrupted\n")


@pytest.mark.slow
def test_a_closed_standard_output_ends_the_run_quietly() -> None:
    command = [*COMMAND, "--epochs", "1"]
    with programs.Program(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("LeNet")
        process.stdout.close()
        errors = process.stderr.read()
        process.wait(60)
    assert (process.returncode, errors) == (128 + signal.SIGPIPE, "")


def test_both_reductions_print_the_same_losses(capsys: pytest.CaptureFixture[str]) -> None:
    lines = []
    for reduction in ("naive", "pycollect"):
        arguments = ["--data", "digits", "--epochs", "1", "--batch-size", "300"]
        assert main([*arguments, "--devices", "cpu", "cpu*2", "--reduce", reduction]) == 0
        header, epoch, *_ = capsys.readouterr().out.splitlines()
        assert header.endswith(f"on [cpu, cpu, cpu], reduced by {reduction}")
        lines.append(re.sub(r"time [\d.]+", "", epoch))
    assert lines[0] == lines[1]


def test_compare_prints_both_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", "digits", "--epochs", "1", "--devices", "cpu*2", "--compare"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [EPOCH.match(line) is not None for line in lines[1:3]] == [True, True]
    times = r"naive [\d.]+ ms, pycollect [\d.]+ ms, ratio [\d.]+"
    assert re.fullmatch(f"reduction time, median of 23 steps: {times}", lines[3])
    assert re.fullmatch(f"epoch time, median of 1 epochs: {times}", lines[4])
    assert lines[5] == "parameters after 23 steps: the same bits"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "0"], "the batch size must be at least 1, not 0"),
        (["--batch-size", "many"], "argument --batch-size: invalid int value: 'many'"),
        (["--epochs", "-3"], "the number of epochs must be at least 1, not -3"),
        (["--lr", "0"], "the learning rate must be a positive number, not 0"),
        (["--lr", "inf"], "the learning rate must be a positive number, not inf"),
        (["--seed", "-1"], "the seed must be from 0"),
        (["--devices", "banana"], "banana"),
        (["--devices"], "argument --devices: expected at least one argument"),
        (["--data", "cifar"], "argument --data: invalid choice: 'cifar'"),
        (["--reduce", "magic"], "argument --reduce: invalid choice: 'magic'"),
        (["--compare", "--reduce", "naive"], "not allowed with argument"),
        (
            ["--compare", "naive,magic"],
            "a comparison takes two or more of naive,pycollect,ddp, not",
        ),
        (
            ["--compare", "naive"],
            "a comparison takes two or more of naive,pycollect,ddp, not 'naive'",
        ),
        (["--momentum", "2"], "the momentum must be from 0 to below 1, not 2"),
        (["--weights", "1,2,3", "--devices", "cpu*2"], "3 weights for 2 ranks"),
        (["--plot", "run.gif"], "a picture ends in .png, .svg, .pdf, and run.gif does not"),
        (["--log", "no/where.jsonl"], "the folder of the log no/where.jsonl does not exist or is"),
        (
            ["--checkpoint", "no/where.pt"],
            "the folder of the checkpoint no/where.pt does not exist",
        ),
        (["--compare", "--log", "no/where.jsonl"], "a comparison does not support log"),
        (["--compare", "--checkpoint", "no/where.pt"], "a comparison does not support checkpoint"),
        (["--compare", "--resume", "no/where.pt"], "a comparison does not support resume"),
        (
            ["--compare", "--replay-shares", "no.pt"],
            "a comparison does not support measured shares",
        ),
        (["--compare", "--graph", "--devices", "cpu"], "a comparison does not support graph"),
        (["--scale-batch", "--batch-size", "0"], "the batch size must be at least 1, not 0"),
        (["--strict", "--batch-size", "3", "--devices", "cpu*2"], "batch size must be divisible"),
    ],
)
def test_bad_arguments_are_refused_before_any_data_is_loaded(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(fashion, "fashion_mnist", lambda data_dir: pytest.fail("data was loaded"))
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "python -m pycollect.train: error: " in output.err
    assert message in output.err.splitlines()[-1]


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_torchruns_variables_must_be_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in {**variables, variable: "abc"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as exit_:
        main(["--data", "digits", "--backend", "gloo"])
    assert exit_.value.code == 2
    message = f"{variable} must be a whole number, as torchrun sets it, not 'abc'"
    assert message in capsys.readouterr().err.splitlines()[-1]


def refuse(data_dir: Path) -> None:
    raise DatasetUnavailable("torchvision is not installed")


def test_missing_fashion_mnist_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fashion, "download", refuse)
    assert main(["--data", "fashion-mnist", "--data-dir", str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == (
        f"python -m pycollect.train: error: Fashion-MNIST is not in {tmp_path}/ and cannot be "
        "downloaded (torchvision is not installed)\n"
    )


def test_the_fallback_is_printed_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fashion, "download", refuse)
    assert main(["--data-dir", str(tmp_path), "--epochs", "1"]) == 0
    notice, header, *_ = capsys.readouterr().out.splitlines()
    assert notice.endswith("using scikit-learn's handwritten digits instead")
    assert "batch size 64, lr 0.3, epochs 1" in header


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "--log", "x.jsonl"], "a comparison does not support log"),
        (["--compare", "--weights", "auto"], "a comparison does not support measured shares"),
        (["--compare", "--ddp-backend", "gloo"], "gloo is for ddp, which is not among naive, py"),
        (["--compare", "naive,ddp", "--ddp-backend", "magic"], "torch has no backend 'magic' here"),
        (["--ddp-backend", "gloo"], "--ddp-backend is for --compare"),
        (["--compare", "--compile"], "a comparison does not support compile"),
        (["--compile", "--sync-batchnorm"], "over all ranks is not one graph: leave out compile"),
        (["--graph", "--devices", "cpu"], "in a CUDA graph on one GPU, not on [cpu]"),
    ],
)
def test_incompatible_options_are_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)  # the checkout may be read-only
    with pytest.raises(SystemExit) as exit_:
        main(["--data", "digits", *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_help_defines_the_printed_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "without the evaluation" in text
    assert "64 for the digits, 256 for Fashion-MNIST" in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_there_is_a_bar_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, quiet, shown in (
        (Terminal(), False, True),
        (Terminal(), True, False),
        (io.StringIO(), False, False),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        with ProgressPrinter(quiet).bar("epoch 7", images=64, done=32) as bar:
            time.sleep(0.11)  # the bar is drawn at most ten times a second
            bar.step(32, lambda: 2.345)
        for text in ("epoch 7", "64/64", "images/s", "loss 2.345"):
            assert (text in stream.getvalue()) == shown
