"""Host views: the part of a plan that the ranks of one host run, with transfers to other hosts."""

from __future__ import annotations

import random
from collections import defaultdict

import plan_cases
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycollect import _C, _testing

REGISTRY = plan_cases.REGISTRY
# The host of each rank. Ranks of a host may be consecutive or not, and hosts of unequal sizes.
PLACEMENTS = ("aabb", "aaabcc", "abcd", "abab", "abca", "abbcba", "aabbccdd", "abcdabcd", "abbbb")
FORMS = [(in_place, first) for in_place in (False, True) for first in (False, True)]

each_algorithm = pytest.mark.parametrize(
    "algorithm", REGISTRY, ids=[f"{a.collective}-{a.name}" for a in REGISTRY]
)
each_placement = pytest.mark.parametrize("placement", PLACEMENTS)


def hosts_of(placement: str) -> list[int]:
    return [ord(host) - ord("a") for host in placement]


def runs(algorithm: _C.Algorithm, placement: str) -> list[_testing.HostsCase]:
    """All ways to run the algorithm on these hosts; none if it refuses them."""
    if algorithm.name == "host_chain" and list(placement) != sorted(placement):
        return []
    roots = (0, len(placement) - 1) if algorithm.collective in plan_cases.ROOTED else (0,)
    return [
        _testing.HostsCase(algorithm, hosts_of(placement), root, pieces, in_place, first)
        for root in roots
        for pieces in (1, 3, 8)
        for in_place, first in FORMS
        if algorithm.in_place or not in_place
    ]


def assert_receives_are_in_the_order_of_sends(
    transfers: list[list[_testing.TransferTuple]],
) -> int:
    """Check the transfers of all ranks, and return the number of messages."""
    sent, posted = defaultdict(list), defaultdict(list)
    for me, own in enumerate(transfers):
        for direction, peer, number, early in own:
            if direction == "send":
                sent[me, peer].append(number)
            elif early:
                posted[peer, me].append(number)
        for direction, peer, number, early in own:
            if direction == "receive" and not early:
                posted[peer, me].append(number)
    assert sent == posted
    assert all(numbers == list(range(len(numbers))) for numbers in sent.values())
    return sum(len(numbers) for numbers in sent.values())


def random_plan(world: int, seed: int) -> _C.Plan:
    """Steps that fold any ranks' scratch, which is overwritten again and again."""
    pick = random.Random(seed)
    chunks = 3

    def scratch(rank: int) -> _C.SliceTuple:
        return (rank, "tmp", pick.randrange(chunks), 1)

    def step(rank: int, how_many: int) -> _C.StepTuple:
        dst, ranks = scratch(rank), range(world)
        srcs = [scratch(other) for other in pick.sample(ranks, how_many) if other != rank]
        return ((dst,), tuple(srcs) or ((rank, "in", 0, 1),), -1)

    first = [
        (((rank, "tmp", c, 1),), ((rank, "in", c, 1),), -1)
        for rank in range(world)
        for c in range(chunks)
    ]
    rest = [step(pick.randrange(world), pick.randint(1, 3)) for _ in range(40)]
    return _C.Plan(world, chunks, [*first, *rest])


@each_placement
@each_algorithm
def test_a_rank_posts_its_receives_in_the_order_in_which_each_peer_sends(
    algorithm: _C.Algorithm, placement: str
) -> None:
    for run in runs(algorithm, placement):
        messages = assert_receives_are_in_the_order_of_sends(
            [run.transfers(me) for me in range(len(placement))]
        )
        assert messages or algorithm.collective == "barrier"


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_receives_of_random_plans_are_in_the_order_of_sends(placement: str) -> None:
    host_of, late = hosts_of(placement), 0
    for seed in range(30):
        plan = random_plan(len(host_of), seed)
        transfers = [
            _testing.transfers_of_plan(plan, False, host_of, me) for me in range(len(host_of))
        ]
        assert_receives_are_in_the_order_of_sends(transfers)
        late += sum(t[0] == "receive" and not t[3] for rank in transfers for t in rank)
    assert late > 0


@each_placement
@each_algorithm
def test_a_host_makes_its_view_without_the_plan_of_the_world(
    algorithm: _C.Algorithm, placement: str
) -> None:
    for run in runs(algorithm, placement):
        for host in set(hosts_of(placement)):
            assert run.difference_of_views(host) == ""


@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=12),
    st.sampled_from(REGISTRY),
    st.integers(0, 11),
    st.integers(1, 20),
    st.sampled_from(FORMS),
)
def test_views_of_random_placements(
    host_of: list[int], algorithm: _C.Algorithm, root: int, pieces: int, form: tuple[bool, bool]
) -> None:
    numbers = {host: number for number, host in enumerate(dict.fromkeys(host_of))}
    host_of = [numbers[host] for host in host_of]
    if algorithm.name == "host_chain":
        host_of.sort()
    root = root % len(host_of) if algorithm.collective in plan_cases.ROOTED else 0
    in_place = form[0] and algorithm.in_place
    run = _testing.HostsCase(algorithm, host_of, root, pieces, in_place, form[1])
    for host in numbers.values():
        assert run.difference_of_views(host) == ""


def default(collective: str, hosts: int, ranks: int, nbytes: int) -> _testing.HostsCase:
    """What a group of so many hosts, with so many ranks each, runs."""
    name, pieces, first = _C.select_over_hosts(collective, (ranks,) * hosts, nbytes, "")
    host_of = [host for host in range(hosts) for _ in range(ranks)]
    algorithm = _C.find_algorithm(collective, name)
    return _testing.HostsCase(algorithm, host_of, 0, min(pieces, 4), False, first)


each_default = pytest.mark.parametrize("collective", _C.COLLECTIVES)
each_size = pytest.mark.parametrize("nbytes", [64, 1 << 10, 64 << 20])


@each_size
@each_default
def test_the_work_for_a_rank_grows_no_faster_than_the_ranks(collective: str, nbytes: int) -> None:
    small, large = (default(collective, hosts, 4, nbytes).slices(hosts // 2) for hosts in (16, 64))
    assert large < 4.5 * small


@each_size
@each_default
def test_programs_of_more_ranks_than_a_host_can_have(collective: str, nbytes: int) -> None:
    """A fold may have all ranks' data as sources."""
    for hosts, ranks in ((200, 1), (40, 8)):
        assert default(collective, hosts, ranks, nbytes).transfers(3) is not None
