"""Descriptors that other processes fetch whenever they like, and what is in the way of that."""

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


def offered(outlet: Any, text: bytes) -> Ticket:
    """A file with this text, which only the outlet has open."""
    file = os.memfd_create("offered")
    os.write(file, text)
    return outlet.offer(file)


def fetched(ticket: Ticket) -> bytes:
    file = _testing.fetch_descriptor(ticket)
    assert not os.get_inheritable(file)
    try:
        return os.pread(file, 100, 0)
    finally:
        os.close(file)


def open_files() -> set[str]:
    """What this process has open, by number and name."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return {name for name in found if not name.endswith("/fd")}


def test_descriptors_are_fetched_by_ticket_and_none_is_left():
    before = open_files()
    outlet, other = _testing.Outlet(), _testing.Outlet()
    tickets = [offered(outlet, b"one"), offered(outlet, b"two"), offered(other, b"three")]
    for _ in range(2):
        assert [fetched(t) for t in tickets] == [b"one", b"two", b"three"]
    outlet.withdraw(tickets[0])
    with pytest.raises(RuntimeError, match="does not offer it any more"):
        _testing.fetch_descriptor(tickets[0])
    assert fetched(tickets[1]) == b"two"
    del outlet, other
    assert open_files() == before


def test_what_is_not_known_is_not_given():
    outlet = _testing.Outlet()
    name, number = offered(outlet, b"secret")
    for guess in (number ^ 1, 0):
        with pytest.raises(RuntimeError, match="does not offer it any more"):
            _testing.fetch_descriptor((name, guess))


def test_an_owner_that_is_gone_cannot_be_reached():
    outlet = _testing.Outlet()
    ticket = offered(outlet, b"gone")
    del outlet
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"must be alive .*: Connection refused"):
        _testing.fetch_descriptor(ticket)
    assert time.monotonic() - begin < 1


def test_many_fetch_at_once_beside_a_stranger_who_says_nothing():
    outlet = _testing.Outlet()
    tickets = [offered(outlet, b"%d" % i) for i in range(20)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(f"\0pycollect-outlet-{tickets[0][0]:016x}")
        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(fetched, tickets * 5)) == [b"%d" % i for i in range(20)] * 5


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_children_keep_nothing_open():
    """They may live for long, as those of a DataLoader do."""
    outlet = _testing.Outlet()
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    ticket = outlet.offer(writes)
    (begun, begins), (lives, ends) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(begins, b"!")
        os.close(ends)
        os.read(lives, 1)
        os._exit(0)
    assert os.read(begun, 1) == b"!"  # fork has returned there, too
    with pytest.raises(BlockingIOError):
        os.read(reads, 1)
    outlet.withdraw(ticket)
    assert os.read(reads, 1) == b""  # nobody writes any more
    del outlet
    with pytest.raises(RuntimeError, match="Connection refused"):
        _testing.fetch_descriptor(ticket)
    for file in (reads, begun, begins, lives, ends):
        os.close(file)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_another_process_fetches_and_one_that_was_forked_lets_it_be():
    outlet = _testing.Outlet()
    ticket = offered(outlet, b"for all")
    child = os.fork()
    if child == 0:
        right = fetched(ticket) == b"for all"
        del outlet  # its thread is the parent's
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert fetched(ticket) == b"for all"
