"""Data-parallel training of any module: one replica per rank, and their common training step.

Every rank computes a summed loss on its shard of a batch. The gradients are summed over the ranks
and divided by the batch size, and every replica's optimizer takes the same step. A rank without
examples contributes zeros.

All ranks are replicas of one process, or each is a replica in a process of a torch.distributed
group. Replicas of one process run forward and backward in turn: only one has activations in memory,
and on the CPU each has all cores. On several GPUs all run forward before one common backward pass,
which has a thread for each GPU.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pycollect as pc
from pycollect.devices import DeviceSpec

from .compiled_step import CompiledStep, check_graph
from .fixed_shards import (
    OwnShards,
    check_shards,
    in_tree_order,
    reduce_gradients_in_tree_order,
)
from .losses import (
    Loss,
    MakeOptimizer,
    accuracy,
    check_reduction,
    check_scalar,
    check_step,
    summed_cross_entropy,
)
from .module_check import SingleValueCheck, check_parameters, explained
from .module_replication import replicate_module
from .random_states import RankRandomStates
from .reduce import (
    Buckets,
    BucketSum,
    GroupSum,
    ListSum,
    Reduction,
    gathered,
    reduce_gradients_coalesced,
    send_from_rank_0,
)
from .results import StepClock, StepSeconds, is_captured
from .shares import Examples, check_strict, microbatches, parts_of, scatter_batch, shares_of
from .sync_batchnorm import convert_sync_batchnorm

# Default bucket size. About one bucket is still to be reduced when the backward pass ends, so
# buckets are small; but a launch costs a GPU microseconds. LeNet has one bucket, ResNet-18 seven.
BUCKET_BYTES = 4 << 20


class ReplicaTrainer:
    """One replica of a module for every rank, trained on shards of the same batches.

    `module` does not change. There is one rank per device that `pycollect.devices` returns for
    `devices`, and a device may occur several times. `optimizer` makes an optimizer from a list of
    parameters, as `sgd_factory` returns it, and is called once per rank. `loss(output, y)`
    returns the *sum* over a shard's examples, without dimensions and never a mean (default:
    `summed_cross_entropy`). `reduction` sums the gradients over the ranks (default: in one
    collective; see GRADIENT_REDUCTIONS). Each rank has batch statistics of its own, and the model
    takes rank 0's.

    With `shards`, a batch is always divided into that many parts, and a step has the same bits on
    any number of ranks: see `pycollect.train.fixed_shards`. Each rank has equally many, a power of
    two (one rank: any number), which it computes one after the other, before their gradients are
    reduced. `shares` are then those of all shards; a rank's loss is the sum of its shards', in
    float64; buffers, and with a `seed` random states, belong to a shard, and what else a module
    remembers to its rank. `group` becomes another one, in tree order. Excludes `microbatch`,
    `compile`, `reduction`, and synchronised batch statistics unless each shard has a rank.

    `microbatch` is the number of examples of a microbatch over all ranks, at least 1; the gradients
    of the microbatches are accumulated. None, the default, trains on the whole batch at once.
    `overlap` (default: on) reduces gradients in buckets of about `bucket_bytes` (at least 1,
    default 4 MiB) while the backward pass still runs; the bits are the same without. The other
    options are off by default. `sync_batchnorm` takes batch statistics over all ranks of a group.
    `strict` refuses a batch that the number of ranks, or of shards, does not divide. `exact_times`
    waits for the devices wherever time is taken, so the host cannot issue work ahead. `compile`
    runs every step after the first as one graph of torch.compile, by the backend that it names, or
    "inductor" for True, and reduces after the backward pass, whatever `overlap` is. It excludes
    `microbatch`, `sync_batchnorm` and a group. With a `seed` each rank draws from random states of
    its own, as in dropout; without one, and in a compiled step, all draw in turn from torch's.

    With a `group` of torch.distributed, each of its processes (or ranks as threads) has one rank:
    `devices` is this process's device, all begin with rank 0's parameters and buffers and call the
    same methods in the same order, and gradients are summed over the group instead of by
    `reduction`. Over the backend "pycollect" the bits are
    those of replicas in one process.

    `modules`, `parameters` and `optimizers` are lists with an item for each rank of this process.
    A trainer cannot be copied or pickled: another one continues from its `state_dict`. Raises
    ValueError for a module without parameters to train or one that `replicate_module` refuses, a
    loss whose `reduction` is not "sum", an optimizer whose step needs a closure, a device that does
    not exist, several devices for a process of a group, and for batch statistics over several ranks
    without a group.

    >>> from pycollect.train import LeNet, sgd_factory
    >>> replicas = ReplicaTrainer(LeNet(), "cpu*2", optimizer=sgd_factory(0.1))
    >>> len(replicas.step(torch.rand(3, 1, 28, 28), torch.tensor([1, 2, 3])))
    2
    """

    def __init__(
        self,
        module: nn.Module,
        devices: DeviceSpec,
        *,
        optimizer: MakeOptimizer,
        loss: Loss = summed_cross_entropy,
        reduction: Reduction = reduce_gradients_coalesced,
        shards: int | None = None,
        microbatch: int | None = None,
        overlap: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        sync_batchnorm: bool = False,
        strict: bool = False,
        exact_times: bool = False,
        compile: bool | str = False,
        group: dist.ProcessGroup | None = None,
        seed: int | None = None,
    ) -> None:
        self.devices, self.group, self.shards = pc.devices(devices), group, shards
        self.ranks = _ranks_of(self.devices, group)
        self.microbatch, self.strict, self.exact_times = microbatch, strict, exact_times
        self.sync_batchnorm, self.compile = sync_batchnorm, compile
        self._bucket_bytes = bucket_bytes if overlap and not compile and not shards else None
        self.loss, self.reduction = loss, reduction
        self._check_arguments(module, bucket_bytes)
        self.modules = self._replicas(module)
        self._sum = self._make_sum()  # not before: the modules keep the group that the user passed
        self.parameters = [list(mine.parameters()) for mine in self.modules]
        self.optimizers = [check_step(optimizer(list(mine))) for mine in self.parameters]
        self._own = OwnShards(shards, self.world, self.ranks, self.modules)
        self._clock = StepClock(self.devices, self.exact_times)
        self.random_states = self._make_random_states(seed)
        # One joint backward pass uses a thread per GPU; separate passes would serialise the GPUs.
        self._joint = len({device for device in self.devices if device.type == "cuda"}) > 1
        self._single_values = SingleValueCheck(self.modules[0])
        self._buckets = self._make_buckets()
        self._compiled = self._make_compiled()

    @property
    def world(self) -> int:
        """The number of ranks, of all processes."""
        return len(self.devices) if self.group is None else dist.get_world_size(self.group)

    @property
    def seconds(self) -> StepSeconds:
        """The seconds of the parts of the last step."""
        return self._clock.seconds

    def rank_seconds(self) -> list[float]:
        """Return the seconds of each rank's passes in the last step; waits for GPUs."""
        return self._clock.rank_seconds()

    def step(self, X: Tensor, y: Tensor, *, shares: Sequence[int] | None = None) -> list[Tensor]:
        """Train on one batch; return the summed loss of each rank here, on its device.

        X has shape [n, ...] and y [n], on any device; `shares` are the numbers of examples of all
        ranks, even by default. With a group, X and y are this process's part of the batch, and the
        shares must be given, alike in all processes. A loss is a tensor without dimensions; a rank
        without examples has 0. Raises ValueError if X and y differ in length, for shares that do
        not fit them, for a batch without examples or that `strict` forbids, for a shard of one
        example under batch normalisation, for a loss with dimensions, where torch does not record
        gradients, and for a forward pass that changes parameters in place, differently on the ranks
        or in a process of a group.
        """
        self._clock.begin()
        if shares is None and self.group is not None:
            raise ValueError("a process of a group has a part of the batch: pass all ranks' shares")
        shares = shares_of(len(X), [1] * self._own.count) if shares is None else shares
        here = self._own.shares(shares)
        self._check(sum(shares))
        X_shards, y_shards = scatter_batch(X, y, self.devices, here)
        self._clock.end_of("split")
        return self._train(X_shards, y_shards, shares)

    def step_on_shards(
        self, X: Sequence[Tensor], y: Sequence[Tensor], *, shares: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Train on shards that are already on their ranks' devices; return as `step` does.

        `X[i]` has shape [k, ...] and `y[i]` [k], for each rank of this process. With a group the
        `shares` of all ranks must be given; without one they are those of the shards. Raises
        ValueError unless there is one shard of each for every rank, with one label per example, and
        in the cases of `step`.
        """
        self._clock.begin()
        sizes = [len(part) for part in X]
        if sizes != [len(part) for part in y] or len(X) != len(self.devices):
            raise ValueError("there must be one shard for each rank, with one label per example")
        shares = sizes if shares is None else shares
        if self._own.shares(shares) != sizes:
            raise ValueError(f"the shares {list(shares)} are not those of the shards, {sizes}")
        self._check(sum(shares))
        return self._train(X, y, shares)

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
        """Return the fraction of labels that have the highest score, 0..1.

        `batches` has pairs (X, y) of shapes [k, ...] and [k], or [k, ...] for scores
        [k, classes, ...]; with a group, this process's part of each batch. Every label counts once
        and all ranks take part, with rank 0's batch statistics. Training mode and the ranks' own
        statistics are restored. Raises ValueError if there are no labels, or if they have another
        shape than the scores' argmax.
        """
        return accuracy(self.modules, self.devices, batches, self.group)

    def state_dict(self) -> dict[str, Any]:
        """Return this process's model and optimizer state, and the buffers of all ranks.

        The random states of the ranks are among them if the trainer has a `seed`. Parameters and
        optimizers of all ranks are equal. Tensors are not copied; in a group all processes must
        call it.
        """
        buffers = self._own.buffers
        if self.group is not None:
            buffers = [{name: b.cpu() for name, b in mine.items()} for mine in buffers]
        own = self.random_states
        states = [None] * len(buffers) if own is None else own.states
        of_ranks = gathered(list(zip(buffers, states, strict=True)), self.group)
        return {
            "model": self.modules[0].state_dict(),
            "buffers": [found for found, _ in of_ranks],
            "optimizer": self.optimizers[0].state_dict(),
            "generators": [found for _, found in of_ranks],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all replicas and optimizers to a stored state.

        With shards, the state may be of any number of ranks. Raises ValueError for another number
        of ranks or shards, and torch's errors for another model.
        """
        stored, wanted = len(state["buffers"]), self._own.count
        if stored != wanted:
            what = "shards" if self.shards else "ranks"
            raise ValueError(f"the state is for {stored} {what}, and there are {wanted}")
        for module, optimizer in zip(self.modules, self.optimizers, strict=True):
            module.load_state_dict(state["model"])
            # torch keeps the given tensors, and no two ranks may share their momentum.
            optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self._own.set_buffers([state["buffers"][number] for number in self._own.numbers])
        if self.random_states is not None:
            # The key is that of checkpoints written before the attribute had this name.
            known = zip(self._own.numbers, self.random_states.states, strict=True)
            self.random_states.states = [state["generators"][r] or kept for r, kept in known]

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ReplicaTrainer has no copies: make another one, and pass its load_state_dict() what "
            "state_dict() returns"
        )

    def _check(self, n: int) -> None:
        if n == 0:
            raise ValueError("a batch needs at least one example")
        if not torch.is_grad_enabled():
            raise ValueError(
                "a training step records gradients, which is switched off here: call it outside of "
                "torch.no_grad() and torch.inference_mode()"
            )
        if self.strict:
            check_strict(n, self.world, self.microbatch, self.shards)

    def _check_arguments(self, module: nn.Module, bucket_bytes: int) -> None:
        """Raise ValueError for arguments out of range, or that exclude each other."""
        check_reduction(self.loss)
        if not any(param.requires_grad for param in module.parameters()):
            raise ValueError("the module has no parameter that requires grad: nothing to train")
        check_graph(self.microbatch, self.sync_batchnorm, self.compile)
        if self.microbatch is not None and self.microbatch < 1:
            raise ValueError(f"a microbatch must have at least 1 example, not {self.microbatch}")
        if self.shards is not None:
            named = self.reduction is not reduce_gradients_coalesced
            check_shards(self.shards, self.world, alone=self.sync_batchnorm)
            if self.microbatch or self.compile or named:
                raise ValueError("shards exclude microbatch, compile and another reduction")
        if bucket_bytes < 1:
            raise ValueError(f"a bucket must have at least 1 byte, not {bucket_bytes}")
        if self.group is not None and len(self.devices) != 1:
            raise ValueError(f"a process of a group has one rank, not {len(self.devices)} devices")
        if self.group is not None and self.compile:
            raise ValueError("a compiled step needs all ranks in one process: leave out compile")
        if self.group is not None and self.reduction is not reduce_gradients_coalesced:
            raise ValueError("a group sums the gradients itself: leave out the reduction")
        if self.group is None and self.sync_batchnorm and self.world > 1:
            raise ValueError(
                "batch statistics over all ranks need ranks that run at the same time: pass a "
                "group, of processes or of the threads that pycollect.threads.launch starts"
            )

    def _replicas(self, module: nn.Module) -> list[nn.Module]:
        """Return copies of the module for this process's ranks, in a group of rank 0's."""
        found = replicate_module(module, self.devices)
        if self.group is not None:
            (own,) = found
            send_from_rank_0([*own.named_parameters(), *own.named_buffers()], self.group)
            if self.sync_batchnorm:
                convert_sync_batchnorm(own, self.group)
        return found

    def _train(
        self, X: Sequence[Tensor], y: Sequence[Tensor], shares: Sequence[int]
    ) -> list[Tensor]:
        """Run the training step on the shards; return the summed loss of each rank here."""
        n = sum(shares)
        sizes = self._own.sizes(shares)
        if not self.shards:
            sizes = microbatches(tuple(shares), self.microbatch or n)
        self._single_values.check(sizes, X[0])  # in a group all raise alike, and none waits
        if self._compiled and self._compiled.prepare():
            compiled = self._compiled.on_shards(X, y)
            self._clock.end_of("compute")  # all of its parts
            return compiled
        for params in self.parameters:
            for param in params:
                param.grad = None  # unlike zeros, this saves adding the first gradient
        early = self._current_buckets()
        versions = [[param._version for param in params] for params in self.parameters]
        parts = parts_of(X, y, [[size[rank] for rank in self.ranks] for size in sizes])
        if self.shards:
            losses = self._own.train(parts, self._pass, self.devices)
        else:
            losses = self._passes(parts, early)
        check_parameters(self.modules, versions, alone=self.group is None and not self.shards)
        self._clock.end_of("compute")
        with torch.no_grad():
            if self.shards:
                self._own.finish(self._sum)
            elif early is not None:
                early.wait()
            elif pending := self._sum.start(self.parameters, async_op=False):
                pending.wait()
        self._clock.end_of("reduction")
        for params, optimizer in zip(self.parameters, self.optimizers, strict=True):
            torch._foreach_div_([param.grad for param in params if param.grad is not None], n)
            optimizer.step()
        self._clock.end_of("update")
        return [
            losses[i] if i in losses else torch.zeros((), device=device)
            for i, device in enumerate(self.devices)
        ]

    def _passes(self, parts: Sequence[Examples], early: Buckets | None) -> dict[int, Tensor]:
        """Run forward and backward on all microbatches; return as `_pass` does."""
        losses: dict[int, Tensor] = {}
        for i, part in enumerate(parts, 1):
            for index, loss in self._pass(*part, early if i == len(parts) else None).items():
                losses[index] = losses[index] + loss if index in losses else loss
        return losses

    def _pass(
        self, X: Sequence[Tensor], y: Sequence[Tensor], buckets: Buckets | None = None
    ) -> dict[int, Tensor]:
        """Run forward and backward on a microbatch; return the summed loss of each busy rank here.

        `buckets` is given for the last microbatch of a step; they reduce during its last pass.
        """
        losses: dict[int, Tensor] = {}
        groups = self._groups(X)
        for group in groups:
            last = buckets.during(group) if buckets and group is groups[-1] else nullcontext()
            with self._clock.ranks(group), last:
                found = [self._forward(i, X[i], y[i]) for i in group]
                torch.autograd.backward(found)
            losses |= {i: loss.detach() for i, loss in zip(group, found, strict=True)}
        if buckets is not None and not groups:  # the other processes have examples
            with buckets.during(()):
                pass
        return losses

    def _groups(self, X: Sequence[Tensor]) -> list[list[int]]:
        """Return groups of ranks here: each has one joint backward pass, and they run in turn."""
        if self.sync_batchnorm:  # ranks without examples too: the others wait for them
            return [list(range(len(self.devices)))]
        busy = [i for i, mine in enumerate(X) if len(mine)]
        # GPU ranks first: their calls return at once, so GPUs work while the CPU ranks run.
        busy.sort(key=lambda i: self.devices[i].type == "cpu")
        return [busy] if self._joint and busy else [[i] for i in busy]

    def _forward(self, i: int, X: Tensor, y: Tensor) -> Tensor:
        """Return the summed loss of the examples of this process's i-th rank."""
        device = self.devices[i]
        # Custom kernels in the module may rely on the current GPU.
        on = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        # With synchronised statistics the layers raise their own error, and shards may be small.
        synchronised = self.sync_batchnorm
        advice = nullcontext() if synchronised else explained(self.ranks[i], len(X))
        owner = self._own.index(i)
        drawing = self.random_states.of(owner) if self.random_states else nullcontext()
        with on, advice, drawing:
            return check_scalar(self.loss(self.modules[i](X), y))

    def _current_buckets(self) -> Buckets | None:
        """Return the buckets of the next step, or None if it does not overlap its reduction."""
        if self._buckets is not None and self._buckets.stale:
            self._buckets.remove()
            self._buckets = self._make_buckets()
        # A CUDA graph has no launch delay to hide, and side streams would only enlarge it.
        return None if is_captured(self.devices[0]) else self._buckets

    def _make_buckets(self) -> Buckets | None:
        """Return new buckets, or None for one rank, a compiled step and without `overlap`."""
        if self.world == 1 or self._bucket_bytes is None:
            return None
        return Buckets(self.parameters, self._sum, self._bucket_bytes)

    def _make_sum(self) -> BucketSum:
        """Return the sum over all ranks; with shards, of a group, those of another group."""
        if self.group is None:
            return ListSum(reduce_gradients_in_tree_order if self.shards else self.reduction)
        if self.shards:
            self.group = in_tree_order(self.group)
        return GroupSum(self.group)

    def _make_random_states(self, seed: int | None) -> RankRandomStates | None:
        """Return random states for each rank or shard, or None if all draw in turn."""
        if seed is None or self.compile:  # a graph draws by itself
            return None
        owners = [device for device in self.devices for _ in range(self._own.each)]
        return RankRandomStates(owners, self._own.numbers, seed)

    def _make_compiled(self) -> CompiledStep | None:
        """Return the compiled step, or None without the `compile` option."""
        if not self.compile:
            return None
        backend = self.compile if isinstance(self.compile, str) else "inductor"
        return CompiledStep(
            self.devices, self.parameters, self.optimizers, self._forward, self.reduction, backend
        )


def _ranks_of(devices: Sequence[torch.device], group: dist.ProcessGroup | None) -> Sequence[int]:
    """Return the numbers of this process's ranks; ValueError outside of the group."""
    if group is None:
        return range(len(devices))
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not in the group")
    return [rank]
