"""Checks of the arguments of ``pycollect.plan``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pycollect import _C

# Limits that keep the largest plans in memory. A plan has its steps for every rank and piece: a
# chain of W ranks and P pieces has 2 W P steps, half a million at most.
_MOST_RANKS = 1024
_MOST_RANKS_OVER_HOSTS, _MOST_RANKS_OF_HOST = 4096, 64  # for plans that grow with the ranks
_MOST_PIECES = 1 << 18  # of all ranks together


def ranks_of_hosts(world: int | None, hosts: Sequence[int] | None) -> tuple[int, ...]:
    """Return the number of ranks on each host."""
    world = None if world is None else _C.int_from(world, "plan", "world")
    if hosts is None:
        if world is None:
            raise TypeError("plan: pass world, the number of ranks, or hosts, those of each host")
        return (world,)
    if isinstance(hosts, str) or not isinstance(hosts, Iterable):
        raise TypeError(
            f"plan: hosts is a {type(hosts).__name__}; "
            "pass the number of ranks on each host, such as (8, 8)"
        )
    places = tuple(_C.int_from(ranks, "plan", f"hosts[{h}]") for h, ranks in enumerate(hosts))
    if not places:
        raise ValueError("plan: hosts is empty; pass the number of ranks on each host")
    for host, ranks in enumerate(places):
        if ranks < 1:
            raise ValueError(f"plan: host {host} has {ranks} ranks; every host needs at least one")
    if world is not None and world != sum(places):
        raise ValueError(f"plan: world is {world}, and the hosts have {sum(places)} ranks together")
    return places


def check_numbers(hosts: tuple[int, ...], nbytes: int, root: int, pieces: int) -> None:
    world = sum(hosts)
    if nbytes < 0:
        raise ValueError(f"plan: nbytes is {nbytes}; it cannot be negative")
    if world < 1:
        raise ValueError(f"plan: world is {world}; pass at least one rank")
    large = len(hosts) > 1 and max(hosts) <= _MOST_RANKS_OF_HOST
    most = _MOST_RANKS_OVER_HOSTS if large else _MOST_RANKS
    if world > most:
        raise ValueError(f"plan: world is {world}; at most {most} ranks are allowed")
    if not 0 <= root < world:
        raise ValueError(f"plan: root {root} is not a rank of a world of {world}")
    if pieces < 1:
        raise ValueError(f"plan: pieces is {pieces}; pass at least one piece")
    most = _MOST_PIECES // world
    if pieces > most:
        raise ValueError(f"plan: pieces is {pieces}; {world} ranks allow at most {most}")


def in_place_of(chosen: _C.Algorithm, wanted: bool | None) -> bool:
    wanted = None if wanted is None else _C.flag_from(wanted, "plan", "in_place")
    if wanted and not chosen.in_place:
        what = f"{chosen.collective} by '{chosen.name}'"
        raise ValueError(f"plan: {what} cannot run in place; pass in_place=False")
    return chosen.in_place if wanted is None else wanted
