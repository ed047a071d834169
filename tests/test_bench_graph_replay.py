"""The benchmark of calls against graph replays: its turns, its conclusions, a run without a GPU."""

from __future__ import annotations

import json

import pytest
import torch
from test_bench_gpu import script

from pycollect._timing import Timing
from pycollect_bench import gpu


@pytest.fixture
def replays():
    return script("graph_replay")


DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
def test_calls_and_replays_take_turns(replays, device, monkeypatch, capsys, tmp_path):
    if device == "cpu":
        monkeypatch.setattr(gpu, "graph_of", lambda run, n: lambda: [run() for _ in range(n)])
    path = tmp_path / "replays.json"
    arguments = ["--devices", device, "--world", "2,3", "-b", "4K", "-e", "16K", "-n", "2"]
    assert replays.main([*arguments, "-w", "1", "--json", str(path)]) == 0
    found = json.loads(path.read_text())["replays"]
    assert [(one["world"], one["bytes"]) for one in found] == [
        (world, nbytes) for world in (2, 3) for nbytes in (4096, 16384)
    ]
    assert all(list(one["timings"]) == ["call", "replay", "row", "row in a graph"] for one in found)
    out = capsys.readouterr().out
    assert out.count("# 3 ranks: ") == 2


def test_the_answer_is_the_size_up_to_which_replays_are_worth_it(replays):
    def found(nbytes: int, call: float, row: float) -> object:
        seconds = {"call": call, "replay": 1.0, "row": row, "row in a graph": 1.0}
        return replays.Found(4, nbytes, {k: Timing(((v,),)) for k, v in seconds.items()})

    all_found = [found(4096, 3.0, 1.0), found(16384, 1.2, 2.0), found(65536, 1.05, 2.0)]
    assert replays.answers([*all_found, found(1 << 18, 2.0, 2.0)]) == [
        "# 4 ranks: replay is 1.1x as fast as call up to 16 KiB",
        "# 4 ranks: row in a graph is 1.1x as fast as row at no size",
    ]


def test_without_a_gpu_the_reason_is_printed(replays, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert replays.main([]) == 77
    assert capsys.readouterr().out == (
        "bench/graph_replay.py: there is no GPU here to replay a graph on\n"
    )
