"""The benchmark between processes on devices: both clocks, failures and hangs.

The CPU replaces the GPU, with events that read the host's clock. No test asserts a speed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import programs
import pytest
import torch

import pycollect_bench as bench
from pycollect._timing import Effort, Sampler, Timing, interleave
from pycollect_bench import gpu
from pycollect_bench.comparison import CaseResult, Row
from pycollect_bench.processes import cases, groups, run_worlds, targets, timers, worker_pool
from pycollect_bench.processes.candidate import Candidate
from pycollect_bench.processes.candidates import CandidateSet, reason

ROOT = Path(__file__).parents[1]
CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.cuda)]


@pytest.fixture(autouse=True)
def ranks_have_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    programs.fork_ranks(monkeypatch)


def sums(world: int, nbytes: int, device: torch.device = GPU) -> cases.ProcessCase:
    return cases.process_case("all_reduce", nbytes, torch.float32, "sum", [device] * world)


def job(world: int = 2, device: torch.device = GPU, **more: object) -> worker_pool.PoolJob:
    about = {"cases": (sums(world, 4, device),), "ours": ("pycollect",), "peers": ("gloo",)}
    about |= {"backend": "gloo", "effort": Effort(iterations=1, warmup=1), "threads": 1}
    about |= {"no_mpi": "not in this test", "both_clocks": True}
    return worker_pool.PoolJob(devices=(device,) * world, **(about | more))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_both_clocks(device, tmp_path):
    path = tmp_path / "run.json"
    arguments = ["--processes", "2", "--devices", device, "-b", "4", "-e", "300K", "-f", "1000"]
    assert bench.main([*arguments, "-n", "2", "-w", "1", "--json", str(path)]) == 0
    run = json.loads(path.read_text())
    assert run["failure"] is None
    assert [case["bytes"] for case in run["cases"]] == [4, 4000, 300 << 10]
    for case in run["cases"]:
        rows = {row["algorithm"]: row for row in case["rows"]}
        for name in ("pycollect", "gloo"):
            assert rows[name]["wrong"] == 0
            clocked = [rows[name], rows[f"{name}:return"], rows[f"{name}:gpu"]]
            assert [row["clock"] for row in clocked] == ["wall", "return", "gpu"]
            assert all(row["speedup"]["gloo"]["median"] > 0 for row in clocked)
            done, returned = clocked[0]["time"]["p50"], clocked[1]["time"]["p50"]
            assert 0 < returned < done
        assert case["devices"] == [device] * 2
        assert "zero-copy" not in rows
    limits = {row["algorithm"] for row in run["cases"][-1]["rows"] if row["kind"] == "limit"}
    assert limits in ({"memory", "memory:gpu"}, {"memcpy", "memcpy:gpu"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "cpu", "--peers", "mpi"], "'mpi' is not a peer of processes on devices"),
        (["--peers", "naive"], "'naive' is not a peer of processes; there are gloo, mpi"),
        (["--devices", "warp:0"], "warp:0"),
    ],
)
def test_incompatible_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--processes", "2", *arguments])
    assert message in capsys.readouterr().err


class OneRankBarrier:
    """The barrier of a single rank."""

    rank, world = 0, 1

    def barrier(self) -> None:
        pass

    def gather(self, number: float) -> list[float]:
        return [number]


def on_both_clocks(candidate: Candidate) -> tuple[timers.Clocks, dict[str, Sampler]]:
    made = timers.Clocks(OneRankBarrier(), CPU, both_clocks=True)  # type: ignore[arg-type]
    return made, made.samplers(candidate, 4)


def test_samplers_synchronize_the_device_and_read_its_clock(monkeypatch):
    order: list[str] = []

    def recorded(device: torch.device) -> SimpleNamespace:
        order.append("record")
        at = order.count("call")
        return SimpleNamespace(at=at, elapsed_time=lambda end: 6000.0 * (end.at - at) / 8)

    monkeypatch.setattr(gpu, "_recorded", recorded)
    monkeypatch.setattr(timers, "_BATCH_SECONDS", 0.0)
    for module in (timers, gpu):
        monkeypatch.setattr(module, "synchronizer", lambda devices: lambda: order.append("sync"))
    monkeypatch.setattr(OneRankBarrier, "barrier", lambda self: order.append("barrier"))
    call, rewrite = lambda: order.append("call"), lambda value: order.append(str(value))
    made, samplers = on_both_clocks(Candidate("a", "peer", call, rewrite, None))
    done = samplers["a"](1)
    assert order == ["1", "sync", "barrier", "call", "sync"]
    assert made.returned["a"][0] < done[0]
    samplers["a:gpu"](1)
    order.clear()
    assert samplers["a:gpu"](1) == [0.75]  # two calls took a quarter of 6 s
    assert order == ["0", "sync", "barrier", "record", "call", "call", "record", "sync"]


def test_the_batch_size_depends_on_the_time_of_a_call(monkeypatch):
    calls: list[int] = []
    for seconds, batch in ((1e-3, 2), (1e-4, 6), (1e-6, 550)):

        def estimate(sampler: Sampler, seconds: float = seconds) -> float:
            before = len(calls)
            sampler(1)
            return seconds * (len(calls) - before)

        monkeypatch.setattr(timers, "estimate", estimate)
        candidate = Candidate("a", "peer", lambda: calls.append(1), lambda value: None, None)
        _, samplers = on_both_clocks(candidate)
        samplers["a:gpu"](1)
        calls.clear()
        samplers["a:gpu"](1)
        assert len(calls) == pytest.approx(batch, abs=1)


def test_every_clock_warms_up():
    calls: list[float] = []

    def call() -> None:
        time.sleep(0.001)
        calls.append(0.001)

    _, samplers = on_both_clocks(Candidate("a", "peer", call, lambda value: None, None))
    for sampler in samplers.values():
        begin = len(calls)
        timing = interleave({"a": sampler}, Effort(iterations=1, warmup=20))["a"]
        assert (timing.count, len(calls) - begin >= 21) == (1, True)


def test_only_ranks_on_one_gpu_share_one_memory():
    assert sums(4, 4096).one_memory
    assert not sums(4, 4096, CPU).one_memory
    case = cases.process_case("all_reduce", 4096, torch.float32, "sum", [GPU, CPU])
    assert not case.one_memory


def test_a_refusal_is_one_line():
    assert reason(RuntimeError("\n a \n b")) == "a"
    assert reason(KeyError()) == "KeyError"


def test_an_error_of_a_peer_is_its_reason_and_ours_fails_the_run():
    def breaks():
        raise RuntimeError("broken")

    ranks = SimpleNamespace(spin_barrier=SimpleNamespace(gather=lambda mine: [mine]))
    candidate_set = SimpleNamespace(ranks=ranks, not_run={}, found=[])
    CandidateSet._try(candidate_set, "gloo", breaks)
    assert candidate_set.not_run == {"gloo": "broken"}
    with pytest.raises(RuntimeError, match="broken"):
        CandidateSet._try(candidate_set, "pycollect", breaks)


def row(name: str, seconds: float, clock: str = "wall", **ratios: float) -> Row:
    speedup = {peer: [ratio] for peer, ratio in ratios.items()}
    kind = "peer" if name == "gloo" else "pycollect"
    timing = Timing(((seconds,),))
    return Row(name, kind, timing, 0, speedup=speedup, clock=clock)


def result(world: int, nbytes: int, gloo: float) -> CaseResult:
    return CaseResult(sums(world, nbytes), [row("pycollect", 1.0, gloo=gloo)], {})


def test_the_targets_of_devices():
    found = targets.judge([result(4, 1 << 20, 11), result(4, 64, 2), result(8, 4, 0.9)], True)
    assert [(o.measured, o.met) for o in found] == [(11, True), (0.9, False)]
    assert found[1].where == "8 ranks, 4 B"


@pytest.mark.slow
def test_a_hang_ends_at_the_time_limit():
    ranks = worker_pool.WorkerPool(job(device=CPU, cases=(sums(2, 64 << 20, CPU),) * 50))
    begin = time.monotonic()

    def stop_and_wait() -> None:
        with ranks:
            ranks.result()
            for process in ranks._processes:
                os.kill(process.pid, signal.SIGSTOP)  # a stopped process handles no SIGTERM
            for _ in range(50):
                ranks.result(1)

    with pytest.raises(TimeoutError, match="did not answer within 1 s"):
        stop_and_wait()
    assert all(process.poll() is not None for process in ranks._processes)
    assert time.monotonic() - begin < 60


@pytest.mark.slow
def test_results_are_kept_at_the_time_limit(tmp_path):
    path = tmp_path / "run.json"
    arguments = ["--processes", "2", "--devices", "cpu", "-b", "4", "-e", "64M", "-f", "4"]
    arguments += ["-n", "5", "-w", "1", "--peers", "gloo", "--json", str(path)]
    command = [sys.executable, ROOT / "bench" / "allreduce_bandwidth.py", *arguments]
    child = programs.Program(command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    timer = threading.Timer(60, child.kill)
    timer.start()
    for line in child.stdout:
        if line.startswith("     2 "):
            child.send_signal(signal.SIGTERM)
            break
    rest = child.stdout.read()
    assert child.wait() == 128 + signal.SIGTERM
    timer.cancel()
    assert "FAILED" not in rest
    run = json.loads(path.read_text())
    assert (run["interrupted"], run["failure"]) == (True, None)
    assert 1 <= len(run["cases"]) < 13


def test_a_backend_that_is_missing_is_not_a_candidate():
    made, refusals = groups.make_groups("warp", timedelta(seconds=9))
    assert list(made) == ["gloo"]
    assert "has no backend 'warp'" in refusals["pycollect"]


def test_the_group_has_the_timeout_of_a_call(monkeypatch):
    asked: list[timedelta] = []
    new_group = SimpleNamespace(new_group=lambda **options: asked.append(options["timeout"]))
    monkeypatch.setattr(groups, "dist", SimpleNamespace(**vars(groups.dist) | vars(new_group)))
    limit = timedelta(seconds=9)
    groups.make_groups("gloo", limit)
    assert asked == [limit]


class OneResult:
    """A worker pool that hangs after its first result."""

    def __init__(self, job: worker_pool.PoolJob) -> None:
        self.left = [result(2, 4, 7)]

    def __enter__(self) -> OneResult:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def result(self, seconds: float | None) -> CaseResult:
        if not self.left:
            raise TimeoutError(f"the processes did not answer within {seconds} s")
        return self.left.pop()


def test_a_failure_keeps_earlier_results(monkeypatch):
    monkeypatch.setattr(run_worlds, "WorkerPool", OneResult)
    two = (sums(2, 4), sums(2, 8))
    found = run_worlds.measure([job(2, cases=two)], lambda result: None, list)
    assert [r.case for r in found.results] == list(two[:1])
    assert "did not answer" in found.failure


def test_gloo_gets_no_messages_from_gpus():
    """It writes them to a socket from GPU memory, and the error ends the process."""
    found = object.__new__(CandidateSet)
    found.case, found._device = SimpleNamespace(collective="send_recv"), torch.device("cuda:0")
    found.ranks = SimpleNamespace(groups={"gloo": None})
    with pytest.raises(ValueError, match="cannot send CUDA tensors"):
        found._through_torch("gloo")
