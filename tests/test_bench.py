"""Whole runs of the benchmark: its table, its files, its exit status, its refusals.

No test asserts a speed: that needs a quiet machine, and `--targets`.
"""

import json
import re

import pytest

import pycollect
import pycollect_bench as bench
from pycollect_bench import targets

QUICK = ["-n", "2", "-w", "1"]
HEADINGS = [
    "world",
    "size",
    "count",
    "type",
    "redop",
    "algorithm",
    "time",
    "p99",
    "algbw",
    "moved",
    "%limit",
    "xnaive",
    "#wrong",
]


def rows_of(output):
    """The rows of the main table, as dictionaries by column heading."""
    lines = [line.split() for line in output.splitlines() if re.match(r" +\d+ +\d+ ", line)]
    return [dict(zip(HEADINGS, line, strict=True)) for line in lines]


def test_the_table_has_its_columns(capsys):
    assert bench.main(["-b", "4K", "-e", "16K", "--world", "2,3", *QUICK]) == 0
    output = capsys.readouterr().out
    heading = next(line for line in output.splitlines() if "algorithm" in line)
    assert heading.lstrip("#").split() == HEADINGS
    rows = rows_of(output)
    assert {(row["world"], row["size"]) for row in rows} == {
        (world, size) for world in "23" for size in ("4096", "16384")
    }
    ours = [row for row in rows if row["algorithm"] == "default"]
    assert [row["#wrong"] for row in ours] == ["0"] * 4
    assert all(float(row["moved"]) > 0 for row in ours)
    assert output.startswith(f"# pycollect {pycollect.__version__}")
    assert "# command: pycollect bench -b 4K" in output
    assert "# noise: load average" in output


def test_a_wrong_element_is_counted_and_fails_the_run(monkeypatch, capsys):
    right = pycollect.all_reduce

    def broken(tensors, op="sum", **how):
        right(tensors, op, **how)
        tensors[1][3] += 1

    monkeypatch.setattr(pycollect, "all_reduce", broken)
    assert bench.main(["-e", "4K", "--world", "2", *QUICK]) == 1
    wrong = {row["algorithm"]: row["#wrong"] for row in rows_of(capsys.readouterr().out)}
    assert wrong["default"] == "1"
    assert wrong["naive"] == "0"


def test_a_refused_case_is_named_and_fails_the_run(monkeypatch, capsys):
    def refuse(tensors, op="sum", **how):
        raise TypeError("not this one")

    monkeypatch.setattr(pycollect, "all_reduce", refuse)
    assert bench.main(["-e", "4K", "--world", "2", *QUICK]) == 1
    assert "# default not run: not this one" in capsys.readouterr().out


def test_the_json_file_has_all_results(tmp_path, capsys):
    path = tmp_path / "run.json"
    wanted = ["--targets", "-b", "4K", "-e", "4K", "--world", "4", "--json", str(path), *QUICK]
    assert bench.main(wanted) in (0, 3)
    run = json.loads(path.read_text())
    assert {"environment", "noise", "cases", "calls", "targets"} < set(run)
    assert {"machine", "torch", "threads", "commit", "gpus", "command"} <= set(run["environment"])
    sized, coalesced = run["cases"]
    assert (sized["bytes"], sized["count"]) == (4096, 1024)
    assert sized["limit"] in ("memory", "memory_flat")
    assert len(coalesced["shapes"]) == 8
    row = next(row for row in sized["rows"] if row["algorithm"] == "default")
    assert 0 < row["time"]["min"] <= row["time"]["p50"] <= row["time"]["p99"]
    ratio = row["speedup"]["naive"]
    assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]
    assert row["wrong"] == 0
    assert row["busbw"] is None
    assert row["moved"] == pytest.approx(8 * 4096 / row["time"]["p50"])
    assert targets.CALL in [row["way"] for row in run["calls"]]
    assert "met" in capsys.readouterr().out


@pytest.mark.parametrize(("ending", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_plot_is_written(tmp_path, ending, begins):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"speed.{ending}"
    assert bench.main(["-e", "16K", "--world", "2,4", "--plot", str(path), *QUICK]) == 0
    assert path.read_bytes().startswith(begins)


def test_a_missed_target_fails_the_run(monkeypatch):
    monkeypatch.setattr(bench, "judge", lambda *_: [targets.Outcome("speed", 2.0, 1.0)])
    args = ["--targets", "-e", "4K", "--world", "2", *QUICK]
    assert bench.main(args) == 3


def test_overhead_alone_measures_no_sizes(capsys):
    assert bench.main(["--overhead", *QUICK]) == 0
    output = capsys.readouterr().out
    assert targets.CALL in output
    assert not rows_of(output)


def test_every_registered_algorithm_can_be_named(capsys):
    assert bench.main(["-e", "4K", "--world", "3", "--algorithms", "all", *QUICK]) == 0
    output = capsys.readouterr().out
    for name in pycollect.algorithms("all_reduce"):
        assert f" {name} " in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--algorithms", "warp"], "is not an algorithm of all_reduce"),
        (["-b", "8K", "-e", "4K"], "past their end"),
        (["-f", "1"], "2 or more"),
        (["--dtype", "float31"], "is not a torch dtype"),
        (["--world", "2,0"], "positive whole number"),
        (["--peers", "gloo"], "is not a peer"),
        (["-n", "0"], "positive whole number"),
        (["--overhead", "--plot", "x.png"], "no sizes are measured"),
        (["--json", "/nowhere/at/all.json"], "the folder of the JSON file /nowhere/at/all.json"),
        (["--plot", "/nowhere/at/all.png"], "the folder of the picture /nowhere/at/all.png"),
        (["--plot", "speed.gif"], "a picture ends in .png, .svg, .pdf, and speed.gif does not"),
        (["--json", "/dev/null"], "must be a regular file, and /dev/null is a device"),
        (["-b", "4KB"], "is not a size"),
        (["--seconds", "nan"], "'nan' is not a positive number of seconds"),
    ],
)
def test_bad_arguments_are_refused_with_a_message(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["--seconds", "0.01", *arguments])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert not rows_of(captured.out)
