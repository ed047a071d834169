"""One process per rank: the numbers of one process, one process's output, every error once."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import sys
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from dist_pool import Pools, RankContext
from sites import PROCESSES, only_on
from torch import Tensor, nn

from pycollect.train import Data, checkpoint
from pycollect.train.__main__ import main
from pycollect.train.comparison import compare_reductions
from pycollect.train.options import Options
from pycollect.train.prepared_run import PreparedRun, prepare
from pycollect.train.processes import LaunchContext, devices_of
from pycollect.train.progress_printer import ProgressPrinter
from pycollect.train.run_result import same_bits
from pycollect.train.training_loop import run

GENERATOR = torch.Generator().manual_seed(3)
X, Y = torch.randn(50, 1, 6, 6, generator=GENERATOR), torch.arange(50) % 3
DATA = Data("noise", (X[:41], Y[:41]), (X[41:], Y[41:]))

pytestmark = [only_on(PROCESSES, "the trainer of torchrun")]


def net(norm: bool) -> nn.Module:
    torch.manual_seed(5)
    norms = [nn.BatchNorm2d(4)] if norm else []
    return nn.Sequential(nn.Conv2d(1, 4, 3), *norms, nn.Flatten(), nn.Linear(64, 3))


class Ends(nn.Sequential):
    """A module that makes a process to which it was sent abort at interpreter exit."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if multiprocessing.parent_process() is not None:  # a copy in the same process has no parent
            atexit.register(os.abort)


def prepared(world: int, norm: bool, backend: str | None = None, **options: Any) -> PreparedRun:
    chosen = {"devices": f"cpu*{world}", "batch_size": 8, "lr": 0.05, "data": DATA}
    chosen |= {"model": net(norm), "momentum": 0.9, "weight_decay": 1e-3, "epochs": 2, **options}
    return prepare(Options.of(chosen), backend)


def trained(
    me: RankContext, norm: bool, options: dict[str, Any]
) -> tuple[list[float], list[float], Any]:
    """One rank's losses, accuracies and parameters."""
    result = run(prepared(me.world, norm, me.spec.backend, **options), ProgressPrinter(quiet=True))
    return result.losses, [e.accuracy for e in result.epochs], result.parameters


def alone(world: int, norm: bool, options: dict[str, Any]) -> tuple[list[float], list[float], Any]:
    torch.set_num_threads(1)  # as in each process
    result = run(prepared(world, norm, **options), ProgressPrinter(quiet=True))
    return result.losses, [e.accuracy for e in result.epochs], result.parameters


def assert_alike(world: int, outcome: Any, norm: bool, options: dict[str, Any]) -> None:
    losses, accuracies, parameters = alone(world, norm, options)
    for theirs in outcome:
        assert theirs[0] == losses
        assert theirs[1] == accuracies
        assert all(map(same_bits, parameters, theirs[2]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weights": "80,20", "drop_last": True},
        {"weights": "0,1"},  # rank 0 has no examples
        {"microbatch": 3, "prefetch": 2},
        {"shuffle": False, "seed": 4},
    ],
)
def test_processes_have_the_bits_of_one(pools: Pools, options: dict[str, Any]) -> None:
    assert_alike(2, pools(2).run(trained, False, options), False, options)


@pytest.mark.slow
def test_batch_statistics_are_each_ranks_own(pools: Pools, tmp_path: Path) -> None:
    options = [{"drop_last": True, "checkpoint": tmp_path / f"{name}.pt"} for name in "ab"]
    assert_alike(2, pools(2).run(trained, True, options[0]), True, options[1])
    found = [
        checkpoint.load(of["checkpoint"])["run"]["engine"]["replicas"]["buffers"] for of in options
    ]
    for theirs, mine in zip(*found, strict=True):
        assert all(same_bits(theirs[name], mine[name]) for name in mine)
    assert not same_bits(found[0][0]["1.running_mean"], found[0][1]["1.running_mean"])


@pytest.mark.slow
def test_more_ranks_than_examples(pools: Pools) -> None:
    """The last batch of 41 has one example, so that two of three ranks have none."""
    assert_alike(3, pools(3).run(trained, False, {}), False, {})


@pytest.mark.slow
def test_gloo_differs_by_rounding_only(pools: Pools) -> None:
    outcome = pools(2, backend="gloo").run(trained, False, {})
    losses, _, parameters = alone(2, False, {})
    for theirs in outcome:
        assert theirs[0] == pytest.approx(losses, abs=1e-5)
        for a, b in zip(parameters, theirs[2], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def stopped_and_continued(me: RankContext, folder: str) -> bool:
    """Compare two epochs and a third in another run with three epochs in one; with dropout."""

    def once(epochs: int, **options: Any) -> list[Tensor]:
        made = prepared(me.world, True, me.spec.backend, epochs=epochs, drop_last=True, **options)
        made.module.add_module("dropout", nn.Dropout(0.2))
        return run(made, ProgressPrinter(quiet=True)).parameters

    path = Path(folder) / "run.pt"
    whole = once(3)
    once(2, checkpoint=path)
    torch.manual_seed(me.rank)
    continued = once(3, resume=path)
    return all(map(same_bits, whole, continued))


@pytest.mark.slow
def test_processes_are_continued_with_the_same_bits(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(stopped_and_continued, str(tmp_path)) == [True, True]
    state = checkpoint.load(tmp_path / "run.pt")
    assert len(state["run"]["engine"]["generators"]) == 2
    with pytest.raises(checkpoint.CheckpointError, match="processes over pycollect, not None"):
        prepared(2, True, drop_last=True, resume=tmp_path / "run.pt")


def test_every_process_has_a_device() -> None:
    cpu = torch.device("cpu")
    assert devices_of(["cpu", "cpu"], "gloo", 4) == [cpu] * 4  # as on two hosts
    assert devices_of(None, "pycollect", 3) == devices_of("cpu", "gloo", 3) == [cpu] * 3
    with pytest.raises(ValueError, match="there are 3 processes for 2 devices; start one per"):
        devices_of("cpu*2", "gloo", 3)


def test_ddp_needs_every_parameter_to_be_used() -> None:
    class Spare(nn.Linear):
        def __init__(self) -> None:
            super().__init__(36, 3)
            self.spare = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(1))

    options = {"data": DATA, "model": Spare(), "names": ("pycollect", "ddp"), "quiet": True}
    with pytest.raises(ValueError, match=r"not depend on spare\.weight, spare\.bias, .* freeze"):
        compare_reductions("cpu*2", 8, 0.05, epochs=1, **options)


def test_only_the_first_process_to_fail_prints() -> None:
    store = torch.distributed.HashStore()
    contexts = [LaunchContext(rank, 2, store) for rank in (0, 1)]
    assert [contexts[i].first_to_fail() for i in (1, 0, 1)] == [True, False, True]
    assert LaunchContext().first_to_fail()


@pytest.mark.parametrize(
    ("variables", "arguments", "message"),
    [
        (
            {},
            ["--backend", "gloo"],
            "torchrun --nproc-per-node 2 -m pycollect.train --backend gloo",
        ),
        ({"WORLD_SIZE": "2"}, [], "torchrun has started 2 processes: choose how they communicate"),
        ({"WORLD_SIZE": "1"}, ["--backend", "magic"], "torch has no backend 'magic' here"),
    ],
)
def test_backend_and_processes_must_fit(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    arguments: list[str],
    message: str,
) -> None:
    if variables:
        variables = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **variables}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as exit_:
        main(["--data", "digits", *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def torchrun(*arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "pycollect.train", *arguments]
    done = programs.run(command, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_under_torchrun_only_rank_0_prints() -> None:
    code, out, err = torchrun("--backend", "pycollect", "--data", "digits", "--epochs", "1")
    assert (code, err) == (0, "")
    header, epoch, _, last = out.splitlines()
    assert header.endswith("on [cpu, cpu], reduced by DistributedDataParallel over pycollect")
    assert epoch.startswith("epoch 1, time ")
    assert last.startswith("test acc: ")


@pytest.mark.slow
def test_an_error_of_one_rank_is_printed_once(tmp_path: Path) -> None:
    """The second of two images is damaged; only rank 1 reads it."""
    from PIL import Image

    for part in ("train", "val"):
        for name in "ab":
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / part / name / "0.png")
    (tmp_path / "train" / "b" / "0.png").write_bytes(b"")
    arguments = ["--data", "folder", "--data-dir", str(tmp_path), "--image-size", "16"]
    code, out, err = torchrun("--backend", "pycollect", "--no-shuffle", *arguments)
    assert code != 0
    assert out.count("\n") == 1  # the header only
    assert len(re.findall("error: .*cannot be decoded as an image", err)) == 1
    assert "PeerLost" not in err


@pytest.mark.slow
def test_a_comparison_with_ddp(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """DDP's ranks skip the interpreter's exit, where gloo's threads may abort them."""
    options = {"data": DATA, "model": Ends(*net(False)), "epochs": 1, "overlap": True}
    options["plot"] = tmp_path / "three.png"
    names = ("naive", "pycollect", "ddp")
    torch.set_num_threads(2)
    comparison = compare_reductions(
        "cpu*2", 8, 0.05, names=names, ddp_backend="pycollect", **options
    )
    naive, ours, ddp = comparison.run_results
    assert ours.difference(naive) == 0
    assert ddp.difference(naive) < 1e-5
    assert not any(t.is_shared() for t in (*DATA.train, *options["model"].parameters()))
    assert len(ddp.steps) == len(ours.steps) == 6
    assert (tmp_path / "three.png").stat().st_size > 10_000
    lines = capfd.readouterr().out.splitlines()
    assert [line.rpartition("(")[2] for line in lines[1:4]] == ["naive)", "pycollect)", "ddp)"]
    assert [line.split()[0] for line in lines[5:8]] == list(names)
