"""Agreement between processes: batch statistics, measured shares, and the last step."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import programs
import pytest
import torch
import torch.distributed as dist
from dist_pool import Pools, RankContext
from sites import PROCESSES, only_on
from test_train_processes import alone, assert_alike, prepared, trained
from torch import Tensor, nn

from pycollect._command import Stopped
from pycollect.train import checkpoint, convert_sync_batchnorm
from pycollect.train.interrupt import Interrupt, StopConsensus
from pycollect.train.output import ProgressPrinter
from pycollect.train.records import same_bits
from pycollect.train.training_loop import run

pytestmark = [only_on(PROCESSES, "the trainer of torchrun")]


def layer() -> nn.BatchNorm2d:
    torch.manual_seed(1)
    made = nn.BatchNorm2d(4).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def batch(shares: list[int]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return tuple(3 + torch.randn(2, sum(shares), 4, 3, 2, dtype=torch.float64))  # type: ignore[return-value]


def normalised(me: RankContext, shares: list[int]) -> dict[str, Tensor]:
    """Run two steps of one rank's layer; return output, gradients and running statistics."""
    (mine,) = convert_sync_batchnorm([layer()], dist.group.WORLD)
    X, factor = (whole.split(shares)[me.rank] for whole in batch(shares))
    for step in range(2):
        x = (X + step).requires_grad_()
        mine.zero_grad()
        y = mine(x)
        (y * factor).sum().backward()
    return {"y": y.detach(), "dx": x.grad, **grads(mine), **mine.state_dict()}


def grads(module: nn.Module) -> dict[str, Tensor]:
    return {f"d_{n}": p.grad for n, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("backend", ["pycollect", "gloo"])
@pytest.mark.parametrize("shares", [[3, 2], [1, 4], [0, 3], [5, 0]], ids=str)
def test_batch_statistics_of_processes_are_the_whole_batch(
    pools: Pools, backend: str, shares: list[int]
) -> None:
    found = pools(2, backend=backend).run(normalised, shares)
    one, (X, factor) = layer(), batch(shares)
    for step in range(2):
        x = (X + step).requires_grad_()
        one.zero_grad()
        y = one(x)
        (y * factor).sum().backward()
    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
    close(torch.cat([rank["y"] for rank in found]), y.detach())
    close(torch.cat([rank["dx"] for rank in found]), x.grad)
    for name, grad in grads(one).items():
        close(sum(rank[name] for rank in found), grad)
    for name in ("running_mean", "running_var"):
        close(found[1][name], one.state_dict()[name])
        assert torch.equal(found[0][name], found[1][name])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"weights": "0,1", "microbatch": 3}], ids=str)
def test_a_network_with_batch_statistics_has_the_bits_of_one_process(
    pools: Pools, options: dict[str, Any]
) -> None:
    """The last batch of 41 has one example, so one rank has none."""
    options = {"sync_batchnorm": True, **options}
    assert_alike(2, pools(2).run(trained, True, options), True, options)


def too_few(me: RankContext) -> str:
    (mine,) = convert_sync_batchnorm([nn.BatchNorm1d(3)], dist.group.WORLD)
    with pytest.raises(ValueError, match="more than 1 value per channel over all ranks"):
        mine(torch.zeros(1 - me.rank, 3))
    with pytest.raises(ValueError, match="2 modules for one process of a group"):
        convert_sync_batchnorm([layer(), layer()], dist.group.WORLD)
    return "refused"


def test_all_processes_refuse_one_value(pools: Pools) -> None:
    assert pools(2).run(too_few) == ["refused"] * 2


def measured(
    me: RankContext, folder: str, **options: Any
) -> tuple[list[tuple[int, ...]], list[Tensor]]:
    """Train with a fake clock: a pass takes 1 ms on rank 0 and 3 ms on rank 1."""
    seconds = (0.001, 0.003)[me.rank]
    options = {"prefetch": 2, "weights": "auto", "checkpoint": f"{folder}/run.pt", **options}
    with mock.patch("pycollect.train.ddp.seconds_between", return_value=seconds):
        made = run(
            prepared(me.world, False, me.spec.backend, **options), ProgressPrinter(quiet=True)
        )
    return [step.shares for step in made.steps], made.parameters


@pytest.mark.slow
def test_all_processes_have_the_same_measured_shares(pools: Pools, tmp_path: Path) -> None:
    pool = pools(2)
    (mine, a), (theirs, b) = pool.run(measured, str(tmp_path))
    assert mine == theirs
    assert len({shares for shares in mine if sum(shares) == 8}) > 1
    assert all(map(same_bits, a, b))
    path = tmp_path / "run.pt"
    assert checkpoint.load(path)["run"]["engine"]["auto"]["step"] == len(mine) == 12
    again = {"weights": None, "replay_shares": path}
    assert_alike(2, pool.run(trained, False, again), False, again)
    assert all(map(same_bits, a, alone(2, False, again)[2]))


def measured_in_parts(me: RankContext, folder: str) -> bool:
    """Two runs of one epoch have the shares of one run of two, with a delay of two steps."""
    whole, _ = measured(me, f"{folder}/whole")
    measured(me, f"{folder}/part", epochs=1)
    path = f"{folder}/part/run.pt"
    return measured(me, f"{folder}/part", epochs=2, resume=path)[0] == whole


@pytest.mark.slow
def test_measured_shares_of_processes_are_continued(pools: Pools, tmp_path: Path) -> None:
    for name in ("whole", "part"):
        (tmp_path / name).mkdir()
    assert pools(2).run(measured_in_parts, str(tmp_path)) == [True, True]


def stopped(me: RankContext, path: str, signalled: list[int]) -> tuple[int, bool]:
    """Get SIGTERM at this rank's given check; compare a resumed run with an uninterrupted one."""
    check = Interrupt.check
    options = {"sync_batchnorm": True, "momentum": 0.9}
    checks = 0

    def send_signal(self: Interrupt) -> None:
        nonlocal checks
        checks += 1
        if checks == signalled[me.rank]:
            os.kill(os.getpid(), signal.SIGTERM)
        check(self)

    store = dist.distributed_c10d._get_default_store()
    consensus = StopConsensus(dist.PrefixStore(path, store), me.rank, me.world, lambda: None)
    made = prepared(me.world, True, me.spec.backend, checkpoint=path, **options)
    with mock.patch.object(Interrupt, "check", send_signal), pytest.raises(Stopped):
        run(made, ProgressPrinter(quiet=True), consensus)
    steps = len(checkpoint.load(path)["run"]["steps"])
    continued = prepared(me.world, True, me.spec.backend, resume=path, **options)
    whole = prepared(me.world, True, me.spec.backend, **options)
    ends = [run(made, ProgressPrinter(quiet=True)).parameters for made in (continued, whole)]
    return steps, all(map(same_bits, *ends))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signalled", "after"), [([2, 2], 3), ([4, 2], 5), ([2, 5], 6), ([6, 6], 6)]
)
def test_processes_stop_after_the_same_step(
    pools: Pools, tmp_path: Path, signalled: list[int], after: int
) -> None:
    """An epoch has 6 steps; the seventh check is at the end of the epoch."""
    found = pools(2).run(stopped, str(tmp_path / "run.pt"), signalled)
    assert found == [(after, True)] * 2


@pytest.mark.slow
def test_torchrun_is_interrupted_and_continued(tmp_path: Path) -> None:
    path, log = tmp_path / "run.pt", tmp_path / "log"
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    start += ["--nproc-per-node", "2", "-m", "pycollect.train", "--backend", "pycollect"]
    options = ["--data", "digits", "--checkpoint", str(path), "--log-file", str(log)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with programs.Program(
        [*start, *options, "--epochs", "40"], stdout=-1, stderr=-1, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("LeNet")
        assert process.stdout.readline().startswith("epoch 1")
        time.sleep(0.1)  # into the next epoch
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert errors.count(f"interrupted; continue with --resume {path} --checkpoint {path}\n") == 1
    state = checkpoint.load(path)["run"]
    assert '"stopped", "why": "interrupted"' in log.read_text().splitlines()[-1]
    epochs = len(state["epochs"]) + 1
    command = [*start, "--resume", path, "--epochs", str(epochs)]
    done = programs.run(command, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"epoch {epochs}, time" in done.stdout
