"""The process groups of the candidates on one rank, and why a candidate has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist

import pycollect

from ..processes.candidates import reason
from ..processes.spin_barrier import SpinBarrier

GLOO, HSDP, OURS, FAST = "gloo", "hsdp", "pycollect", "fast"


@dataclass(frozen=True)
class HsdpGroups:
    """Two groups of a rank: the ranks of its host, and those in its place on each host."""

    host: Any
    column: Any


@dataclass
class HostRanks:
    """The groups of this rank's process by candidate, and the reasons of those without one."""

    spin_barrier: SpinBarrier
    hosts: int
    rate: float | None
    groups: dict[str, Any] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)

    @property
    def ranks_per_host(self) -> int:
        """The number of ranks of each host."""
        return self.spin_barrier.world // self.hosts

    def make_groups(self, names: tuple[str, ...]) -> None:
        """Make the groups of these candidates; collective. The default group is gloo's."""
        makers: dict[str, Callable[[], Any]] = {
            GLOO: lambda: dist.group.WORLD,
            HSDP: partial(_hsdp, self.hosts, self.ranks_per_host),
            OURS: partial(dist.new_group, backend=OURS),
            FAST: _fast,
        }
        for name in names:
            try:
                group, refusal = makers[name](), ""
            except (NotImplementedError, ValueError) as error:
                group, refusal = None, reason(error)
            refusal = agreed_refusal(self.spin_barrier, refusal)
            if refusal:
                self.refusals[name] = refusal
            else:
                self.groups[name] = group


def agreed_refusal(spin_barrier: SpinBarrier, refusal: str) -> str:
    """Return this rank's refusal, or that another rank refused, or ""; collective."""
    refused = spin_barrier.gather(float(bool(refusal)))
    return refusal or (f"rank {refused.index(1.0)} refused" if any(refused) else "")


def _hsdp(hosts: int, ranks_per_host: int) -> HsdpGroups:
    """Make the groups of HSDP's device mesh, (hosts, ranks of a host)."""
    of_hosts = [list(range(h * ranks_per_host, (h + 1) * ranks_per_host)) for h in range(hosts)]
    columns = [list(column) for column in zip(*of_hosts, strict=True)]
    split: Any = dist.new_subgroups_by_enumeration  # torch has no type annotations for it
    host, _ = split(of_hosts, backend=OURS)
    column, _ = split(columns, backend=GLOO)
    return HsdpGroups(host, column)


def _fast() -> Any:
    return dist.new_group(backend=OURS, pg_options=pycollect.distributed.options(hosts="fast"))
