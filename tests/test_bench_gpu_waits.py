"""The wait probe: its ways, its watchdog and its conclusions, on threads as a fake GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from test_bench_gpu import script

ROOT = Path(__file__).parents[1]
PROBE = ROOT / "bench" / "native" / "gpu_waits"


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    made = tmp_path_factory.mktemp("waits") / "waits"
    sources = [PROBE / "main.cpp", ROOT / "tests" / "native" / "gpu_waits_threads.cpp"]
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run(["g++", *flags, *sources, "-o", made], check=True)
    return made


@pytest.mark.slow
def test_every_way_computes_the_sum(program, capsys, tmp_path):
    path = tmp_path / "waits.json"
    arguments = ["--program", str(program), "--world", "2,5", "--bytes", "8,4K", "--rounds", "5"]
    assert script("gpu_waits").main([*arguments, "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert len(record["exchanges"]) == 2 * 2 * len(record["ways"])
    for found in record["exchanges"]:
        assert (found["status"], found["wrong"]) == ("ok", 0)
        assert 0 < found["round_us"] <= found["round_p99_us"]
    assert len(record["blocked"]) == 4
    for found in record["blocked"]:
        assert all(found[key] for key in ("held", "other_process_ran", "own_second_stream_ran"))
    out = capsys.readouterr().out
    assert out.count("another process ran;") == 4
    assert "# 5 processes, 4 KiB: " in out


def probe(program: Path, fake: str, *words: object) -> tuple[int, str, float]:
    begin = time.monotonic()
    done = subprocess.run(
        [program, *map(str, words)],
        env={"WAITS_FAKE": fake},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, time.monotonic() - begin


@pytest.mark.slow  # compiles the program
def test_a_way_that_does_not_wait_is_wrong(program):
    status, out, _ = probe(program, "hasty", "pinned", 4, 4096, 50, 10)
    assert status == 0
    assert json.loads(out)["wrong"] > 0


@pytest.mark.slow
def test_a_stream_that_hangs_is_released_by_a_store(program):
    status, out, took = probe(program, "deaf", "pinned", 2, 8, 5, 0.5)
    found = json.loads(out)
    assert (status, found["status"], found["ended_when_released"]) == (0, "time is up", True)
    assert took < 10


@pytest.mark.slow
def test_a_process_whose_stream_is_not_released_is_killed(program):
    _, out, took = probe(program, "deaf", "blocked-device", 2, 8, 5, 0.5)
    found = json.loads(out)
    assert (found["status"], found["ended_when_released"]) == ("time is up", False)
    assert took < 20


@pytest.mark.slow
def test_a_stream_that_blocks_others_is_detected(program):
    # The limit includes one second for the second stream.
    _, out, _ = probe(program, "exclusive", "blocked-pinned", 3, 8, 5, 4)
    found = json.loads(out)
    assert found["held"] is True
    assert found["other_process_ran"] is False
    sentence = script("gpu_waits").blocked_sentences(found)
    assert "did NOT run until they were released" in sentence[0]


@pytest.mark.slow  # compiles the program
def test_ways_that_share_no_memory_run_where_sharing_is_refused(program):
    for way in ("blocked-pinned", "staged"):
        status, out, _ = probe(program, "private", way, 3, 4096, 5, 10)
        assert (status, json.loads(out)["status"]) == (0, "ok"), way
    status, out, _ = probe(program, "private", "host", 3, 4096, 5, 10)
    assert (status, json.loads(out)["failure"]) == (1, "nothing is shared: WAITS_FAKE is private")


@pytest.mark.slow  # compiles the program
def test_without_a_gpu_the_reason_is_printed(program, capsys, monkeypatch):
    assert probe(program, "none", "host", 2)[:2] == (77, "no GPU here: WAITS_FAKE is none\n")
    monkeypatch.setenv("WAITS_FAKE", "none")
    assert script("gpu_waits").main(["--program", str(program)]) == 77
    assert capsys.readouterr().out == "bench/gpu_waits.py: no GPU here: WAITS_FAKE is none\n"


@pytest.mark.slow  # compiles the program
def test_bad_arguments_are_refused(program):
    for words in (["warp", 2], ["host"], ["host", 1], ["host", 17]):
        assert probe(program, "", *words)[0] == 2


def test_failures_are_printed_and_fail_the_run():
    waits = script("gpu_waits")
    failed = {"way": "events", "world": 2, "bytes": 8, "status": "failed", "failure": "no IPC"}
    hung = {"way": "device", "world": 2, "bytes": 8, "status": "time is up"}
    assert "no IPC" in waits.exchange_line(failed)
    assert "time is up: a stream or a host hung" in waits.exchange_line(hung)
    assert [waits.is_bad(f) for f in (failed, hung, {**hung, "wrong": 1})] == [True, False, True]
    unheld = {"way": "blocked-pinned", "world": 2, "held": False, "other_process_ran": True}
    assert "the streams did not wait" in waits.blocked_sentences(unheld)[0]
    assert "no answer, time is up" in waits.blocked_sentences({**hung, "way": "blocked-device"})[0]


@pytest.mark.slow
def test_the_probe_compiles_for_a_gpu(tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    waits = script("gpu_waits")
    made = waits.build(waits.SOURCES, tmp_path / "waits")
    before = made.stat().st_mtime_ns
    assert waits.build(waits.SOURCES, made).stat().st_mtime_ns == before
    assert subprocess.run([made, "host", "2"], capture_output=True, check=False).returncode in (
        0,
        77,
    )
