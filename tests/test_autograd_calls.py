"""Other properties of recorded collectives: calls at no cost, layouts, transforms, refusals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_autograd import cases, leaves
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from pycollect import autograd

# --- outputs without gradients, inputs that need none ---------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", sorted(set(cases(4)) - {"copy", "all_reduce nothing"}))
def test_missing_gradients_are_zeros_and_unneeded_ones_are_not_computed(
    name: str, world: int
) -> None:
    call, shapes = cases(world)[name]
    tensors = leaves(shapes)
    outputs = call(*tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    given = [i % 2 == 1 or len(outputs) == 1 for i in range(len(outputs))]
    seeds = [torch.randn_like(o) * g for o, g in zip(outputs, given, strict=True)]
    wanted = torch.autograd.grad(outputs, tensors, seeds, allow_unused=True)
    for chosen in range(len(tensors)):
        some = [t.detach().requires_grad_(i >= chosen) for i, t in enumerate(tensors)]
        again = call(*some)
        again = again if isinstance(again, tuple) else (again,)
        triples = zip(again, seeds, given, strict=True)
        used = [(o, s) for o, s, g in triples if g and o.requires_grad]
        if used:
            torch.autograd.backward(*zip(*used, strict=True))
        for i, t in enumerate(some):
            assert i >= chosen or t.grad is None
            if t.grad is not None:
                torch.testing.assert_close(t.grad, wanted[i])


class RecordedCalls(TorchDispatchMode):
    """Records the name of every collective that runs meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if operator.namespace == "pycollect":
            self.calls.append(operator.name().partition("::")[2].rstrip("_"))
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "back"),
    [
        ("all_reduce", "all_reduce"),
        ("all_gather", "reduce_scatter"),
        ("reduce_scatter", "all_gather"),
        ("all_to_all", "all_to_all"),
        ("broadcast", "reduce"),
        ("reduce", "broadcast"),
        ("gather", "scatter"),
    ],
)
def test_the_backward_pass_is_a_collective(name: str, back: str) -> None:
    tensors = leaves([(4, 2)] * 2)
    got = getattr(autograd, name)(tensors)
    with RecordedCalls() as recorded:
        torch.autograd.backward([t.sum() for t in got] if isinstance(got, list) else got.sum())
    assert recorded.calls == [back]


def test_tensors_without_requires_grad_cost_no_collective() -> None:
    tensors = [torch.randn(4, requires_grad=rank == 1) for rank in range(3)]
    gathered = autograd.all_gather(tensors)
    replicated = autograd.replicate(tensors, "cpu*2")
    with RecordedCalls() as recorded:
        torch.autograd.backward([g.sum() for g in gathered])
        assert recorded.calls == ["reduce"]
        sum(c.sum() for rank in replicated for c in rank).backward()
        assert recorded.calls == ["reduce"] * 2
    with torch.no_grad():
        assert not any(t.requires_grad for t in autograd.all_reduce(tensors))


def test_a_replicated_tensor_that_no_rank_uses_has_no_gradient() -> None:
    used, unused = leaves([(2,), (3,)])
    first, second = autograd.replicate([used, unused], "cpu*2")
    (first[0].sum() + 0 * second[0].sum()).backward()
    assert torch.equal(used.grad, torch.ones(2))
    assert unused.grad is None


# --- layouts, conjugates, modes -------------------------------------------------------------------


def test_all_layouts() -> None:
    base = torch.randn(4, 6, dtype=torch.float64)
    several = [base.t(), base[:, ::2].repeat(1, 1).expand(4, 3), torch.randn(1, 3).expand(4, 3)]
    for world, tensors in ((2, [base.t(), torch.randn(6, 4).double()]), (2, several[1:])):
        tensors = [t.double().requires_grad_() for t in tensors]
        for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
            assert gradcheck(partial(_tuple, name), tensors, fast_mode=True), (world, name)
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    [[a], [b]] = autograd.replicate([x], "cpu*2")
    assert a.is_contiguous(memory_format=torch.channels_last)
    (a * b).sum().backward()
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


def _tuple(name: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(getattr(autograd, name)(tensors))


def test_lazy_conjugates_are_accepted() -> None:
    x = [torch.randn(3, dtype=torch.complex128, requires_grad=True) for _ in range(2)]
    y = autograd.all_reduce([x[0].conj(), x[1]])
    torch.testing.assert_close(y[0], x[0].conj() + x[1])
    assert gradcheck(lambda a, b: _tuple("all_gather", a.conj(), b.conj().imag + 0j), x)


def test_zero_tensors_without_memory_are_accepted() -> None:
    zeros = torch._efficientzerotensor((2,))
    assert autograd.all_gather([zeros, torch.ones(2)])[0].tolist() == [0, 0, 1, 1]


def test_function_transforms() -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        a, b = autograd.all_gather([x * x, y * y], dim=-1)
        return (a * b).sum()  # x ** 4 + y ** 4

    x, y, many = torch.randn(3, 2), torch.randn(3, 2), torch.randn(5, 3, 2)
    torch.testing.assert_close(torch.func.grad(loss)(x, y), 4 * x**3)
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss), (0, None))(many, y), 4 * many**3)
    hessian = torch.func.hessian(loss)(x, y).reshape(6, 6)
    torch.testing.assert_close(hessian, torch.diag(12 * x.flatten() ** 2))
    extreme = torch.func.grad(lambda x: autograd.all_reduce([x, y], "max")[1].sum())(x)
    assert torch.equal(extreme, (x > y).float())


@pytest.mark.parametrize("name", ["reduce_scatter", "all_to_all", "all_gather", "all_reduce"])
@pytest.mark.parametrize("dim", [0, 1])
def test_vmap(name: str, dim: int) -> None:
    options = {} if name == "all_reduce" else {"dim": dim}
    call = partial(getattr(autograd, name), **options)
    many, y = torch.randn(3, 5, 2), torch.randn(3, 2)
    got = torch.vmap(lambda x, y: call([x, y]), (1, None))(many, y)
    each = [call([x, y]) for x in many.unbind(1)]
    for rank, stacked in enumerate(got):
        torch.testing.assert_close(stacked, torch.stack([ranks[rank] for ranks in each]))


@pytest.mark.parametrize("op", ["max", "prod"])
def test_unsupported_transforms_raise(op: str) -> None:
    def call(x: Tensor) -> Tensor:
        return autograd.all_reduce([x, x.detach() + 1], op)[0]

    x = torch.randn(3)
    with pytest.raises(RuntimeError, match="vmap"):
        torch.vmap(call)(x)
    with pytest.raises((RuntimeError, NotImplementedError), match="jvp"):
        torch.func.jvp(call, (x,), (x,))


def test_max_shares_its_gradient_among_equal_ranks_and_keeps_nan() -> None:
    x = [torch.tensor([1.0, 2.0, float("nan")], requires_grad=True) for _ in range(2)]
    with torch.no_grad():
        x[1][1] = 3.0
    y = autograd.all_reduce(x, "max")
    torch.autograd.backward([y[0].sum(), y[1].sum()])
    assert x[0].grad.tolist() == [1, 0, 1]
    assert x[1].grad.tolist() == [1, 2, 1]


def test_gradient_of_a_product_with_zeros() -> None:
    x = [torch.tensor([0.0, 0.0, 3.0], requires_grad=True) for _ in range(2)]
    with torch.no_grad():
        x[1][0] = 5.0
    autograd.all_reduce(x, "prod")[0].sum().backward()
    assert [t.grad.tolist() for t in x] == [[5, 0, 3], [0, 0, 3]]


# --- refusals -------------------------------------------------------------------------------------

X = torch.zeros(4, 2)
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no list": (lambda: autograd.all_reduce(X), TypeError, "tensors is a Tensor.*list"),
    "empty": (lambda: autograd.all_gather([]), ValueError, "empty"),
    "an array": (lambda: autograd.all_reduce([X.numpy()]), TypeError, r"\[0\] is a ndarray"),
    "no tensor": (lambda: autograd.scatter(3, "cpu"), TypeError, "int.*torch.Tensor"),
    "shapes": (lambda: autograd.all_reduce([X, X[:2]]), ValueError, r"\[1\].*same shape"),
    "dims": (lambda: autograd.all_gather([X, X[0]]), ValueError, "number of dimensions"),
    "dtypes": (lambda: autograd.reduce([X, X.double()]), ValueError, "same dtype"),
    "dim": (lambda: autograd.gather([X, X], dim=2), ValueError, "dim is 2.*-2 to 1"),
    "dim of a kind": (lambda: autograd.gather([X], dim=0.0), TypeError, "dim is a float"),
    "scalars": (lambda: autograd.all_gather([X.sum()] * 2), ValueError, r"reshape\(1\)"),
    "src": (lambda: autograd.broadcast([X, X], src=2), ValueError, "src is 2.*0 to 1"),
    "dst": (lambda: autograd.reduce([X, X], dst=True), TypeError, "dst is a bool"),
    "bits": (lambda: autograd.all_reduce([X], "bxor"), ValueError, "bxor.*no gradient.*sum, avg"),
    "a torch op": (lambda: autograd.all_reduce([X], dist.ReduceOp.BOR), ValueError, "no gradient"),
    "max of reduce": (lambda: autograd.reduce([X], op="max"), ValueError, "all_reduce has 'max'"),
    "max of complex": (lambda: autograd.all_reduce([X + 0j], "max"), TypeError, "max"),
    "two devices": (lambda: autograd.copy(X, "cpu*2"), ValueError, "2 devices; pass one"),
    "a device": (lambda: autograd.copy(X, "toaster"), ValueError, "toaster"),
    "sizes": (
        lambda: autograd.scatter(X, "cpu*2", chunk_sizes=[1, 2]), ValueError, "chunk_sizes",
    ),
    "splits": (
        lambda: autograd.all_to_all([X, X], split_sizes=[[1, 3], [1, 1]]), ValueError, "split_s",
    ),
    "no splits": (lambda: autograd.all_to_all([X], split_sizes=4), TypeError, "is a int"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_invalid_arguments_raise(what: str) -> None:
    call, error, message = REFUSED[what]
    with pytest.raises(error, match=f"(?s){message}"):
        call()


def test_ops_of_torch_distributed_are_accepted() -> None:
    assert autograd.all_reduce([X + 1, X + 3], dist.ReduceOp.AVG)[0][0, 0] == 2


def test_integers_pass_without_gradients() -> None:
    labels = [torch.tensor([1, 2]), torch.tensor([3])]
    assert autograd.gather(labels).tolist() == [1, 2, 3]
