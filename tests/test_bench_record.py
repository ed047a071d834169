"""Result files: their layout, medians without the rounds behind them, pictures drawn from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_bench_gpu import script

from pycollect_bench import plot, result_format

RESULTS = Path(__file__).parents[1] / "bench" / "results"
RECORDS = sorted(RESULTS.glob("*.json"))
# Limit of the lines of all result files together, to keep unused numbers out of git.
LINES = 1_500
# Keys of a record whose cases a picture shows.
DRAWN = ("cases", "training", "tensor_parallel")

FEW = ["-n", "3", "-w", "1"]
TRAIN = ["--models", "lenet", "--worlds", "1", "2", "--batch", "4", "--no-ddp", *FEW]
COPIES = ["-b", "64K", "-e", "64K", "--world", "2", "--devices", "cpu", "--targets", *FEW]
SCRIPTS = {
    "allreduce_bandwidth": ["-e", "16K", "--world", "2,3", "--targets", *FEW],
    "copy_bandwidth": COPIES,
    "overlap": ["--size", "8", "--products", "2", "--world", "2", "--devices", "cpu"],
    "train": [*TRAIN, "--targets"],
    "train_step": ["--devices", "cpu", "--batch", "4", "--world", "2", "--targets", *FEW],
}


def objects(value: object) -> Iterator[dict[str, object]]:
    """Yield every object in a JSON value."""
    if isinstance(value, dict):
        yield value
    for entry in value.values() if isinstance(value, dict) else value:
        if isinstance(entry, dict | list):
            yield from objects(entry)


def raw(record: dict[str, object]) -> list[str]:
    """Return the keys in a record that hold several measured times or ratios."""
    return [
        key
        for found in objects(record)
        for key, value in found.items()
        if isinstance(value, list) and any(isinstance(one, float) for one in value)
    ]


def run(name: str, arguments: list[str]) -> int:
    return int(script(name).main(arguments))


def test_a_row_has_a_line_and_a_header_is_indented():
    record = {
        "a": {"b": [1, 2], "c": {"e": 1, "f": 2}},
        "rows": [{"x": {"y": 1}, "in": [{"z": None}]}],
        "d": [],
    }
    written = result_format.text(record)
    assert json.loads(written) == record
    assert written.splitlines() == [
        "{",
        ' "a": {',
        '  "b": [1, 2],',
        '  "c": {"e": 1, "f": 2}',
        " },",
        ' "rows": [',
        '  {"x": {"y": 1}, "in": [',
        '   {"z": null}',
        "  ]}",
        " ],",
        ' "d": []',
        "}",
    ]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_writes_medians_and_no_rounds(name, tmp_path):
    path = tmp_path / "run.json"
    assert run(name, [*SCRIPTS[name], "--json", str(path)]) in (0, 3)
    record = json.loads(path.read_text())
    assert record["schema"] == result_format.SCHEMA
    assert record["interrupted"] is False
    assert raw(record) == []
    assert path.read_text() == result_format.text(record)


def test_turns_of_the_executor_become_medians():
    executor = script("executor_bandwidth")
    times = {
        executor.COPY: {4: [1.0, 2.0, 4.0]},
        executor.ZERO_COPY: {},
        "intel_mpi": {4: [8.0, 2.0, 4.0]},
    }
    rows = executor.rows({2: times})
    assert rows[0] == {
        "world": 2,
        "bytes": 4,
        "candidate": executor.COPY,
        "time": {"median": 2.0, "min": 1.0, "max": 4.0},
        "speedup": {"intel_mpi": {"median": 1.0, "min": 1.0, "max": 8.0}},
    }
    assert [row["candidate"] for row in rows] == [executor.COPY, "intel_mpi"]
    assert rows[1]["speedup"] == {}
    del times["intel_mpi"]
    assert executor.rows({2: times})[0]["speedup"] == {}


PICTURES = {
    "allreduce_bandwidth": SCRIPTS["allreduce_bandwidth"],  # with cases that are not drawn
    "train": [*TRAIN, "--no-loading"],
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_the_same_from_the_file(name, tmp_path):
    pytest.importorskip("matplotlib")
    path, first, again = (tmp_path / file for file in ("run.json", "run.png", "again.png"))
    arguments = [*PICTURES[name], "--json", str(path), "--plot", str(first)]
    assert run(name, arguments) in (0, 3)
    assert run("plot_results", [str(path), str(again)]) == 0
    assert first.read_bytes() == again.read_bytes()


def case_of(count: int = 1, shapes: int = 1, **about: object) -> dict[str, object]:
    """A case with one row that moved 2e9 bytes per second, and one with a busbw of 3e9."""
    rows = [
        {"algorithm": "default", "moved": 2e9, "busbw": None},
        {"algorithm": "memory", "moved": None, "busbw": 3e9},
    ]
    sums = {"collective": "all_reduce", "dtype": "float32", "bytes": 4 * count, "limit": "memory"}
    return {**sums, "count": count, "shapes": [[count]] * shapes, "rows": rows, **about}


def test_a_picture_shows_the_requested_sizes():
    wanted = [case_of(), case_of(7), case_of(dtype="int8")]
    others = [case_of(0), case_of(shapes=8), case_of(collective="broadcast"), case_of(dtype="bool")]
    requested = {"collective": "all_reduce", "dtypes": ["float32", "int8"]}
    assert plot.drawn({"environment": requested, "cases": [*others, *wanted]}) == wanted


def test_a_picture_shows_gigabytes_per_second():
    cases = [case_of(1), case_of(4, limit=None)]
    assert plot._points(cases, "default") == [(4, 2.0), (16, 2.0)]
    assert plot._points(cases) == [(4, 3.0)]  # cases without a limit have no point
    assert plot._points(cases, "unknown") == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "holds no JSON object"),
        ("{", "cannot be read"),
        ('{"copies": []}', "has none of cases, training, tensor_parallel"),
        ('{"environment": {"collective": "all_reduce", "dtypes": []}, "cases": []}', "nothing"),
    ],
)
def test_a_record_without_a_picture_is_refused(tmp_path, capsys, content, message):
    path = tmp_path / "run.json"
    path.write_text(content)
    assert run("plot_results", [str(path), str(tmp_path / "run.png")]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


def test_all_results_have_few_lines():
    assert RECORDS
    assert sum(len(path.read_text().splitlines()) for path in RECORDS) < LINES


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_a_result_has_the_layout_and_no_rounds(path):
    record = result_format.read("record", path)
    assert path.read_text() == result_format.text(record)
    assert record["schema"] == result_format.SCHEMA
    assert raw(record) == []


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_a_result_is_drawn_again(path, tmp_path):
    if not any(key in result_format.read("record", path) for key in DRAWN):
        pytest.skip(f"{path.name} has no picture")
    pytest.importorskip("matplotlib")
    assert run("plot_results", [str(path), str(tmp_path / "again.png")]) == 0
    assert (tmp_path / "again.png").stat().st_size > 10_000
