"""Where a test runs: what its ranks are, and where their tensors are.

A test of torch.distributed requests `pools`, and so runs on threads, on processes, and on processes
that count as those of several hosts; its id says which, and the marks below make exceptions. A
parameter of `sites` or `site_worlds` says where the tensors are: in host memory (""), on emulated
devices that defer all work until something waits for it ("late") or do all permitted work at once
("eager"), or on a GPU ("cuda"). A test of lists on GPUs takes one of PLACEMENTS.
PYCOLLECT_TEST_GPU_DEVICE=cpu puts the CPU in the place of the GPU, which checks the tests, not the
library.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

# --- what the ranks are ---------------------------------------------------------------------------

THREADS, PROCESSES, HOSTS = "threads", "processes", "hosts"
BACKEND = os.environ.get("PYCOLLECT_TEST_BACKEND", "pycollect")  # "gloo" checks the harness
OURS = BACKEND == "pycollect"
KINDS = (THREADS, PROCESSES, HOSTS) if OURS else (PROCESSES,)
# World size -> the hosts of its ranks, a letter per rank.
ON_HOSTS = {1: "a", 2: "ab", 3: "aab", 4: "aabb", 8: "aaabbbcc"}
# Marks of modules, tests and parameters. On hosts, a test is slow unless a mark makes it quick.
MARKS = {
    "not_on(kind, why)": "does not run on this kind of ranks",
    "only_on(kind, why)": "runs on this kind of ranks alone",
    "slow_on(kind)": "is slow on this kind of ranks",
    "quick_on(kind)": "is not slow on this kind of ranks",
    "pools_with(**options)": "all pools of the module have these options",
}
IN_PLACE = "threads use device tensors in place"


def not_on(kind: str, why: str) -> pytest.MarkDecorator:
    return pytest.mark.not_on(kind, why)


def only_on(kind: str, why: str) -> pytest.MarkDecorator:
    return pytest.mark.only_on(kind, why)


slow_on_processes = pytest.mark.slow_on(PROCESSES)
quick_on_hosts = pytest.mark.quick_on(HOSTS)


@pytest.fixture(scope="module")
def pools(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The pools of a module's ranks, by world size; see dist_pool.py."""
    from dist_pool import Pools  # late: it loads the extension

    mark = request.node.get_closest_marker("pools_with")
    made = Pools(ranks_as=request.param, **(mark.kwargs if mark else {}))
    try:
        yield made
        made.check_sites()
    finally:
        made.close()


def pytest_configure(config: pytest.Config) -> None:
    for mark, text in MARKS.items():
        config.addinivalue_line("markers", f"{mark}: {text}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = metafunc.definition.iter_markers("parametrize")
    if "pools" in metafunc.fixturenames and not any("pools" in mark.args[0] for mark in chosen):
        kinds = [k for k in KINDS if not excluded(metafunc.definition, k)]
        metafunc.parametrize("pools", kinds, indirect=True, scope="module")


def excluded(item: Any, kind: str) -> bool:
    if any(kind == mark.args[0] for mark in item.iter_markers("not_on")):
        return True
    return bool(kind) and any(kind != mark.args[0] for mark in item.iter_markers("only_on"))


def _kind(item: pytest.Item) -> str:
    return item.callspec.params.get("pools", "") if hasattr(item, "callspec") else ""


def pytest_itemcollected(item: pytest.Item) -> None:
    kind = _kind(item)
    slow = {mark.args[0] for mark in item.iter_markers("slow_on")}
    quick = any(kind == mark.args[0] for mark in item.iter_markers("quick_on"))
    if kind in slow or (kind == HOSTS and (not quick or PROCESSES in slow)):
        item.add_marker(pytest.mark.slow)
    if kind == THREADS:  # torch's warnings, which processes write into their logs
        item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = (item for item in items if not excluded(item, _kind(item)))


# --- where the tensors of ranks are ---------------------------------------------------------------

EMULATED, REAL = ("late", "eager"), ("cuda",)
GPU = os.environ.get("PYCOLLECT_TEST_GPU_DEVICE", "cuda:0")


def is_real(name: str) -> bool:
    return name.startswith("cuda")


STANDS_IN = not is_real(GPU)
# Marks of tests that can also run with the CPU as stand-in; tests that cannot are marked cuda.
ON_GPU = [] if STANDS_IN else [pytest.mark.cuda]


def sites(*names: str, stands_in: bool = True) -> list[Any]:
    """pytest parameters (site). Without `stands_in`, "cuda" needs a real GPU; the CPU does not
    replace it."""
    marks = [not_on(HOSTS, "GPUs make no difference to the exchange between hosts")]
    marks += ON_GPU if stands_in else [pytest.mark.cuda]
    return [pytest.param(n, marks=marks if is_real(n) else [], id=n or "host") for n in names]


def site_worlds(*names: str, stands_in: bool = True) -> list[Any]:
    """pytest parameters (site, world): three ranks on emulated devices, two and four on a GPU."""
    return [
        pytest.param(*site.values, world, marks=site.marks, id=f"{site.id}-{world}")
        for site in sites(*names, stands_in=stands_in)
        for world in ((2, 4) if is_real(site.id) else (3,))
    ]


# --- where the tensors of a list are --------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """Devices of a list: rank r is on device r mod n of `names`; "*" is all GPUs, at least two."""

    label: str
    names: tuple[str, ...]
    peer_access: bool | None = None

    def devices(self, world: int) -> list[torch.device]:
        """The device of each rank; skips the test if the placement needs more GPUs."""
        names = self.names
        if names == ("*",):
            names = several_gpus()
        return [torch.device(names[rank % len(names)]) for rank in range(world)]

    def api(self, world: int) -> Any:
        """The pycollect module, or a communicator if `peer_access` is set."""
        import pycollect

        return pycollect if self.peer_access is None else _communicator(self, world)

    def bound(self, call: str, world: int) -> Callable[..., Any]:
        """scatter or replicate with the devices already bound, as a communicator has them."""
        function, devices = getattr(self.api(world), call), self.devices(world)
        if self.peer_access is not None:
            return function  # type: ignore[no-any-return]
        return lambda what, **options: function(what, devices, **options)

    def synchronize(self, world: int) -> None:
        """Synchronize every GPU that has a rank."""
        for device in {d for d in self.devices(world) if d.type == "cuda"}:
            torch.cuda.synchronize(device)


@functools.cache
def _communicator(placement: Placement, world: int) -> Any:
    from pycollect import Communicator

    return Communicator(placement.devices(world), peer_access=placement.peer_access)


def several_gpus() -> tuple[str, ...]:
    """The names of all GPUs; skips the test where there is only one."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two CUDA GPUs, and there is {count}")
    return tuple(f"cuda:{i}" for i in range(count))


VIRTUAL = Placement("virtual", (GPU,))
STAGED = Placement("staged", (GPU,), peer_access=False)
MIXED = Placement("mixed", (GPU, "cpu", GPU))
SEVERAL = Placement("several", ("*",))
SEVERAL_STAGED = Placement("several-staged", ("*",), peer_access=False)
PLACEMENTS = [
    pytest.param(placement, id=placement.label, marks=ON_GPU)
    for placement in (VIRTUAL, STAGED, MIXED, SEVERAL, SEVERAL_STAGED)
]
