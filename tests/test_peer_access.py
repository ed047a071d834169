"""Peer access: tested once per pair and direction, used only if it works, named if missing."""

from __future__ import annotations

import threading

import pytest
import torch

import pycollect as pc
from pycollect import _C, _testing


class Machine:
    """Peer access as the driver reports it, and the defects of some pairs."""

    def __init__(self, reported, broken=()):
        self.reported, self.broken = set(reported), dict(broken)
        self.queried, self.tested, self.logged = [], [], []
        self.peers = _testing.PeerAccessCache(self.query, self.test, self.logged.append)

    def query(self, one, other):
        self.queried.append((one, other))
        return (one, other) in self.reported

    def test(self, one, other):
        self.tested.append((one, other))
        return self.broken.get((one, other), "")


def test_a_pair_is_queried_and_tested_once():
    machine = Machine({(0, 1), (1, 0)})
    for _ in range(3):
        assert machine.peers.works(0, 1)
        assert machine.peers.works(1, 0)
        assert machine.peers.works(2, 2), "a device reaches itself"
        assert not machine.peers.works(2, 0), "the driver reports no access"
    assert machine.queried == [(0, 1), (1, 0), (2, 0)]
    assert machine.tested == [(0, 1), (1, 0)]
    assert machine.logged == []


def test_a_defective_pair_is_logged_once_and_not_used():
    machine = Machine({(0, 1), (1, 0)}, {(1, 0): "what was written there did not arrive"})
    for _ in range(3):
        assert not machine.peers.works(1, 0)
        assert machine.peers.works(0, 1), "the other direction is another pair"
    assert machine.logged == [
        "the driver reports that cuda:1 can access the memory of cuda:0, but what was written "
        "there did not arrive; copies between them go through the host"
    ]


def test_a_failed_self_test_is_repeated():
    machine = Machine({(0, 1)})
    results = [ValueError("a capture is under way"), ""]

    def test(one, other):
        answer = results.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    peers = _testing.PeerAccessCache(machine.query, test, machine.logged.append)
    with pytest.raises(ValueError, match="capture"):
        peers.works(0, 1)
    assert peers.works(0, 1)
    assert results == []


def test_concurrent_threads_test_each_pair_once():
    machine = Machine({(a, b) for a in range(8) for b in range(8)})
    start = threading.Barrier(4)

    def work():
        start.wait()
        for a in range(8):
            for b in range(8):
                assert machine.peers.works(a, b)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len(machine.tested) == len(set(machine.tested)) == 56


@pytest.fixture
def two_gpus(monkeypatch):
    """Two devices with a name and no memory, and answers about them."""
    results = {(0, 1): (True, "", 0), (1, 0): (True, "", 0)}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(_C, "has_cuda", lambda: True)
    monkeypatch.setattr(_C, "peer_access", lambda one, other: results[one, other])
    return results


def test_peer_access_can_be_required(two_gpus):
    communicator = pc.Communicator(["cuda:0", "cuda:1", "cuda:0"], peer_access=True)
    assert communicator.world == 3


@pytest.mark.parametrize("answer", [(False, "", -1), (True, "what was read is wrong", 0)])
def test_required_peer_access_names_the_missing_pair(two_gpus, answer):
    two_gpus[1, 0] = answer
    why = answer[1] or "the driver reports no peer access"
    with pytest.raises(ValueError, match=f"cuda:1 does not reach the memory of cuda:0: {why}"):
        pc.Communicator(["cuda:0", "cuda:1"], peer_access=True)
    for choice in (None, False):
        assert pc.Communicator(["cuda:0", "cuda:1"], peer_access=choice).world == 2


def test_peer_access_has_no_effect_on_cpu_ranks():
    x = [torch.ones(2), torch.ones(2)]
    pc.Communicator("cpu*2", peer_access=True).all_reduce(x)
    assert x[1].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("choice", [None, True, False])
def test_a_communicator_passes_its_choice_to_every_call(monkeypatch, choice):
    """Each collective passes it on as the last argument; a call's own choice comes first."""
    communicator = pc.Communicator("cpu*2", peer_access=choice)
    x = [torch.ones(2), torch.ones(2)]
    calls = {
        "all_reduce": (x,),
        "all_reduce_coalesced": ([x, x],),
        "reduce": (x,),
        "broadcast": (x,),
        "broadcast_coalesced": ([x, x],),
        "all_gather": (x,),
        "reduce_scatter": (x,),
        "all_to_all": (x,),
        "gather": (x,),
        "scatter": (x[0],),
        "replicate": (x,),
        "copy_": (x[0], x[1]),
    }
    given = {}
    for name, args in calls.items():
        monkeypatch.setattr(
            _C, name, lambda *given_args, name=name: given.update({name: given_args[-1]})
        )
        getattr(communicator, name)(*args)
    assert given == dict.fromkeys(calls, choice is not False)
    communicator.all_reduce(x, peer_access=choice is False)
    assert given["all_reduce"] is (choice is False)


@pytest.mark.cuda
def test_real_gpus():
    count = torch.cuda.device_count()
    for one in range(count):
        for other in range(count):
            queried, defect, rank = _C.peer_access(one, other)
            if one == other:
                assert (queried, defect) == (True, "")
            else:
                assert queried == torch.cuda.can_device_access_peer(one, other)
                assert defect == "" or not queried, "this machine's peer access is broken"
                assert queried == (rank >= 0)
