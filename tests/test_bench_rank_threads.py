"""The benchmark of ranks as threads: its parts, its options, and runs without processes.

No test asserts a speed: that needs a quiet machine, and `--targets`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import programs
import pytest
import torch
import torch.distributed as dist

import rank_threads as script
from pycollect import threads
from pycollect._timing import Effort, Timing
from pycollect_bench.rank_threads import (
    Results,
    all_reduce,
    process_pool,
    small_programs,
    spawned,
    targets,
    timed_calls,
    whole_worlds,
)

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
LENGTH = {all_reduce.FAKE: 1, all_reduce.LIST: 0, all_reduce.THREADS: 2}


class BrokenPool:
    """Stands for processes that do not answer."""

    def run(self, *request):
        raise RuntimeError("a rank ended")


def failing(rank, world, device):
    raise ValueError(f"no program for {rank}")


@pytest.mark.parametrize("name", small_programs.PROGRAMS)
@pytest.mark.parametrize("world", [1, 3])
def test_the_programs_run_on_threads(name, world):
    whole_worlds.run_on_threads(small_programs.PROGRAMS[name], world, CPU)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("FSDP2", "all_reduce"),
        ("all_gather_object", "all_gather_object"),
        ("all_to_all", "all_to_all_single"),
        ("send/recv ring", "recv"),
        ("subgroups", "all_reduce"),
    ],
)
def test_the_programs_notice_a_collective_without_effect(name, broken, monkeypatch):
    monkeypatch.setattr(dist, broken, lambda *args, **options: None)
    with pytest.raises((AssertionError, RuntimeError)):
        whole_worlds.run_on_threads(small_programs.PROGRAMS[name], 3, CPU)


@pytest.mark.parametrize("name", ["DDP", "DDP with dropout"])
def test_the_programs_notice_gradients_that_are_not_reduced(name, monkeypatch):
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", lambda model: model)
    with pytest.raises(AssertionError, match="that all ranks should share"):
        whole_worlds.run_on_threads(small_programs.PROGRAMS[name], 3, CPU)


def test_a_wrong_all_reduce_is_noticed(monkeypatch):
    def measured(rank, world):
        return timed_calls.timed_batches(3, CPU, batches=2, calls=4)

    assert len(timed_calls.seconds_of(threads.launch(measured, 2))) == 2
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: None)
    with pytest.raises(AssertionError, match="all_reduce of 3 elements is wrong on rank"):
        threads.launch(measured, 2)


def test_whole_worlds_take_turns_and_failures_leave_them(monkeypatch):
    ran = []

    def run(program, world, backend, device):
        ran.append(backend)
        if backend == "gloo":
            raise RuntimeError("rank 1: no route\nmore")

    monkeypatch.setattr(spawned, "run", run)
    peers = ("gloo", "pycollect")
    result = whole_worlds.measure("nothing", small_programs.nothing, 2, CPU, peers, 3, 4)
    assert ran.count("gloo") == 1
    assert ran.count("pycollect") == 3
    assert result.not_run == {"gloo": "RuntimeError: rank 1: no route"}
    assert {way: t.count for way, t in result.timings.items()} == {"threads": 12, "pycollect": 3}
    assert len(result.speedup("pycollect")) == 3
    assert result.speedup("gloo") == []
    assert result.first > 0


def test_a_program_that_fails_on_threads_fails_the_run():
    result = whole_worlds.measure("failing", failing, 2, CPU, (), 1, 1)
    assert result.not_run["threads"].startswith("ValueError: no program for ")
    assert not result.timings
    assert Results((), programs=[result]).failed
    assert not Results((), programs=[whole_worlds.WorldResult("other")]).failed


def test_the_total_is_of_programs_that_ran_in_both_ways():
    def result(**seconds):
        timings = {way: Timing(tuple((t,) for t in rounds)) for way, rounds in seconds.items()}
        return whole_worlds.WorldResult("some", 0.0, timings)

    both = result(threads=[1.0, 1.0, 2.0], gloo=[10.0, 30.0, 20.0])
    found = whole_worlds.total([both, result(threads=[9.0, 9.0, 9.0]), both], "gloo")
    assert found.programs == 2
    assert found.of_peer == [20.0, 60.0, 40.0]
    assert found.speedup == 10.0
    assert whole_worlds.total([both], "pycollect") is None


def test_a_batch_takes_some_time_slices():
    asked = []

    def run(batches, calls):
        asked.append(calls)
        return [calls * 1e-3] * batches

    sampler = timed_calls.BatchSampler(run)
    assert sampler(2) == pytest.approx([1e-3, 1e-3])
    assert asked[-1] * 1e-3 >= 20e-3
    assert asked[-1] <= 64
    sizing = len(asked)
    sampler(1)
    assert asked[sizing:] == [asked[-1]]


def test_all_ways_without_processes_are_measured():
    result = all_reduce.measure(BrokenPool(), 2, CPU, 8, Effort(iterations=1), floors=True)
    assert result.not_run == dict.fromkeys(
        (all_reduce.PROCESSES, all_reduce.GLOO_PROCESSES), "RuntimeError: a rank ended"
    )
    rows = {row.way: row for row in result.rows}
    ways = {all_reduce.THREADS, all_reduce.PARALLEL, all_reduce.LIST, *all_reduce.FLOORS}
    assert rows.keys() == ways
    assert {way: rows[way].ranks for way in LENGTH} == LENGTH
    assert rows[all_reduce.LIST].call is None
    mine = rows[all_reduce.THREADS]
    assert mine.call == mine.timing.percentile(50) / 2
    assert mine.speedup.keys() == {all_reduce.LIST}
    with pytest.raises(ValueError, match="6 bytes"):
        all_reduce.measure(BrokenPool(), 2, CPU, 6, Effort(iterations=1), floors=False)


def test_the_targets_are_those_of_the_device():
    def size(nbytes, seconds, of_list, gloo):
        ratios = {all_reduce.LIST: [1 / of_list], all_reduce.GLOO_PROCESSES: [gloo]}
        row = all_reduce.WayResult(all_reduce.THREADS, nbytes, 4, Timing(((seconds,),)), ratios)
        return all_reduce.SizeResult(nbytes, [row], {})

    def world(name, mine, theirs):
        timings = {"threads": Timing(((mine,),)), "gloo": Timing(((theirs,),))}
        return whole_worlds.WorldResult(name, 0.0, timings)

    sizes = [size(4, 40e-6, 9.0, 2.0), size(1 << 20, 1e-3, 1.5, 20.0)]
    found = targets.judge(world("nothing", 0.02, 2.0), sizes, [world("one", 0.1, 0.5)], False)
    assert [o.measured for o in found] == pytest.approx([20.0, 10.0, 1.5, 5.0])
    assert [o.met for o in found] == [True, True, False, False]
    found = targets.judge(None, sizes, [], on_gpu=True)
    assert [o.measured for o in found] == pytest.approx([1.5, 20.0])
    assert [o.met for o in found] == [False, True]
    assert {o.met for o in targets.judge(None, [], [], on_gpu=False)} == {None}


def test_quick_changes_only_what_is_not_given():
    quick = script.arguments(["--quick", "--world", "3", "--device", "cuda:0"])
    assert (quick.world, quick.sizes, quick.peers) == (3, [4, 1 << 20], ["gloo"])
    assert quick.device == "cuda:0"
    usual = script.arguments(["--sizes", "64K", "--peers", "none"])
    assert (usual.world, usual.sizes, usual.peers) == (4, [64 << 10], [])


@pytest.mark.parametrize(
    "wrong",
    [["--world", "0"], ["--parts", "other"], ["--peers", "mpi"], ["--sizes", "many"]],
)
def test_wrong_options_are_refused(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        script.main(wrong)
    assert wrong[0] in capsys.readouterr().err


def test_a_gpu_that_does_not_exist_is_refused(capsys):
    assert script.main(["--device", "cuda:99"]) == 2
    assert "'cuda:99' does not exist" in capsys.readouterr().err


def test_a_run_without_processes_writes_its_record(tmp_path, capsys):
    file = tmp_path / "threads.json"
    options = ["--quick", "--parts", "worlds,programs", "--peers", "none", "--targets"]
    assert script.main([*options, "--json", str(file)]) in (0, 3)
    printed = capsys.readouterr().out
    assert "start and end of a world" in printed
    record = json.loads(file.read_text())
    found = record["rank_threads"]
    assert (found["world"], found["device"]) == (2, "cpu")
    assert [row["way"] for row in found["worlds"]["rows"]] == ["threads"]
    assert [p["program"] for p in found["programs"]] == list(small_programs.QUICK_PROGRAMS)
    assert found["all_reduce"] == []
    assert len(record["targets"]) == 4
    assert {"machine", "gpus", "commit", "command"} <= record["environment"].keys()


@pytest.mark.slow
def test_processes_answer_and_a_failed_one_is_named():
    with process_pool.started_pool(2, CPU) as pool:
        for backend in (process_pool.GLOO, process_pool.OURS):
            assert len(pool.run(backend, 5, batches=2, calls=3)) == 2
    with (
        pytest.raises(RuntimeError, match=r"rank \d: (KeyError|RuntimeError)"),
        process_pool.started_pool(2, CPU) as pool,
    ):
        pool.run("other", 5, batches=1, calls=1)


@pytest.mark.slow
def test_a_rank_that_fails_in_a_process_is_named():
    with pytest.raises(RuntimeError, match=r"rank \d: ValueError: no program for \d"):
        spawned.run(failing, 2, "gloo", CPU)


@pytest.mark.slow
def test_the_command(tmp_path):
    file = tmp_path / "threads.json"
    command = [sys.executable, ROOT / "bench/rank_threads.py", "--quick", "--json", file]
    done = programs.run(command, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())["rank_threads"]
    assert found["all_programs"]["gloo"]["programs"] == len(small_programs.QUICK_PROGRAMS)
    for result in found["all_reduce"]:
        assert result["not_run"] == {}
        assert result["rows"][0]["speedup"].keys() == {"processes, gloo", "list"}
