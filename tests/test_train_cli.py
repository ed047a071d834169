"""`python -m pycollect.train`: its lines, its help, and command lines that are refused."""

import os
import re
import sys
from pathlib import Path

import programs
import pytest

from pycollect.train import DatasetUnavailable, datasets, train
from pycollect.train.__main__ import main, parser
from pycollect.train.__main__ import options as asked_by
from pycollect.train.options import Options

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def test_one_epoch_in_a_process(tmp_path: Path) -> None:
    """In addition: the digits need no torchvision, and without a terminal there is no bar."""
    (tmp_path / "torchvision.py").write_text("raise SystemExit('torchvision was imported')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    arguments = "-m pycollect.train --data digits --devices cpu cpu --epochs 1 --batch-size 100"
    command = [sys.executable, *arguments.split()]
    done = programs.run(command, env={**os.environ, "PYTHONPATH": path}, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    header, *lines = done.stdout.splitlines()
    assert header == (
        "LeNet on digits (1442 train, 355 test): batch size 100, lr 0.3, epochs 1, seed 0, on "
        "[cpu, cpu], reduced by pycollect"
    )
    seconds = r"\d+\.\d sec"
    expected = (
        rf"epoch 1, time {seconds}, loss \d\.\d{{3}}, test acc [01]\.\d\d",
        rf"first batch: {seconds}; epoch: {seconds}, {seconds} with data loading",
        rf"test acc: 0\.\d\d, {seconds}/epoch on \[cpu, cpu\]",
    )
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch-size 0", "the batch size must be at least 1, not 0"),
        ("--batch-size many", "argument --batch-size: invalid int value: 'many'"),
        ("--devices", "argument --devices: expected at least one argument"),
        ("--reduce magic", "argument --reduce: invalid choice: 'magic'"),
        ("--strict --batch-size 3 --devices cpu*2", "batch size must be divisible"),
        ("--graph --devices cpu", "in a CUDA graph on one GPU, not on [cpu]"),
        ("--compile --sync-batchnorm", "over all ranks is not one graph: leave out compile"),
        ("--backend gloo", "torchrun --nproc-per-node 2 -m pycollect.train --backend gloo"),
        ("WORLD_SIZE=2", "torchrun has started 2 processes: choose how they communicate"),
        ("WORLD_SIZE=1 --backend magic", "torch has no backend 'magic' here"),
        *(
            (f"{name}=abc --backend gloo", f"{name} must be a whole number, as torchrun sets it")
            for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")
        ),
        ("WORLD_SIZE=2 --compare", "--backend and torchrun are for one process per rank"),
        ("--compare --log no/where.jsonl", "a comparison does not support log"),
        ("--compare --graph --devices cpu", "a comparison does not support graph"),
        ("--compare --weights auto", "a comparison does not support measured shares"),
    ],
)
def test_bad_command_lines_are_refused_before_any_data_is_loaded(
    capsys: Capture, monkeypatch: Patch, tmp_path: Path, arguments: str, message: str
) -> None:
    """A word such as WORLD_SIZE=2 stands for the environment of torchrun, with this value."""
    monkeypatch.chdir(tmp_path)  # the checkout may be read-only
    for name in ("digits", "fashion_mnist", "download"):
        monkeypatch.setattr(datasets, name, lambda *_: pytest.fail("data was loaded"))
    words = arguments.split()
    if "=" in words[0]:
        torchrun = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        for name, value in {**torchrun, **dict([words.pop(0).split("=")])}.items():
            monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        main(words)
    output = capsys.readouterr()
    assert output.out == ""
    assert "python -m pycollect.train: error: " in output.err
    assert message in output.err.splitlines()[-1]


def test_a_run_on_the_digits_for_want_of_fashion_mnist_is_continued(
    capsys: Capture, monkeypatch: Patch, tmp_path: Path
) -> None:
    """Also if Fashion-MNIST could be had by then."""

    def refuse(data_dir: Path) -> None:
        raise DatasetUnavailable("torchvision is not installed")

    arguments = ["--data-dir", str(tmp_path / "empty"), "--checkpoint", str(tmp_path / "run.pt")]
    with monkeypatch.context() as patch:
        patch.setattr(datasets, "download", refuse)
        assert main([*arguments, "--epochs", "1"]) == 0
    notice, header, *_ = capsys.readouterr().out.splitlines()
    assert notice.endswith("using scikit-learn's handwritten digits instead")
    assert "batch size 64, lr 0.3, epochs 1" in header
    monkeypatch.setattr(datasets, "download", lambda _: pytest.fail("data was downloaded"))
    assert main([*arguments, "--epochs", "2", "--resume", str(tmp_path / "run.pt")]) == 0
    assert "LeNet on digits" in capsys.readouterr().out


def test_a_command_line_asks_for_the_options_of_train() -> None:
    text = (
        "--devices cpu*2 --weights 80,20 --strict --model resnet18 --data digits --no-shuffle "
        "--drop-last --batch-size 10 --lr 0.2 --epochs 3 --scale-batch --scale-lr --momentum 0.9 "
        "--weight-decay 0.001 --microbatch 4 --sync-batchnorm --seed 5 --prefetch 3 --no-overlap"
    )
    made = asked_by(parser().parse_args(text.split())).resolved(datasets.digits())
    assert made.stored() == {
        "devices": ["cpu", "cpu"], "batch_size": 20, "lr": 0.4, "epochs": 3, "seed": 5,
        "model": "resnet18", "momentum": 0.9, "weight_decay": 0.001, "weights": (80.0, 20.0),
        "microbatch": 4, "sync_batchnorm": True, "strict": True, "shuffle": False,
        "drop_last": True, "shards": None,
    }  # fmt: skip
    assert (made.prefetch, made.overlap) == (3, False)
    assert str(made) == (
        "batch size 20, microbatch 4, lr 0.4, momentum 0.9, weight decay 0.001, epochs 3, seed 5, "
        "batch statistics of all ranks, weights 80,20, on [cpu, cpu]"
    )
    assert vars(asked_by(parser().parse_args([]))) == vars(Options())


def test_help_and_documentation_have_every_option(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name in Options.__dataclass_fields__:
        assert f"\n{name}: " in str(train.__doc__)
        assert name == "test_data" or f" --{name.replace('_', '-')}" in text
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
