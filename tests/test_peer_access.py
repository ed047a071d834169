"""Peer access: tried once per pair and direction, used only if that works, named if missing."""

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
        self.asked, self.tried, self.said = [], [], []
        self.peers = _testing.Peers(self.ask, self.try_out, self.said.append)

    def ask(self, one, other):
        self.asked.append((one, other))
        return (one, other) in self.reported

    def try_out(self, one, other):
        self.tried.append((one, other))
        return self.broken.get((one, other), "")


def test_a_pair_is_asked_and_tried_once():
    machine = Machine({(0, 1), (1, 0)})
    for _ in range(3):
        assert machine.peers.works(0, 1)
        assert machine.peers.works(1, 0)
    assert machine.asked == machine.tried == [(0, 1), (1, 0)]
    assert machine.said == []


def test_a_device_reaches_itself_without_a_question():
    machine = Machine({})
    assert machine.peers.works(2, 2)
    assert machine.asked == []


def test_what_the_driver_denies_is_not_tried():
    machine = Machine({(0, 1)})
    assert not machine.peers.works(1, 0)
    assert machine.tried == []
    assert machine.said == []


def test_a_pair_that_lies_is_said_once_and_not_believed():
    machine = Machine({(0, 1), (1, 0)}, {(1, 0): "what was written there did not arrive"})
    for _ in range(3):
        assert not machine.peers.works(1, 0)
        assert machine.peers.works(0, 1), "the other direction is another pair"
    assert machine.said == [
        "cuda:1 is said to reach the memory of cuda:0, but what was written there did not arrive; "
        "copies between them go through the host"
    ]


def test_a_trial_that_fails_is_made_again():
    machine = Machine({(0, 1)})
    answers = [ValueError("a capture is under way"), ""]

    def try_out(one, other):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    peers = _testing.Peers(machine.ask, try_out, machine.said.append)
    with pytest.raises(ValueError, match="capture"):
        peers.works(0, 1)
    assert peers.works(0, 1)
    assert answers == []


def test_many_threads_try_once():
    machine = Machine({(a, b) for a in range(8) for b in range(8)})
    start = threading.Barrier(4)

    def work():
        start.wait()
        for a in range(8):
            for b in range(8):
                assert machine.peers.works(a, b)

    team = [threading.Thread(target=work) for _ in range(4)]
    for t in team:
        t.start()
    for t in team:
        t.join(60)
    assert len(machine.tried) == len(set(machine.tried)) == 56


@pytest.fixture
def two_gpus(monkeypatch):
    """Two devices with a name and no memory, and answers about them."""
    answers = {(0, 1): (True, "", 0), (1, 0): (True, "", 0)}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(_C, "has_cuda", lambda: True)
    monkeypatch.setattr(_C, "peer_access", lambda one, other: answers[one, other])
    return answers


def test_peer_access_can_be_insisted_on(two_gpus):
    communicator = pc.Communicator(["cuda:0", "cuda:1", "cuda:0"], peer_access=True)
    assert communicator.world == 3


@pytest.mark.parametrize("answer", [(False, "", -1), (True, "what was read is wrong", 0)])
def test_insisting_names_the_pair(two_gpus, answer):
    two_gpus[1, 0] = answer
    why = answer[1] or "the driver reports no peer access"
    with pytest.raises(ValueError, match=f"cuda:1 does not reach the memory of cuda:0: {why}"):
        pc.Communicator(["cuda:0", "cuda:1"], peer_access=True)
    for choice in (None, False):
        assert pc.Communicator(["cuda:0", "cuda:1"], peer_access=choice).world == 2


def test_ranks_on_the_cpu_have_no_use_for_it():
    x = [torch.ones(2), torch.ones(2)]
    pc.Communicator("cpu*2", peer_access=True).all_reduce(x)
    assert x[1].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("choice", [None, True, False])
def test_a_communicator_hands_its_choice_to_every_call(monkeypatch, choice):
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
def test_gpus_that_are_here():
    count = torch.cuda.device_count()
    for one in range(count):
        for other in range(count):
            asked, defect, rank = _C.peer_access(one, other)
            if one == other:
                assert (asked, defect) == (True, "")
            else:
                assert asked == torch.cuda.can_device_access_peer(one, other)
                assert defect == "" or not asked, "this machine's peer access is broken"
                assert asked == (rank >= 0)
