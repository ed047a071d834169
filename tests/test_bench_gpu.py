"""GPU parts of the benchmarks, on a GPU and on a fake of the few CUDA calls that they use.

The clock of the fake advances only by its calls, so every time is known. No test asserts a speed.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import pycollect_bench as bench
from pycollect import _timing
from pycollect_bench import baselines, cases, comparison, copies, gpu, targets

BENCH = Path(__file__).parents[1] / "bench"
CPUS = (torch.device("cpu"),) * 4


def script(name):
    """Import a script of bench/ as a module."""
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeGpu:
    """A GPU with one stream, whose work is done in order of issue, and a clock for events."""

    def __init__(self):
        self.now = 0.0
        self.slept = []

    def recorded(self, device):
        event = SimpleNamespace(at=self.now)
        event.elapsed_time = lambda end: (end.at - event.at) * 1e3
        return event

    def _sleep(self, cycles):
        self.slept.append(cycles)
        self.now += 1.0


@pytest.fixture
def fake(monkeypatch):
    fake = FakeGpu()
    monkeypatch.setattr(gpu, "_cuda", fake)
    monkeypatch.setattr(gpu, "_recorded", fake.recorded)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return fake


@pytest.fixture
def as_gpu(monkeypatch, fake):
    """Measure cases on the CPU as if on a GPU that takes one second per call."""

    def counted(run, calls):
        return lambda: [run() for _ in range(calls)]

    def ticking(run, rewrite, devices, calls=1):
        def tick():
            fake.now += calls
            return run()

        return gpu.gpu_time(tick, rewrite, devices, calls)

    monkeypatch.setattr(cases.Case, "on_gpus", True)
    monkeypatch.setattr(comparison, "graph_of", counted)
    monkeypatch.setattr(comparison, "gpu_time", ticking)
    return fake


def test_gpu_time_leaves_out_the_delay_and_the_rewriting(fake):
    order = []

    def run():
        order.append("run")
        fake.now += 6.0

    def rewrite():
        order.append("rewrite")
        fake.now += 40.0

    sampler = gpu.gpu_time(run, rewrite, CPUS, calls_in_run=3)
    assert sampler(2) == [2.0, 2.0]
    assert order == ["run"] * 3 + ["rewrite", "run"] * 2
    assert len(fake.slept) == 2
    assert fake.slept[0] == fake.slept[1] >= 50e-6 * 2e9


def test_rows_by_every_clock(as_gpu):
    case = cases.sized_case("all_reduce", 4_096, torch.float32, "sum", CPUS)
    selection = comparison.Candidates(peers=("naive", "stack"), inside=False)
    result = comparison.run_case(case, selection, _timing.Effort(iterations=2, warmup=1))
    clocks = {row.name: row.clock for row in result.rows}
    assert clocks == {
        "default": "wall",
        "default:gpu": "gpu",
        "default:graph": "graph",
        "naive": "wall",
        "naive:gpu": "gpu",
        "stack": "wall",
        "stack:gpu": "gpu",
        "memcpy": "wall",
        "memcpy:gpu": "gpu",
    }
    gpu_row, graph = result.row("default:gpu"), result.row("default:graph")
    assert gpu_row.timing.percentile(50) == graph.timing.percentile(50) == 1.0
    assert gpu_row.limit_share == graph.limit_share == 1.0
    assert gpu_row.times_faster_than("naive") == graph.times_faster_than("naive") == 1.0
    assert result.row("default").times_faster_than("naive") != 1.0
    assert result.limit.name == "memcpy"
    assert {r.name: r.wrong for r in result.rows if r.wrong is not None} == {
        "default": 0, "default:graph": 0, "naive": 0, "stack": 0
    }  # fmt: skip


def test_a_graph_that_cannot_be_captured_fails_but_the_calls_are_measured(as_gpu, monkeypatch):
    def refused(run, calls):
        raise RuntimeError("not permitted when stream is capturing")

    monkeypatch.setattr(comparison, "graph_of", refused)
    case = cases.sized_case("all_reduce", 4_096, torch.float32, "sum", CPUS)
    result = comparison.run_case(
        case, comparison.Candidates(peers=()), _timing.Effort(iterations=1)
    )
    assert result.not_run == {"default:graph": "not permitted when stream is capturing"}
    assert {"default", "default:gpu", "memcpy"} <= {row.name for row in result.rows}
    assert result.failed("default")


def test_targets_of_a_gpu(as_gpu):
    outcomes = []
    for dtype, nbytes in ((torch.float32, 4_096), (torch.bfloat16, 64 << 20)):
        case = cases.Case("all_reduce", dtype, "sum", CPUS, ((nbytes // dtype.itemsize,),))
        timing = {name: _timing.Timing(((seconds,),)) for name, seconds in TIMES.items()}
        rows = [
            comparison.Row("default", "pycollect", timing["default"], 0, None, {"naive": [3.0]}),
            comparison.Row("default:gpu", "pycollect", timing["gpu"], None, 0.95, clock="gpu"),
            comparison.Row("default:graph", "pycollect", timing["graph"], clock="graph"),
        ]
        outcomes.append(comparison.CaseResult(case, rows, {}))
    found = {o.what: o for o in targets.judge(outcomes, {})}
    assert found["limit, from 64 MiB, GPU time"].met is True
    assert found["naive loop, from 64 MiB"].met is True
    assert found["a call up to 256 KiB, GPU time"].measured == pytest.approx(9.0)
    assert found["a call up to 256 KiB, GPU time"].met is False
    assert found["the same in a graph of many"].met is True
    assert found["naive loop, 4 ranks, up to 256 KiB"].met is False
    assert found["naive loop, 8 ranks, up to 256 KiB"].met is None


TIMES = {"default": 20e-6, "gpu": 9e-6, "graph": 5e-6}


def test_the_table_record_and_plot_take_every_clock(as_gpu, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "run.json", tmp_path / "run.png"
    arguments = ["-e", "4K", "--world", "2,4", "-n", "1", "-w", "1", "--devices", "cpu"]
    arguments += ["--json", str(path), "--plot", str(picture), "--peers", "naive,stack"]
    assert bench.main(arguments) == 0
    out = capsys.readouterr().out
    assert " default:graph " in out
    assert "relative to `memcpy`" in out
    rows = json.loads(path.read_text())["cases"][0]["rows"]
    assert {row["clock"] for row in rows} == {"wall", "gpu", "graph"}
    assert picture.stat().st_size > 1000


def test_peers_for_gpus_refuse_the_cpu_and_are_not_default_there():
    case = cases.sized_case("all_reduce", 4_096, torch.float32, "sum", CPUS)
    assert baselines.usual(case) == ("naive", "stack")
    selection = comparison.Candidates(peers=("naive", "comm", "cupy"))
    result = comparison.run_case(case, selection, _timing.Effort(iterations=1))
    assert result.not_run == {
        "comm": "needs every rank on a GPU",
        "cupy": "needs all ranks on one GPU",
    }


DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("collective", cases.COLLECTIVES)
def test_all_candidates_compute_the_same(device, collective):
    devices = (torch.device(device),) * 4
    case = cases.sized_case(collective, 40_960, torch.float32, "sum", devices)
    selection = comparison.Candidates(peers=baselines.usual(case))
    result = comparison.run_case(case, selection, _timing.Effort(iterations=1))
    assert {row.wrong for row in result.rows} <= {0, None}
    assert set(result.not_run) <= {"cupy", "stack", "comm"}
    assert "default:graph" in [row.name for row in result.rows] or device == "cpu"


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e5m2", "int8", "bool"])
def test_every_dtype_is_checked_on_the_gpu(dtype):
    devices = (torch.device("cuda:0"),) * 3
    case = cases.sized_case("all_reduce", 999, getattr(torch, dtype), "sum", devices)
    result = comparison.run_case(case, comparison.Candidates(), _timing.Effort(iterations=1))
    assert result.row("default").wrong == result.row("default:graph").wrong == 0


@pytest.mark.parametrize("device", DEVICES)
def test_copies_are_timed_and_checked(device, capsys, tmp_path):
    path = tmp_path / "copies.json"
    arguments = ["-b", "64K", "-e", "64K", "-n", "1", "-w", "1", "--world", "3"]
    assert (
        script("copy_bandwidth").main([*arguments, "--devices", device, "--json", str(path)]) == 0
    )
    rows = [row for copy in json.loads(path.read_text())["copies"] for row in copy["rows"]]
    assert {row["wrong"] for row in rows} == {0, None}
    assert {"pycollect", "to"} <= {row["way"] for row in rows}
    assert "WRONG" not in capsys.readouterr().out


def test_a_wrong_copy_fails_the_run(monkeypatch, capsys):
    def nothing(tensor, devices, *, dim, out):
        return out

    monkeypatch.setattr(copies.pycollect, "scatter", nothing)
    arguments = ["-b", "64K", "-e", "64K", "-n", "1", "-w", "1", "--devices", "cpu"]
    assert script("copy_bandwidth").main(arguments) == 1
    assert "# WRONG: " in capsys.readouterr().out


@pytest.mark.parametrize("device", DEVICES)
def test_overlap_prints_every_run(device, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["overlap.py"])
    path = tmp_path / "overlap.json"
    arguments = ["--size", "32", "--products", "2", "--repeats", "1", "--world", "3"]
    assert script("overlap").main([*arguments, "--devices", device, "--json", str(path)]) == 0
    record = json.loads(path.read_text())["overlap"]
    labels = [f"one device, {device}", f"3 virtual ranks on {device}"]
    assert [row["where"] for row in record] == [label for label in labels for _ in range(6)]
    assert all(row["seconds"] > 0 for row in record)
    assert "until the calls return" in capsys.readouterr().out


def reported(report, out, *arguments):
    """Run bench/gpu_report.py; return its exit status and the records."""
    status = report.main([str(out), *arguments])
    return status, [json.loads(line) for line in (out / "report.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_every_command_of_the_report_runs(tmp_path):
    """A selection without a test would fail, as an option that a benchmark does not know."""
    report = script("gpu_report")
    status, records = reported(report, tmp_path, "--rehearse", "--seconds", "900")
    assert {r["name"]: r["output"] for r in records if r["status"] not in (0, report.MISSED)} == {}
    assert status == 0
    assert list(dict.fromkeys(record["stage"] for record in records)) == list(report.STAGES)
    assert len(list(tmp_path.glob("*.json"))) == len(report.BENCHMARKS)


def test_a_report_needs_no_xdist(tmp_path, monkeypatch):
    report = script("gpu_report")
    for installed in (True, False):
        monkeypatch.setattr(report, "find_spec", lambda name, found=installed: found or None)
        commands = [case.command for case in report.all_cases(tmp_path, False)]
        assert any("pytest" in c and "-n" in c for c in commands) == installed


def test_a_report_goes_on_after_a_failure_unless_it_is_the_builds(tmp_path, monkeypatch):
    report = script("gpu_report")
    commands = {"hangs": "echo begun; sleep 60", "fails": "exit 7", "misses": "exit 3"}
    cases = [report.Case("lists", name, 0.5, ["sh", "-c", c]) for name, c in commands.items()]
    monkeypatch.setattr(report, "all_cases", lambda out, rehearse: cases)
    status, records = reported(report, tmp_path / "new", "lists")
    assert status == 1
    assert [record["status"] for record in records] == [report.STOPPED, 7, 3]
    assert (records[0]["output"], records[0]["command"][0]) == (["begun"], "sh")
    cases.insert(0, report.Case("build", "build", 9, ["false"]))
    assert len(reported(report, tmp_path / "next")[1]) == 1
    with pytest.raises(SystemExit):
        report.main([str(tmp_path), "warp"])
