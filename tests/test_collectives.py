"""Collectives beside the matrix: chunk sizes, every dtype of torch, methods bound to devices."""

from __future__ import annotations

import inspect
import pydoc

import pytest
import torch
from reference import assert_same, expected, randoms, short

import pycollect as pc

OUT_OF_PLACE = ("all_gather", "reduce_scatter", "all_to_all")


def clones(tensors):
    return [t.clone() for t in tensors]


def test_scatter_accepts_chunk_sizes_devices_and_out():
    tensor = torch.arange(24.0).view(6, 4)
    out = [torch.zeros_like(part) for part in tensor.split([1, 0, 5])]
    got = pc.scatter(tensor, pc.devices("cpu*3"), chunk_sizes=(1, 0, 5), out=out)
    assert all(g is o for g, o in zip(got, out, strict=True))
    assert_same(out, list(tensor.split([1, 0, 5])))
    pc.scatter(tensor, ["cpu"])[0].zero_()
    assert tensor.sum() == 276, "scatter to one rank aliases its input"


def test_every_dtype_of_torch_is_moved_unless_it_is_quantized():
    for dtype in {d for d in vars(torch).values() if isinstance(d, torch.dtype)}:
        if short(dtype).startswith(("qint", "quint")):
            continue  # test_arguments.py
        ranks = [t.view(dtype) for t in randoms(2, (3, 16), torch.uint8)]
        wanted = ranks[1].view(torch.uint8).clone()
        pc.broadcast([t.t() for t in ranks], 1)
        assert_same([t.view(torch.uint8) for t in ranks], [wanted] * 2, dtype)
        copy = pc.replicate([ranks[0][::2]], "cpu*1")[0][0]
        assert_same([copy.view(torch.uint8)], [wanted[::2]], dtype)


def test_a_communicator_has_the_same_methods():
    communicator = pc.Communicator(["cpu"] * 3)
    tensors = randoms(3, (6, 5), torch.float32)
    for collective in ("all_reduce", "reduce", "broadcast"):
        mine = clones(tensors)
        assert getattr(communicator, collective)(mine) is None
        assert_same(mine, expected(collective, tensors), collective)
    for collective in OUT_OF_PLACE:
        got = getattr(communicator, collective)(tensors, dim=1)
        assert_same(got, expected(collective, tensors, dim=1), collective)
    lists = [[t.clone(), t[0].clone()] for t in tensors]
    communicator.all_reduce_coalesced(lists)
    assert_same([mine[0] for mine in lists], expected("all_reduce", tensors))
    communicator.barrier()


BOUND = [name for name in pc.__all__ if hasattr(pc.Communicator, name) and name != "barrier"]


@pytest.mark.parametrize("name", BOUND)
def test_signatures_of_a_communicators_methods(name):
    """The function's, without `devices`; by position only where a call by name is refused."""
    function = inspect.signature(getattr(pc, name)).parameters
    of_class = inspect.signature(getattr(pc.Communicator, name))
    bound = inspect.signature(getattr(pc.Communicator("cpu*2"), name))
    wanted = [argument for argument in function if argument != "devices"]
    assert list(of_class.parameters) == ["self", *wanted]
    assert list(bound.parameters) == wanted
    first = bound.parameters[wanted[0]]
    assert (first.kind is first.POSITIONAL_ONLY) == (name != "copy_")
    assert repr(bound.parameters["peer_access"].default) == "<the communicator's>"
    for argument in wanted[1:-1]:
        assert bound.parameters[argument] == function[argument]


def test_help_on_a_communicator_shows_its_calls():
    text = pydoc.plain(pydoc.render_doc(pc.Communicator))
    assert len(BOUND) == 12
    assert "scatter(self, tensor: 'TensorLike', /, *, chunk_sizes:" in text
    assert "replicate(self, tensors: 'TensorList', /, *, peer_access:" in text
    assert ">>> scatter(" not in text, "the example of the module function"
