"""Batch normalisation over all ranks equals the whole batch's: outputs, gradients, statistics.

The reference is nn.BatchNorm on the concatenated batch, in float64 unless stated otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from pycollect.train import SyncBatchNorm, convert_sync_batchnorm, run_lockstep

KINDS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
EXTENTS = {1: (5,), 2: (5, 3), 3: (2, 3, 4)}
SHARES = ([3, 2], [4], [1, 4, 2], [0, 3], [5, 0, 0, 1], [1, 1])


def in_lockstep(layers: Sequence[nn.Module], shards: Sequence[Tensor]) -> list[Tensor]:
    runs: list[Callable[[], Tensor]] = [
        partial(layer, x) for layer, x in zip(layers, shards, strict=True)
    ]
    return run_lockstep(runs)


def replicas(layer: nn.Module, world: int) -> list[nn.Module]:
    return convert_sync_batchnorm([copy.deepcopy(layer) for _ in range(world)])


def prepared(layer: nn.Module) -> nn.Module:
    """Replace the initial ones and zeros of the parameters, which would hide mistakes."""
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def assert_like_one(
    layer: nn.Module, shares: Sequence[int], X: Tensor, *, tolerance: float = 1e-10, steps: int = 2
) -> None:
    """Compare several steps of all ranks with the layer on the whole batch."""
    ranks = replicas(layer, len(shares))
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    for step in range(steps):
        whole = (X + step).detach().requires_grad_()
        shards = [s.detach().requires_grad_() for s in whole.split(list(shares))]
        factor = torch.randn_like(X)  # a plain sum has zero gradients here
        expected = layer(whole)
        got = in_lockstep(ranks, shards)
        close(torch.cat(got), expected)
        layer.zero_grad()
        (expected * factor).sum().backward()
        for rank in ranks:
            rank.zero_grad()
        losses = [(y * f).sum() for y, f in zip(got, factor.split(list(shares)), strict=True)]
        torch.autograd.backward(losses)
        close(torch.cat([s.grad for s in shards]), whole.grad)
        for name, parameter in layer.named_parameters():
            grads = [dict(rank.named_parameters())[name].grad for rank in ranks]
            assert all(grad is not None for grad in grads)
            close(torch.stack(grads).sum(0), parameter.grad)
        for name, buffer in layer.named_buffers():
            mine = [dict(rank.named_buffers())[name] for rank in ranks]
            close(mine[0], buffer)
            assert all(torch.equal(m, mine[0]) for m in mine)


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_as_one_layer_on_the_whole_batch(dims: int, shares: list[int]) -> None:
    X = 3 + 2 * torch.randn(sum(shares), 4, *EXTENTS[dims], dtype=torch.float64)
    assert_like_one(prepared(KINDS[dims](4).double()), shares, X)


@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"momentum": None},
        {"momentum": 0.5, "eps": 0.1},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
    ],
    ids=str,
)
def test_every_option(options: dict[str, object]) -> None:
    X = torch.randn(6, 3, 4, 2, dtype=torch.float64)
    layer = prepared(nn.BatchNorm2d(3, **options).double())  # type: ignore[arg-type]
    assert_like_one(layer, [4, 0, 2], X, steps=3)


def test_one_row_of_features_per_rank() -> None:
    X = torch.randn(3, 4, dtype=torch.float64)
    assert_like_one(prepared(nn.BatchNorm1d(4).double()), [1, 1, 1], X)


def test_channels_last_stays() -> None:
    X = torch.randn(5, 4, 6, 3, dtype=torch.float64).to(memory_format=torch.channels_last)
    assert_like_one(prepared(nn.BatchNorm2d(4).double()), [3, 2], X)
    ranks = replicas(nn.BatchNorm2d(4).double(), 2)
    got = in_lockstep(ranks, X.split([3, 2]))
    assert all(y.is_contiguous(memory_format=torch.channels_last) for y in got)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide_parameters", [True, False])
def test_narrow_inputs_have_statistics_in_float32(
    dtype: torch.dtype, wide_parameters: bool
) -> None:
    layer = prepared(nn.BatchNorm2d(4))
    if not wide_parameters:
        layer = layer.to(dtype)
    X = (100 + torch.randn(64, 4, 8, 8)).to(dtype)
    ranks = replicas(layer, 2)
    shards = [s.clone().requires_grad_() for s in X.split([40, 24])]
    got = in_lockstep(ranks, shards)
    assert all(y.dtype == dtype for y in got)
    with torch.no_grad():
        one = copy.deepcopy(layer).double()
        expected = one(X.double())
    step = torch.finfo(dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(torch.cat(got).double(), expected, rtol=0, atol=2 * step)
    torch.autograd.backward([y.float().square().sum() for y in got])
    assert all(s.grad is not None and s.grad.dtype == dtype for s in shards)
    assert all(s.grad.isfinite().all() for s in shards)
    if wide_parameters:
        for rank in ranks:
            torch.testing.assert_close(
                rank.running_var, one.running_var.float(), rtol=1e-5, atol=1e-6
            )


def test_far_from_zero_no_digits_are_lost() -> None:
    X = 1e4 + torch.randn(256, 2, 8, 8)
    got = in_lockstep(replicas(nn.BatchNorm2d(2), 2), X.split([200, 56]))
    expected = nn.BatchNorm2d(2).double()(X.double())
    torch.testing.assert_close(torch.cat(got).double(), expected, rtol=0, atol=5e-3)


def test_evaluation_needs_no_lockstep_and_changes_nothing() -> None:
    layer = prepared(nn.BatchNorm2d(3))
    ranks = replicas(layer, 2)
    in_lockstep(ranks, torch.randn(4, 3, 2, 2).split([2, 2]))
    kept = {name: value.clone() for name, value in ranks[1].state_dict().items()}
    layer.load_state_dict(kept)
    layer.eval()
    X = torch.randn(3, 3, 2, 2)
    assert torch.equal(ranks[1].eval()(X), layer(X))
    assert all(torch.equal(kept[name], v) for name, v in ranks[1].state_dict().items())


def test_under_no_grad_the_statistics_are_updated() -> None:
    ranks, layer = replicas(nn.BatchNorm1d(3).double(), 2), nn.BatchNorm1d(3).double()
    X = torch.randn(6, 3, dtype=torch.float64)
    with torch.no_grad():
        got = in_lockstep(ranks, X.split([2, 4]))
        torch.testing.assert_close(torch.cat(got), layer(X))
    assert not any(y.requires_grad for y in got)
    torch.testing.assert_close(ranks[1].running_var, layer.running_var)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4),
        nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3),
    ).double()  # fmt: skip


@pytest.mark.parametrize("shares", [[3, 4], [0, 7], [2, 0, 5]], ids=str)
def test_a_network_trains_as_one_on_the_whole_batch(shares: list[int]) -> None:
    one = net()
    ranks = [copy.deepcopy(one) for _ in shares]
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (one, *ranks)]
    assert convert_sync_batchnorm(ranks) == ranks
    for _ in range(3):
        X, y = torch.randn(7, 1, 8, 8, dtype=torch.float64), torch.randint(3, (7,))
        total = partial(nn.functional.cross_entropy, reduction="sum")
        for optimizer in optimizers:
            optimizer.zero_grad()
        total(one(X), y).backward()
        scores = in_lockstep(ranks, X.split(shares))
        losses = [total(s, t) for s, t in zip(scores, y.split(shares), strict=True)]
        torch.autograd.backward(losses)
        for parameters in zip(*(rank.parameters() for rank in ranks), strict=True):
            whole = torch.stack([p.grad for p in parameters]).sum(0)
            for p in parameters:
                p.grad.copy_(whole)
        for optimizer in optimizers:
            optimizer.step()
    for mine, theirs in zip(
        ranks[-1].state_dict().values(), one.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_the_state_dict_is_that_of_batch_norm() -> None:
    plain, (converted, _) = net(), convert_sync_batchnorm([net(), net()])
    assert list(plain.state_dict()) == list(converted.state_dict())
    plain.load_state_dict(converted.state_dict())


def test_shared_layers_parameters_and_hooks_stay() -> None:
    def tied() -> nn.Module:
        layer = nn.BatchNorm1d(2)
        return nn.Sequential(layer, nn.Linear(2, 2), layer)

    modules = [tied(), tied()]
    weight, called = modules[0][0].weight, []
    modules[0][0].register_forward_hook(lambda *_: called.append(1))
    refers = modules[0].register_forward_hook(partial(lambda norm, *_: norm, modules[0][0]))
    names = modules[0].names = {"norm": modules[0][0]}
    converted, _ = convert_sync_batchnorm(modules)
    assert converted.names is names
    assert names["norm"] is converted[0]
    refers.remove()
    assert not converted._forward_hooks
    assert converted[0] is converted[2]
    assert isinstance(converted[0], SyncBatchNorm)
    assert converted[0].weight is weight
    in_lockstep(modules, [torch.randn(3, 2)] * 2)
    assert len(called) == 2
    assert convert_sync_batchnorm(modules)[0][0] is converted[0]


def test_outside_of_lockstep_it_refuses() -> None:
    layers = replicas(nn.BatchNorm1d(3), 2)
    with pytest.raises(
        RuntimeError, match=r"over 2 ranks was called outside of run_lockstep.*train\.run_lockstep"
    ):
        layers[0](torch.randn(4, 3))
    with pytest.raises(RuntimeError, match="in a lockstep of 1"):
        in_lockstep(layers[:1], [torch.randn(4, 3)])
    (alone,) = replicas(nn.BatchNorm1d(3), 1)
    X = torch.randn(4, 3)
    torch.testing.assert_close(alone(X), nn.BatchNorm1d(3)(X))


@pytest.mark.parametrize("shares", [[1, 0], [0, 0]], ids=str)
def test_less_than_two_values_are_refused(shares: list[int]) -> None:
    with pytest.raises(ValueError, match=f"more than 1 value.*there are {sum(shares)}"):
        in_lockstep(replicas(nn.BatchNorm1d(3), 2), torch.randn(sum(shares), 3).split(shares))


def test_the_wrong_number_of_dimensions_is_refused() -> None:
    for layer, X in ((nn.BatchNorm2d(3), torch.randn(4, 3)), (nn.BatchNorm1d(3), torch.randn(3))):
        with pytest.raises(ValueError, match=r"expected .*D input"):
            in_lockstep(replicas(layer, 2), [X, X])


def test_a_backward_pass_of_one_rank_alone_is_an_error() -> None:
    shards = [torch.randn(3, 2, requires_grad=True) for _ in range(2)]
    got = in_lockstep(replicas(nn.BatchNorm1d(2), 2), shards)
    got[0].square().sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        got[1].square().sum().backward()


def test_unsupported_modules_are_refused() -> None:
    class Own(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            return input

    same = nn.BatchNorm1d(2)
    for modules, message in (
        ([nn.Sequential(Own(2))], "0 is a Own; only nn.BatchNorm1d"),
        ([nn.SyncBatchNorm(2)], "the module is a SyncBatchNorm"),
        ([nn.LazyBatchNorm1d()], "LazyBatchNorm1d"),
        ([same, same], "one module is shared by several ranks"),
        ([nn.Sequential(same), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(2))], "rank 1 .*alike"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_sync_batchnorm(modules)
