"""Peer backends that may hang, which run in separate processes with a time limit.

A fake worker pool with a fixed number of results replaces the processes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import programs
import pytest
import torch
from test_bench_dist import CPU, job, result, row, sums

from pycollect_bench.comparison import CaseResult
from pycollect_bench.processes import isolated, run_worlds, worker_pool


class FakeWorkerPool:
    """Returns the given results, then raises TimeoutError."""

    made: ClassVar[list[FakeWorkerPool]] = []
    answers: ClassVar[list[CaseResult]] = []

    def __init__(self, job: worker_pool.PoolJob) -> None:
        self.job, self.left, self.abandoned = job, list(self.answers), False
        self.made.append(self)

    def __enter__(self) -> FakeWorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def abandon(self) -> None:
        self.abandoned = True

    def result(self, seconds: float | None) -> CaseResult:
        if not self.left:
            raise TimeoutError(f"the processes did not answer within {seconds} s")
        return self.left.pop(0)


@pytest.fixture
def fake_worker_pool(monkeypatch):
    monkeypatch.setattr(isolated, "WorkerPool", FakeWorkerPool)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    monkeypatch.setattr(FakeWorkerPool, "made", [])
    return FakeWorkerPool


def test_a_peer_that_hangs_is_not_run_again(fake_worker_pool, monkeypatch):
    beside = [row("pycollect", 2.0, nccl=1.5), row("pycollect:gpu", 1.0, "gpu", nccl=2.5)]
    other = CaseResult(
        sums(2, 4), [*beside, row("nccl", 3.0, nccl=1.0)], {"gloo": "was not selected"}
    )
    monkeypatch.setattr(fake_worker_pool, "answers", [other])
    reported: list[CaseResult] = []
    peers = isolated.Isolated(60, reported.append)
    joined = peers.join("nccl", job(2), [result(2, 4, 7), result(2, 64, 7)])
    assert [r.name for r in joined[0].rows] == ["pycollect", "nccl"]
    assert joined[0].rows[0].speedup == {"gloo": [7], "nccl": [1.5]}
    assert joined[0].not_run == {}
    assert joined[1].not_run == {"nccl": "did not answer within 60 s"}
    assert reported[0] is other
    assert reported[1].not_run == joined[1].not_run
    assert fake_worker_pool.made[0].job.environ == (("NCCL_MULTI_RANK_GPU_ENABLE", "1"),)
    assert fake_worker_pool.made[0].job.ours == ("pycollect",)
    later = peers.join("nccl", job(4), [result(4, 4, 7)])
    assert later[0].not_run == {"nccl": "did not answer within 60 s (2 ranks)"}
    assert len(fake_worker_pool.made) == 1
    assert peers.join("symm_mem", job(2), [result(2, 4, 7)])[0].rows[-1].name == "pycollect"
    assert len(fake_worker_pool.made) == 2


def test_an_nccl_that_refuses_ranks_on_one_gpu_is_not_started(fake_worker_pool, monkeypatch):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    apart = (torch.device("cuda:0"), torch.device("cuda:1"))
    for devices, starts in ((apart[:1] * 2, 0), (apart, 1)):
        peers = isolated.Isolated(60, lambda result: None)
        joined = peers.join("nccl", replace(job(2), devices=devices), [result(2, 4, 7)])
        assert len(fake_worker_pool.made) == starts
        refused = {"nccl": "NCCL 2.28.9 allows one rank per GPU"}
        assert starts or joined[0].not_run == refused


def test_a_peer_that_refuses_twice_is_not_run_again(fake_worker_pool, monkeypatch):
    refused = [
        CaseResult(sums(2, 4), [], {"nccl": why}) for why in ("odd", "duplicate", "duplicate")
    ]
    monkeypatch.setattr(fake_worker_pool, "answers", [*refused, result(2, 8, 7)])
    joined = isolated.Isolated(60, lambda result: None).join(
        "nccl", job(2), [result(2, 4, 7) for _ in range(5)]
    )
    assert [r.not_run["nccl"] for r in joined] == ["odd", *["duplicate"] * 4]
    assert [r.row("pycollect").speedup["gloo"] for r in joined] == [[7]] * 5


def test_peers_that_may_hang_get_only_requested_cases(fake_worker_pool, monkeypatch):
    monkeypatch.setattr(run_worlds, "WorkerPool", fake_worker_pool)
    monkeypatch.setattr(fake_worker_pool, "answers", [result(2, 4, 7), result(2, 8, 7)])
    cases = (sums(2, 4), sums(2, 8))
    found = run_worlds.measure(
        [job(2, cases=cases, requested=1)], ("nccl",), 60, lambda result: None, list
    )
    assert [made.job.cases for made in fake_worker_pool.made] == [cases, cases[:1]]
    assert [r.case for r in found.results] == list(cases)
    assert found.failure == ""


def test_a_failure_keeps_earlier_results(fake_worker_pool, monkeypatch):
    monkeypatch.setattr(run_worlds, "WorkerPool", fake_worker_pool)
    monkeypatch.setattr(fake_worker_pool, "answers", [result(2, 4, 7)])
    cases = (sums(2, 4), sums(2, 8))
    found = run_worlds.measure([job(2, cases=cases)], (), 60, lambda result: None, list)
    assert [r.case for r in found.results] == list(cases[:1])
    assert "did not answer" in found.failure


@pytest.mark.slow
def test_results_of_real_peer_processes_are_merged(monkeypatch):
    programs.fork_ranks(monkeypatch)
    monkeypatch.setattr(isolated, "_refusal_of", lambda peer, job: "")
    monkeypatch.setitem(isolated._SWITCHES, "gloo", ("PYCOLLECT_NOTHING", "1"))
    cases = (sums(2, 4, CPU), sums(2, 512 << 10, CPU))
    one_candidate = job(device=CPU, cases=cases, peers=(), backend="pycollect", requested=2)
    found = run_worlds.measure([one_candidate], ("gloo",), 60, lambda result: None, list)
    assert found.failure == ""
    for measured in found.results:
        rows = {row.name: row for row in measured.rows}
        for clock in ("", ":return", ":gpu"):
            assert rows[f"pycollect{clock}"].times_faster_than("gloo") > 0
            assert rows[f"gloo{clock}"].kind == "peer"
        assert rows["gloo"].wrong == rows["pycollect"].wrong == 0
    assert "memory:gpu" in rows


def test_a_peer_may_hang_after_its_last_result(fake_worker_pool, monkeypatch):
    monkeypatch.setattr(fake_worker_pool, "answers", [result(2, 4, 1)])
    peers = isolated.Isolated(60, lambda result: None)
    assert peers.join("nccl", job(2), [result(2, 4, 7)])[0].not_run == {}
    assert fake_worker_pool.made[0].abandoned
