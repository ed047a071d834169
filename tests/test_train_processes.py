"""Equal options give equal bits: in one process, in processes over a group, in ranks as threads."""

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
from train_cases import convolutional, noise

from pycollect._command import Stopped
from pycollect.train import (
    GluonTrainer,
    ReplicaTrainer,
    checkpoint,
    reduce_gradients_naive,
    sgd_factory,
)
from pycollect.train.interrupt import Interrupt, StopConsensus
from pycollect.train.options import Options
from pycollect.train.output import ProgressPrinter
from pycollect.train.prepared_run import PreparedRun, prepare
from pycollect.train.processes import LaunchContext, with_devices
from pycollect.train.records import same_bits
from pycollect.train.training_run import run

DATA = noise()
X, Y = DATA.train

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
    if kind == "sometimes":
        torch.manual_seed(5)
        return Sometimes()
    layers = {"": [], "norm": [nn.BatchNorm2d(4)], "dropout": [nn.Dropout(0.2)]}
    return convolutional(*layers[kind])


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
    torch.manual_seed(me.rank)  # the process's own random state must not matter
    return quietly(prepared(me.world, kind, me.spec.backend, **options))


def assert_alike(outcome: Any, expected: Any, *, buffers: bool = True) -> None:
    """All ranks have the losses and accuracies, and rank 0 the model, of the expected run."""
    for rank, theirs in enumerate(outcome):
        assert theirs[:2] == expected[:2]
        if rank == 0 or buffers:
            assert all(map(same_bits, theirs[2], expected[2]))


@pytest.mark.parametrize(
    "options",
    [{}, {"prefetch": 3}, {"overlap": False}, {"reduce": "naive"}, {"exact_times": True}],
    ids=str,
)
def test_speed_options_do_not_change_the_bits(options: dict[str, Any]) -> None:
    expected = quietly(prepared(2, "dropout"))
    assert_alike([quietly(prepared(2, "dropout", **options))], expected)
    assert quietly(prepared(2, "dropout", **options, seed=6))[0] != expected[0]


@pytest.mark.parametrize(
    ("world", "kind", "options"),
    [
        (2, "", {"weights": "80,20", "drop_last": True}),
        (2, "", {"weights": "0,1", "overlap": False}),  # rank 0 has no examples
        (2, "dropout", {"microbatch": 3, "prefetch": 2, "shuffle": False, "seed": 4}),
        (3, "sometimes", {}),  # the last batch of 41 has one example: two ranks have none
        (3, "sometimes", {"overlap": False, "microbatch": 4}),
        (2, "norm", {"drop_last": True}),
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


@pytest.mark.parametrize(
    "parts",
    [("group", "group"), ("group", "one process"), ("one process", "group")],
    ids=" to ".join,
)
def test_a_run_is_continued_by_ranks_of_either_kind(
    pools: Pools, tmp_path: Path, parts: tuple[str, str]
) -> None:
    """Each rank has its own dropout."""
    first = {"epochs": 1, "checkpoint": tmp_path / "run.pt"}
    rest = {"epochs": 3, "resume": tmp_path / "run.pt"}
    for part, options in zip(parts, (first, rest), strict=True):
        if part == "group":
            outcome = pools(2).run(trained, "dropout", options)
        else:
            outcome = [quietly(prepared(2, "dropout", **options))]
    assert_alike(outcome, quietly(prepared(2, "dropout", epochs=3)))


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
    """The errors of a trainer in a group that are not the expected ones."""
    make = {"optimizer": sgd_factory(0.1), "group": dist.group.WORLD}
    one, scattered = (nn.Sequential(nn.Flatten(), nn.Linear(36, 3)) for _ in range(2))
    scattered.register_buffer("few", torch.eye(3).to_sparse())

    class Clamps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return super().forward(x)

    def trainer(module: nn.Module = one, devices: str = "cpu", **options: Any) -> ReplicaTrainer:
        return ReplicaTrainer(module, devices, **make, **options)

    def step(module: nn.Module, **shares: Any) -> None:
        trainer(module).step(X[:3].flatten(1), Y[:3], **shares)

    calls = {
        "a process of a group has one rank, not 2 devices": lambda: trainer(devices="cpu*2"),
        "a compiled step needs all ranks in one process": lambda: trainer(compile=True),
        "pass all ranks' shares": lambda: step(one),
        "one share per rank: 1 for 2": lambda: step(one, shares=[3]),
        "must be at least 0 and add up to 3": lambda: step(one, shares=[2, 2]),
        "forward changes parameter weight in place, which a group cannot compare": lambda: step(
            Clamps(36, 3), shares=[3, 3]
        ),
        "few is sparse, and no group of processes sends it": lambda: trainer(scattered),
        "a trainer of a group has no copies: make one in": lambda: copy.deepcopy(trainer()),
        "a group sums the gradients itself: leave out the reduction": lambda: trainer(
            reduction=reduce_gradients_naive
        ),
        "GluonTrainer: the replicas are one rank of a group": lambda: GluonTrainer(trainer()),
    }
    wrong = []
    for message, call in calls.items():
        with pytest.raises((ValueError, TypeError)) as error:
            call()
        if message not in str(error.value):
            wrong.append(str(error.value))
    return wrong


def test_what_a_process_of_a_group_cannot_do(pools: Pools) -> None:
    assert pools(2).run(refused) == [[], []]
    with pytest.raises(ValueError, match=r"pass a group, of processes or of the threads that pyc"):
        ReplicaTrainer(net("norm"), "cpu*2", optimizer=sgd_factory(1), sync_batchnorm=True)


def measured(me: RankContext, folder: str) -> tuple[list[Any], list[Any], list[Tensor]]:
    """Shares of a run of two epochs and of two runs of one, and the parameters of the first.

    By a fake clock a pass takes 1 ms on rank 0 and 3 ms on rank 1.
    """

    def trained_to(name: str, **options: Any) -> Any:
        chosen = {"prefetch": 2, "weights": "auto", "checkpoint": f"{folder}/{name}.pt", **options}
        made = prepared(me.world, "", me.spec.backend, **chosen)
        with mock.patch.object(ReplicaTrainer, "rank_seconds", return_value=[seconds]):
            return run(made, ProgressPrinter(quiet=True))

    seconds = (0.001, 0.003)[me.rank]
    whole = trained_to("whole")
    trained_to("part", epochs=1)
    parts = trained_to("part", resume=f"{folder}/part.pt")
    shares = ([step.shares for step in result.steps] for result in (whole, parts))
    return *shares, whole.parameters


@of_processes
def test_all_processes_have_the_same_measured_shares(pools: Pools, tmp_path: Path) -> None:
    """Also after the run was continued, although shares change two steps after the decision."""
    outcome = pools(2).run(measured, str(tmp_path))
    shares, _, parameters = outcome[0]
    assert len({step for step in shares if sum(step) == 8}) > 1
    for whole, parts, theirs in outcome:
        assert whole == parts == shares
        assert all(map(same_bits, parameters, theirs))
    auto = checkpoint.load(tmp_path / "whole.pt")["run"]["engine"]["auto"]
    assert auto["step"] == len(shares) == 12


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


# --- commands -------------------------------------------------------------------------------------

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
THREADS = [sys.executable, "-m", "pycollect.threads", "--nproc", "2"]
TRAIN = ["-m", "pycollect.train", "--backend", "pycollect"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


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
def test_torchrun_is_interrupted_and_its_run_continued(tmp_path: Path) -> None:
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
    for launcher in (TORCHRUN, THREADS):
        command = [*launcher, *TRAIN, "--resume", path, "--epochs", str(epochs)]
        done = programs.run(command, env=environment, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        header, *lines, _, last = done.stdout.splitlines()
        assert header.endswith("on [cpu, cpu], reduced by processes over pycollect")
        assert lines[-1].startswith(f"epoch {epochs}, time ")
        assert len(lines) == 1, "only rank 0 prints"
        assert last.startswith("test acc: ")
