"""The recorded collectives: values of the plain ones, numerically checked gradients, any order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference import assert_same, expected
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from pycollect import autograd

WORLDS = (1, 2, 3, 4)
DTYPES = (torch.float64, torch.complex128)
Shapes = list[tuple[int, ...]]


def leaves(shapes: Shapes, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def values(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach() for t in tensors]


def uneven(world: int, dim: int) -> Shapes:
    """Lengths 2, 0, 1, 3, ... along dim: one rank of several has no elements."""
    return [(length, 2) if dim == 0 else (2, length) for length in (2, 0, 1, 3)[:world]]


def splits(world: int) -> list[list[int]]:
    """Numbers of rows that each rank sends to each other rank; some are zero."""
    return [[(i + 2 * j) % 3 for j in range(world)] for i in range(world)]


def along(world: int) -> dict[str, tuple[Callable[..., object], Shapes]]:
    """The cases with a dimension, by name."""
    even: Shapes = [(3, 2)] * world
    found: dict[str, tuple[Callable[..., object], Shapes]] = {}
    for dim in (0, -1):
        cut = {
            "all_gather": lambda *t, dim=dim: tuple(autograd.all_gather(t, dim=dim)),
            "gather": lambda *t, dim=dim: autograd.gather(t, dim=dim),
            "all_to_all": lambda *t, dim=dim: tuple(autograd.all_to_all(t, dim=dim)),
        }
        for name, call in cut.items():
            found[f"{name} {dim}"] = call, uneven(world, dim)
        for op in ("sum", "avg"):
            found[f"reduce_scatter {op} {dim}"] = (
                lambda *t, dim=dim, op=op: tuple(autograd.reduce_scatter(t, op, dim=dim)),
                even,
            )
        found[f"scatter {dim}"] = (
            lambda t, dim=dim: tuple(autograd.scatter(t, f"cpu*{world}", dim=dim)),
            even[:1],
        )
    return found


def cases(world: int) -> dict[str, tuple[Callable[..., object], Shapes]]:
    """A call for every collective, and the shapes of its input tensors, by name."""
    even: Shapes = [(3, 2)] * world
    rows: Shapes = [(sum(row), 2) for row in splits(world)]
    found: dict[str, tuple[Callable[..., object], Shapes]] = {
        "all_reduce": (lambda *t: tuple(autograd.all_reduce(t)), even),
        "all_reduce avg": (lambda *t: tuple(autograd.all_reduce(t, "avg")), even),
        "all_reduce scalars": (lambda *t: tuple(autograd.all_reduce(t)), [()] * world),
        "all_reduce nothing": (lambda *t: tuple(autograd.all_reduce(t)), [(0, 2)] * world),
        "reduce": (lambda *t: autograd.reduce(t, world - 1), even),
        "tree_sum": (lambda *t: autograd.tree_sum(t), even),
        "reduce avg": (lambda *t: autograd.reduce(t, op="avg"), even),
        "broadcast": (lambda *t: tuple(autograd.broadcast(t, world // 2)), even),
        "copy": (lambda t: autograd.copy(t, "cpu"), even[:1]),
        "replicate": (
            lambda *t: tuple(c for rank in autograd.replicate(t, f"cpu*{world}") for c in rank),
            [(3, 2), (), (0, 1), (4,)],
        ),
        "all_to_all splits": (
            lambda *t: tuple(autograd.all_to_all(t, split_sizes=splits(world))),
            rows,
        ),
        "scatter sizes": (
            lambda t: tuple(autograd.scatter(t, f"cpu*{world}", chunk_sizes=[2, 0, 1, 3][:world])),
            [(sum((2, 0, 1, 3)[:world]), 2)],
        ),
    }
    return found | along(world)


@pytest.mark.parametrize("name", cases(4))
@pytest.mark.parametrize("world", WORLDS)
def test_gradients(name: str, world: int) -> None:
    call, shapes = cases(world)[name]
    for dtype in DTYPES if world in (1, 3) else DTYPES[:1]:
        tensors = leaves(shapes, dtype)
        assert gradcheck(call, tensors, check_forward_ad=True, fast_mode=True)
        assert gradgradcheck(call, tensors, fast_mode=True)


@pytest.mark.parametrize("op", ["max", "min", "prod"])
@pytest.mark.parametrize("world", WORLDS)
def test_gradients_of_nonlinear_ops(op: str, world: int) -> None:
    def call(*t: Tensor) -> tuple[Tensor, ...]:
        return tuple(autograd.all_reduce(t, op))

    for dtype in DTYPES if op == "prod" else DTYPES[:1]:
        tensors = leaves([(2, 2)] * world, dtype)
        assert gradcheck(call, tensors)
        assert gradgradcheck(call, tensors)


def test_values_equal_those_of_plain_collectives() -> None:
    tensors = leaves([(4, 3)] * 3)
    for name in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"):
        got = getattr(autograd, name)(tensors)
        assert_same(values(got), expected(name, values(tensors)), name)
        assert all(g.requires_grad for g in got)
    for op in ("avg", "max", "min", "prod"):
        got = autograd.all_reduce(tensors, op)
        assert_same(values(got), expected("all_reduce", values(tensors), op), op)
    assert torch.equal(autograd.gather(tensors, dim=1), torch.cat(tensors, 1))
    assert all(map(torch.equal, autograd.scatter(tensors[0], "cpu*2"), tensors[0].split(2)))
    for [copy] in autograd.replicate(tensors[:1], "cpu*2"):
        assert torch.equal(copy, tensors[0])
    assert torch.equal(autograd.reduce(tensors, 2), sum(tensors[1:], tensors[0]))


def test_results_are_new_memory_and_inputs_are_unchanged() -> None:
    for world in (1, 3):
        for call, shapes in cases(world).values():
            tensors = leaves(shapes)
            kept = [t.clone() for t in values(tensors)]
            got = call(*tensors)
            outputs = got if isinstance(got, tuple) else (got,)
            filled = [t.data_ptr() for t in (*tensors, *outputs) if t.numel()]
            assert len(set(filled)) == len(filled)
            torch.autograd.backward([o.sum() for o in outputs])
            assert all(map(torch.equal, values(tensors), kept))
            assert all(t._version == 0 for t in tensors)


def test_algorithms_are_selected_by_name() -> None:
    x = [1e8, 1.0, -1e8, 1.0]
    tensors = [torch.tensor([v], requires_grad=True) for v in x]
    by_order, by_tree = (autograd.all_reduce(tensors, algorithm=a)[0] for a in (None, "tree"))
    assert (float(by_order.detach()), float(by_tree.detach())) == (1.0, 0.0)
    for name, algorithm in (("broadcast", "chain"), ("all_gather", "ring"), ("reduce", "chain")):
        getattr(autograd, name)(tensors, algorithm=algorithm)
        with pytest.raises(ValueError, match="butterfly"):
            getattr(autograd, name)(tensors, algorithm="butterfly")


def test_results_and_gradients_in_tree_order() -> None:
    """1e8 + 1 - 1e8 + 1 is 1 in rank order, and 0 in tree order; also in the second derivative."""
    values = (1e8, 1.0, -1e8, 1.0)
    for name in ("all_reduce", "reduce", "reduce_scatter"):
        call = getattr(autograd, name)
        x = [torch.full((4,), v, requires_grad=True) for v in values]
        (total, *_) = found = [call(x, order="tree")] if name == "reduce" else call(x, order="tree")
        assert not total.detach().any(), name
        grads = [
            torch.full_like(f, v, requires_grad=True) for f, v in zip(found, values, strict=False)
        ]
        wanted = 0.0 if name == "all_reduce" else 1e8
        (back,) = torch.autograd.grad(found, x[:1], grads, create_graph=True)
        assert float(back[0].detach()) == wanted, name
        again = torch.autograd.grad(back.sum(), grads, allow_unused=True)
        assert float(again[0][0]) == 1.0, name
    with pytest.raises(ValueError, match="order is 'ring'; allowed are rank, tree"):
        autograd.all_reduce(x, order="ring")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="order is a int; pass 'rank' or 'tree'"):
        autograd.reduce(x, order=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"tree_sum: dtype is a str; pass a torch\.dtype"):
        autograd.tree_sum(x, dtype="float32")  # type: ignore[arg-type]


def test_gradients_add_in_rank_order() -> None:
    """1e8 + 1 - 1e8 is 0 in rank order, and 1 in other orders."""
    weight = torch.zeros(1, requires_grad=True)
    copies = autograd.replicate([weight], "cpu*3")
    factors = zip(copies, (1e8, 1.0, -1e8), strict=True)
    sum(f * c for [c], f in reversed(list(factors))).backward()
    assert weight.grad == 0
    everywhere = autograd.broadcast([weight, torch.zeros(1), torch.zeros(1)])
    weight.grad = None
    torch.autograd.backward([f * c for c, f in zip(everywhere, (1e8, -1e8, 1.0), strict=True)])
    assert weight.grad == 1
