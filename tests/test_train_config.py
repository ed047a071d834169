"""Options: what is asked for is filled in; bad values are refused before a step."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from train_cases import noise, same_bits

from pycollect.train import (
    Data,
    DefaultHyperparameters,
    ImageFolder,
    train,
)
from pycollect.train.cuda_graph import GraphedStep
from pycollect.train.options import PREFETCH, Options, ranks
from pycollect.train.prepared_run import prepare

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
USUAL = DefaultHyperparameters(batch_size=8, lr=0.1, epochs=2)
DATA = Data("noise", noise().train, noise().test, USUAL)
FEW = tuple(part[:39] for part in DATA.train)  # three ranks divide them


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 3))


def filled(**options: Any) -> Options:
    chosen = {"devices": "cpu*2", "data": DATA, "model": net()}
    return prepare(Options.of(chosen | options)).options


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


# Options that shards exclude.
OF_OTHERS: dict[str, Any] = {"weights": "80,20", "microbatch": 4}
OF_OTHERS |= {"reduce": "naive", "compile": "aot_eager", "overlap": True}


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
        ({"devices": []}, "device"),
        ({"devices": "banana"}, "banana"),
        ({"epochs": -1}, "epochs must be at least 1, not -1"),
        ({"lr": 0}, "the learning rate must be a positive number, not 0"),
        ({"lr": float("nan")}, "positive number, not nan"),
        ({"momentum": 1.0}, "momentum must be from 0 to below 1, not 1"),
        ({"weight_decay": -1.0}, "weight decay must be at least 0, not -1"),
        ({"seed": -1}, r"the seed must be from 0 to 2\*\*63 - 1, not -1"),
        ({"microbatch": 0}, "at least 1 example, not 0"),
        ({"shards": 0}, "there must be at least 1 shard, not 0"),
        *(
            (
                {"shards": n, "devices": f"cpu*{w}"},
                f"{n} shards cannot be .* {w} ranks, a power of two for each: {fit} can$",
            )
            for n, w, fit in ((8, 7, "1, 2, 4, 8"), (6, 2, "1, 3, 6"), (2, 4, "1, 2"))
        ),
        *(
            ({"shards": 4, name: value}, f"shards are even, .*leave out {name}, or the shards")
            for name, value in OF_OTHERS.items()
        ),
        ({"shards": 10**18, "devices": "cpu*3"}, "cannot be divided among 3 ranks"),
        *(
            ({"shards": 4, name: True}, "so nothing can be scaled by it: leave out scale_batch and")
            for name in ("scale_batch", "scale_lr")
        ),
        ({"shards": 4, "sync_batchnorm": True}, "a rank for each of the 4 shards: there are 2"),
        ({"shards": 4, "batch_size": 10, "strict": True}, "number of shards: 10 examples on 4 sh"),
        ({"prefetch": -1}, "at least 0 batches, not -1"),
        ({"model": "vgg"}, r"unknown model 'vgg'; allowed are lenet, resnet18, and any torch"),
        ({"reduce": "magic"}, "unknown reduction 'magic'; allowed are pycollect, naive"),
        ({"weights": "1,2,3"}, "one weight per rank: 3 weights for 2 ranks"),
        *(
            ({"weights": w}, "weights are 'auto' or one number per rank such as")
            for w in ("80;20", [1, None], 3, {0: 3.0, 1: 1.0}, {1, 2}, torch.ones(2, 2))
        ),
        ({"weights": "auto", "sync_batchnorm": True}, "measured shares need separate times"),
        ({"batch_size": 42, "drop_last": True}, "drop_last leaves no batch: there are 41"),
        ({"batch_size": 7, "strict": True}, "divisible by the number of devices: 7 examples on 2"),
        ({"batch_size": 8, "strict": True, "microbatch": 3}, "microbatch size must be divisible"),
        ({"strict": True}, "1 examples on 2 devices"),  # the last batch
        ({"strict": True, "data": FEW, "devices": "cpu*3"}, "256 examples on 3 devices"),
        ({"graph": True}, r"not on \[cpu, cpu\]; .*on the CPU --compile makes one graph of"),
        ({"compile": True, "weights": "auto"}, "a compiled step has no parts and ranks to time"),
        ({"compile": True, "microbatch": 4}, "a step with microbatches is not one graph"),
        ({"model": "lenet"}, "LeNet takes images of 28 x 28, and noise has 6 x 6; choose"),
        ({"image_size": 6}, "image_size is for data by name, not for data of your own"),
        ({"data": "folder", "image_size": 0}, "at least 1 pixel, not 0"),
        ({"resume": "a.pt", "init_from": "b.pt"}, "goes on with a run and init_from starts one"),
        ({"plot": "run.gif"}, r"a picture ends in \.png, \.svg, \.pdf"),
        ({"checkpoint": "/dev/full/run.pt"}, "the folder of the checkpoint /dev/full/run.pt does"),
        ({"log": "no/where.jsonl"}, "the folder of the log no/where.jsonl does not exist or is"),
    ],
)
def test_bad_options_are_refused_before_a_step(options: dict[str, Any], message: str) -> None:
    of_type = message.startswith("unknown option") or "; pass " in message
    with pytest.raises(TypeError if of_type else ValueError, match=message):
        train(**{"devices": "cpu*2", "data": DATA, "model": net(), **options})


def test_options_are_equal_if_they_give_the_same_run() -> None:
    made = filled()
    assert made == filled(prefetch=2, log="/dev/null", data=DATA, reduce="naive")
    assert all(made != filled(**{name: 1}) for name in ("seed", "epochs", "lr", "batch_size"))


def test_deterministic_algorithms_are_enabled_for_the_run_only() -> None:
    seen = []

    class Watching(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.append(torch.are_deterministic_algorithms_enabled())
            return super().forward(input.flatten(1))

    for deterministic in (True, False):
        train(data=DATA, model=Watching(36, 3), epochs=1, deterministic=deterministic, quiet=True)
        assert set(seen) == {deterministic}
        seen.clear()
    assert not torch.are_deterministic_algorithms_enabled()


def test_batches_are_prepared_ahead_for_files_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    files = Data("files", ImageFolder((Path("a.png"),), (0,), ("a",)), DATA.test)
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
    graphed, eager = (
        train("cpu*2", data=DATA, model=net(), graph=graph, quiet=True) for graph in (True, False)
    )
    assert graphed.losses == eager.losses
    assert same_bits(graphed.modules[1], eager.modules[1])
    assert captured == [8, 1]
