"""The benchmark between hosts: namespaces with limited links, its checks, and a small run.

No test asserts a speed: that needs a quiet machine. A limited link is never faster than its rate.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from programs import Program

import hosts as script
from pycollect._timing import Effort, Timing
from pycollect_bench.comparison import CaseResult
from pycollect_bench.hosts import candidates, namespaces, pool, report
from pycollect_bench.hosts.comparison import HostRow
from pycollect_bench.processes.cases import CPU, Buffers, process_case

ROOT = Path(__file__).parents[1]
NAMES = Path("/run/netns")
MIB = 1 << 20


@pytest.fixture(scope="module")
def possible():
    if reason := namespaces.why_no_namespaces():
        pytest.skip(f"needs network namespaces: {reason}")


def on_host(hosts, host, work):
    """Run work() in a thread on a host; return the thread, and the list that gets its result."""
    results = []

    def run():
        hosts.enter(host)
        try:
            results.append(work())
        except OSError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def transfer(hosts, sender, receiver, nbytes):
    """Send bytes between two hosts; return the seconds until the last one arrived, or an error."""
    address = (hosts.addresses[receiver], 5000)
    listens = threading.Event()

    def receive():
        with socket.create_server(address) as server:
            server.settimeout(1)
            listens.set()
            connection, _ = server.accept()
            begin, left = time.perf_counter(), nbytes
            with connection:
                while left:
                    left -= len(connection.recv(min(left, MIB)))
            return time.perf_counter() - begin

    def send():
        listens.wait()
        with socket.create_connection(address, timeout=1) as connection:
            connection.settimeout(None)
            connection.sendall(bytes(nbytes))

    thread, results = on_host(hosts, receiver, receive)
    on_host(hosts, sender, send)[0].join()
    thread.join()
    return results[0]


@pytest.mark.parametrize("number", [2, 3])
def test_a_link_has_its_rate_and_counts_its_bytes(possible, number):
    last = number - 1
    with namespaces.Namespaces(number, rate=200e6) as hosts:
        before = hosts.counters(0), hosts.counters(last)
        seconds = transfer(hosts, 0, last, MIB)
        after = hosts.counters(0), hosts.counters(last)
        assert seconds > 8 * (MIB - (32 << 10) * 2) / 200e6
        (sent, back), (answered, received) = (
            [b - a for a, b in zip(*ends, strict=True)] for ends in zip(before, after, strict=True)
        )
        assert MIB < sent < 1.1 * MIB
        assert abs(received - sent) < 1000
        assert 0 < back < 0.05 * MIB
        assert abs(answered - back) < 1000
        hosts.limit(None)
        assert isinstance(transfer(hosts, 0, last, MIB), float)


def test_a_link_that_is_down_loses_packets_and_comes_back(possible):
    with namespaces.two_hosts() as hosts:
        assert isinstance(transfer(hosts, 0, 1, 1), float)
        hosts.link_down(1)
        assert isinstance(transfer(hosts, 0, 1, 1), OSError)
        assert isinstance(transfer(hosts, 1, 1, 1), float)
        hosts.link_up(1)
        until = time.monotonic() + 20  # a first packet may be lost while hosts look for each other
        while not isinstance(found := transfer(hosts, 0, 1, 1), float):
            assert time.monotonic() < until, found


def test_programs_run_on_their_host(possible):
    code = "import os, socket; print(os.environ['PYCOLLECT_HOST'], os.environ['EXTRA'])"
    code += "; socket.create_server((os.environ['MASTER_ADDR'], 0))"
    with namespaces.two_hosts() as hosts:
        first, second = (hosts.run(h, [sys.executable, "-c", code], {"EXTRA": "a"}) for h in (0, 1))
        assert first.stdout == f"{hosts.names[0]} a\n"
        assert (first.returncode, second.returncode) == (0, 1)
        assert "Cannot assign requested address" in second.stderr
        left = hosts.start(0, ["sleep", "100"])
    assert left.returncode == -signal.SIGKILL


def test_namespaces_are_removed_whatever_ends_them(possible):
    hosts = namespaces.two_hosts()
    assert all((NAMES / name).exists() for name in hosts.names)
    with pytest.raises(KeyboardInterrupt), hosts:
        raise KeyboardInterrupt
    assert not any((NAMES / name).exists() for name in hosts.names)
    with pytest.raises(RuntimeError, match=r"tc .* rate 0bit .*: .+"):
        namespaces.two_hosts(rate=0.0)
    assert not list(NAMES.glob(f"pycollect-{os.getpid()}-*"))


def test_namespaces_of_killed_processes_are_removed(possible):
    code = "from pycollect_bench.hosts import namespaces; import os, signal; "
    code += "print(namespaces.two_hosts().names[0], flush=True); os.kill(os.getpid(), 9)"
    path = os.pathsep.join([str(ROOT), str(ROOT / "bench")])
    pipe = subprocess.PIPE
    with Program(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, stdout=pipe
    ) as program:
        name = program.stdout.read().strip()
    assert (NAMES / name).exists()
    while Path("/proc", name.split("-")[1]).exists():  # a zombie, until its parent has its status
        time.sleep(0.01)
    namespaces.two_hosts().close()
    assert not (NAMES / name).exists()


def test_a_machine_without_namespaces_is_refused_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert script.main([]) == 2
    assert capsys.readouterr().err == "bench/hosts.py: error: network namespaces need root\n"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert "need ip, which was not found" in namespaces.why_no_namespaces()


@pytest.mark.parametrize(
    "wrong",
    [["--ranks", "1x4"], ["--ranks", "4"], ["--rates", "0"], ["--peers", "mpi"], ["-n", "0"]],
)
def test_wrong_options_are_refused(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        script.main(wrong)
    assert wrong[0].lstrip("-") in capsys.readouterr().err


def test_lists_are_given_with_commas_or_blanks():
    args = script.arguments(["--ranks", "2x2", "3x1,2x2", "--sizes", "1K,1M", "--rates", "none"])
    assert args.ranks == [(2, 2), (3, 1)]
    assert args.sizes == [1024, MIB]
    assert args.rates == [None]
    assert args.dtypes == [torch.float32]


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter_tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_result_that_is_not_the_fold_is_wrong(collective, dtype):
    def buffers_of(rank):
        case = process_case(collective, 4096, dtype, "sum", [CPU] * 3)
        return Buffers(case, rank, lambda count, of: torch.empty(count, dtype=of))

    def input_of(rank):
        buffers = buffers_of(rank)
        candidates.fold_wrong(buffers, lambda: None)
        return buffers.input

    a, b, c = map(input_of, range(3))
    buffers = buffers_of(1)
    (_, start, count), *_ = candidates.COLLECTIVES[collective].parts(buffers.case, 1)

    def wrong(total):
        result = total[start : start + count].to(dtype)
        return candidates.fold_wrong(buffers, lambda: buffers.output.copy_(result))

    assert wrong((a.float() + b.float()) + c.float()) == 0
    if dtype == torch.float32:
        assert wrong((b + c) + a) > 0
    else:
        assert wrong((a + b) + c) > 0  # rounded to the dtype at every addition
    assert wrong((a.float() + b.float()) + 2 * c.float()) > count // 2


def job(**more):
    return pool.HostJob((CPU,) * 4, (), (), ("gloo",), "gloo", Effort(), 1, "none", **more)


@pytest.mark.parametrize(("seconds", "warned"), [(0.14, False), (0.2, True), (0.1, True)])
def test_a_link_with_another_rate_is_warned_of(seconds, warned):
    case = process_case("all_reduce", 16 * MIB, torch.float32, "sum", [CPU] * 4)
    row = HostRow("link", "limit", Timing(((seconds,),)), sent=(1.0,), received=(1.0,))
    lines = report.link_lines(job(rate=1e9), [CaseResult(case, [row], {})])
    assert f"move {0.134217728 / seconds:.2f} Gbit/s of 1" in lines[0]
    assert (len(lines) == 2) == warned


def test_the_least_bytes_of_a_link():
    def least(collective, hosts):
        case = process_case(collective, 1024, torch.float32, "sum", [CPU] * 4)
        row = HostRow("gloo", "peer", Timing(((1.0,),)))
        return report.least(job(hosts=hosts), case, row)

    assert least("all_reduce", 2) == 1
    assert least("all_reduce", 4) == 1.5
    assert least("all_gather_into_tensor", 2) == 0.5
    assert least("all_to_all_single", 2) == 1
    assert least("send_recv", 2) == 2


@pytest.mark.slow
def test_a_run(possible, tmp_path, capfd):
    file = tmp_path / "hosts.json"
    options = ["--ranks", "2x2", "--rates", "1", "--sizes", "1K", "-n", "1", "--json", str(file)]
    assert script.main(options) == 0, capfd.readouterr().out
    lines = capfd.readouterr().out.splitlines()
    head = next(line for line in lines if line.startswith("#ranks"))
    columns = head[1:].split()
    rows = [line.split() for line in lines if line.startswith("   2x2")]
    table = {row[columns.index("peer")]: dict(zip(columns, row, strict=True)) for row in rows}
    assert table.keys() >= {"gloo", "hsdp", "link"}
    for peer, row in table.items():
        assert row["#wrong"] == ("-" if peer == "link" else "0")
        assert float(row["out/S"]) >= float(row["least/S"]) == 1
    assert table["gloo"]["xgloo"] == "1.00"
    record = json.loads(file.read_text())
    (world,) = record["hosts"]["worlds"]
    assert (world["hosts"], world["ranks_per_host"], world["rate"]) == (2, 2, 1e9)
    for row in world["cases"][0]["rows"]:
        assert len(row["sent"]) == len(row["received"]) == 2
    assert not record["interrupted"]


@pytest.mark.slow
def test_an_interrupted_run_leaves_no_namespace(possible):
    command = [sys.executable, str(ROOT / "bench/hosts.py"), "--seconds", "100"]
    with Program(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        for line in program.stdout:
            if line.startswith("#ranks"):
                break
        assert list(NAMES.glob(f"pycollect-{program.pid}-*"))
        os.killpg(program.pid, signal.SIGINT)
        _, errors = program.communicate(timeout=60)
    assert program.returncode == 130
    assert errors.strip() == "interrupted"
    assert not list(NAMES.glob(f"pycollect-{program.pid}-*"))
