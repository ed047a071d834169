"""Options: what is asked for is filled in, compared, documented; bad values are refused."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pycollect.train import Data, DatasetUnavailable, ImageFolder, LoaderOptions, digits, train
from pycollect.train.__main__ import options as asked_by
from pycollect.train.__main__ import parser
from pycollect.train.data import DefaultHyperparameters
from pycollect.train.engine import Engine
from pycollect.train.graph import GraphedStep
from pycollect.train.options import PREFETCH, Options, ranks
from pycollect.train.prepared_run import prepare
from pycollect.train.records import same_bits

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
X, Y = torch.randn(26, 1, 5, 5, generator=torch.Generator().manual_seed(2)), torch.arange(26) % 3
DATA = Data("noise", (X, Y), (X, Y), DefaultHyperparameters(batch_size=8, lr=0.1, epochs=2))


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(25, 8), nn.ReLU(), nn.Linear(8, 3))


def filled(**options: Any) -> Options:
    chosen = {"devices": "cpu*2", "data": DATA, "model": net()}
    return prepare(Options.of(chosen | options)).options


def run(batch_size: int = 8, **options: Any) -> Any:
    chosen = {"data": DATA, "model": net(), "quiet": True}
    return train("cpu*2", batch_size, 0.1, **(chosen | options))


@pytest.mark.parametrize(
    ("spec", "num_gpus", "visible", "expected"),
    [
        ("cpu", None, 0, [CPU]),
        (["cpu*2", CPU], None, 0, [CPU] * 3),
        (iter(["cpu", "cpu"]), None, 0, [CPU] * 2),
        (None, None, 0, [CPU] * 2),
        (3, None, 0, [CPU] * 3),
        (1, None, 2, [GPU]),
        (None, 1, 2, [GPU]),
        (None, 0, 0, "num_gpus must be at least 1, not 0"),
        ("cpu", 2, 0, "either devices or num_gpus"),
        (None, 3, 2, r"3, and 2 GPUs are visible; devices='cuda:0\*3' puts several"),
    ],
)
def test_devices(
    monkeypatch: pytest.MonkeyPatch, spec: Any, num_gpus: int | None, visible: int, expected: Any
) -> None:
    """A number means GPUs, as in the chapters, or ranks on the CPU where there is no GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            ranks(spec, num_gpus)
    else:
        asked = Options.of({"devices": spec, "num_gpus": num_gpus})
        for data in (None, DATA):  # devices of an iterator are read more than once
            assert asked.resolved(data).devices == tuple(expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"batch_size": 8, "lr": 0.1, "epochs": 2, "model": "Sequential", "seed": 0}),
        ({"data": "digits", "model": None}, {"model": "lenet", "lr": 0.3, "epochs": 40}),
        ({"data": "digits", "model": "resnet18"}, {"batch_size": 64, "lr": 0.1, "epochs": 5}),
        ({"scale_batch": True, "devices": "cpu*3"}, {"batch_size": 24, "lr": 0.1}),
        ({"lr": 0.5, "scale_lr": True, "devices": "cpu*3"}, {"batch_size": 8, "lr": 1.5}),
        ({"lr": torch.tensor(0.5), "momentum": np.float32(0.5)}, {"lr": 0.5, "momentum": 0.5}),
        ({"batch_size": np.int64(4), "weights": np.ones(2)}, {"batch_size": 4, "weights": (1, 1)}),
        ({"weights": "80,20", "strict": None}, {"weights": (80, 20), "strict": False}),
        ({"batch_size": 8, "strict": True, "microbatch": 4, "drop_last": True}, {"strict": True}),
    ],
)
def test_options_are_filled_in(options: dict[str, Any], expected: dict[str, Any]) -> None:
    made = filled(**options)
    for name, value in expected.items():
        assert getattr(made, name) == pytest.approx(value)
        assert type(getattr(made, name)) is type(value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 8.0}, "train: batch_size is a float; pass an int"),
        ({"lr": "0.1"}, "train: lr is a str; pass a number"),
        ({"momentum": torch.rand(99)}, "train: momentum is a Tensor; pass a number"),
        ({"strict": 1}, "train: strict is a int; pass True or False"),
        ({"compile": 1}, "train: compile is a int; pass True or False"),
        ({"model": torch.rand(99)}, "train: model is a Tensor; pass a name or an nn.Module"),
        ({"reduce": 1}, "train: reduce is a int; pass a name"),
        ({"plot": 3}, "train: plot is a int; pass a path"),
        ({"momentun": 0.9}, r"unknown option 'momentun'; allowed are .*momentum"),
        ({"batch_size": 10**20}, "train: batch_size does not fit 64 bits"),
        ({"batch_size": 2**62, "scale_batch": True}, "batch size must be at most 92233720"),
        ({"lr": 10**400}, "train: lr does not fit a float"),
        ({"lr": 0}, "the learning rate must be a positive number, not 0"),
        ({"momentum": 1.0}, "momentum must be from 0 to below 1, not 1"),
        ({"weight_decay": -1.0}, "weight decay must be at least 0, not -1"),
        ({"seed": -1}, r"the seed must be from 0 to 2\*\*63 - 1, not -1"),
        ({"microbatch": 0}, "at least 1 example, not 0"),
        ({"prefetch": -1}, "at least 0 batches, not -1"),
        ({"model": "vgg"}, r"unknown model 'vgg'; allowed are lenet, resnet18, and any torch"),
        ({"reduce": "magic"}, "unknown reduction 'magic'; allowed are pycollect, naive"),
        ({"weights": "1,2,3"}, "one weight per rank: 3 weights for 2 ranks"),
        *(
            ({"weights": w}, "weights are 'auto' or one number per rank such as")
            for w in ("80;20", [1, None], 3, {0: 3.0, 1: 1.0}, {1, 2}, torch.ones(2, 2))
        ),
        ({"weights": "auto", "sync_batchnorm": True}, "measured shares need separate times"),
        ({"batch_size": 27, "drop_last": True}, "drop_last leaves no batch: there are 26"),
        ({"batch_size": 7, "strict": True}, "divisible by the number of devices: 7 examples on 2"),
        ({"batch_size": 8, "strict": True, "microbatch": 3}, "microbatch size must be divisible"),
        ({"devices": "cpu*4", "strict": True}, "2 examples on 4 devices"),  # the last batch
        ({"graph": True}, r"a CUDA graph on one GPU, not on \[cpu, cpu\]; 'cuda:0\*2' puts"),
        ({"compile": True, "weights": "auto"}, "a compiled step has no parts and ranks to time"),
        ({"graph": True}, "on the CPU --compile makes one graph of the step"),
        ({"compile": True, "microbatch": 4}, "a step with microbatches is not one graph"),
        ({"model": "lenet"}, "LeNet takes images of 28 x 28, and noise has 5 x 5; choose"),
        ({"image_size": 5}, "image_size is for data by name, not for data of your own"),
        ({"data": "folder", "image_size": 0}, "at least 1 pixel, not 0"),
        ({"data": "digits", "image_size": 28}, "the image size is for image folders"),
        ({"data": "digits", "test_data": (X, Y)}, "test_data goes with data of your own"),
        ({"resume": "a.pt", "init_from": "b.pt"}, "goes on with a run and init_from starts one"),
        ({"plot": "run.gif"}, r"a picture ends in \.png, \.svg, \.pdf"),
        ({"checkpoint": "/dev/full/run.pt"}, "the folder of the checkpoint /dev/full/run.pt does"),
        ({"log": "no/where.jsonl"}, "the folder of the log no/where.jsonl does not exist or is"),
    ],
)
def test_bad_options_are_refused_before_a_step(options: dict[str, Any], message: str) -> None:
    of_type = message.startswith("unknown option") or "; pass " in message
    with pytest.raises(TypeError if of_type else ValueError, match=message):
        filled(**options)


def test_a_command_line_asks_for_the_same() -> None:
    text = (
        "--devices cpu*2 --weights 80,20 --strict --model resnet18 --data digits --no-shuffle "
        "--drop-last --batch-size 10 --lr 0.2 --epochs 3 --scale-batch --scale-lr --momentum 0.9 "
        "--weight-decay 0.001 --microbatch 4 --sync-batchnorm --seed 5 --prefetch 3 --no-overlap"
    )
    made = asked_by(parser().parse_args(text.split())).resolved(digits())
    assert made.stored() == {
        "devices": ["cpu", "cpu"], "batch_size": 20, "lr": 0.4, "epochs": 3, "seed": 5,
        "model": "resnet18", "momentum": 0.9, "weight_decay": 0.001, "weights": (80.0, 20.0),
        "microbatch": 4, "sync_batchnorm": True, "strict": True, "shuffle": False,
        "drop_last": True,
    }  # fmt: skip
    assert (made.prefetch, made.overlap) == (3, False)
    assert str(made) == (
        "batch size 20, microbatch 4, lr 0.4, momentum 0.9, weight decay 0.001, epochs 3, seed 5, "
        "batch statistics of all ranks, weights 80,20, on [cpu, cpu]"
    )
    assert vars(asked_by(parser().parse_args([]))) == vars(Options())


def test_every_option_is_documented_and_has_a_flag() -> None:
    flags = parser().format_help()
    for option in fields(Options):
        assert f"\n{option.name}: " in str(train.__doc__)
        assert option.name == "test_data" or f"--{option.name.replace('_', '-')}" in flags


def test_options_are_equal_if_they_give_the_same_run() -> None:
    made = filled()
    assert made == filled(prefetch=2, log="/dev/null", data=DATA, reduce="naive")
    assert all(made != filled(**{name: 1}) for name in ("seed", "epochs", "lr", "batch_size"))


def test_shares_by_weights() -> None:
    first, again, even = (run(10, weights=w, epochs=1) for w in ("80,20", [80, 20], None))
    assert [step.shares for step in first.steps] == [(8, 2), (8, 2), (5, 1)]
    assert all(map(same_bits, first.parameters, again.parameters))
    for a, b in zip(first.parameters, even.parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_a_resumed_run_on_digits_may_name_the_folder_of_auto(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(_: object) -> None:
        raise DatasetUnavailable("no network")

    options: dict[str, Any] = {"epochs": 1, "quiet": True, "data_dir": tmp_path / "empty"}
    with monkeypatch.context() as patch:
        patch.setattr("pycollect.train.datasets.download", unavailable)
        first = train("cpu", 256, 0.1, checkpoint=tmp_path / "run.pt", **options)
    again = train(resume=tmp_path / "run.pt", **options)
    assert all(map(same_bits, again.parameters, first.parameters))


def test_deterministic_algorithms_are_enabled_for_the_run_only() -> None:
    seen = []

    class Watching(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.append(torch.are_deterministic_algorithms_enabled())
            return super().forward(input.flatten(1))

    for deterministic in (True, False):
        run(model=Watching(25, 3), epochs=1, deterministic=deterministic)
        assert set(seen) == {deterministic}
        seen.clear()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("options", [{"prefetch": 3}, {"overlap": False}, {"reduce": "naive"}])
def test_speed_options_do_not_change_the_bits(options: dict[str, Any]) -> None:
    result, other = run(momentum=0.9), run(momentum=0.9, **options)
    assert result.losses == other.losses
    assert all(map(same_bits, result.parameters, other.parameters))


def test_batches_are_prepared_ahead_for_files_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    files = Data("files", ImageFolder((Path("a.png"),), (0,), ("a",)), (X, Y))
    for data, devices, given, expected in (
        (DATA, [CPU], None, 0),
        (DATA, [CPU, GPU], None, PREFETCH),
        (files, [CPU], None, PREFETCH),
        (files, [GPU], 0, 0),
    ):
        monkeypatch.setattr("pycollect.train.options.ranks", lambda *_, to=devices: to)
        assert Options(prefetch=given).resolved(data).prefetch == expected


def test_a_captured_step_is_replayed_for_every_size_of_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the CPU nothing is captured: a replay calls the function."""
    captured: list[int] = []
    of = GraphedStep.of

    def capture(X: torch.Tensor, *args: Any, **options: Any) -> GraphedStep:
        captured.append(len(X))
        return of(X, *args, **options, capturing=lambda run: run)

    monkeypatch.setattr(GraphedStep, "of", capture)
    monkeypatch.setattr("pycollect.train.prepared_run.check_combination", lambda *_: None)
    bits = []
    for graph in (True, False):
        made = prepare(
            Options.of({"devices": "cpu*2", "data": DATA, "model": net(), "graph": graph})
        )
        engine = Engine(made)
        batches = engine.loader(DATA.train, LoaderOptions(8)).epoch()
        losses = [torch.stack(list(engine.step(batch))) for batch in batches]
        bits.append([*losses, *engine.modules[1].parameters()])
    assert all(map(same_bits, *bits))
    assert captured == [8, 2]
