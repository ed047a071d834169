"""`pycollect info`: one line without a GPU; with (fake) GPUs, their properties and connections."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch

from pycollect import _C, _build_check, cli, info
from pycollect.info import describe
from pycollect_bench import report


def printed(capsys, *options):
    assert cli.main(["info", *options]) == 0
    return capsys.readouterr().out


def test_without_a_gpu_one_line_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    lines = [line for line in printed(capsys).splitlines() if "gpu" in line]
    assert len(lines) == 1
    assert lines[0].split()[0] == "no_gpu"
    found = json.loads(printed(capsys, "--json"))
    assert found["gpus"] == []
    assert found["no_gpu"] in lines[0]


@pytest.fixture
def three_gpus(monkeypatch):
    answers = {(0, 1): (True, "", 0), (1, 0): (True, "it did not arrive", 0)}

    about = {"name": "NVIDIA H200", "total_memory": 139 << 30, "multi_processor_count": 132}
    properties = SimpleNamespace(**about, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13020, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_C, "has_cuda", lambda: True)
    monkeypatch.setattr(
        _C, "peer_access", lambda one, other: answers.get((one, other), (False, "", -1))
    )


def test_devices_links_and_versions(three_gpus, capsys):
    found = json.loads(printed(capsys, "--json"))
    assert found["driver_cuda"] == "13.2"
    assert found["gpus"][0]["capability"] == "9.0"
    links = {x["from"][-1] + x["to"][-1]: x for x in found["gpu_links"]}
    assert len(links) == 6
    assert links["01"]["works"]
    assert (links["10"]["peer_access"], links["10"]["works"]) == (True, False)
    assert links["10"]["defect"] == "it did not arrive"
    assert not links["21"]["peer_access"]
    text = printed(capsys)
    for part in (
        "device: cuda:0, name: NVIDIA H200, capability: 9.0, memory_bytes: 149250113536",
        "from: cuda:0, to: cuda:1, peer_access: True, works: True",
        "from: cuda:1, to: cuda:0, peer_access: True, works: False, defect: it did not arrive",
        "from: cuda:2, to: cuda:0, peer_access: False",
    ):
        assert part in text


def test_a_build_without_cuda_is_reported_beside_gpus(three_gpus, monkeypatch, capsys):
    monkeypatch.setattr(_C, "has_cuda", lambda: False)
    found = json.loads(printed(capsys, "--json"))
    assert found["no_gpu"] == "this build of pycollect has no CUDA part"
    assert found["gpu_links"] == []
    assert "no_gpu" in printed(capsys)


@pytest.mark.cuda
def test_real_gpus():
    found = describe()
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert found["driver_cuda"]
    json.dumps(found)


def test_a_build_from_an_sdist_reports_an_unknown_commit(capsys, monkeypatch):
    """Without a commit from the folder or the build, the output is "unknown", never None."""
    monkeypatch.setattr(info, "_commit_of_checkout", lambda: None)
    built = {**_build_check.build_info(), "commit": None}
    monkeypatch.setattr(info, "build_info", lambda: built)
    assert cli.main(["info"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^commit +unknown$", output, re.MULTILINE)
    assert "commit: unknown" in output
    assert "commit: None" not in output
    assert ", commit unknown, torch" in report.header({"command": "", **info.machine()})[0]
    monkeypatch.setattr(info, "build_info", lambda: {"commit": "abc"})
    assert info.machine()["commit"] == "abc"


def test_numa_nodes_and_the_cores_of_this_process(tmp_path, monkeypatch, capsys):
    for node, cores in {"node0": "0-3,8-11", "node4": "5,128-130", "node7": ""}.items():
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(f"{cores}\n")
    nodes = _C.numa_nodes(str(tmp_path))
    assert nodes == {0: [0, 1, 2, 3, 8, 9, 10, 11], 4: [5, 128, 129, 130]}
    monkeypatch.setattr(_C, "numa_nodes", lambda: nodes)
    monkeypatch.setattr(info.os, "sched_getaffinity", lambda pid: {1, 2, 3, 9})
    assert json.loads(printed(capsys, "--json"))["numa"] == {
        "node 0": "cores 0-3,8-11, this process on 1-3,9",
        "node 4": "cores 5,128-130, this process on none",
    }
