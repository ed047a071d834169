"""Host views: the part of a plan that the ranks of one host run, with transfers to other hosts."""

from __future__ import annotations

from collections import defaultdict

import plan_cases
import pytest

from pycollect import _C, _testing

REGISTRY = plan_cases.registry()
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


@each_placement
@each_algorithm
def test_a_rank_posts_its_receives_in_the_order_in_which_each_peer_sends(
    algorithm: _C.Algorithm, placement: str
) -> None:
    for run in runs(algorithm, placement):
        sent, posted = defaultdict(list), defaultdict(list)
        for me in range(len(placement)):
            transfers = run.transfers(me)
            for direction, peer, number, early in transfers:
                if direction == "send":
                    sent[me, peer].append(number)
                elif early:
                    posted[peer, me].append(number)
            for direction, peer, number, early in transfers:
                if direction == "receive" and not early:
                    posted[peer, me].append(number)
        assert sent == posted
        assert all(numbers == list(range(len(numbers))) for numbers in sent.values())
        assert sent or algorithm.collective == "barrier"
