"""The training step: results as on one device with the whole batch, and the same bits every way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint
from train_cases import (
    CLASSES,
    CPU,
    FEATURES,
    batches,
    difference,
    perceptron,
    replicas_of,
    same_bits,
    same_in_graphs,
)

from pycollect import threads
from pycollect.train import (
    ReplicaTrainer,
    reduce_gradients_naive,
    resnet18,
    sgd_factory,
    summed_cross_entropy,
)
from pycollect.train.shares import shares_of

UNEVEN = (16, 16, 7, 3, 1, 16)  # a batch of 1 leaves all ranks but one idle
MOMENTUM = partial(SGD, lr=0.3, momentum=0.9, weight_decay=1e-3)


def unchanged(step: int, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    pass


def frozen() -> nn.Module:
    module = perceptron()
    module.get_submodule("0").requires_grad_(False)
    return module


def thawed_between(step: int, modules: Sequence[nn.Module], _: Any) -> None:
    for module in modules:
        module.get_submodule("0").requires_grad_(step in (2, 3, 4))


def other_rates(step: int, _: Any, optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        rate = optimizer.param_groups[0]["lr"]  # compiled steps make it a tensor meanwhile
        assert step == 0 or (isinstance(rate, float) and rate == 0.3 / step)
        optimizer.param_groups[0]["lr"] = 0.3 / (1 + step)


@dataclass(frozen=True)
class Case:
    """How a module is trained."""

    world: int = 2
    module: Callable[[], nn.Module] = perceptron
    sizes: Sequence[int] = UNEVEN
    weights: Sequence[Sequence[float]] = ()  # of the ranks, for the steps in turn
    optimizer: Callable[..., Optimizer] = MOMENTUM
    loss: Callable[[Tensor, Tensor], Tensor] = summed_cross_entropy
    before: Callable[..., None] = unchanged  # called before each step
    options: dict[str, Any] = field(default_factory=dict)
    in_group: bool = False  # ranks are threads of a group
    whole: bool = True  # one device with the whole batch trains the same
    exact: bool = True  # other ways have the same bits

    def __str__(self) -> str:
        return " ".join([str(self.world), "group" if self.in_group else "ranks", *self.options])

    def data(self) -> list[tuple[Tensor, Tensor]]:
        dtype = next(self.module().parameters()).dtype
        return [(X.to(dtype), y) for X, y in batches(self.sizes)]

    def shares(self, step: int, n: int) -> list[int]:
        even = [1.0] * self.world
        return shares_of(n, self.weights[step % len(self.weights)] if self.weights else even)


class Partly(nn.Module):
    """Uses one layer only for examples of one kind, and another layer never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.rarely, self.never = (nn.Linear(FEATURES, CLASSES) for _ in "abc")

    def forward(self, X: Tensor) -> Tensor:
        out, few = self.always(X), X[:, :1] > 0.5
        return torch.where(few, self.rarely(X), out) if few.any() else out


class Twice(nn.Module):
    """Uses one layer twice, by a second name or in a checkpoint."""

    def __init__(self, **how: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Linear(FEATURES, FEATURES, bias=bias) for bias in (True, False))
        self.b.weight = self.a.weight
        self.out, self.how = nn.Linear(FEATURES, CLASSES), how

    def forward(self, X: Tensor) -> Any:
        hidden = self.a(X.requires_grad_()).tanh()
        return self.out(checkpoint(self.a, hidden, **self.how) if self.how else self.b(hidden))


class Mixed(nn.Module):
    """Has a layer that is not used, one that is frozen, buffers, two parameters with the same
    gradient in the same memory, and one with an expanded gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(FEATURES)) for _ in range(3))
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.norm = nn.BatchNorm1d(FEATURES)

    def forward(self, X: Tensor) -> Any:
        return self.net(self.norm(self.frozen(X)) + (self.a + self.b)) + self.c.sum()


def layers(*made: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(make() for make in made)).to(dtype)


def channels_last():
    pairs, conv = partial(nn.Unflatten, 1, (2, 1, 3)), partial(nn.Conv2d, 2, 4, (1, 2))
    return layers(pairs, conv, nn.Flatten, OUT).to(memory_format=torch.channels_last)


def slow(case):
    return pytest.param(case, marks=pytest.mark.slow)


NORM, OUT = partial(nn.BatchNorm1d, 8), partial(nn.Linear, 8, CLASSES)
normed = partial(layers, partial(nn.Linear, FEATURES, 8), NORM, nn.Tanh, OUT, dtype=torch.float64)
images = partial(nn.Unflatten, 1, (1, 2, 3))
chapters = partial(layers, images, partial(resnet18, in_channels=1, num_classes=CLASSES))
dropped = partial(layers, partial(nn.Linear, FEATURES, 8), nn.Dropout, OUT)
smoothed = partial(F.cross_entropy, reduction="sum", label_smoothing=0.3)
WEIGHTS = (((7, 0, 3),), ((0, 1),), ((1, 1), (0, 1)))
SYNC = {"sync_batchnorm": True}
EAGER = {"compile": "aot_eager"}

CASES = [
    *(Case(world) for world in (1, 2, 3, 4)),
    *(Case(len(weights[0]), weights=weights) for weights in WEIGHTS),
    *(Case(world, options={"microbatch": m}) for world in (1, 2, 3) for m in (1, 3, 100)),
    *(Case(3, options={"bucket_bytes": size}) for size in (1, 700)),
    Case(options={"bucket_bytes": 1, "microbatch": 5, "reduction": reduce_gradients_naive}),
    Case(options={"exact_times": True, "overlap": False}),
    Case(options={"strict": True, "microbatch": 4}, sizes=(8, 12)),
    Case(2, frozen, before=thawed_between, options={"bucket_bytes": 1, "microbatch": 5}),
    Case(before=other_rates),
    *(Case(3, make, options={"bucket_bytes": 1}) for make in (Partly, Twice, channels_last)),
    Case(3, partial(Twice, use_reentrant=False), options={"bucket_bytes": 1, "microbatch": 5}),
    Case(2, partial(Twice, use_reentrant=True), options={"overlap": False}),
    Case(optimizer=partial(AdamW, lr=0.01, eps=1e-3)),
    Case(optimizer=sgd_factory(0.3, momentum=0.9)),
    Case(loss=smoothed),
    Case(3, Mixed, sizes=(12, 12), whole=False),
    Case(2, chapters, sizes=(4, 5), whole=False),
    Case(3, dropped, options={"seed": 5}, whole=False),
    Case(3, in_group=True, weights=WEIGHTS[0], options={"bucket_bytes": 1}),
    Case(3, Partly, in_group=True, options={"bucket_bytes": 1}),
    Case(3, dropped, in_group=True, options={"seed": 5}, whole=False),
    Case(3, normed, sizes=(9, 9, 9), in_group=True, options=SYNC | {"bucket_bytes": 1}),
    Case(3, normed, sizes=(9, 9, 9), in_group=True, options=SYNC, weights=WEIGHTS[0]),
    Case(1, sizes=(12, 12, 12, 7, 12), options=EAGER),
    Case(3, Mixed, sizes=(12, 12, 12, 7, 12), options=EAGER, whole=False),
    Case(options=EAGER | {"reduction": reduce_gradients_naive}, sizes=(8, 8, 8)),
    # Graphs have step numbers in float32, and fused optimizers round differently.
    Case(optimizer=partial(AdamW, lr=0.01, eps=1e-3), options=EAGER, sizes=[8] * 4, exact=False),
    Case(optimizer=partial(MOMENTUM, fused=True), options=EAGER, sizes=[8] * 4, exact=False),
    slow(Case(optimizer=partial(Adagrad, lr=0.01), options=EAGER, sizes=[8] * 4, exact=False)),
    slow(Case(weights=WEIGHTS[2], sizes=(9, 9, 9, 9, 1), options=EAGER)),
    slow(Case(2, frozen, before=thawed_between, options=EAGER, sizes=[8] * 7)),
    slow(Case(before=other_rates, options=EAGER, sizes=[8] * 12, exact=False)),
]


def on_one_device(case: Case) -> tuple[nn.Module, list[float]]:
    """The same training in plain torch, on the mean loss of whole batches."""
    module = case.module()
    optimizer = case.optimizer(list(module.parameters()))
    losses = []
    for step, (X, y) in enumerate(case.data()):
        case.before(step, [module], [optimizer])
        optimizer.zero_grad()
        loss = case.loss(module(X), y)
        (loss / len(X)).backward()
        optimizer.step()
        losses.append(loss.item())
    return module, losses


def replicas(
    case: Case, rank: int | None = None, again: bool = False, **others: Any
) -> list[tuple[nn.Module, list[float]]]:
    """The module and the losses of every rank, or of one of a group.

    `again` gives shards instead of batches, and goes on from a stored state after two steps.
    """
    here = slice(None) if rank is None else slice(rank, rank + 1)
    module, world = case.module(), len(range(case.world)[here])
    options = {"optimizer": case.optimizer, "loss": case.loss, **case.options, **others}
    one = ReplicaTrainer(module, [CPU] * world, **options)
    losses = []
    for step, (X, y) in enumerate(case.data()):
        case.before(step, one.modules, one.optimizers)
        shares = case.shares(step, len(X))
        # Copies: some of torch's kernels have other bits at another alignment.
        shards = [[part.clone() for part in whole.split(shares)[here]] for whole in (X, y)]
        if again:
            found = one.step_on_shards(*shards, shares=shares)
        else:
            given = shares if case.weights or rank is not None else None
            found = one.step(*map(torch.cat, shards), shares=given)
        losses.append([*map(float, found)])
        assert all(share or x == 0 for x, share in zip(losses[-1], shares[here], strict=True))
        if again and step == 1:
            state = copy.deepcopy(one.state_dict())
            one = ReplicaTrainer(case.module(), [CPU] * world, **options)
            one.load_state_dict(state)
    assert same_bits(module, case.module()), "the module itself has changed"
    return list(zip(one.modules, map(list, zip(*losses, strict=True)), strict=True))


def in_group(case: Case, again: bool = False, **others: Any) -> list[tuple[nn.Module, list[float]]]:
    def run(rank: int, world: int) -> Any:
        return replicas(case, rank, again, group=dist.group.WORLD, **others)

    return [mine for found in threads.launch(run, case.world) for mine in found]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_is_that_of_one_device_and_has_the_same_bits_every_way(case: Case) -> None:
    torch._dynamo.reset()
    found = in_group(case) if case.in_group else replicas(case)
    simple: dict[str, Any] = {"overlap": False, "exact_times": False, "compile": False}
    if "sync_batchnorm" in case.options:
        again = in_group(case, True, **simple)
    else:
        again = replicas(case, None, True, reduction=reduce_gradients_naive, **simple)
    (module, _), begun = found[0], case.module()
    same = same_in_graphs if "compile" in case.options else same_bits
    for (mine, losses), (theirs, wanted) in zip(found, again, strict=True):
        assert same(mine, theirs) if case.exact else difference(mine, theirs) < 1e-5
        torch.testing.assert_close(losses, wanted, rtol=1e-6, atol=1e-6)
        assert difference(mine, module) == 0 < 0.01 < difference(mine, begun)
    if case.whole:
        one, wanted = on_one_device(case)
        tolerance = 1e-5 if next(one.parameters()).dtype == torch.float32 else 1e-10
        torch.testing.assert_close(module.state_dict(), one.state_dict(), rtol=0, atol=tolerance)
        sums = [sum(of_step) for of_step in zip(*(losses for _, losses in found), strict=True)]
        torch.testing.assert_close(sums, wanted, rtol=1e-4, atol=1e-4)
        for p, q in zip(module.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_momentum_of_narrow_floats(dtype: torch.dtype) -> None:
    """Of 16 elements or more, which torch's fused SGD computes wrongly."""
    param, wide = (nn.Parameter(torch.ones(100, dtype=t)) for t in (dtype, torch.float64))
    made = [sgd_factory(0.1, momentum=0.9)([p]) for p in (param, wide)]
    for step in range(4):
        for p, optimizer in zip((param, wide), made, strict=True):
            p.grad = torch.full_like(p, 0.25 * (step + 1))
            optimizer.step()
    torch.testing.assert_close(param.double(), wide, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("shares", [[4, 4, 4], [12, 0, 0], [6, 0, 6]])
def test_a_joint_backward_pass_of_several_gpus_has_the_same_bits(shares):
    in_turn, joint = (replicas_of(perceptron(), 3, bucket_bytes=1) for _ in "ab")
    assert not joint._joint
    joint._joint = True
    for each in (in_turn, joint):
        each.step(*batches([12])[0], shares=shares)
    assert all(map(same_bits, in_turn.modules, joint.modules))


def test_ranks_draw_numbers_of_their_own_with_a_seed_and_torchs_without():
    X, y = torch.ones(6, FEATURES), torch.zeros(6).long()
    *seeded, without = (replicas_of(dropped(), 2, seed=seed) for seed in (1, 1, 2, None))
    state = torch.get_rng_state()
    first, again, other = (each.step(X, y) for each in seeded)
    assert first == again
    assert len({*map(float, first), *map(float, other)}) == 4
    assert torch.equal(torch.get_rng_state(), state)
    without.step(X, y)
    assert not torch.equal(torch.get_rng_state(), state)


# --- refusals -------------------------------------------------------------------------------------


def without_gradients(mode):
    def step(r, X, y):
        with mode():
            r.step(X, y)

    return step


def of(module, world=2, **options):
    def step(_, X, y):
        replicas = replicas_of(module, world, **options)
        try:
            replicas.step(X, y)
        finally:
            assert same_bits(replicas.modules[0], module)

    return step


BAG = nn.Sequential(nn.EmbeddingBag(9, CLASSES, sparse=True, mode="sum"))
SPARSE = "a gradient is sparse: make the layer with sparse=False"
GRAD = r"call it outside of torch\.no_grad"
LOADED = "the state is for 2 ranks, and there are 3"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r, X, y: r.step(X[:0], y[:0]), "at least one example"),
        (lambda r, X, y: r.step(X, y[:4]), "7 images, 4 labels"),
        (lambda r, X, y: r.step(X, y, shares=[1, 1]), r"shares \[1, 1\] must .* add up to 7"),
        (lambda r, X, y: r.step(X, y, shares=[8, -1]), r"shares \[8, -1\] must be at least 0"),
        (lambda r, X, y: r.step(X, y, shares=[7]), "one share per rank: 1 for 2"),
        (lambda r, X, y: r.step_on_shards([X], [y]), "one shard for each rank"),
        (
            lambda r, X, y: r.step_on_shards(X.split([3, 4]), y.split([4, 3])),
            "one label per example",
        ),
        (
            lambda r, X, y: r.step_on_shards(X.split(4), y.split(4), shares=[3, 4]),
            r"the shares \[3, 4\] are not those of the shards, \[4, 3\]",
        ),
        (without_gradients(torch.no_grad), GRAD),
        (without_gradients(torch.inference_mode), GRAD),
        (
            of(perceptron(), strict=True),
            "batch size must be divisible by the number of devices: 7 examples on 2",
        ),
        (
            of(perceptron(), 1, strict=True, microbatch=4),
            "batch size must be divisible by the microbatch size: 7 examples in .* of 4",
        ),
        (of(perceptron(), microbatch=0), "a microbatch must have at least 1 example, not 0"),
        (of(perceptron(), compile=True, sync_batchnorm=True), "statistics .* is not one graph"),
        (of(perceptron(), shards=3), "3 shards .* 2 ranks, a power of two for each: 1, 3 can"),
        (of(perceptron(), shards=4, microbatch=2), "shards exclude microbatch, compile and"),
        (of(perceptron(), shards=4, reduction=reduce_gradients_naive), "and another reduction"),
        (
            lambda r, X, y: replicas_of(perceptron(), 2, shards=4).load_state_dict(r.state_dict()),
            "the state is for 2 shards, and there are 4",
        ),
        (
            lambda r, X, y: replicas_of(perceptron(), 2, shards=4).step(X, y, shares=[4, 3]),
            "there must be one share per shard: 2 for 4",
        ),
        (lambda r, X, y: of(BAG, shards=4)(r, X.abs().long(), y), SPARSE),
        (of(perceptron(), bucket_bytes=0), "a bucket must have at least 1 byte, not 0"),
        (of(perceptron().requires_grad_(False)), "nothing to train"),
        (lambda r, X, y: of(BAG)(r, X.abs().long(), y), SPARSE),
        (lambda r, X, y: of(BAG, overlap=False)(r, X.abs().long(), y), SPARSE),
        (
            of(Twice(use_reentrant=True), bucket_bytes=1),
            "use_reentrant=False, or switch the overlap off",
        ),
        (lambda r, X, y: replicas_of(perceptron(), 3).load_state_dict(r.state_dict()), LOADED),
    ],
)
def test_refusals_change_nothing(call, message):
    replicas = replicas_of(perceptron(), 2)
    with pytest.raises((ValueError, RuntimeError), match=message):
        call(replicas, *batches([7])[0])
    assert same_bits(replicas.modules[0], perceptron())
