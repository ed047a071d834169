"""Plain collectives are not recorded by autograd, and must never cause wrong gradients.

Overwritten tensors get a new version, so that backward raises instead of using them; tensors that
are only read keep theirs. Views that differ from their memory are refused or handled correctly.
"""

from __future__ import annotations

import pytest
import torch
from reference import assert_same, expected, left_fold, randoms

import pycollect as pc

OUT_OF_PLACE = ("all_gather", "reduce_scatter", "all_to_all")
OTHER = torch.arange(6.0)

# Calls that overwrite x, in most of them the tensor of rank 0 of two.
WRITES = {
    "all_reduce": lambda x: pc.all_reduce([x, OTHER.clone()]),
    "all_reduce, one rank": lambda x: pc.all_reduce([x]),
    "reduce": lambda x: pc.reduce([x, OTHER.clone()], dst=0),
    "broadcast": lambda x: pc.broadcast([x, OTHER.clone()], src=1),
    "async": lambda x: pc.all_reduce([x, OTHER.clone()], async_op=True).wait(),
    "coalesced": lambda x: pc.all_reduce_coalesced([[OTHER.clone(), x], [OTHER.clone(), -OTHER]]),
    "broadcast_coalesced": lambda x: pc.broadcast_coalesced([[x], [OTHER.clone()]], src=1),
    "copy_": lambda x: pc.copy_(x, OTHER),
    "all_gather": lambda x: pc.all_gather([OTHER[:3], OTHER[3:]], out=[x, OTHER.clone()]),
    "reduce_scatter": lambda x: pc.reduce_scatter([OTHER.repeat(2)] * 2, out=[x, OTHER.clone()]),
    "all_to_all": lambda x: pc.all_to_all([OTHER] * 2, out=[x, OTHER.clone()]),
    "scatter": lambda x: pc.scatter(OTHER.repeat(2), "cpu*2", out=[x, OTHER.clone()]),
    "gather": lambda x: pc.gather([OTHER[:3], OTHER[3:]], out=x),
    "torch.ops": lambda x: torch.ops.pycollect.all_reduce_([x, OTHER.clone()]),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("through", ["no_grad", "detach", "view"])
def test_backward_raises_if_a_saved_tensor_was_overwritten(name, through):
    leaf = torch.linspace(-1, 1, 6, requires_grad=True)
    saved = leaf.sigmoid()  # backward reads the output
    with torch.no_grad():
        write = WRITES[name]
        if through == "no_grad":
            write(saved)
        else:
            write(saved.detach() if through == "detach" else saved.view(2, 3).view(6))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_read_tensors_keep_their_version():
    tensors = randoms(2, (6,), torch.float32)
    for collective in OUT_OF_PLACE:
        getattr(pc, collective)(tensors)
    pc.scatter(tensors[0], "cpu*2")
    pc.gather(tensors)
    pc.replicate(tensors, "cpu*2")
    pc.copy_(torch.zeros(6), tensors[0])
    pc.broadcast([tensors[0], torch.zeros(6)], src=0)
    pc.reduce([tensors[0], torch.zeros(6)], dst=1)
    assert [t._version for t in tensors] == [0, 0]


@pytest.mark.parametrize("name", WRITES)
def test_outputs_that_require_grad_are_refused_in_grad_mode(name):
    x = torch.zeros(6, requires_grad=True)
    with pytest.raises((ValueError, RuntimeError), match=r"no_grad.*detach|detach.*no_grad"):
        WRITES[name](x)
    assert (x == 0).all()
    assert x._version == 0


@pytest.mark.parametrize("collective", OUT_OF_PLACE)
def test_inputs_that_require_grad_need_no_grad(collective):
    values = [torch.nn.Parameter(v) for v in randoms(2, (6,), torch.float32)]
    with pytest.raises(ValueError, match="no_grad"):
        getattr(pc, collective)(values)
    with torch.no_grad():
        got = getattr(pc, collective)(values)
    assert_same(got, expected(collective, [v.detach() for v in values]))
    assert not any(g.requires_grad for g in got)


def test_parameters_and_their_gradients_are_reduced_and_replicated():
    values = randoms(3, (4, 5), torch.float32)
    parameters = [torch.nn.Parameter(v.clone()) for v in values]
    for p, v in zip(parameters, values, strict=True):
        p.grad = v.clone()
    pc.all_reduce([p.grad for p in parameters])  # with grad mode on
    with torch.no_grad():
        pc.all_reduce(parameters)
        copies = pc.replicate(parameters, "cpu*2")
    wanted = left_fold(values, "sum")
    assert_same([p.detach() for p in parameters], [wanted] * 3)
    assert_same([p.grad for p in parameters], [wanted] * 3)
    assert_same([c.detach() for c in copies[1]], [wanted] * 3)
    assert all(p.requires_grad and p.is_leaf for p in parameters)


def test_inference_tensors():
    values = randoms(3, (9, 4), torch.float32)
    with torch.inference_mode():
        tensors = [v.clone() for v in values]
        assert tensors[0].is_inference()
        pc.all_reduce(tensors)
        assert_same(tensors, [left_fold(values, "sum")] * 3)
        for collective in OUT_OF_PLACE:
            got = getattr(pc, collective)(tensors)
            assert_same(got, expected(collective, tensors), collective)
    pc.all_reduce(tensors)  # outside of the mode
    assert_same(tensors, [left_fold([left_fold(values, "sum")] * 3, "sum")] * 3)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "broadcast", *OUT_OF_PLACE])
def test_lazy_conjugates_and_negatives_are_refused(collective):
    z, other = randoms(2, (5, 4), torch.complex64, tame=True)
    for tensors in ([z.conj(), other.conj()], [z.conj().imag, other.conj().imag], [z, z.conj()]):
        kept = [t.clone() for t in tensors]
        with pytest.raises(ValueError, match="lazy conjugate or negative"):
            getattr(pc, collective)(tensors)
        assert_same(tensors, kept)


def test_vmap_is_refused():
    a, b = randoms(2, (3, 4), torch.float32, tame=True)
    with pytest.raises(ValueError, match="no memory of its own"):
        torch.vmap(lambda x, y: pc.all_reduce([x, y]) or x)(a, b)
