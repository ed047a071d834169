"""The benchmark's training step and its graph, and the speed targets of scatters."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import programs
import pytest
import torch

from pycollect._timing import Effort, Timing
from pycollect_bench import copies, lenet_step

ROOT = Path(__file__).parents[1]


def test_a_step_is_measured_and_right():
    result = lenet_step.measure_steps([torch.device("cpu")] * 2, 4, Effort(iterations=1, warmup=1))
    assert set(result.timings) == {
        lenet_step.NAIVE,
        lenet_step.EAGER,
        lenet_step.NAIVE_REDUCTION,
        lenet_step.REDUCTION,
    }
    assert result.wrong == 0
    with pytest.raises(ValueError, match="share one device"):
        lenet_step.measure_steps([torch.device("cpu"), torch.device("meta")], 4, Effort())


def test_a_wrong_reduction_is_noticed(monkeypatch):
    def first_only(gradients):
        for parameter in zip(*gradients, strict=True):
            for grad in parameter[1:]:
                grad.copy_(parameter[0])

    reductions = {**lenet_step.GRADIENT_REDUCTIONS, "pycollect": first_only}
    monkeypatch.setattr(lenet_step, "GRADIENT_REDUCTIONS", reductions)
    assert lenet_step.Bench([torch.device("cpu")] * 2, 4).wrong() > 0


def test_bits_are_compared_with_deterministic_convolutions(monkeypatch):
    seen = []

    def recorded(gradients):
        seen.append(torch.backends.cudnn.deterministic)
        lenet_step.GRADIENT_REDUCTIONS["naive"](gradients)

    before = torch.backends.cudnn.deterministic
    bench = lenet_step.Bench([torch.device("cpu")] * 2, 4)
    reductions = {**lenet_step.GRADIENT_REDUCTIONS, "pycollect": recorded}
    monkeypatch.setattr(lenet_step, "GRADIENT_REDUCTIONS", reductions)
    assert bench.wrong() == 0
    assert set(seen) == {True}
    assert torch.backends.cudnn.deterministic == before


def test_the_targets_are_the_share_of_the_reduction_and_the_graph():
    def timing(seconds):
        return Timing(((seconds,),))

    times = {
        lenet_step.NAIVE: 10.0,
        lenet_step.EAGER: 8.0,
        lenet_step.GRAPH: 1.0,
        lenet_step.REDUCTION: 0.2,
    }
    result = lenet_step.StepResult({name: timing(t) for name, t in times.items()}, 0)
    share, graph = result.outcomes()
    assert (share.measured, share.met) == (pytest.approx(2.5), True)
    assert (graph.measured, graph.met) == (10.0, True)
    slow = lenet_step.StepResult({**result.timings, lenet_step.GRAPH: timing(3.0)}, 0)
    assert slow.outcomes()[1].met is False
    assert lenet_step.StepResult({}, 0).outcomes()[0].met is None


@pytest.mark.slow
def test_the_command(tmp_path):
    file = tmp_path / "step.json"
    command = [sys.executable, ROOT / "bench/train_step.py", "--devices", "cpu"]
    command += ["-n", "1", "--batch", "8", "--targets", "--json", file]
    done = programs.run(command, timeout=300)
    assert done.returncode in (0, 3), done.stderr
    record = json.loads(file.read_text())
    assert record["wrong"] == 0
    assert len(record["targets"]) == 2
    assert lenet_step.EAGER in [row["way"] for row in record["steps"]]


def test_the_targets_of_scatters_are_at_their_worst_size():
    def result(kind, mib, **seconds):
        source = SimpleNamespace(nbytes=mib << 20)
        copy = copies.CopyCase(f"scatter {kind} -> 4 x cuda:0, dim 0", source, {}, [], list, ())
        timings = {name: Timing(((t,),)) for name, t in seconds.items()}
        return copies.CopyResult(copy, timings, 0)

    found = copies.outcomes(
        [
            result("pinned", 1, pycollect=9.0, to=9.0, bare=1.0),  # too small to count for a target
            result("pinned", 16, pycollect=1.0, to=2.0, bare=0.97),
            result("pinned", 256, pycollect=1.0, to=2.0, bare=0.96),
            result("pageable", 16, pycollect=1.0, to=3.0, bare=0.5),
            result("pageable", 256, pycollect=1.0, to=1.5, bare=0.5),
            result("device", 256, pycollect=9.0, to=1.0, bare=0.1),
        ]
    )
    assert [round(o.measured, 6) for o in found] == [96.0, 1.5]
    assert [o.met for o in found] == [True, False]
    assert found[1].where.endswith("256 MiB")
    assert [o.met for o in copies.outcomes([])] == [None, None]
