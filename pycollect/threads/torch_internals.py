"""The parts of torch that are not public, and on which ranks as threads depend.

Tried with torch 2.11 to 2.15. If a version lacks a part of `_PARTS`, `require_parts` raises and
names it. `DTensor._op_dispatcher._custom_op_handlers` is in op_handlers.py, and what
process_wide.py replaces in `DistributedDataParallel`.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed.distributed_c10d

from .. import _C, _coalescing_patch

c10d: Any = torch.distributed.distributed_c10d
# Hooks of all modules, with which `CommDebugMode` and `FlopCounterMode` follow a rank's modules.
_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)
_CHECKPOINT = ("_enable_checkpoint_early_stop", "_checkpoint_debug_enabled")
_PARTS = {
    "torch.distributed.distributed_c10d": (
        "_world",  # the state of a process: a _WorldOfThread is in its place, while ranks run
        "rendezvous",  # finds the store of init_process_group: ranks use their launch's
        "_new_process_group_helper",  # creates every group: in a rank, of backend pycollect
        "get_debug_level",  # with DETAIL, torch adds a group of gloo to every group
    ),
    "torch._C._distributed_c10d": (
        "_set_thread_isolation_mode",  # gives each thread a registry of groups by name ...
        "_register_process_group",  # ... whose names are handed on to threads that a rank starts
        "_unregister_process_group",
        "TCPStore",  # whose server waits for its clients, unless told otherwise
    ),
    "torch._C": ("_ensureCUDADeviceGuardSet",),  # this and the profiler's: see process_wide.py
    # The seeds that CUDA gets when it is initialized; whether it is. The extension reads the latter
    # between two turns, when it must not run Python code.
    "torch.cuda": ("_lazy_seed_tracker", "_initialized"),
    "torch.autograd.profiler": (
        "_prepare_profiler",
        "_enable_profiler",
        "_disable_profiler",
        "_is_profiler_enabled",
    ),
    "torch.nn.modules.module": _HOOKS,
    "torch.utils.checkpoint": _CHECKPOINT,
    "torch._library.custom_ops": ("get_library_allowing_overwrite",),  # see process_wide.py
    # torch's own tests have a world that is not in module variables. torch adds its fields when it
    # adds one to `_world`.
    "torch.testing._internal.distributed.multi_threaded_pg": ("ThreadLocalWorld", "WorldData"),
}
# Module variables of which every rank has its own value, while ranks run one at a time.
_SEEDS = ("torch.cuda", "_lazy_seed_tracker")
_WARNINGS = ("warnings", "filters")
RANK_VARIABLES = (
    ("torch.distributed.tensor._random", "_rng_tracker"),
    _SEEDS,
    _WARNINGS,
    ("sys", "stdout"),
    ("sys", "stderr"),
    *(("torch.nn.modules.module", name) for name in _HOOKS),
    *(("torch.utils.checkpoint", name) for name in _CHECKPOINT),
)
# An object, the name of its attribute, and a function that makes the new value from the old one.
Replacement = tuple[Any, str, Callable[[Any], Any]]
_SERVED = ("pycollect", "fake")
_C10D = vars(c10d)


@contextmanager
def attributes_replaced(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Replace attributes of modules and classes in this context."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    try:
        for (owner, name, replace), (_, _, value) in zip(replacements, before, strict=True):
            setattr(owner, name, replace(value))
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def require_parts() -> None:
    """Raise RuntimeError if torch lacks a part."""
    for module, names in _PARTS.items():
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            raise RuntimeError(lacks(module)) from error
        for name in names:
            if not hasattr(found, name):
                raise RuntimeError(lacks(f"{module}.{name}"))


def set_variables(variables: _C.RankVariables, world: int) -> None:
    """Give every rank an object of its own for a variable of `RANK_VARIABLES` that it changes."""
    copies = {
        _SEEDS: copy.deepcopy,
        _WARNINGS: copy.deepcopy,
        **{("torch.nn.modules.module", name): copy.copy for name in _HOOKS},  # of the same hooks
    }
    for (module, name), copied in copies.items():
        found = getattr(sys.modules[module], name, None)
        for rank in range(world):
            variables.set(rank, module, name, copied(found))


def lacks(what: str) -> str:
    """Return the message of the error that torch has no such part."""
    return (
        f"ranks as threads need {what}, which torch {torch.__version__} does not have; use torch "
        "2.11 to 2.15, or one process per rank (torchrun)"
    )


def is_importing(frame: FrameType) -> bool:
    """Return whether the frame is in a module that is being imported."""
    return getattr(frame.f_globals.get("__spec__"), "_initializing", False)


def _field(name: str) -> property:
    def assign(self: Any, value: Any) -> None:
        setattr(self.data, name, value)

    return property(attrgetter(f"data.{name}"), assign)


def _new_world() -> Any:
    """Return the state of `torch.distributed` of a process without groups."""
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    # torch's class makes one object of data per thread, when that is first used.
    local = ThreadLocalWorld._world
    before = local.__dict__.pop("world", None)
    data = ThreadLocalWorld()._get_world()
    del local.world
    if before is not None:
        local.world = before
    data.pg_coalesce_state = _coalescing_patch.lists_of_threads()
    fields = [field.name for field in dataclasses.fields(data)]

    class RankWorld(c10d._World):  # type: ignore[misc]
        """torch's own class, with the fields of `data` in place of module variables."""

        made_by_launch: Any = None  # the default group, until `init_process_group` replaces it
        data_fields = tuple(fields)

    for name in fields:
        setattr(RankWorld, name, _field(name))
    made = RankWorld()
    made.data = data
    return made


class _WorldOfThread(threading.local):
    """Stands for `distributed_c10d._world`: the world of the rank to which the thread belongs.

    Threads of no rank see the process's own world. The dictionaries of a world are attributes here,
    because torch reads them in every call.
    """

    def __init__(self, scheduler: _C.RankScheduler, of_ranks: list[Any], of_process: Any) -> None:
        rank = scheduler.rank_of_thread()
        world = of_process if rank < 0 else of_ranks[rank]
        self.__dict__.update(_of_rank=rank >= 0, _world=world)
        for name in of_ranks[0].data_fields:
            if isinstance(found := getattr(world, name), (dict, list)):
                self.__dict__[name] = found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_world"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_world"], name, value)
        if name in self.__dict__:
            self.__dict__[name] = value

    @property
    def default_pg(self) -> Any:
        found = self._world.default_pg
        if found is None or not self._of_rank:
            return found
        reader = sys._getframe(2)
        if reader.f_globals is not _C10D:
            # A process imports its modules before it makes a group, so that the default argument
            # `group=dist.group.WORLD` of their functions is None: it stands for the default group.
            return None if is_importing(reader) else found
        if reader.f_code.co_name == "init_process_group" and found is self._world.made_by_launch:
            self._world.made_by_launch = None
            c10d.destroy_process_group()
            return None
        return found

    @default_pg.setter
    def default_pg(self, value: Any) -> None:
        self._world.default_pg = value


def _rendezvous(scheduler: _C.RankScheduler, original: Callable[..., Any]) -> Callable[..., Any]:
    store = _C.ThreadStore(scheduler)

    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Any:
        own = scheduler.rank_of_thread()
        if own < 0:
            return original(url, rank, world_size, **options)
        world = scheduler.world
        if rank not in (-1, own) or world_size not in (-1, world):
            raise ValueError(
                f"init_process_group: rank {rank} of {world_size} was passed by rank {own} of "
                f"{world} of the launch; pass these, or neither"
            )
        return iter([(store, own, world)])

    return rendezvous


def _without_prefix(store: Any) -> Any:
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return store


def _new_group_helper(
    scheduler: _C.RankScheduler, replaced: Callable[[str], None], original: Callable[..., Any]
) -> Callable[..., Any]:
    def new_group_helper(
        group_size: int, group_rank: int, ranks: list[int], backend: Any, store: Any, *args: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        if scheduler.rank_of_thread() >= 0:
            wanted = str(backend)
            backends = {part.partition(":")[2] or part for part in wanted.split(",")}
            if not backends <= {*_SERVED, "undefined"}:
                replaced(wanted)
            if backends != {"fake"}:
                backend = c10d.Backend("pycollect")
            if not isinstance(_without_prefix(store), _C.ThreadStore):
                store = _C.ThreadStore(scheduler, store)
        return original(group_size, group_rank, ranks, backend, store, *args, **options)

    return new_group_helper


def _debug_level(scheduler: _C.RankScheduler, original: Callable[[], Any]) -> Callable[[], Any]:
    """Return a `get_debug_level` that is never DETAIL in a rank.

    torch would compare calls by a group of gloo, whose waits keep the turn; pycollect compares them
    itself.
    """

    def get_debug_level() -> Any:
        level = original()
        if level == c10d.DebugLevel.DETAIL and scheduler.rank_of_thread() >= 0:
            return c10d.DebugLevel.INFO
        return level

    return get_debug_level


def _store_without_wait(
    scheduler: _C.RankScheduler, original: Callable[..., None]
) -> Callable[..., None]:
    """Return a `TCPStore.__init__` whose server does not wait for the other ranks' clients.

    It would keep its turn meanwhile.
    """

    def init(self: Any, *args: Any, **options: Any) -> None:
        if scheduler.rank_of_thread() >= 0 and len(args) < 6:
            options["wait_for_workers"] = False
        original(self, *args, **options)

    return init


@contextmanager
def worlds_of(scheduler: _C.RankScheduler, replaced: Callable[[str], None]) -> Iterator[None]:
    """Give every rank a world of `torch.distributed` of its own.

    Calls `replaced(name)` when a rank asks for another backend than pycollect.
    """
    worlds = [_new_world() for _ in range(scheduler.world)]
    hook, dtype, filters = sys.excepthook, torch.get_default_dtype(), list(warnings.filters)
    anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    registry = sys.modules["torch._C._distributed_c10d"]

    def same(value: Any) -> Any:
        return value

    replacements: list[Replacement] = [
        (c10d, "get_debug_level", partial(_debug_level, scheduler)),
        (c10d, "_world", partial(_WorldOfThread, scheduler, worlds)),
        (c10d, "rendezvous", partial(_rendezvous, scheduler)),
        (c10d, "_new_process_group_helper", partial(_new_group_helper, scheduler, replaced)),
        # torch warns of a build without NCCL where a rank asks for NCCL's default timeout.
        (c10d, "default_pg_nccl_timeout", lambda found: found or c10d.default_pg_timeout),
        (registry.TCPStore, "__init__", partial(_store_without_wait, scheduler)),
        *((c10d, name, same) for name in ("_backend", "_default_pg_init_method")),  # restored
    ]
    with attributes_replaced([item for item in replacements if hasattr(*item[:2])]):
        registry._set_thread_isolation_mode(True)
        try:
            yield
        finally:
            registry._set_thread_isolation_mode(False)
            sys.excepthook = hook
            torch.set_default_dtype(dtype)
            torch.set_anomaly_enabled(*anomaly)
            cast(Any, warnings.filters)[:] = filters  # of ranks in parallel, which share them


def make_default_group(timeout: Any = None) -> None:
    """Create the rank's default group, which `init_process_group` may still replace."""
    c10d.init_process_group("pycollect", timeout=timeout)
    world = c10d._world
    world.made_by_launch = world.default_pg


@contextmanager
def named_groups() -> Iterator[None]:
    """Let a thread that a rank has started find the rank's groups by name."""
    registry = sys.modules["torch._C._distributed_c10d"]
    names = []
    for group, name in list(c10d._world.pg_names.items()):
        registry._register_process_group(name, group)
        names.append(name)
    try:
        yield
    finally:
        for name in names:
            registry._unregister_process_group(name)


def leave_groups() -> None:
    """Destroy all groups of the rank, if there are any, and if its launch has not ended."""
    world = c10d._world
    if isinstance(world, _WorldOfThread) and world._of_rank and world.default_pg is not None:
        c10d.destroy_process_group()
