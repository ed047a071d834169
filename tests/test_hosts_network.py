"""Ranks in network namespaces of their own, joined by a link, as on two hosts.

Which host a rank is on follows from its namespace here, not from PYCOLLECT_HOST.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from dist_pool import OURS

from pycollect_bench.hosts.namespaces import Namespaces, two_hosts, why_no_namespaces

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


@pytest.fixture
def hosts() -> Iterator[Namespaces]:
    with two_hosts(rate=1e9) as hosts:
        yield hosts


QUIET = {"PYCOLLECT_HOST": "", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def test_torchrun_on_two_hosts(hosts, tmp_path):
    program = tmp_path / "sum.py"
    program.write_text(SUM)
    shared = ("--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "static")
    shared += ("--master-addr", hosts.addresses[0], "--master-port", str(PORT))
    torchrun = (sys.executable, "-m", "torch.distributed.run", *shared)
    runs = [
        hosts.start(host, (*torchrun, "--node-rank", str(host), str(program)), QUIET, **PIPES)
        for host in range(2)
    ]
    errors = ""
    for run in runs:
        out, err = run.communicate(timeout=60)
        assert out.count("right") == 2, err[-2000:]
        assert run.returncode == 0
        errors += err
    assert "ranks of one machine are in different network namespaces" in errors


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


def test_a_link_that_goes_down(hosts):
    """All ranks of both hosts raise after the timeout, name the other host, and can end."""
    runs = ranks(hosts, ENDLESS)
    for run in runs:
        assert run.stdout.readline() == "begun\n", run.communicate(timeout=30)
    down = time.monotonic()
    hosts.link_down(1)
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
