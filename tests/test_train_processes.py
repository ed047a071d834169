"""Ranks that are processes or threads train as the replicas of one process do, to the bit."""

from __future__ import annotations

import copy
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import programs
import pytest
import torch
import torch.distributed as dist
from dist_pool import Pools, RankContext
from PIL import Image
from sites import HOSTS, PROCESSES, not_on, only_on, slow_on_processes
from torch import Tensor, nn

from pycollect._command import Stopped
from pycollect.train import (
    Data,
    GluonTrainer,
    ReplicaTrainer,
    checkpoint,
    reduce_gradients_naive,
    sgd_factory,
)
from pycollect.train.__main__ import main
from pycollect.train.interrupt import Interrupt, StopConsensus
from pycollect.train.options import Options
from pycollect.train.output import ProgressPrinter
from pycollect.train.prepared_run import PreparedRun, prepare
from pycollect.train.processes import LaunchContext, with_devices
from pycollect.train.records import same_bits
from pycollect.train.training_run import run

GENERATOR = torch.Generator().manual_seed(3)
X, Y = torch.randn(50, 1, 6, 6, generator=GENERATOR), torch.arange(50) % 3
DATA = Data("noise", (X[:41], Y[:41]), (X[41:], Y[41:]))

pytestmark = [not_on(HOSTS, "the trainer sees one group"), slow_on_processes]
of_processes = only_on(PROCESSES, "the trainer of torchrun")


class Sometimes(nn.Module):
    """Uses one layer, with transposed weights, for shards with a positive sum only; another never.

    A rank that lacks its gradient must have it with the strides of the parameter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rarely, self.never = (nn.Linear(36, 36) for _ in range(3))
        self.rarely.weight = nn.Parameter(self.rarely.weight.detach().t())
        self.last, self.dropout = nn.Linear(36, 3), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x.flatten(1)))
        hidden = self.rarely(hidden) if x.sum() > 0 else hidden
        scores: Tensor = self.last(self.dropout(hidden))
        return scores


def net(kind: str) -> nn.Module:
    torch.manual_seed(5)
    if kind == "sometimes":
        return Sometimes()
    norms = [nn.BatchNorm2d(4)] if kind == "norm" else []
    dropouts = [nn.Dropout(0.2)] if kind == "dropout" else []
    return nn.Sequential(nn.Conv2d(1, 4, 3), *norms, nn.Flatten(), *dropouts, nn.Linear(64, 3))


def prepared(world: int, kind: str = "", backend: str | None = None, **options: Any) -> PreparedRun:
    chosen = {"devices": f"cpu*{world}", "batch_size": 8, "lr": 0.05, "data": DATA}
    chosen |= {"model": net(kind), "momentum": 0.9, "weight_decay": 1e-3, "epochs": 2, **options}
    return prepare(Options.of(chosen), backend)


def quietly(made: PreparedRun) -> tuple[list[float], list[float], list[Tensor]]:
    """Losses, accuracies, and the parameters and buffers of a process's first rank."""
    torch.set_num_threads(1)
    result = run(made, ProgressPrinter(quiet=True))
    return (
        result.losses,
        [e.accuracy for e in result.epochs],
        [*result.module.state_dict().values()],
    )


def trained(me: RankContext, kind: str, options: dict[str, Any]) -> Any:
    return quietly(prepared(me.world, kind, me.spec.backend, **options))


def assert_alike(outcome: Any, expected: Any, *, buffers: bool = True) -> None:
    """All ranks have the losses and accuracies, and rank 0 the model, of the expected run."""
    for rank, theirs in enumerate(outcome):
        assert theirs[:2] == expected[:2]
        if rank == 0 or buffers:
            assert all(map(same_bits, theirs[2], expected[2]))


@pytest.mark.parametrize(
    ("world", "kind", "options"),
    [
        (2, "", {}),
        (2, "", {"weights": "80,20", "drop_last": True}),
        (2, "", {"weights": "0,1", "overlap": False}),  # rank 0 has no examples
        (2, "dropout", {"microbatch": 3, "prefetch": 2}),
        (2, "", {"shuffle": False, "seed": 4}),
        (3, "sometimes", {}),  # the last batch of 41 has one example: two ranks have none
        (3, "sometimes", {"overlap": False, "microbatch": 4}),
        (2, "norm", {"drop_last": True}),
        (2, "norm", {"sync_batchnorm": True}),
        (3, "norm", {"sync_batchnorm": True, "weights": "0,1,1", "microbatch": 3}),
    ],
    ids=str,
)
def test_ranks_have_the_bits_of_one_process(
    pools: Pools, world: int, kind: str, options: dict[str, Any]
) -> None:
    outcome = pools(world).run(trained, kind, options)
    each = kind != "norm" or "sync_batchnorm" in options  # otherwise statistics are each rank's own
    assert_alike(outcome, quietly(prepared(world, kind, **options)), buffers=each)
    if not each:
        assert not all(map(same_bits, outcome[0][2], outcome[1][2]))


@of_processes
def test_gloo_differs_by_rounding_only(pools: Pools) -> None:
    outcome = pools(2, backend="gloo").run(trained, "", {})
    losses, _, state = quietly(prepared(2))
    for theirs in outcome:
        assert theirs[0] == pytest.approx(losses, abs=1e-5)
        for a, b in zip(state, theirs[2], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def continued(me: RankContext, options: dict[str, Any]) -> Any:
    torch.manual_seed(me.rank)
    return trained(me, "dropout", options)


@pytest.mark.parametrize("first", ["group", "one process"])
@pytest.mark.parametrize("then", ["group", "one process"])
def test_a_run_is_continued_by_the_same_ranks(
    pools: Pools, tmp_path: Path, first: str, then: str
) -> None:
    """Also by the other kind of ranks; each has its own dropout."""
    part = {"epochs": 1, "checkpoint": tmp_path / "run.pt"}
    rest = {"epochs": 3, "resume": tmp_path / "run.pt"}
    expected = quietly(prepared(2, "dropout", epochs=3))
    ends = []
    for how, options in ((first, part), (then, rest)):
        if how == "group":
            ends.append(pools(2).run(continued, options))
        else:
            ends.append([quietly(prepared(2, "dropout", **options))])
    assert_alike(ends[1], expected)
    if first == then == "group":
        with pytest.raises(checkpoint.CheckpointError, match=r"kinds of devices .*, not"):
            prepared(3, "dropout", resume=tmp_path / "run.pt")


def begun_apart(me: RankContext) -> list[Tensor]:
    """Parameters after a step of ranks whose modules were initialised by other seeds."""
    torch.manual_seed(me.rank)
    module = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    one = ReplicaTrainer(module, "cpu", optimizer=sgd_factory(0.1), group=dist.group.WORLD)
    one.step(X[me.rank : me.rank + 1], Y[:1], shares=[1] * me.world)
    return one.parameters[0]


def test_all_ranks_begin_with_the_module_of_rank_0(pools: Pools) -> None:
    first, *others = pools(3).run(begun_apart)
    for mine in others:
        assert all(map(same_bits, mine, first))


def refused(me: RankContext) -> list[str]:
    """The errors of a trainer in a group."""
    make = {"optimizer": sgd_factory(0.1), "group": dist.group.WORLD}
    one, scattered = (nn.Sequential(nn.Flatten(), nn.Linear(36, 3)) for _ in range(2))
    scattered.register_buffer("few", torch.eye(3).to_sparse())

    class Clamps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return super().forward(x)

    def step(module: nn.Module, **shares: Any) -> None:
        mine = X[:3].flatten(1)
        ReplicaTrainer(module, "cpu", **make).step(mine, Y[:3], **shares)

    calls = [
        lambda: ReplicaTrainer(one, "cpu*2", **make),
        lambda: ReplicaTrainer(one, "cpu", compile=True, **make),
        lambda: step(one),
        lambda: step(one, shares=[3]),
        lambda: step(one, shares=[2, 2]),
        lambda: step(Clamps(36, 3), shares=[3, 3]),
        lambda: ReplicaTrainer(scattered, "cpu", **make),
        lambda: copy.deepcopy(ReplicaTrainer(one, "cpu", **make)),
        lambda: ReplicaTrainer(one, "cpu", reduction=reduce_gradients_naive, **make),
        lambda: GluonTrainer(ReplicaTrainer(one, "cpu", **make)),
    ]
    found = []
    for call in calls:
        with pytest.raises((ValueError, TypeError)) as error:
            call()
        found.append(str(error.value))
    return found


def test_what_a_process_of_a_group_cannot_do(pools: Pools) -> None:
    messages = [
        "a process of a group has one rank, not 2 devices",
        "a compiled step needs all ranks in one process",
        "pass all ranks' shares",
        "one share per rank: 1 for 2",
        "must be at least 0 and add up to 3",
        "forward changes parameter weight in place, which a group cannot compare",
        "few is sparse, and no group of processes sends it",
        "a trainer of a group has no copies: make one in each process",
        "a group sums the gradients itself: leave out the reduction",
        "GluonTrainer: the replicas are one rank of a group",
    ]
    for found in pools(2).run(refused):
        for message, text in zip(messages, found, strict=True):
            assert message in text
    with pytest.raises(ValueError, match=r"pass a group, of processes or of the threads that pyc"):
        ReplicaTrainer(net("norm"), "cpu*2", optimizer=sgd_factory(1), sync_batchnorm=True)


def measured(
    me: RankContext, folder: str, **options: Any
) -> tuple[list[tuple[int, ...]], list[Tensor]]:
    """Train with a fake clock: a pass takes 1 ms on rank 0 and 3 ms on rank 1."""
    seconds = (0.001, 0.003)[me.rank]
    options = {"prefetch": 2, "weights": "auto", "checkpoint": f"{folder}/run.pt", **options}
    with mock.patch.object(ReplicaTrainer, "rank_seconds", return_value=[seconds]):
        made = run(prepared(me.world, "", me.spec.backend, **options), ProgressPrinter(quiet=True))
    return [step.shares for step in made.steps], made.parameters


def measured_in_parts(me: RankContext, folder: str) -> bool:
    """Two runs of one epoch have the shares of one run of two, with a delay of two steps."""
    whole, _ = measured(me, f"{folder}/whole")
    measured(me, f"{folder}/part", epochs=1)
    path = f"{folder}/part/run.pt"
    return measured(me, f"{folder}/part", epochs=2, resume=path)[0] == whole


@of_processes
def test_all_processes_have_the_same_measured_shares(pools: Pools, tmp_path: Path) -> None:
    pool = pools(2)
    (mine, a), (theirs, b) = pool.run(measured, str(tmp_path))
    assert mine == theirs
    assert len({shares for shares in mine if sum(shares) == 8}) > 1
    assert all(map(same_bits, a, b))
    path = tmp_path / "run.pt"
    assert checkpoint.load(path)["run"]["engine"]["auto"]["step"] == len(mine) == 12
    for name in ("whole", "part"):
        (tmp_path / name).mkdir()
    assert pool.run(measured_in_parts, str(tmp_path)) == [True, True]


def stopped(me: RankContext, path: str, signalled: list[int]) -> tuple[int, bool]:
    """Get SIGTERM at this rank's given check; compare a resumed run with an uninterrupted one."""
    check, checks = Interrupt.check, 0

    def send_signal(self: Interrupt) -> None:
        nonlocal checks
        checks += 1
        if checks == signalled[me.rank]:
            os.kill(os.getpid(), signal.SIGTERM)
        check(self)

    store = dist.distributed_c10d._get_default_store()
    consensus = StopConsensus(dist.PrefixStore(path, store), me.rank, me.world, lambda: None)
    options = {"sync_batchnorm": True, "momentum": 0.9}
    made = prepared(me.world, "norm", me.spec.backend, checkpoint=path, **options)
    with mock.patch.object(Interrupt, "check", send_signal), pytest.raises(Stopped):
        run(made, ProgressPrinter(quiet=True), consensus)
    steps = len(checkpoint.load(path)["run"]["steps"])
    parts = ({"resume": path}, {})
    ends = [trained(me, "norm", {**options, **part})[2] for part in parts]
    return steps, all(map(same_bits, *ends))


@of_processes
@pytest.mark.parametrize(
    ("signalled", "after"), [([2, 2], 3), ([4, 2], 5), ([2, 5], 6), ([6, 6], 6)]
)
def test_processes_stop_after_the_same_step(
    pools: Pools, tmp_path: Path, signalled: list[int], after: int
) -> None:
    """An epoch has 6 steps; the seventh check is at the end of the epoch."""
    found = pools(2).run(stopped, str(tmp_path / "run.pt"), signalled)
    assert found == [(after, True)] * 2


def test_rank_threads_stop_after_the_same_step(tmp_path: Path) -> None:
    """The main thread gets the signal; all ranks stop, and the run goes on with the same bits."""
    torch.set_num_threads(1)
    path = tmp_path / "run.pt"
    check, checks = Interrupt.check, 0

    def send_signal(self: Interrupt) -> None:
        nonlocal checks
        checks += 1
        if checks == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)  # the main thread runs its handler
        check(self)

    made = prepared(2, "norm", sync_batchnorm=True, checkpoint=path)
    with mock.patch.object(Interrupt, "check", send_signal), pytest.raises(Stopped):
        run(made, ProgressPrinter(quiet=True))
    assert 2 <= len(checkpoint.load(path)["run"]["steps"]) <= 4
    whole = quietly(prepared(2, "norm", sync_batchnorm=True))
    assert_alike([quietly(prepared(2, "norm", sync_batchnorm=True, resume=path))], whole)


def test_every_process_has_a_device() -> None:
    cpu = torch.device("cpu")
    asked = {"cpu*2": 4, "cpu": 3, None: 3}  # two devices for four processes: as on two hosts
    for spec, world in asked.items():
        assert with_devices(Options.of({"devices": spec}), "gloo", world).devices == (cpu,) * world
    with pytest.raises(ValueError, match="there are 3 processes for 2 devices; start one per"):
        with_devices(Options.of({"devices": "cpu*2"}), "gloo", 3)


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
        (
            {"WORLD_SIZE": "2"},
            ["--compare"],
            "--backend and torchrun are for one process per rank",
        ),
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


# --- commands -------------------------------------------------------------------------------------

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
THREADS = [sys.executable, "-m", "pycollect.threads", "--nproc", "2"]
TRAIN = ["-m", "pycollect.train", "--backend", "pycollect"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [TORCHRUN, THREADS], ids=["torchrun", "threads"])
def test_only_rank_0_prints(launcher: list[str]) -> None:
    command = [*launcher, *TRAIN, "--data", "digits", "--epochs", "1"]
    done = programs.run(command, timeout=120, env={**os.environ, **ONE_THREAD})
    assert (done.returncode, done.stderr) == (0, "")
    header, epoch, _, last = done.stdout.splitlines()
    assert header.endswith("on [cpu, cpu], reduced by processes over pycollect")
    assert epoch.startswith("epoch 1, time ")
    assert last.startswith("test acc: ")


@pytest.mark.slow
def test_an_error_of_one_rank_is_printed_once(tmp_path: Path) -> None:
    """The second of two images is damaged; only rank 1 reads it."""
    for part in ("train", "val"):
        for name in "ab":
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / part / name / "0.png")
    (tmp_path / "train" / "b" / "0.png").write_bytes(b"")
    arguments = ["--data", "folder", "--data-dir", str(tmp_path), "--image-size", "16"]
    command = [*TORCHRUN, *TRAIN, "--no-shuffle", *arguments]
    done = programs.run(command, timeout=120, env={**os.environ, **ONE_THREAD})
    assert done.returncode != 0
    assert done.stdout.count("\n") == 1  # the header only
    assert len(re.findall("error: .*cannot be decoded as an image", done.stderr)) == 1
    assert "PeerLost" not in done.stderr


@pytest.mark.slow
def test_torchrun_is_interrupted_and_continued(tmp_path: Path) -> None:
    path, log = tmp_path / "run.pt", tmp_path / "log"
    options = ["--data", "digits", "--checkpoint", str(path), "--log-file", str(log)]
    environment = {**os.environ, **ONE_THREAD}
    with programs.Program(
        [*TORCHRUN, *TRAIN, *options, "--epochs", "40"], stdout=-1, stderr=-1, env=environment
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
    command = [*TORCHRUN, *TRAIN, "--resume", path, "--epochs", str(epochs)]
    done = programs.run(command, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"epoch {epochs}, time" in done.stdout
