"""What the ranks of a test are: a test that requests `ranks_as` runs on threads, on processes, and
on processes that count as those of several hosts.

The id says which. Marks, for a module, a test or a parameter, make exceptions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

THREADS, PROCESSES, HOSTS = "threads", "processes", "hosts"
# PYCOLLECT_TEST_RANKS=threads leaves out the tests on processes.
KINDS = os.environ.get("PYCOLLECT_TEST_RANKS", f"{THREADS},{PROCESSES},{HOSTS}").split(",")
# World size -> the placement of its ranks on hosts, a letter per rank.
PLACEMENTS = {1: "a", 2: "ab", 3: "aab", 4: "aabb", 8: "aaabbbcc"}
MARKS = {
    "on_one_host(why)": "does not run on several hosts",
    "quick_on_hosts": "on several hosts, the test is not slow",
    "between_processes(why)": "does not run on threads",
    "slow_on_processes": "with processes as ranks, the test is slow",
}
IN_PLACE = "threads use device tensors in place"


def between_processes(why: str) -> pytest.MarkDecorator:
    """The test's subject exists between processes only."""
    return pytest.mark.between_processes(why)


def on_one_host(why: str) -> pytest.MarkDecorator:
    """The test's subject exists within one host only."""
    return pytest.mark.on_one_host(why)


slow_on_processes = pytest.mark.slow_on_processes
quick_on_hosts = pytest.mark.quick_on_hosts


def staged(*names: str) -> list[Any]:
    """pytest parameters (site): host memory (""), and emulated devices."""
    return [pytest.param(n, id=n or "host") for n in names]


@pytest.fixture(scope="module")
def ranks_as(request: pytest.FixtureRequest) -> Iterator[str]:
    """ "threads", "processes" or "hosts"."""
    return request.param


def pytest_configure(config: pytest.Config) -> None:
    for mark, text in MARKS.items():
        config.addinivalue_line("markers", f"{mark}: {text}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ranks_as" not in metafunc.fixturenames:
        return
    ours = os.environ.get("PYCOLLECT_TEST_BACKEND", "pycollect") == "pycollect"
    only = metafunc.definition.get_closest_marker("between_processes") or not ours
    kinds = [kind for kind in KINDS if kind != THREADS or not only]
    if not ours or metafunc.definition.get_closest_marker("on_one_host"):
        kinds = [kind for kind in kinds if kind != HOSTS]
    metafunc.parametrize("ranks_as", kinds, indirect=True, scope="module")


def _kind(item: pytest.Item) -> str:
    return item.callspec.params.get("ranks_as", "") if hasattr(item, "callspec") else ""


def pytest_itemcollected(item: pytest.Item) -> None:
    if _kind(item) == PROCESSES and item.get_closest_marker("slow_on_processes"):
        item.add_marker(pytest.mark.slow)
    if _kind(item) == HOSTS and not item.get_closest_marker("quick_on_hosts"):
        item.add_marker(pytest.mark.slow)
    if _kind(item) == HOSTS and item.get_closest_marker("slow_on_processes"):
        item.add_marker(pytest.mark.slow)
    if _kind(item) == THREADS:  # torch's warnings, which processes write into their logs
        item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning"))


def _runs(item: pytest.Item) -> bool:
    if _kind(item) == HOSTS and item.get_closest_marker("on_one_host"):
        return False
    return _kind(item) != THREADS or not item.get_closest_marker("between_processes")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = filter(_runs, items)
