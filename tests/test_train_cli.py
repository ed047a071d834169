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

from pycollect.train import DatasetUnavailable, datasets
from pycollect.train.__main__ import main
from pycollect.train.output import ProgressPrinter

EPOCH = re.compile(r"epoch \d+, time \d+\.\d sec, loss \d+\.\d{3}, test acc [01]\.\d\d")
SECONDS = r"\d+\.\d sec"
TIMES = re.compile(rf"first batch: {SECONDS}; epoch: {SECONDS}, {SECONDS} with data loading")
COMMAND = [sys.executable, "-m", "pycollect.train", "--data", "digits", "--devices", "cpu*2"]
Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def test_one_epoch_in_a_process(tmp_path: Path) -> None:
    """In addition: the digits need no torchvision, and without a terminal there is no bar."""
    (tmp_path / "torchvision.py").write_text("raise SystemExit('torchvision was imported')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [*COMMAND, "--epochs", "1", "--batch-size", "100"]
    done = programs.run(command, env={**os.environ, "PYTHONPATH": path}, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    header, epoch, times, last = done.stdout.splitlines()
    assert header == (
        "LeNet on digits (1442 train, 355 test): batch size 100, lr 0.3, epochs 1, seed 0, on "
        "[cpu, cpu], reduced by pycollect"
    )
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


def test_compare_prints_a_table(capsys: Capture) -> None:
    arguments = ["--data", "digits", "--epochs", "1", "--devices", "cpu", "cpu*2", "--compare"]
    assert main(arguments) == 0
    *runs, head, naive, ours, last = capsys.readouterr().out.splitlines()
    assert [line.rpartition(", reduced by ")[2] for line in runs[::4]] == ["naive", "pycollect"]
    assert all(EPOCH.match(line) for line in runs[1::4])
    columns = [f"{what} (ms) ratio" for what in ("reduction", "step", "epoch")]
    assert " ".join(head.split()) == f"median of {' '.join(columns)} test acc"
    number = r" +[\d.]+"
    assert re.fullmatch(f"naive{number * 7}", naive)
    assert re.fullmatch(f"pycollect{number * 7}", ours)
    assert last == "parameters after 23 steps: the same bits"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch-size 0", "the batch size must be at least 1, not 0"),
        ("--batch-size many", "argument --batch-size: invalid int value: 'many'"),
        ("--devices banana", "banana"),
        ("--devices", "argument --devices: expected at least one argument"),
        ("--data cifar", "argument --data: invalid choice: 'cifar'"),
        ("--strict --batch-size 3 --devices cpu*2", "batch size must be divisible"),
        ("--log no/where.jsonl", "the folder of the log no/where.jsonl does not exist or is"),
        ("--graph --devices cpu", "in a CUDA graph on one GPU, not on [cpu]"),
        ("--compile --sync-batchnorm", "over all ranks is not one graph: leave out compile"),
        ("--backend gloo --data digits", "start them with torchrun"),
        ("--compare --reduce naive", "a comparison does not support reduce"),
        ("--compare --log no/where.jsonl", "a comparison does not support log"),
        ("--compare --resume no/where.pt", "a comparison does not support resume"),
        ("--compare --weights auto", "a comparison does not support measured shares"),
        ("--compare --graph --devices cpu", "a comparison does not support graph"),
        ("--compare --backend gloo", "--backend and torchrun are for one process per rank"),
    ],
)
def test_bad_arguments_are_refused_before_any_data_is_loaded(
    capsys: Capture, monkeypatch: Patch, tmp_path: Path, arguments: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)  # the checkout may be read-only
    for name in ("fashion_mnist", "download"):
        monkeypatch.setattr(datasets, name, lambda data_dir: pytest.fail("data was loaded"))
    with pytest.raises(SystemExit, match="2"):
        main(arguments.split())
    output = capsys.readouterr()
    assert output.out == ""
    assert "python -m pycollect.train: error: " in output.err
    assert message in output.err.splitlines()[-1]


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_torchruns_variables_must_be_numbers(
    capsys: Capture, monkeypatch: Patch, variable: str
) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in {**variables, variable: "abc"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        main(["--data", "digits", "--backend", "gloo"])
    message = f"{variable} must be a whole number, as torchrun sets it, not 'abc'"
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_missing_fashion_mnist_is_one_sentence_or_a_notice(
    capsys: Capture, monkeypatch: Patch, tmp_path: Path
) -> None:
    def refuse(data_dir: Path) -> None:
        raise DatasetUnavailable("torchvision is not installed")

    monkeypatch.setattr(datasets, "download", refuse)
    assert main(["--data", "fashion-mnist", "--data-dir", str(tmp_path)]) == 2
    assert capsys.readouterr() == (
        "",
        f"python -m pycollect.train: error: Fashion-MNIST is not in {tmp_path}/ and cannot be "
        "downloaded (torchvision is not installed)\n",
    )
    assert main(["--data-dir", str(tmp_path), "--epochs", "1"]) == 0
    notice, header, *_ = capsys.readouterr().out.splitlines()
    assert notice.endswith("using scikit-learn's handwritten digits instead")
    assert "batch size 64, lr 0.3, epochs 1" in header


def test_help_defines_the_printed_time(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "without the evaluation",
        "64 for the digits, 256 for Fashion-MNIST",
        "--log FILE, --log-file FILE",
        "--compile [BACKEND]",
        "--strict, --no-strict",
        "--reduce {pycollect,naive}",
        "--devices SPEC [SPEC ...]",
    ):
        assert part in text


def test_there_is_a_bar_on_a_terminal_only(monkeypatch: Patch) -> None:
    for terminal, quiet in ((True, False), (True, True), (False, False)):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda to=terminal: to)
        monkeypatch.setattr(sys, "stderr", stream)
        with ProgressPrinter(quiet).bar("epoch 7", images=64, done=32) as bar:
            time.sleep(0.11)  # the bar is drawn at most ten times a second
            bar.step(32, lambda: 2.345)
        for text in ("epoch 7", "64/64", "images/s", "loss 2.345"):
            assert (text in stream.getvalue()) == (terminal and not quiet)
