"""The list collectives in torch.export: operators of the exported program, which can be saved."""

from __future__ import annotations

import io

import pytest
import torch
from graph_functions import (
    FULL,
    TWO,
    all_reduce_of_graph_inputs,
    async_op,
    inputs,
    on_streams,
    scattered,
    staged,
)
from reference import assert_same

import pycollect as pc


class Program(torch.nn.Module):
    """A module for torch.export, which takes no functions."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, a, b):
        return self.function(a, b)


EXPORTED = [f for f in FULL if f is not all_reduce_of_graph_inputs]


@pytest.mark.parametrize("function", EXPORTED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_exported_programs(function, strict):
    exported = torch.export.export(Program(function), tuple(inputs()), strict=strict)
    assert any("pycollect" in str(node.target) for node in exported.graph.nodes)
    assert_same(exported.module()(*inputs()), function(*inputs()))
    functional = exported.run_decompositions()
    assert_same(functional.module()(*inputs()), function(*inputs()))
    for program in (exported, functional):
        file = io.BytesIO()
        torch.export.save(program, file)
        loaded = torch.export.load(io.BytesIO(file.getvalue()))
        assert_same(loaded.module()(*inputs()), function(*inputs()))


@pytest.mark.slow
def test_a_program_compiled_ahead_of_time(tmp_path):
    exported = torch.export.export(Program(scattered), tuple(inputs()))
    path = str(tmp_path / "program.pt2")
    torch._inductor.aoti_compile_and_package(exported, package_path=path)
    assert_same(torch._inductor.aoti_load_package(path)(*inputs()), scattered(*inputs()))


def test_exported_programs_have_no_asynchronous_calls():
    for function in (async_op, on_streams, staged):
        with pytest.raises(RuntimeError, match="an exported program has no async_op"):
            torch.export.export(Program(function), tuple(inputs()))


def test_exported_chunk_sizes_can_be_dynamic():
    class Cut(torch.nn.Module):
        def forward(self, x):
            return pc.scatter(x, TWO, chunk_sizes=[x.shape[0] - 1, 1])

    rows = {0: torch.export.Dim("rows", min=3, max=100)}
    exported = torch.export.export(Cut(), (torch.arange(4.0),), dynamic_shapes=(rows,))
    assert_same(exported.module()(torch.arange(6.0)), Cut()(torch.arange(6.0)))
