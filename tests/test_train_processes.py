"""Equal options give equal bits: in one process, in processes over a group, in ranks as threads."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
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
from train_cases import convolutional, difference, noise, same_bits

from pycollect.train import (
    ReplicaTrainer,
    checkpoint,
    reduce_gradients_naive,
    sgd_factory,
)
from pycollect.train.interrupt import StopConsensus
from pycollect.train.options import Options
from pycollect.train.output import ProgressPrinter
from pycollect.train.prepared_run import PreparedRun, prepare
from pycollect.train.torchrun import with_devices
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
        self.last = nn.Sequential(nn.ReLU(), nn.Dropout(0.3), nn.Linear(36, 3))

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x.flatten(1))
        return self.last(self.rarely(hidden) if x.sum() > 0 else hidden)


def net(kind: str) -> nn.Module:
    if kind == "sometimes":  # each process initialises another; all must begin with rank 0's
        return Sometimes()
    layers = {"": [], "norm": [nn.BatchNorm2d(4)], "dropout": [nn.Dropout(0.2)]}
    return convolutional(*layers[kind])


def seconds_of(replicas: ReplicaTrainer) -> list[float]:
    """A clock by which every rank is slower than the one before it."""
    return [0.001 * (1 + 2 * rank) for rank in replicas.ranks]


@pytest.fixture(scope="module", autouse=True)
def same_clock() -> Iterator[None]:
    with mock.patch.object(ReplicaTrainer, "rank_seconds", seconds_of):
        yield


def prepared(world: int, kind: str = "", backend: str | None = None, **options: Any) -> PreparedRun:
    chosen = {"devices": f"cpu*{world}", "batch_size": 8, "lr": 0.05, "data": DATA}
    chosen |= {"model": net(kind), "momentum": 0.9, "weight_decay": 1e-3, "epochs": 2, **options}
    return prepare(Options.of(chosen), backend)


def quietly(made: PreparedRun) -> tuple[list[float], list[float], nn.Module]:
    """Losses, accuracies, and the model of a process's first rank."""
    torch.set_num_threads(1)
    result = run(made, ProgressPrinter(quiet=True))
    return result.losses, [epoch.accuracy for epoch in result.epochs], result.module


def trained(me: RankContext, kind: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(me.rank)  # only rank 0's may matter, and only for how a module begins
    ReplicaTrainer.rank_seconds = seconds_of  # type: ignore[method-assign]
    return quietly(prepared(me.world, kind, me.spec.backend, **options))


def assert_alike(outcome: Any, expected: Any, *, buffers: bool = True) -> None:
    """All ranks have the losses and accuracies, and rank 0 the model, of the expected run."""
    for rank, theirs in enumerate(outcome):
        assert theirs[:2] == expected[:2]
        assert same_bits(theirs[2], expected[2]) or (rank and not buffers)


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
        (2, "", {"weights": "auto", "epochs": 3}),  # the shares change
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
    torch.manual_seed(0)  # as in the process of rank 0
    each = kind != "norm" or "sync_batchnorm" in options  # otherwise statistics are each rank's own
    assert_alike(outcome, quietly(prepared(world, kind, **options)), buffers=each)
    assert each or not same_bits(outcome[0][2], outcome[1][2])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("", {"prefetch": 2}),  # the last batch of 41 has one example: three shards have none
        ("dropout", {"seed": 4}),
        ("sometimes", {"batch_size": 12}),
        ("norm", {"drop_last": True}),
        ("norm", {"batch_size": 12, "drop_last": True, "shards": 6}),
    ],
    ids=str,
)
def test_shards_have_the_same_bits_on_any_number_of_ranks(
    pools: Pools, kind: str, options: dict[str, Any]
) -> None:
    options = {"shards": 4, **options}
    torch.manual_seed(0)
    expected = quietly(prepared(1, kind, **options))
    worlds = (3, 6) if options["shards"] == 6 else (2, 4)
    for world in worlds:
        torch.manual_seed(0)
        assert_alike([quietly(prepared(world, kind, **options))], expected)
        outcome = pools(world).run(trained, kind, options)
        assert_alike(outcome, expected, buffers=kind != "norm")
    plain = {name: value for name, value in options.items() if name != "shards"}
    torch.manual_seed(0)
    assert quietly(prepared(worlds[-1], kind, **plain))[0] != expected[0]  # in rank order


def test_synchronised_statistics_of_shards_with_a_rank_each(pools: Pools) -> None:
    options = {"shards": 4, "sync_batchnorm": True}
    expected = quietly(prepared(4, "norm", **options))
    assert_alike(pools(4).run(trained, "norm", options), expected)


@of_processes
def test_gloo_differs_by_rounding_only(pools: Pools) -> None:
    losses, _, model = quietly(prepared(2))
    for theirs in pools(2, backend="gloo").run(trained, "", {}):
        assert theirs[0] == pytest.approx(losses, abs=1e-5)
        assert difference(model, theirs[2]) < 1e-5


GROUP, ALONE = "group", "one process"
MEASURED = {"weights": "auto", "prefetch": 2}  # in a group shares change two steps later


@pytest.mark.parametrize(
    ("first", "then", "options"),
    [(GROUP, GROUP, {}), (GROUP, ALONE, {}), (ALONE, GROUP, {}), (GROUP, GROUP, MEASURED)],
    ids=str,
)
def test_a_run_is_continued_by_ranks_of_either_kind(
    pools: Pools, tmp_path: Path, first: str, then: str, options: dict[str, Any]
) -> None:
    """Each rank has its own dropout."""

    def ran(kind: str, **others: Any) -> Any:
        if kind == GROUP:
            return pools(2).run(trained, "dropout", {**options, **others})
        return [quietly(prepared(2, "dropout", **options, **others))]

    path = tmp_path / "run.pt"
    ran(first, epochs=1, checkpoint=path)
    assert_alike(ran(then, epochs=3, resume=path), ran(then, epochs=3)[0])


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
        "forward changes parameter weight in place, which a group or shards cannot": lambda: step(
            Clamps(36, 3), shares=[3, 3]
        ),
        "few is sparse, and no group of processes sends it": lambda: trainer(scattered),
        "a group sums the gradients itself: leave out the reduction": lambda: trainer(
            reduction=reduce_gradients_naive
        ),
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


@pytest.mark.parametrize("turns", [(0, 1), (1, 0)])
@pytest.mark.parametrize(("signalled", "after"), [([2, 2], 3), ([4, 2], 5), ([2, 5], 6)])
def test_all_ranks_stop_at_the_same_check(
    turns: tuple[int, int], signalled: list[int], after: int
) -> None:
    """Each asks from the check on at which it has the signal, the one or the other rank first."""
    store, ends = dist.HashStore(), {}
    ranks = [StopConsensus(store, rank, 2, lambda: None) for rank in (0, 1)]
    for check in range(1, 9):
        for rank in turns:
            if rank not in ends and check >= signalled[rank] and ranks[rank].reached(check):
                ends[rank] = check
    assert ends == {0: after, 1: after}


def test_every_process_has_a_device() -> None:
    cpu = torch.device("cpu")
    asked = {"cpu*2": 4, "cpu": 3, None: 3}  # two devices for four processes: as on two hosts
    for spec, world in asked.items():
        assert with_devices(Options.of({"devices": spec}), "gloo", world).devices == (cpu,) * world
    with pytest.raises(ValueError, match="there are 3 processes for 2 devices; start one per"):
        with_devices(Options.of({"devices": "cpu*2"}), "gloo", 3)


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
