"""The fd server: other processes fetch descriptors at any time; errors name the obstacle."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pycollect import _testing

Ticket = tuple[int, int]


def offered(server: Any, text: bytes) -> Ticket:
    """Offer a file with this text, which only the fd server holds open."""
    file = os.memfd_create("offered")
    os.write(file, text)
    return server.offer(file)


def fetched(ticket: Ticket) -> bytes:
    file = _testing.fetch_descriptor(ticket)
    assert not os.get_inheritable(file)
    try:
        return os.pread(file, 100, 0)
    finally:
        os.close(file)


def open_files() -> set[str]:
    """The open descriptors of this process, by number and name."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return {name for name in found if not name.endswith("/fd")}


def test_descriptors_are_fetched_by_ticket_and_none_is_left():
    before = open_files()
    server, other = _testing.FdServer(), _testing.FdServer()
    tickets = [offered(server, b"one"), offered(server, b"two"), offered(other, b"three")]
    for _ in range(2):
        assert [fetched(t) for t in tickets] == [b"one", b"two", b"three"]
    name, number = tickets[0]
    with pytest.raises(RuntimeError, match="no longer offers the descriptor"):
        _testing.fetch_descriptor((name, number ^ 1))
    del server, other
    assert open_files() == before


def test_wrong_random_numbers_are_refused():
    server = _testing.FdServer()
    name, number = offered(server, b"secret")
    for guess in (number ^ 1, 0):
        with pytest.raises(RuntimeError, match="no longer offers the descriptor"):
            _testing.fetch_descriptor((name, guess))


def test_a_destroyed_server_cannot_be_reached():
    server = _testing.FdServer()
    ticket = offered(server, b"gone")
    del server
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"must be alive .*: Connection refused"):
        _testing.fetch_descriptor(ticket)
    assert time.monotonic() - begin < 1


def test_concurrent_fetches_beside_a_silent_connection():
    server = _testing.FdServer()
    tickets = [offered(server, b"%d" % i) for i in range(20)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(f"\0pycollect-fd-server-{tickets[0][0]:016x}")
        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(fetched, tickets * 5)) == [b"%d" % i for i in range(20)] * 5


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_children_keep_no_descriptor_open():
    """Forked children, such as a DataLoader's workers, may live for long."""
    server = _testing.FdServer()
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    ticket = server.offer(writes)
    (started, starts), (stops, ends) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(starts, b"!")
        os.close(ends)
        os.read(stops, 1)
        os._exit(0)
    assert os.read(started, 1) == b"!"  # fork has returned in the child
    with pytest.raises(BlockingIOError):
        os.read(reads, 1)
    del server
    assert os.read(reads, 1) == b""  # no process holds the writing end
    with pytest.raises(RuntimeError, match="Connection refused"):
        _testing.fetch_descriptor(ticket)
    for file in (reads, started, starts, stops, ends):
        os.close(file)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_can_fetch_and_does_not_stop_the_server():
    server = _testing.FdServer()
    ticket = offered(server, b"for all")
    child = os.fork()
    if child == 0:
        correct = fetched(ticket) == b"for all"
        del server  # the fd server's thread exists only in the parent
        os._exit(0 if correct else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert fetched(ticket) == b"for all"
