"""Benchmarks keep what they have measured: when they are killed, and when a candidate fails."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest
import torch
from test_bench_gpu import CPUS, script

import pycollect_bench
from pycollect import _timing
from pycollect_bench import cases, comparison, rank_threads, training
from pycollect_bench.processes import run_worlds
from pycollect_bench.rank_threads import process_pool, whole_worlds

FEW = ["-n", "1", "-w", "1"]
ONCE = _timing.Effort(iterations=1, warmup=1)


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the benchmark runs, and nothing is written afterwards."""


class KilledPool:
    """A pool whose ranks measure one case."""

    def __init__(self, job):
        self.job, self.measured = job, False

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def result(self, seconds):
        if self.measured:
            raise Killed
        self.measured = True
        return comparison.CaseResult(self.job.cases[0], [], {})


def once(work):
    """The function, which is killed in its second call."""
    calls = []

    def run(*arguments, **options):
        if calls:
            raise Killed
        calls.append(None)
        return work(*arguments, **options)

    return run


# Arguments of a script, the function that is killed in its second case (None: of the script), its
# name, and the key of the results.
KILLED = {
    "lists": (["-e", "16K", "--world", "2", *FEW], pycollect_bench, "run_case", "cases"),
    "processes": (["-e", "16", "--processes", "2"], None, "", "cases"),
    "copy_bandwidth": (
        ["-b", "64K", "-e", "64K", "--world", "2", "--devices", "cpu", *FEW],
        None,
        "measure_copy",
        "copies",
    ),
    "train": (
        ["--models", "lenet", "--worlds", "1", "2", "--batch", "4", "--no-ddp", *FEW],
        training,
        "measure",
        "training",
    ),
    "rank_threads": (
        ["--quick", "--parts", "programs", "--peers", "none", "--rounds", "1"],
        whole_worlds,
        "measure",
        "programs",
    ),
}


@pytest.mark.parametrize("name", KILLED)
def test_a_killed_benchmark_keeps_all_earlier_cases(name, tmp_path, monkeypatch):
    arguments, owner, function, key = KILLED[name]
    path = tmp_path / "run.json"
    monkeypatch.setattr(run_worlds, "WorkerPool", KilledPool)
    benchmark = pycollect_bench if name in ("lists", "processes") else script(name)
    if function:
        owner = owner or benchmark
        monkeypatch.setattr(owner, function, once(getattr(owner, function)))
    with pytest.raises(Killed):
        benchmark.main([*arguments, "--json", str(path)])
    record = json.loads(path.read_text())
    assert record["interrupted"] is True
    assert len(record.get("rank_threads", record)[key]) == 1


@pytest.mark.parametrize("error", [RuntimeError, ImportError])
def test_a_peer_that_fails_does_not_end_the_run(monkeypatch, error):
    def broken(name, case, workspace):
        raise error("the library does not know this GPU\nsecond line")

    monkeypatch.setattr(comparison, "peer", broken)
    case = cases.sized_case("all_reduce", 4_096, torch.float32, "sum", CPUS)
    result = comparison.run_case(case, comparison.Candidates(peers=("cupy",)), ONCE)
    assert result.not_run == {"cupy": "the library does not know this GPU"}
    assert result.row("default")
    assert not result.failed("default")


def test_processes_that_fail_do_not_end_the_run_of_threads(tmp_path, monkeypatch):
    class Ended:
        def send(self, request):
            raise BrokenPipeError

    @contextmanager
    def broken(world, device):
        pool = process_pool.ProcessPool([Ended()], [])
        yield pool
        pool.end()
        raise RuntimeError("rank 1: CUDA error")

    monkeypatch.setattr(rank_threads, "started_pool", broken)
    path = tmp_path / "run.json"
    arguments = ["--quick", "--parts", "all_reduce,programs", "--peers", "none", "--sizes", "4"]
    assert script("rank_threads").main([*arguments, *FEW[:2], "--json", str(path)]) == 1
    found = json.loads(path.read_text())["rank_threads"]
    assert found["failure"] == "rank 1: CUDA error"
    assert "a rank has ended" in found["all_reduce"][0]["not_run"]["processes, gloo"]
    assert {"threads", "list"} <= {row["way"] for row in found["all_reduce"][0]["rows"]}
    assert found["programs"]


def test_processes_of_ddp_that_fail_leave_the_other_candidates(tmp_path, monkeypatch):
    def fails(job):
        raise RuntimeError("rank 1: Traceback ...\nRuntimeError: CUDA error\n")

    monkeypatch.setattr(training.comparison, "DDPWorkers", fails)
    path = tmp_path / "run.json"
    arguments = ["--models", "lenet", "--worlds", "2", "--batch", "4", "--no-loading", *FEW]
    assert script("train").main([*arguments, "--json", str(path)]) == 1
    (case,) = json.loads(path.read_text())["training"]
    assert case["not_run"]["DDP, gloo"] == "RuntimeError: CUDA error"
    assert "pycollect" in [row["way"] for row in case["rows"]]
