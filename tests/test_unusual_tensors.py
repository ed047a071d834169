"""Unusual tensors: refused wherever they occur, or handled correctly; never a crash.

Freed and shrunk storages, zeros without memory, nested, quantized and fake tensors, and tensors
under a transformation or a mode that would change the meaning of a collective.
"""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from reference import COLLECTIVES, assert_same, expected, randoms
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import pycollect as pc

EITHER = (TypeError, ValueError)


def resized(bytes_left, offset=0):
    t = torch.zeros(6 + offset)[offset:]
    t.untyped_storage().resize_(bytes_left)
    return t


def fake():
    with FakeTensorMode():
        return torch.zeros(6)


def nested(layout):
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(4)], layout=layout)


STRANGE = {
    "a freed storage": lambda: resized(0),
    "a shrunk storage": lambda: resized(20),
    "a storage that ends before the view": lambda: resized(24, offset=1),
    "zeros without memory": lambda: torch._efficientzerotensor(6),
    "a fake tensor": fake,
    "a nested tensor": lambda: nested(torch.strided),
    "a jagged tensor": lambda: nested(torch.jagged),
    "a quantized tensor": lambda: torch.quantize_per_tensor(torch.zeros(6), 0.1, 0, torch.qint8),
    "an mkldnn tensor": lambda: torch.zeros(6).to_mkldnn(),
    "a sparse tensor": lambda: torch.zeros(6).to_sparse(),
}
CALLS = {
    "all_reduce": lambda x, y: pc.all_reduce([x, y]),
    "reduce": lambda x, y: pc.reduce([x, y], dst=1),
    "broadcast": lambda x, y: pc.broadcast([x, y], src=1),
    "all_reduce_coalesced": lambda x, y: pc.all_reduce_coalesced([[y.clone(), x], [y.clone(), y]]),
    "broadcast_coalesced": lambda x, y: pc.broadcast_coalesced([[x], [y]]),
    "all_gather": lambda x, y: pc.all_gather([x, y]),
    "reduce_scatter": lambda x, y: pc.reduce_scatter([x, y]),
    "all_to_all": lambda x, y: pc.all_to_all([x, y]),
    "scatter": lambda x, y: pc.scatter(x, "cpu*2"),
    "scatter, out": lambda x, y: pc.scatter(torch.ones(12), "cpu*2", out=[x, y]),
    "gather": lambda x, y: pc.gather([y, x]),
    "gather, out": lambda x, y: pc.gather([torch.ones(3), torch.ones(3)], out=x),
    "replicate": lambda x, y: pc.replicate([y, x], "cpu*2"),
    "copy_": lambda x, y: pc.copy_(y, x),
    "copy_, dst": lambda x, y: pc.copy_(x, y),
    "async": lambda x, y: pc.all_reduce([y, x], async_op=True),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize("call", CALLS)
def test_unusual_tensors_are_refused(call, strange):
    plain = torch.arange(6.0)
    with pytest.raises(EITHER) as raised:
        CALLS[call](STRANGE[strange](), plain)
    assert len(str(raised.value)) > 25
    assert_same([plain], [torch.arange(6.0)])
    assert plain._version == 0


def test_a_storage_that_is_just_large_enough():
    tensors = [resized(24), resized(28, offset=1)]
    values = [
        t.copy_(v).clone() for t, v in zip(tensors, randoms(2, (6,), torch.float32), strict=True)
    ]
    pc.all_reduce(tensors)
    assert_same(tensors, expected("all_reduce", values))
    empty = [torch.zeros(0), resized(0)[:0]]
    pc.all_reduce(empty)
    assert pc.gather(empty).numel() == 0


@pytest.mark.parametrize("call", CALLS)
def test_forward_mode_derivatives_are_refused(call):
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.zeros(6), torch.ones(6))
        y = torch.arange(6.0)
        with pytest.raises(ValueError, match="forward"):
            CALLS[call](x, y)
        assert_same([y, forward_ad.unpack_dual(x).primal], [torch.arange(6.0), torch.zeros(6)])
        CALLS[call](forward_ad.unpack_dual(x).primal, y)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd, torch.func.jacrev])
@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "gather", "replicate", "copy_"])
def test_transformations_of_functions_are_refused(transform, call):
    def loss(x):
        y = x * 2
        got = CALLS[call](y, torch.ones(6))
        return (y if got is None else torch.stack(got[1]) if call == "replicate" else got[0]).sum()

    with pytest.raises((ValueError, RuntimeError)):
        transform(loss)(torch.ones(6))


@pytest.mark.parametrize("call", CALLS)
def test_a_fake_mode_does_not_crash(call):
    # Results that are created under the mode have no memory.
    x, y = torch.ones(6), torch.ones(6)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            CALLS[call](x, y)
    except (ValueError, RuntimeError):
        assert_same([x, y], [torch.ones(6)] * 2)


class PassThrough(TorchDispatchMode):
    """A mode that passes every call on."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_pass_through_dispatch_mode():
    values = randoms(3, (7, 4), torch.float32)
    for collective in COLLECTIVES:
        tensors = [v.clone() for v in values]
        with PassThrough():
            got = getattr(pc, collective)(tensors)
        wanted = expected(collective, values)
        assert_same(tensors if got is None else got, wanted, collective)


def test_lazy_clones_are_separate_or_refused():
    for collective in COLLECTIVES:
        values = randoms(2, (6,), torch.float32)
        tensors = [torch._lazy_clone(v) for v in values]
        got = getattr(pc, collective)(tensors)
        wanted = expected(collective, randoms(2, (6,), torch.float32))
        assert_same(tensors if got is None else got, wanted, collective)
        assert_same(values, randoms(2, (6,), torch.float32), f"{collective}: the original changed")


def test_subclasses_are_tensors():
    class Mine(torch.Tensor):
        pass

    values = randoms(2, (6,), torch.float32)
    tensors = [v.clone().as_subclass(Mine) for v in values]
    pc.all_reduce(tensors)
    assert all(type(t) is Mine for t in tensors)
    assert_same([t.as_subclass(torch.Tensor) for t in tensors], expected("all_reduce", values))
