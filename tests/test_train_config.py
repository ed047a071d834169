"""Options become settings: devices, defaults, scaling, shares; invalid options are refused."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pycollect.train import (
    AutoShares,
    Data,
    DatasetUnavailable,
    ImageFolder,
    LoaderOptions,
    digits,
    train,
)
from pycollect.train.__main__ import main, options, parser
from pycollect.train.data import DefaultHyperparameters
from pycollect.train.graph import GraphedStep
from pycollect.train.options import PREFETCH, Options, StepOptions, ranks
from pycollect.train.prepared_run import prepare
from pycollect.train.reduce import reduce_gradients_coalesced
from pycollect.train.run_result import same_bits
from pycollect.train.single_process import SingleProcessEngine

CPU = torch.device("cpu")
X, Y = torch.randn(26, 1, 5, 5, generator=torch.Generator().manual_seed(2)), torch.arange(26) % 3
DATA = Data("noise", (X, Y), (X, Y), DefaultHyperparameters(batch_size=8, lr=0.1, epochs=2))


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(25, 8), nn.ReLU(), nn.Linear(8, 3))


def settings(devices: Any = "cpu*2", batch_size: int | None = None, **options: Any) -> Options:
    chosen = {"devices": devices, "batch_size": batch_size, "data": DATA, "model": net()}
    return prepare(Options.of(chosen | options)).options


def run(devices: Any = "cpu*2", batch_size: int = 8, **options: Any) -> Any:
    return train(
        devices, batch_size, 0.1, **{"data": DATA, "model": net(), "quiet": True} | options
    )


@pytest.mark.parametrize(
    ("spec", "world"),
    [
        ("cpu", 1),
        ("cpu*3", 3),
        (["cpu", "cpu"], 2),
        (["cpu*2", CPU], 3),
        ("c.u", 1),
        (CPU, 1),
        (None, None),
    ],
)
def test_devices_come_in_every_form(spec: Any, world: int | None) -> None:
    result = run(spec, epochs=1)
    if world is None:
        world = torch.cuda.device_count() or 2
    assert len(result.settings.devices) == len(result.steps[0].shares) == world


@pytest.mark.parametrize(("count", "visible"), [(1, 0), (3, 0), (2, 2), (1, 2)])
def test_a_number_means_gpus_as_in_the_chapters(
    monkeypatch: pytest.MonkeyPatch, count: int, visible: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    expected = [torch.device("cuda", i) for i in range(count)] if visible else [CPU] * count
    assert ranks(count, None) == ranks(None, count) == expected


def test_numbers_of_gpus_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        ranks(None, 0)
    with pytest.raises(ValueError, match="either devices or num_gpus"):
        ranks("cpu", 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"3, and 2 GPUs are visible; devices='cuda:0\*3' puts"):
        ranks(None, 3)


@pytest.mark.cuda
def test_hidden_gpus_are_not_used() -> None:
    program = "from pycollect.train.options import ranks; print(len(ranks('cuda:*', None)))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout == "1\n"


def test_defaults_belong_to_data_and_model() -> None:
    lenet, resnet = (Options("cpu", model=name).resolved(digits()) for name in (None, "resnet18"))
    assert (lenet.model, lenet.batch_size, lenet.lr, lenet.epochs) == ("lenet", 64, 0.3, 40)
    assert (resnet.batch_size, resnet.lr, resnet.epochs) == (64, 0.1, 5)
    assert settings().lr == 0.1
    with pytest.raises(ValueError, match=r"unknown model 'vgg'; allowed are lenet, resnet18, and"):
        settings(model="vgg")


def test_weak_scaling_multiplies_by_the_ranks() -> None:
    for devices, world in (("cpu", 1), ("cpu*3", 3)):
        scaled = settings(devices, 16, scale_batch=True, scale_lr=True)
        assert (scaled.batch_size, scaled.lr) == (16 * world, pytest.approx(0.1 * world))
        assert settings(devices, scale_batch=True).batch_size == 8 * world
        assert settings(devices, 16).batch_size == 16


def test_shares_by_weights() -> None:
    result = run("cpu*2", 10, weights="80,20", epochs=1)
    assert [step.shares for step in result.steps] == [(8, 2), (8, 2), (5, 1)]
    again = run("cpu*2", 10, weights=[80, 20], epochs=1)
    assert all(map(same_bits, result.parameters, again.parameters))
    even = run("cpu*2", 10, epochs=1)
    for a, b in zip(result.parameters, even.parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_measured_shares_observe_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[float]] = []

    def observe(self: AutoShares, seconds: list[float]) -> None:
        seen.append(seconds)
        self._given = []

    monkeypatch.setattr(AutoShares, "observe", observe)
    result = run(weights="auto", epochs=1)
    assert len(seen) == len(result.steps) == 4
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in seen)


@pytest.mark.parametrize(
    "weights", ["80;20", "fast", [1, None], 3, {0: 3.0, 1: 1.0}, {1, 2}, torch.ones(2, 2)]
)
def test_malformed_weights_are_refused(weights: Any) -> None:
    with pytest.raises(ValueError, match="weights are 'auto' or one number per rank such as"):
        Options(weights=weights)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "1,2,3"}, "one weight per rank: 3 weights for 2 ranks"),
        ({"weights": "1,-1"}, "weights must be numbers of at least 0"),
        ({"momentum": 1.0}, "momentum must be from 0 to below 1, not 1"),
        ({"weight_decay": -1.0}, "weight decay must be at least 0, not -1"),
        ({"microbatch": 0}, "at least 1 example, not 0"),
        ({"prefetch": -1}, "at least 0 batches, not -1"),
        ({"batch_size": 27, "drop_last": True}, "drop_last leaves no batch: there are 26"),
        ({"batch_size": 7, "strict": True}, "divisible by the number of devices: 7 examples on 2"),
        ({"batch_size": 13, "strict": True, "devices": "cpu*13"}, None),
        ({"batch_size": 8, "strict": True}, None),
        ({"batch_size": 8, "strict": True, "microbatch": 3}, "microbatch size must be divisible"),
        ({"batch_size": 8, "strict": True, "microbatch": 4}, "of 4"),
        ({"batch_size": 8, "strict": True, "microbatch": 4, "drop_last": True}, None),
        ({"devices": "cpu*4", "batch_size": 8, "strict": True}, "2 examples on 4 devices"),
        ({"graph": True}, r"a CUDA graph on one GPU, not on \[cpu, cpu\]; 'cuda:0\*2' puts"),
        ({"compile": True, "weights": "auto"}, "a compiled step has no parts and ranks to time"),
        ({"compile": True, "exact_times": True}, "leave out --compile, or measured shares and"),
        ({"compile": True, "microbatch": 4}, "a step with microbatches is not one graph"),
        ({"model": "lenet"}, "LeNet takes images of 28 x 28, and noise has 5 x 5; choose"),
        ({"data": "folder", "image_size": 0}, "at least 1 pixel, not 0"),
        ({"data": "digits", "image_size": 28}, "the image size is for image folders"),
        ({"batch_size": 10**20}, "train: batch_size does not fit 64 bits"),
        (
            {"batch_size": 2**62, "scale_batch": True},
            "batch size must be at most 92233720",
        ),
        ({"lr": 10**400}, "train: lr does not fit a float"),
        ({"resume": "a.pt", "init_from": "b.pt"}, "goes on with a run and init_from starts one"),
    ],
)
def test_invalid_options_are_refused_before_a_step(
    options: dict[str, Any], message: str | None
) -> None:
    if message is None:
        settings(**options)
        return
    with pytest.raises(ValueError, match=message):
        settings(**options)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("batch_size", 8.0, "train: batch_size is a float; pass an int"),
        ("epochs", True, "train: epochs is a bool; pass an int"),
        ("lr", "0.1", "train: lr is a str; pass a number"),
        ("momentum", torch.rand(99), "train: momentum is a Tensor; pass a number"),
        ("strict", 1, "train: strict is a int; pass True or False"),
        ("model", torch.rand(99), "train: model is a Tensor; pass a name"),
        ("plot", 3, "train: plot is a int; pass a path"),
    ],
)
def test_an_option_of_another_type_is_named(option: str, value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        settings(**{option: value})


def test_numbers_of_other_libraries_are_numbers() -> None:
    made = settings(
        batch_size=np.int64(8), lr=torch.tensor(0.5), momentum=np.float32(0.5), weights=np.ones(2)
    )
    assert made == settings(batch_size=8, lr=0.5, momentum=0.5, weights=(1.0, 1.0))
    assert {type(made.batch_size), type(made.lr), type(made.momentum)} == {int, float}


def test_a_resumed_run_on_digits_may_name_the_folder_of_auto(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 1, "quiet": True, "data_dir": tmp_path / "empty"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pycollect.train.data.fashion.download", _unavailable)
        first = train("cpu", 256, 0.1, checkpoint=tmp_path / "run.pt", **options)
    again = train(resume=tmp_path / "run.pt", **options)
    assert all(map(same_bits, again.parameters, first.parameters))


def _unavailable(_: object) -> None:
    raise DatasetUnavailable("no network")


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match=r"unknown option 'momentun'; allowed are .*momentum"):
        train("cpu", data=DATA, momentun=0.9)


def test_the_command_line_gives_the_same_settings() -> None:
    text = (
        "--devices cpu*2 --weights 80,20 --strict --model resnet18 --data digits --no-shuffle "
        "--drop-last --batch-size 10 --lr 0.2 --epochs 3 --scale-batch --scale-lr --momentum 0.9 "
        "--weight-decay 0.001 --microbatch 4 --sync-batchnorm --seed 5 --prefetch 3 --no-overlap"
    )
    made = options(parser().parse_args(text.split()))
    expected = Options(
        devices=(CPU, CPU), batch_size=20, lr=0.4, epochs=3, seed=5, model="resnet18",
        momentum=0.9, weight_decay=0.001, weights=(80.0, 20.0), microbatch=4, sync_batchnorm=True,
        strict=True, shuffle=False, drop_last=True,
    )  # fmt: skip
    assert made.resolved(digits()) == expected
    assert (made.prefetch, made.overlap) == (3, False)
    assert vars(options(parser().parse_args([]))) == vars(Options())


def test_the_header_shows_unusual_settings(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--data digits --epochs 1 --batch-size 700 --microbatch 350 --momentum 0.5"
    assert main([*arguments.split(), "--devices", "cpu*2", "--weights", "3,1"]) == 0
    header = capsys.readouterr().out.splitlines()[0]
    assert "batch size 700, microbatch 350, lr 0.3, momentum 0.5, epochs 1, seed 0, wei" in header
    assert "weights 3,1, on [cpu, cpu]" in header


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


def test_prefetch_is_on_for_files_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    files = Data("files", ImageFolder((Path("a.png"),), (0,), ("a",)), (X, Y))
    for data, devices, given, expected in (
        (DATA, [CPU], None, 0),
        (DATA, [CPU, gpu], None, PREFETCH),
        (files, [CPU], None, PREFETCH),
        (files, [gpu], 0, 0),
    ):
        monkeypatch.setattr("pycollect.train.options.ranks", lambda *_, to=devices: to)
        assert Options(prefetch=given).resolved(data).prefetch == expected


def test_a_captured_step_is_replayed_for_every_size_of_batch() -> None:
    """On the CPU nothing is captured: a replay calls the function."""
    captured: list[int] = []

    def capture(X: torch.Tensor, *args: Any, **options: Any) -> GraphedStep:
        captured.append(len(X))
        make = partial(GraphedStep.of, capturing=lambda run: run)
        return make(X, *args, **options)

    def trained(capture: Any) -> list[torch.Tensor]:
        engine = SingleProcessEngine(
            net(),
            settings(),
            reduction=reduce_gradients_coalesced,
            options=StepOptions(),
            capture=capture,
        )
        batches = engine.loader(DATA.train, LoaderOptions(8)).epoch()
        losses = [torch.stack(list(engine.step(batch))) for batch in batches]
        return [*losses, *engine.modules[1].parameters()]

    assert all(map(same_bits, trained(capture), trained(None)))
    assert captured == [8, 2]
