"""The soak: phases of random calls, in threads over random groups, with rank failures.

All ranks derive the same scenario from one seed. In a phase each thread has a group of its own, or
sends messages in the group of another thread. A rank may be killed, or stopped for a while; every
rank that waits for it must raise, and the next phase makes new groups of the remaining ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import random
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import torch.distributed as dist
from dist_pool import RankContext, backend_of
from dist_soak_steps import KINDS, MESSAGES, GroupRank, Pending, begin_step, choose

import pycollect as pc

STEPS = 60  # steps of a thread whose group loses no rank
MAX_OPEN = 6  # largest number of calls that a thread has in flight
NOTICE_SECONDS = 8.0  # from a death until every survivor raises, on an overloaded machine
USUAL, SHORT = 120.0, 2.0  # timeouts of groups, in seconds; SHORT where a timeout must expire
FAULTS = ("", "pause", "death", "absence")


@dataclasses.dataclass(frozen=True)
class Phase:
    """The part of a phase that all ranks derive from the seed. Ranks keep their initial numbers."""

    seed: str
    groups: tuple[tuple[int, ...], ...]
    fault: str
    faulty_rank: int
    helper: int  # the rank that stops the faulty rank
    after: float  # seconds before the fault
    recreate: bool  # the default group, too, is destroyed and created again

    def loses(self, group: int) -> bool:
        return self.fault in ("death", "absence") and self.faulty_rank in self.groups[group]

    def survivors(self) -> set[int]:
        """The other ranks of all groups that lose the faulty rank."""
        lost = [members for n, members in enumerate(self.groups) if self.loses(n)]
        return {rank for members in lost for rank in members} - {self.faulty_rank}

    def timeout(self, group: int) -> float:
        return SHORT if self.fault == "absence" and self.loses(group) else USUAL


def phases_of(seed: int, world: int) -> list[Phase]:
    """Return the phases of a seed: at most five, and none once fewer than three ranks are alive."""
    rng, alive, phases = random.Random(seed), list(range(world)), []
    while len(alive) >= 3 and len(phases) < 5:
        fault = rng.choice(FAULTS) if phases else ""
        faulty_rank, helper = rng.sample(alive, 2)
        groups = tuple(
            tuple(sorted(rng.sample(alive, rng.randint(2, len(alive)))))
            for _ in range(rng.randint(1, 3))
        )
        recreate = bool(phases) and rng.random() < 0.5
        name = f"{seed}.{len(phases)}"
        after = rng.uniform(0, 0.8) + (fault == "absence")  # an absence must begin during the calls
        phases.append(Phase(name, groups, fault, faulty_rank, helper, after, recreate))
        if fault == "death":
            alive.remove(faulty_rank)
    return phases


class Thread:
    """One thread's calls in one group. `failure` is the traceback of an unexpected exception."""

    def __init__(self, me: GroupRank, name: str, *, messages: bool, loses_rank: bool):
        self.me, self.name = me, name
        self.first = 100_000 if messages else 0
        self.only = MESSAGES if messages else tuple(KINDS)
        self.loses_rank = loses_rank  # the group loses a rank: continue until a call raises
        self.raised_at = 0.0
        self.error: BaseException | None = None
        self.failure = ""
        self.now = ""
        self.open: list[Pending] = []
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._steps()
            assert not self.loses_rank, "no call raised although a rank is missing"
        except pc.CollectiveError as error:
            self.raised_at, self.error = time.monotonic(), error
        except BaseException:
            self.failure = traceback.format_exc()
        try:
            if self.error is not None:
                assert self.loses_rank, "no rank of the group is missing"
                self._leave()
        except BaseException:
            self.failure = traceback.format_exc()

    def _steps(self) -> None:
        rng = random.Random(self.name)
        number = self.first
        until = time.monotonic() + 40
        while time.monotonic() < until if self.loses_rank else number < self.first + STEPS:
            number += 1
            kind = choose(rng, self.only)
            seed = rng.randrange(2**30)
            self.now = f"step {number}, {kind}"
            self.open.append(begin_step(self.me, kind, number, seed))
            while len(self.open) > self.me.local.randint(0, MAX_OPEN):
                self._finish_one()
        while self.open:
            self._finish_one()

    def _finish_one(self) -> None:
        pending = self.open.pop(self.me.local.randrange(len(self.open)))
        self.now = f"waits for {pending.step}"
        pending.finish()

    def _leave(self) -> None:
        """Finish all other calls in flight: each raises, or its result is checked."""
        while self.open:
            with contextlib.suppress(pc.CollectiveError):
                self._finish_one()


def wait_for(paths: list[Path]) -> None:
    until = time.monotonic() + USUAL
    while not all(path.exists() for path in paths) and time.monotonic() < until:
        time.sleep(0.01)


def inject_fault(phase: Phase, me: int, pids: list[int], folder: str) -> None:
    """Inject the fault: the faulty rank kills itself, or the helper stops it for a while.

    The faulty rank must have begun the phase.
    """
    begun = Path(folder, f"begun_{phase.seed}")
    if me == phase.faulty_rank:
        begun.touch()
    if me == phase.helper:
        wait_for([begun])
    time.sleep(phase.after)
    if phase.fault == "death" and me == phase.faulty_rank:
        Path(folder, f"death_{phase.seed}").write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    if phase.fault in ("pause", "absence") and me == phase.helper:
        os.kill(pids[phase.faulty_rank], signal.SIGSTOP)
        time.sleep(0.7)
        if phase.fault == "absence":  # it resumes after all its peers have timed out
            wait_for([Path(folder, f"over_{phase.seed}_{rank}") for rank in phase.survivors()])
        os.kill(pids[phase.faulty_rank], signal.SIGCONT)


@dataclasses.dataclass
class Scenario:
    """State of one rank while it runs a scenario."""

    me: RankContext
    seed: int
    pids: list[int]
    alive: list[int] = dataclasses.field(default_factory=list)
    members: list[int] = dataclasses.field(default_factory=list)  # ranks of the default group
    bootstraps: int = 0
    latest: float = 0.0

    def bootstrap(self, seconds: float = USUAL) -> None:
        self.bootstraps += 1
        self.members = list(self.alive)
        here = dataclasses.replace(self.me.spec, world=len(self.alive), timeout=seconds)
        me = dataclasses.replace(self.me, rank=self.alive.index(self.me.rank), spec=here)
        me.init(f"scenario_{self.seed}_{self.bootstraps}")

    def run(self, phase: Phase) -> None:
        if phase.recreate:
            dist.destroy_process_group()
            self.bootstrap()
        limit = datetime.timedelta(seconds=USUAL)
        groups = [
            dist.new_group([self.members.index(r) for r in members], timeout=limit)
            for members in phase.groups
        ]
        mine = {
            n: group
            for n, (group, members) in enumerate(zip(groups, phase.groups, strict=True))
            if self.me.rank in members
        }
        for n, group in mine.items():
            limit = datetime.timedelta(seconds=phase.timeout(n))
            backend_of(group).set_timeout(limit)
            dist.barrier(group)
        threads = [t for n, group in mine.items() for t in self._threads(phase, n, group)]
        injector = threading.Thread(
            target=inject_fault, args=(phase, self.me.rank, self.pids, self.me.folder), daemon=True
        )
        injector.start()
        self._join(phase, threads)
        Path(self.me.folder, f"over_{phase.seed}_{self.me.rank}").touch()
        injector.join()
        if phase.fault == "death":
            self.alive.remove(phase.faulty_rank)
        for group in mine.values():
            dist.destroy_process_group(group)

    def _threads(self, phase: Phase, n: int, group: dist.ProcessGroup) -> list[Thread]:
        members = phase.groups[n]
        lost = phase.loses(n)
        name = f"{phase.seed} group {n}"
        message_thread = random.Random(name).random() < 0.5
        made = []
        for messages in (False, True)[: 1 + message_thread]:
            me = GroupRank(
                group, members.index(self.me.rank), random.Random(f"{name} {self.me.rank}")
            )
            name += " messages" if messages else ""
            made.append(Thread(me, name, messages=messages, loses_rank=lost))
        return made

    def _join(self, phase: Phase, threads: list[Thread]) -> None:
        while any(t.thread.is_alive() for t in threads) and not any(t.failure for t in threads):
            for t in threads:
                t.thread.join(0.02)
        failures = [
            f"{t.name}, {t.now}:\n{t.error or ''}\n{t.failure}" for t in threads if t.failure
        ]
        assert not failures, "\n".join([str(phase), *failures])
        self._check_errors(phase, threads)

    def _check_errors(self, phase: Phase, threads: list[Thread]) -> None:
        """Check that errors come within NOTICE_SECONDS of a death, and name the dead rank."""
        for t in (t for t in threads if t.error):
            if phase.fault == "death":
                when = float(Path(self.me.folder, f"death_{phase.seed}").read_text())
                self.latest = max(self.latest, t.raised_at - when)
                assert self.latest < NOTICE_SECONDS, (
                    f"{t.raised_at - when:.1f} s after the death: {t.error}"
                )
                assert isinstance(t.error, pc.PeerLost), repr(t.error)
                lost = phase.groups[int(t.name.split()[2])].index(phase.faulty_rank)
                assert f"rank {lost}" in str(t.error), f"does not name rank {lost}: {t.error}"
            assert "rank" in str(t.error), f"names no rank: {t.error}"  # it may name any


def run_scenario(me: RankContext, seed: int, pids: list[int]) -> float:
    """Run one rank's part of a scenario; on failure end the process, so no peer waits for it."""
    scenario = Scenario(me, seed, pids, list(range(me.world)))
    try:
        scenario.bootstrap()
        for phase in phases_of(seed, me.world):
            scenario.run(phase)
        dist.destroy_process_group()
    except BaseException:
        message = f"seed {seed}, rank {me.rank} fails: {traceback.format_exc()}"
        print(message, file=sys.stderr, flush=True)
        os._exit(70)
    return scenario.latest
