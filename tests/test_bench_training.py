"""The benchmark of training steps: its candidates, its table, its targets and its plot."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import programs
import pytest
import torch
from test_bench_gpu import script

from pycollect._timing import Effort, Timing
from pycollect_bench import training
from pycollect_bench.training import (
    COMPILED,
    NAIVE,
    ONE,
    OVERLAPPED,
    PYCOLLECT,
    Measured,
    Result,
    TrainingCase,
)
from pycollect_bench.training.ddp import BACKENDS, DDP_GLOO, DDP_OURS, DDPJob, DDPWorkers

CPU = torch.device("cpu")
ONCE = Effort(iterations=1, warmup=1)


@pytest.fixture(autouse=True)
def ranks_have_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    programs.fork_ranks(monkeypatch)


@pytest.fixture
def command() -> ModuleType:
    return script("train")


def test_all_candidates_take_turns() -> None:
    result = training.measure(TrainingCase("lenet", 8, (CPU,) * 3), ONCE, ddp=False)
    assert list(result.entries) == [ONE, NAIVE, PYCOLLECT, OVERLAPPED]
    for name, entry in result.entries.items():
        assert entry.step > entry.reduction > 0
        assert len(entry.reductions) == entry.timing.count == 1
        assert 0 < (result.share(name) or 0) < 1
    assert result.slowdown(ONE) == 1
    assert result.slowdown("unknown") is None
    assert list(training.measure(TrainingCase("lenet", 4, (CPU,)), ONCE, ddp=False).entries) == [
        ONE
    ]


@pytest.mark.slow
def test_a_compiled_step_takes_its_turns() -> None:
    case = TrainingCase("lenet", 8, (CPU,) * 2)
    result = training.measure(case, ONCE, ddp=False, compiled=True)
    assert list(result.entries) == [ONE, NAIVE, PYCOLLECT, OVERLAPPED, COMPILED]
    assert result.entries[COMPILED].reduction == 0


def test_batches_are_loaded_with_and_without_preparing_ahead() -> None:
    result = training.measure_loading([CPU] * 2, 4, ONCE)
    assert len(result.entries) == 4
    assert not result.not_run
    for entry in result.entries.values():
        assert entry.timing.percentile(50) > entry.waited > 0


def test_without_pillow_there_are_no_image_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pycollect_bench.training.loading.find_spec", lambda name: None)
    result = training.measure_loading([CPU], 2, ONCE)
    assert len(result.entries) == 2
    assert result.not_run == {"image files": "Pillow is not installed"}


@pytest.mark.slow
def test_processes_of_ddp_take_their_turns(
    command: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / name for name in ("run.json", "run.png")}
    arguments = ["--models", "lenet", "--worlds", "2", "--batch", "6", "-n", "1", "--targets"]
    arguments += ["--no-loading", "--json", str(files["run.json"]), "--plot", str(files["run.png"])]
    assert command.main(arguments) in (0, 3)
    out = capsys.readouterr().out
    record = json.loads(files["run.json"].read_text())
    names = [row["way"] for row in record["training"][0]["rows"]]
    assert names == [ONE, NAIVE, PYCOLLECT, OVERLAPPED, *BACKENDS]
    assert all(f" {name} " in out for name in names)
    assert len(record["targets"]) == 4
    assert record["loading"] is None
    assert files["run.png"].stat().st_size > 10_000


@pytest.mark.slow
def test_the_error_of_a_ddp_rank_is_raised() -> None:
    X, y = torch.zeros(2, 1, 5, 5), torch.zeros(2, dtype=torch.int64)
    with DDPWorkers(DDPJob("lenet", (X, y), 0.1, (CPU,), "gloo")) as workers:
        sample = workers.sampler([])
        with pytest.raises(RuntimeError, match=r"rank 0: (.|\n)*LeNet takes images of 28 x 28"):
            sample(1)


def test_ddp_ranks_end_if_their_start_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def interrupted(by_multiprocessing: bool) -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    monkeypatch.setattr("pycollect_bench.training.ddp.interrupts_kept_from_children", interrupted)
    workers = DDPWorkers(DDPJob("lenet", (torch.zeros(2), torch.zeros(2)), 0.1, (CPU, CPU), "gloo"))
    with pytest.raises(KeyboardInterrupt):
        workers.__enter__()
    assert [process.is_alive() for process in workers._processes] == [False]


def result_of(model: str, world: int, **seconds: tuple[float, float]) -> Result:
    """A result with the given seconds of steps and reductions."""
    names = {"one": ONE, "naive": NAIVE, "plain": PYCOLLECT, "overlapped": OVERLAPPED}
    entries = {
        names[name]: Measured(Timing(((step,),)), [reduction])
        for name, (step, reduction) in seconds.items()
    }
    return Result(TrainingCase(model, 256, (CPU,) * world), entries, {})


def test_the_target_of_one_gpu_is_ddp_against_gloo() -> None:
    def ddp(world: int, ours: float, gpus: int = 1) -> Result:
        entries = {
            DDP_OURS: Measured(Timing(((ours,),)), [0.0]),
            DDP_GLOO: Measured(Timing(((6.0,),)), [0.0]),
        }
        devices = tuple(torch.device("cuda", r % gpus) for r in range(world))
        return Result(TrainingCase("lenet", 256, devices), entries, {})

    found = training.judge([ddp(4, 2.0), ddp(4, 3.0), ddp(2, 6.0), ddp(4, 5.0, gpus=2)])
    assert [(o.measured, o.met) for o in found] == [(2.0, False)]
    assert training.judge([ddp(2, 1.0)])[0].met is None
    assert ddp(4, 2.0).times_faster(DDP_OURS, "unknown") is None


def test_ddp_needs_one_kind_of_device() -> None:
    mixed = TrainingCase("lenet", 4, (CPU, torch.device("meta")))
    assert not mixed.one_kind
    assert TrainingCase("lenet", 4, (CPU, CPU)).one_kind


@pytest.mark.cuda
def test_processes_of_ddp_share_a_gpu() -> None:
    result = training.measure(TrainingCase("lenet", 8, (torch.device("cuda:0"),) * 2), ONCE)
    assert set(BACKENDS) < set(result.entries)
    assert not result.not_run


def test_targets_take_the_worst_point() -> None:
    results = [
        result_of("lenet", 2, one=(1.0, 0), plain=(1.2, 0.06), overlapped=(1.04, 0)),
        result_of("lenet", 4, one=(1.0, 0), plain=(1.0, 0.11), overlapped=(9.0, 0)),
        result_of("resnet18", 2, one=(1.0, 0), plain=(1.0, 0.019), overlapped=(1.06, 0)),
    ]
    found = training.judge(results)
    assert [o.measured for o in found] == pytest.approx([1.04, 1.06, 11, 1.9])
    assert [o.met for o in found] == [True, False, False, True]
    assert found[2].where == "4 ranks"
    assert [o.met for o in training.judge([])] == [None] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--worlds", "0"], "--worlds must be positive, not [0]"),
        (["--seconds", "nan"], "--seconds must be positive, not nan"),
        (["-n", "-1"], "--iterations must be positive, not -1"),
        (["--size", "32"], "LeNet takes images of 28 x 28"),
        (["--models", "alexnet"], "invalid choice"),
        (["--json", "/nowhere/at/all.json"], "the folder of the JSON file /nowhere/at/all.json"),
        (["--plot", "bars.gif"], "a picture ends in .png, .svg, .pdf, and bars.gif does not"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_measured(
    command: ModuleType,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert message in capsys.readouterr().err


def test_ranks_take_the_devices_in_turn(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    monkeypatch.setattr(sys.modules["pycollect"], "devices", lambda spec: gpus)
    found = command.cases(command.arguments(["--models", "lenet", "--worlds", "1", "3"]))
    assert [case.devices for case in found] == [(gpus[0],), (gpus[0], gpus[1], gpus[0])]
