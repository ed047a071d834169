"""Batch normalisation over all ranks equals the whole batch's: outputs, gradients, statistics.

The reference is nn.BatchNorm on the concatenated batch, in float64 unless stated otherwise.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import Pools, RankContext
from sites import HOSTS, not_on, slow_on_processes
from torch import Tensor, nn
from train_cases import same_bits

from pycollect import threads
from pycollect.train import RunResult, SyncBatchNorm, convert_sync_batchnorm, train

KINDS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
EXTENTS = {0: (), 1: (5,), 2: (5, 3), 3: (2, 3, 4)}
SHARES = ([3, 2], [4], [1, 4, 2], [0, 3], [5, 0, 0, 1], [1, 1])

pytestmark = [not_on(HOSTS, "a layer calls all_reduce, whose bits are tested there")]


def prepared(layer: nn.Module) -> nn.Module:
    """Replace the initial ones and zeros of the parameters, which would hide mistakes."""
    torch.manual_seed(1)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def stepped(module: nn.Module, X: Tensor, factor: Tensor, steps: int) -> dict[str, Any]:
    """Run steps on x, x + 1, ...; return the last output and gradients, and all statistics."""
    for step in range(steps):
        x = (X + step).detach().requires_grad_()
        module.zero_grad()
        y = module(x)
        (y * factor).sum().backward()  # a plain sum has zero gradients here
    grads = {f"d {n}": p.grad for n, p in module.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **grads, **dict(module.named_buffers())}


def on_rank(
    rank: int, world: int, module: nn.Module, shares: list[int], X: Tensor, factor: Tensor, n: int
) -> dict[str, Any]:
    mine = convert_sync_batchnorm(copy.deepcopy(module))
    return stepped(mine, X.split(shares)[rank], factor.split(shares)[rank], n)


def assert_like_one(
    found: Sequence[dict[str, Any]], module: nn.Module, X: Tensor, factor: Tensor, steps: int
) -> None:
    one = stepped(module, X, factor, steps)
    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
    for name, value in one.items():
        mine = [rank[name] for rank in found]
        if name in ("y", "dx"):
            close(torch.cat(mine), value)
        elif name.startswith("d "):
            close(torch.stack(mine).sum(0), value)
        else:
            close(mine[0], value)
            assert all(torch.equal(m, mine[0]) for m in mine)


def batch(n: int, *shape: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    X = 3 + 2 * torch.randn(n, *shape, dtype=torch.float64)
    return X, torch.randn_like(X)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4),
        nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3),
    ).double()  # fmt: skip


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("dims", [0, 1, 2, 3])
def test_as_one_layer_on_the_whole_batch(dims: int, shares: list[int]) -> None:
    X, factor = batch(sum(shares), 4, *EXTENTS[dims])
    layer = prepared(KINDS[dims or 1](4).double())
    found = threads.launch(on_rank, len(shares), layer, shares, X, factor, 2)
    assert_like_one(found, layer, X, factor, 2)


@pytest.mark.parametrize("shares", [[3, 4], [0, 7], [2, 0, 5]], ids=str)
def test_a_network_as_one_on_the_whole_batch(shares: list[int]) -> None:
    torch.manual_seed(3)
    module, (X, factor) = net(), batch(7, 1, 8, 8)
    factor = factor.flatten(1)[:, :3]
    found = threads.launch(on_rank, len(shares), module, shares, X, factor, 1)
    assert_like_one(found, module, X, factor, 1)


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
def test_every_option(options: dict[str, Any]) -> None:
    layer, (X, factor) = prepared(nn.BatchNorm2d(3, **options).double()), batch(6, 3, 4, 2)
    found = threads.launch(on_rank, 3, layer, [4, 0, 2], X, factor, 3)
    assert_like_one(found, layer, X, factor, 3)


def test_channels_last_stays() -> None:
    layer = prepared(nn.BatchNorm2d(4).double())
    X, factor = (t.to(memory_format=torch.channels_last) for t in batch(5, 4, 6, 3))
    found = threads.launch(on_rank, 2, layer, [3, 2], X, factor, 2)
    assert_like_one(found, layer, X, factor, 2)
    assert all(rank["y"].is_contiguous(memory_format=torch.channels_last) for rank in found)


def in_group(me: RankContext, shares: list[int]) -> dict[str, Any]:
    layer = prepared(nn.BatchNorm2d(4).double())
    (mine, factor) = (t.split(shares)[me.rank] for t in batch(sum(shares), 4, 3, 2))
    return stepped(convert_sync_batchnorm(layer, dist.group.WORLD), mine, factor, 2)


@slow_on_processes
@pytest.mark.parametrize("backend", ["pycollect", "gloo"])
@pytest.mark.parametrize("shares", [[3, 2], [0, 3]], ids=str)
def test_any_backend(pools: Pools, backend: str, shares: list[int]) -> None:
    found = pools(2, backend=backend).run(in_group, shares)
    layer = prepared(nn.BatchNorm2d(4).double())
    assert_like_one(found, layer, *batch(sum(shares), 4, 3, 2), 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide_parameters", [True, False])
def test_narrow_inputs_have_statistics_in_float32(
    dtype: torch.dtype, wide_parameters: bool
) -> None:
    layer = prepared(nn.BatchNorm2d(4))
    if not wide_parameters:
        layer = layer.to(dtype)
    X = (100 + torch.randn(64, 4, 8, 8)).to(dtype)
    found = threads.launch(on_rank, 2, layer, [40, 24], X, torch.ones_like(X), 1)
    assert all(rank["y"].dtype == rank["dx"].dtype == dtype for rank in found)
    assert all(rank["dx"].isfinite().all() for rank in found)
    one = copy.deepcopy(layer).double()
    expected = one(X.double()).detach()
    step = torch.finfo(dtype).eps * float(expected.abs().max())
    got = torch.cat([rank["y"] for rank in found]).double()
    torch.testing.assert_close(got, expected, rtol=0, atol=2 * step)
    if wide_parameters:
        close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
        close(found[1]["running_var"], one.running_var.float())


def test_far_from_zero_no_digits_are_lost() -> None:
    layer, X = nn.BatchNorm2d(2), 1e4 + torch.randn(256, 2, 8, 8)
    found = threads.launch(on_rank, 2, layer, [200, 56], X, X, 1)
    expected = nn.BatchNorm2d(2).double()(X.double())
    got = torch.cat([rank["y"] for rank in found]).double()
    torch.testing.assert_close(got, expected, rtol=0, atol=5e-3)


def test_without_gradients_and_in_evaluation() -> None:
    """Under no_grad the statistics are updated; evaluation needs no group and changes nothing."""
    layer, (X, _) = prepared(nn.BatchNorm2d(3).double()), batch(6, 3, 2, 2)

    def run(rank: int, world: int) -> nn.Module:
        mine = convert_sync_batchnorm(copy.deepcopy(layer))
        with torch.no_grad():
            assert not mine(X.split([2, 4])[rank]).requires_grad
        return mine

    ranks = threads.launch(run, 2)
    with torch.no_grad():
        layer(X)
    torch.testing.assert_close(ranks[1].running_var, layer.running_var)
    layer.load_state_dict(kept := copy.deepcopy(ranks[1].state_dict()))
    again = pickle.loads(pickle.dumps(ranks[1])).eval()  # it holds no group
    assert torch.equal(again(X), layer.eval()(X))
    assert all(torch.equal(kept[name], v) for name, v in again.state_dict().items())


def test_shared_layers_parameters_and_hooks_stay() -> None:
    def run(rank: int, world: int) -> None:
        layer = nn.BatchNorm1d(2)
        module: Any = nn.Sequential(layer, nn.Linear(2, 2), layer)
        state, weight, called = list(module.state_dict()), layer.weight, []
        layer.register_forward_hook(lambda *_: called.append(1))
        refers = module.register_forward_hook(partial(lambda norm, *_: norm, layer))
        names = module.names = {"norm": layer}
        converted = convert_sync_batchnorm(module, dist.group.WORLD)
        assert converted is module
        assert isinstance(module[0], SyncBatchNorm)
        assert module[0] is module[2] is names["norm"]
        assert module.names is names
        refers.remove()
        assert not module._forward_hooks
        assert module[0].weight is weight
        module(torch.randn(3, 2))
        assert len(called) == 2
        assert list(module.state_dict()) == state
        assert convert_sync_batchnorm(module)[0] is module[0]
        assert isinstance(copy.deepcopy(module)[0], SyncBatchNorm)

    threads.launch(run, 2)


class Own(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return input


@pytest.mark.parametrize(
    ("module", "X", "message"),
    [
        (nn.Sequential(Own(2)), None, "0 is a Own; only nn.BatchNorm1d"),
        (nn.SyncBatchNorm(2), None, "the module is a SyncBatchNorm"),
        (nn.LazyBatchNorm1d(), None, "LazyBatchNorm1d"),
        (nn.BatchNorm1d(3), [torch.randn(1, 3), torch.randn(0, 3)], "more than 1 value.* are 1;"),
        (nn.BatchNorm1d(3), [torch.randn(0, 3)] * 2, "more than 1 value.*there are 0;"),
        (nn.BatchNorm2d(3), [torch.randn(4, 3)] * 2, "expected 4D input"),
        (nn.BatchNorm1d(3), [torch.randn(3)] * 2, "expected 2D or 3D input"),
    ],
)
def test_all_ranks_refuse(module: nn.Module, X: Any, message: str) -> None:
    def run(rank: int, world: int) -> bool:
        with pytest.raises(ValueError, match=message):
            convert_sync_batchnorm(copy.deepcopy(module) if X else module)(X and X[rank])
        return True

    assert threads.launch(run, 2) == [True, True]


def test_it_needs_a_group() -> None:
    with pytest.raises(ValueError, match="process group has not been initialized"):
        convert_sync_batchnorm(nn.BatchNorm1d(2))


# --- runs of one process --------------------------------------------------------------------------


class Drawing:
    """A data set that draws random numbers, and notes them."""

    classes, drawn = ("a", "b"), []

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        self.drawn.append(float(torch.rand(())))
        return torch.arange(6.0) + i, i % 2


def run(**options: Any) -> RunResult:
    torch.manual_seed(4)
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))
    chosen = {"model": model, "data": Drawing(), "epochs": 1, "quiet": True, **options}
    return train("cpu*3", 8, 0.05, sync_batchnorm=True, **chosen)


def test_a_run_has_a_thread_for_each_rank() -> None:
    """All replicas are returned; the caller's autocast applies; ranks draw different numbers."""
    result = run()
    assert len(set(Drawing.drawn[-24:])) > 20
    assert len(result.modules) == 3
    assert all(same_bits(mine, result.module) for mine in result.modules)
    with torch.autocast("cpu", torch.bfloat16):
        assert 1e-6 < abs(run().losses[-1] - result.losses[-1]) < 0.1
    with pytest.raises(RuntimeError, match=r"over 3 ranks needs their group; .*after eval\(\)"):
        result.module(torch.zeros(4, 6))
    assert result.module.eval()(torch.zeros(4, 6)).shape == (4, 2)


def test_what_a_run_with_threads_cannot_do() -> None:
    with pytest.raises(ValueError, match="reduction 'naive' sums over replicas of one"):
        run(reduce="naive")
    with torch.no_grad(), pytest.raises(ValueError, match="gradients, which is switched off"):
        run()
    with pytest.raises(ValueError, match="this thread is a rank itself: train with a backend"):
        threads.launch(lambda rank, world: run(), 2)
