"""Random programs of ranks: calls, messages, batches and mistakes in random groups, in flight at
once, each compared with reference.py.

The steps are those of the soak (dist_soak_steps.py), derived from a seed, which a failure reports.
test_dist_soak.py adds threads and faults.
"""

from __future__ import annotations

import datetime
import itertools
import random

import pytest
import torch.distributed as dist
from dist_pool import OURS, RankContext
from dist_soak_steps import GroupRank, Pending, begin_step, choose
from sites import THREADS, only_on

pytestmark = [
    pytest.mark.skipif(not OURS, reason="runs pycollect alone"),
    pytest.mark.filterwarnings("ignore"),
]
STEPS = 12
_Groups = dict[tuple[int, ...], dist.ProcessGroup]


def groups_of(world: int) -> _Groups:
    """A group for every subset of two or more ranks."""
    limit = datetime.timedelta(seconds=60)
    subsets = [m for n in range(2, world + 1) for m in itertools.combinations(range(world), n)]
    return {members: dist.new_group(members, timeout=limit) for members in subsets}


def run_program(rank: int, seed: int, groups: _Groups) -> None:
    """All ranks draw the steps alike; each waits in an order of its own for those that it can."""
    ours, mine = random.Random(seed), random.Random(f"{seed} {rank}")
    pending: list[Pending] = []
    for number in range(STEPS):
        members = ours.choice(sorted(groups))
        kind = choose(ours)
        if rank not in members:
            continue
        me = GroupRank(groups[members], members.index(rank), mine)
        pending.append(begin_step(me, kind, number, 1000 * seed + number))
        while pending and mine.random() < 0.5:
            pending.pop(mine.randrange(len(pending))).finish()
    for step in pending:
        step.finish()


def run_programs(me: RankContext, seeds: range) -> None:
    groups = groups_of(me.world)
    for seed in seeds:
        try:
            me.be_late(random.Random(f"{seed} {me.rank} late").choice((0.0, 0.0, 0.004)))
            run_program(me.rank, seed, groups)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {me.world} ranks") from error


@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 300), marks=pytest.mark.slow)], ids=["some", "more"]
)
@pytest.mark.parametrize(
    ("world", "parallel"),
    [(3, False), (4, False), pytest.param(3, True, marks=only_on(THREADS, "all others are"))],
)
def test_programs(pools, world, parallel, seeds):
    pools(world, parallel=parallel).run(run_programs, seeds, seconds=len(seeds))
