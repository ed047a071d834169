"""bench/merge_results.py puts what several commands left on a lent machine into one record."""

from __future__ import annotations

import json

import pytest
from test_bench_gpu import script

ABOUT = {"gpu": "NVIDIA H100", "driver": "580", "cuda": "13.0", "torch": "2.11.0", "commit": "abc"}


def run(status=0, **more):
    return {**ABOUT, "command": "c", "status": status, "seconds": 1, "last_line": "done", **more}


def left(folder, runs, file="h100.json", **contents):
    """Write what a command leaves in OUT."""
    folder.mkdir(exist_ok=True)
    record = {"schema": 2, **ABOUT, "runs": runs}
    (folder / file).write_text(json.dumps(record))
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


@pytest.fixture
def merge(tmp_path):
    """A function that merges folders into tmp_path / "results", and returns the record there."""
    results = tmp_path / "results"
    results.mkdir()

    def of(*arguments, file="h100.json"):
        assert script("merge_results").main(["folders", "--results", str(results), *arguments]) == 0
        return json.loads((results / file).read_text())

    return of


def test_later_folders_replace_runs_of_earlier_ones(merge, tmp_path):
    one = left(tmp_path / "one", {"build": run(), "dist": run(1)})
    two = left(tmp_path / "two", {"dist": run(0), "test": run(2)})
    record = merge(one, two)
    assert {name: run["status"] for name, run in record["runs"].items()} == {
        "build": 0,
        "dist": 0,
        "test": 2,
    }
    assert {key: record[key] for key in ABOUT} == ABOUT
    three = left(tmp_path / "three", {"test": run(0)})
    assert len(merge(three)["runs"]) == 3


def test_a_killed_run_has_its_results_so_far_and_its_last_line(merge, tmp_path):
    killed = run(None, last_line="== copies [at most 9 s]: c")
    content = {"schema": 2, "copies": [1], "interrupted": True}
    folder = left(tmp_path / "one", {"build": run(), "copies": killed}, copies=content)
    (tmp_path / "one" / "build.log").write_text("== build [at most 9 s]: c\nbuilt\n")
    (tmp_path / "one" / "bench.log").write_text("== copies [at most 9 s]: c\nfirst copy\n\n")
    record = merge(folder)
    found = record["runs"]["copies"]
    assert found["status"] is None
    assert found["content"] == content
    assert found["last_line"] == "first copy"
    # A run that ended replaces it, and is not replaced by it.
    assert merge(left(tmp_path / "two", {"copies": run()}))["runs"]["copies"]["status"] == 0
    assert merge(folder)["runs"]["copies"]["status"] == 0


@pytest.mark.parametrize("key", ["gpu", "torch", "commit"])
def test_different_machines_and_states_are_refused_unless_told(merge, tmp_path, capsys, key):
    one = left(tmp_path / "one", {"build": run()})
    two = left(tmp_path / "two", {"test": run(**{key: "other"})})
    for folders in ((one, two), (two, one)):
        with pytest.raises(SystemExit) as stop:
            merge(*folders)
        assert stop.value.code == 2
        error = capsys.readouterr().err
        assert "the runs differ in gpu, torch, commit" in error
        assert "other" in error
        assert not list((tmp_path / "results").iterdir())
    assert len(merge("--mixed", one, two)["runs"]) == 2
    # The earlier record counts, too.
    with pytest.raises(SystemExit):
        merge(one)


def test_each_gpu_has_a_record(merge, tmp_path):
    one = left(tmp_path / "one", {"build": run()})
    two = left(tmp_path / "two", {"build": run(gpu="NVIDIA H200")}, file="h200.json")
    assert merge("--mixed", one, two)["gpu"] == "NVIDIA H100"
    assert json.loads((tmp_path / "results" / "h200.json").read_text())["gpu"] == "NVIDIA H200"


def test_a_folder_without_a_record_is_refused(merge, tmp_path, capsys):
    folder = tmp_path / "empty"
    folder.mkdir()
    with pytest.raises(SystemExit):
        merge(str(folder))
    assert f"the folder {folder} has no record" in capsys.readouterr().err
