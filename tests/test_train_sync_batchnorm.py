"""Batch normalisation over all ranks equals the whole batch's: outputs, gradients, statistics.

The reference is nn.BatchNorm on the concatenated batch, in float64 unless stated otherwise.
"""

from __future__ import annotations

import copy
import pickle
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

pytestmark = [not_on(HOSTS, "a layer calls all_reduce, whose bits are tested there")]


def prepared(module: nn.Module) -> nn.Module:
    """Replace the initial ones and zeros of the parameters, which would hide mistakes."""
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.double()


def stepped(module: nn.Module, X: Tensor, factor: Tensor, steps: int) -> dict[str, Any]:
    """Run steps on x, x + 1, ..., a pass without gradients, and a copy's evaluation.

    Returns the last output and gradients, the output of the evaluation, and all statistics.
    """
    for step in range(steps):
        x = (X + step).detach().requires_grad_()
        module.zero_grad()
        y = module(x)
        (y * factor).sum().backward()  # a plain sum has zero gradients here
    grads = {f"d {n}": p.grad for n, p in module.named_parameters()}
    with torch.no_grad():
        assert not module(X).requires_grad
        tested = pickle.loads(pickle.dumps(module)).eval()(X)
    return {"y": y.detach(), "dx": x.grad, "z": tested, **grads, **dict(module.named_buffers())}


def on_rank(
    rank: int,
    world: int,
    module: nn.Module,
    shares: list[int],
    X: Tensor,
    factor: Tensor,
    n: int = 3,
) -> dict[str, Any]:
    mine = convert_sync_batchnorm(copy.deepcopy(module))
    return stepped(mine, X.split(shares)[rank], factor.split(shares)[rank], n)


def in_group(me: RankContext, *given: Any) -> dict[str, Any]:
    return on_rank(me.rank, me.world, *given)


def assert_as_one(run: Any, module: nn.Module, shares: list[int], X: Tensor) -> None:
    """Compare the whole batch to ranks, which `run` starts with the arguments of `on_rank`."""
    factor = torch.randn_like(copy.deepcopy(module)(X))
    found = run(module, shares, X, factor)
    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
    for name, value in stepped(module, X, factor, 3).items():
        mine = [rank[name] for rank in found]
        if name in ("y", "dx", "z"):
            close(torch.cat(mine), value)
            assert all(m.stride()[1:] == value.stride()[1:] for m in mine if len(m))
        elif name.startswith("d "):
            close(torch.stack(mine).sum(0), value)
        else:
            close(mine[0], value)
            assert all(torch.equal(m, mine[0]) for m in mine)


def batch(*shape: int) -> Tensor:
    torch.manual_seed(2)
    return 3 + 2 * torch.randn(*shape, dtype=torch.float64)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4),
        nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3),
    )  # fmt: skip


LAYERS = [
    (partial(nn.BatchNorm1d, 4), (4,)),
    (partial(nn.BatchNorm1d, 4), (4, 5)),
    (partial(nn.BatchNorm2d, 4), (4, 5, 3)),
    (partial(nn.BatchNorm3d, 4), (4, 2, 3, 4)),
]
SHARES = ([3, 2], [4], [1, 4, 2], [0, 3], [5, 0, 0, 1], [1, 1])
OPTIONS: list[dict[str, Any]] = [
    {"affine": False},
    {"momentum": None},
    {"momentum": 0.5, "eps": 0.1},
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False},
]


@pytest.mark.parametrize(
    ("make", "shape", "shares"),
    [
        *((*layer, shares) for layer in LAYERS for shares in SHARES),
        *((partial(nn.BatchNorm2d, 3, **options), (3, 4, 2), [4, 0, 2]) for options in OPTIONS),
        *((net, (1, 8, 8), shares) for shares in ([3, 4], [0, 7], [2, 0, 5])),
    ],
)
def test_as_one_on_the_whole_batch(make: Any, shape: tuple[int, ...], shares: list[int]) -> None:
    launch = partial(threads.launch, on_rank, len(shares))
    X = batch(sum(shares), *shape)
    assert_as_one(launch, prepared(make()), shares, X)
    if X.dim() == 4 and make is not net:
        assert_as_one(launch, prepared(make()), shares, X.to(memory_format=torch.channels_last))


@slow_on_processes
@pytest.mark.parametrize("backend", ["pycollect", "gloo"])
@pytest.mark.parametrize("shares", [[3, 2], [0, 3]], ids=str)
def test_any_backend(pools: Pools, backend: str, shares: list[int]) -> None:
    run = partial(pools(2, backend=backend).run, in_group)
    assert_as_one(run, prepared(nn.BatchNorm2d(5)), shares, batch(sum(shares), 5, 3, 2))


HALF = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "parameters", "mean"),
    [(dtype, of, 100) for dtype in HALF for of in (torch.float32, dtype)]
    + [(torch.float32, torch.float32, 1e4)],
)
def test_no_digits_are_lost(dtype: torch.dtype, parameters: torch.dtype, mean: float) -> None:
    """Narrow inputs have statistics in float32; values may be far from zero."""
    layer = prepared(nn.BatchNorm2d(4)).to(parameters)
    X = (mean + torch.randn(64, 4, 8, 8)).to(dtype)
    found = threads.launch(on_rank, 2, layer, [40, 24], X, torch.ones_like(X), 1)
    assert all(rank["y"].dtype == rank["dx"].dtype == dtype for rank in found)
    assert all(rank["dx"].isfinite().all() for rank in found)
    one = stepped(layer.double(), X.double(), torch.ones_like(X), 1)
    got = torch.cat([rank["y"] for rank in found]).double()
    atol = max(2 * torch.finfo(dtype).eps * float(one["y"].abs().max()), 5e-3)
    torch.testing.assert_close(got, one["y"], rtol=0, atol=atol)
    if parameters == torch.float32:
        found_var, wanted = found[1]["running_var"], one["running_var"].float()
        torch.testing.assert_close(found_var, wanted, rtol=1e-5, atol=1e-6)


def test_shared_layers_parameters_and_hooks_stay() -> None:
    def run(rank: int, world: int) -> None:
        layer = nn.BatchNorm1d(2)
        module: Any = nn.Sequential(layer, nn.Linear(2, 2), layer)
        state, weight, called = list(module.state_dict()), layer.weight, []
        layer.register_forward_hook(lambda *_: called.append(1))
        module.names, module.others = {"norm": layer}, [nn.BatchNorm1d(2, affine=False)]
        assert convert_sync_batchnorm(module, dist.group.WORLD) is module
        assert isinstance(layer, SyncBatchNorm)
        assert isinstance(module.others[0], SyncBatchNorm), "a layer that is not registered"
        assert module[0] is module[2] is module.names["norm"] is layer
        assert module[0].weight is weight
        module(torch.randn(3, 2))
        assert len(called) == 2
        assert list(module.state_dict()) == state
        assert convert_sync_batchnorm(module)[0] is layer
        assert isinstance(copy.deepcopy(module)[0], SyncBatchNorm)

    threads.launch(run, 2)


class Own(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return input


def with_another_forward() -> nn.Module:
    module = nn.Sequential(nn.BatchNorm1d(2))
    module[0].forward = lambda input: input
    return module


@pytest.mark.parametrize(
    ("module", "X", "message"),
    [
        (with_another_forward(), None, "0 is a BatchNorm1d with another forward; only"),
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
