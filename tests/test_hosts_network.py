"""Ranks in network namespaces of their own, joined by a link, as on two hosts.

Which host a rank is on follows from its namespace here, not from PYCOLLECT_HOST.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import pytest
from dist_pool import OURS

from pycollect_bench.namespaces import Namespaces, why_no_namespaces

pytestmark = [
    pytest.mark.skipif(not OURS, reason="tests promises of pycollect alone"),
    pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces()),
]
TIMEOUT = 3  # seconds, of the group whose link goes down
PORT = 29511

SUM = """
import torch
import torch.distributed as dist
import pycollect

dist.init_process_group("pycollect")
rank, world = dist.get_rank(), dist.get_world_size()
for count in (3, 100_000, 1_000_000):
    x = torch.full((count,), 1.0 + rank, dtype=torch.bfloat16)
    dist.all_reduce(x)
    assert x.tolist() == [sum(range(1, world + 1))] * count
dist.destroy_process_group()
print("right")
"""

ENDLESS = f"""
import datetime
import time
import torch
import torch.distributed as dist
import pycollect

dist.init_process_group("pycollect", timeout=datetime.timedelta(seconds={TIMEOUT}))
x = torch.ones(1_000_000)
dist.all_reduce(x)
print("begun", flush=True)
try:
    while True:
        dist.all_reduce(x)
except RuntimeError as error:
    print(time.monotonic(), type(error).__name__, error, flush=True)
begin = time.monotonic()
dist.destroy_process_group()
print("destroyed in", time.monotonic() - begin, flush=True)
"""

PATIENT = """
import datetime
import torch
import torch.distributed as dist
import pycollect

dist.init_process_group("pycollect", timeout=datetime.timedelta(seconds=40))
rank = dist.get_rank()
print("begun", flush=True)
for call in range(6):
    x = torch.arange(700_000, dtype=torch.float32) + rank + call
    dist.all_reduce(x)
    assert torch.equal(x, 4 * torch.arange(700_000, dtype=torch.float32) + 6 + 4 * call)
    dist.barrier()
dist.destroy_process_group()
print("right")
"""


@pytest.fixture
def hosts() -> Iterator[Namespaces]:
    with Namespaces(2, rate=1e9) as hosts:
        yield hosts


QUIET = {"PYCOLLECT_HOST": "", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def torchrun(
    hosts: Namespaces, program: Sequence[str], nodes: int = 2
) -> list[subprocess.Popen[str]]:
    """Start a program with four ranks, divided among the hosts."""
    shared = ("--nnodes", str(nodes), "--nproc-per-node", str(4 // nodes))
    shared += ("--rdzv-backend", "static", "--master-port", str(PORT))
    command = (sys.executable, "-m", "torch.distributed.run", *shared)
    return [
        hosts.start(
            host,
            (*command, "--master-addr", hosts.addresses[0], "--node-rank", str(host), *program),
            QUIET,
            **PIPES,
        )
        for host in range(nodes)
    ]


@pytest.mark.slow
def test_torchrun_on_two_hosts(hosts, tmp_path):
    program = tmp_path / "sum.py"
    program.write_text(SUM)
    errors = ""
    for run in torchrun(hosts, (str(program),)):
        out, err = run.communicate(timeout=60)
        assert out.count("right") == 2, err[-2000:]
        assert run.returncode == 0
        errors += err
    assert "ranks of one machine are in different network namespaces" in errors


@pytest.mark.slow
def test_the_trainer_on_two_hosts_has_the_bits_of_one(hosts, tmp_path):
    def losses(nodes: int) -> list[float]:
        log = tmp_path / f"{nodes}.jsonl"
        train = ("-m", "pycollect.train", "--backend", "pycollect", "--data", "digits")
        for run in torchrun(hosts, (*train, "--epochs", "1", "--log-file", str(log)), nodes):
            _, err = run.communicate(timeout=100)
            assert run.returncode == 0, err[-2000:]
        steps = [json.loads(line) for line in log.read_text().splitlines()]
        return [step["loss"] for step in steps if step["event"] == "step"]

    on_one = losses(1)
    assert len(on_one) > 20
    assert losses(2) == on_one


def ranks(hosts: Namespaces, program: str) -> list[subprocess.Popen[str]]:
    """Start a program as two ranks on each host."""
    return [
        hosts.start(
            rank // 2,
            (sys.executable, "-c", program),
            {**QUIET, "RANK": str(rank), "WORLD_SIZE": "4", "MASTER_PORT": str(PORT + 1)},
            **PIPES,
        )
        for rank in range(4)
    ]


@pytest.mark.slow
def test_a_link_that_goes_down(hosts):
    """All ranks of both hosts raise after the timeout, name the other host, and can end."""
    runs = ranks(hosts, ENDLESS)
    for run in runs:
        assert run.stdout.readline() == "begun\n", run.communicate(timeout=30)
    down = time.monotonic()
    hosts.link(1, "down")
    for rank, run in enumerate(runs):
        out, err = run.communicate(timeout=30)
        error = re.search(r"^([\d.]+) (Timeout|PeerLost) (.*)$", out, re.MULTILINE)
        assert error, (rank, out, err[-2000:])
        when, _, message = error.groups()
        assert float(when) - down < TIMEOUT + 2, message
        other = r"\(ranks 2, 3\)" if rank < 2 else r"\(ranks 0, 1\)"
        assert re.search(rf"rank \d on host \S+ .*{other}", message), message
        end = re.search(r"^destroyed in ([\d.]+)$", out, re.MULTILINE)
        assert end, (rank, out, err[-2000:])
        assert float(end[1]) < 5


@pytest.mark.slow
def test_a_link_that_becomes_slow_and_is_cut_for_a_while(hosts):
    """Within the timeout, calls go on when the network does."""
    runs = ranks(hosts, PATIENT)
    for run in runs:
        assert run.stdout.readline() == "begun\n", run.communicate(timeout=30)
    hosts.limit(20e6)
    time.sleep(1)
    hosts.link(1, "down")
    time.sleep(1)
    hosts.link(1, "up")
    hosts.limit(1e9)
    for run in runs:
        out, err = run.communicate(timeout=60)
        assert out == "right\n", (out, err[-2000:])
