"""Data-parallel training of any module: one replica per rank, and their common training step.

Every rank computes a summed loss on its shard of a batch. The gradients are summed over the ranks
and divided by the batch size, and every replica's optimizer takes the same step. A rank without
examples contributes zeros.

The ranks run forward and backward in turn or jointly. In turn, each finishes before the next
begins: only one has activations in memory, and on the CPU each has all cores. Jointly, all run
forward before one common backward pass, which batch statistics over all ranks require.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import pycollect as pc
from pycollect.devices import DeviceSpec

from .accuracy import accuracy
from .buckets import Buckets
from .compiled_step import CompiledStep
from .lockstep import run_lockstep
from .losses import Loss, check_reduction, check_scalar, summed_cross_entropy
from .module_check import SingleValueCheck, explained
from .module_replication import (
    Detached,
    copied,
    copied_tensors,
    memory_blocks,
    replicate_module,
)
from .optimizers import MakeOptimizer, check_step
from .options import StepOptions
from .reduce import Reduction, matching_gradients, reduce_gradients_coalesced
from .shares import check_split, check_strict, microbatches, scatter, shares_of
from .step_clock import StepClock, StepSeconds, is_captured
from .sync_batchnorm import convert_sync_batchnorm


class ReplicaTrainer:
    """One replica of a module for every rank, trained on shards of the same batches.

    `module` does not change. There is one rank per device that `pycollect.devices` returns for
    `devices`, and a device may occur several times. `optimizer` makes an optimizer from a list of
    parameters, as `sgd_factory` returns it, and is called once per rank. `loss(output, y)`
    returns the *sum* over a shard's examples, without dimensions and never a mean (default:
    `summed_cross_entropy`). `reduction` sums the gradients over the ranks (default: in one
    collective; see GRADIENT_REDUCTIONS). `options` are the `StepOptions`, by default all at their
    defaults. Each rank has its own batch statistics, and the model takes rank 0's, unless the
    options synchronise them.

    `modules`, `parameters` and `optimizers` are lists with an item for each rank. A trainer can be
    copied by copy.deepcopy, and pickled. Raises ValueError for a module without parameters to train
    or one that `replicate_module` refuses, a loss whose `reduction` is not "sum", an optimizer
    whose step needs a closure, and a device that does not exist.

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
        options: StepOptions | None = None,
    ) -> None:
        check_reduction(loss)
        if not any(param.requires_grad for param in module.parameters()):
            raise ValueError("the module has no parameter that requires grad: nothing to train")
        self.devices = pc.devices(devices)
        self.options = options or StepOptions()
        self.modules = replicate_module(module, self.devices)
        if self.options.sync_batchnorm:
            self.modules = convert_sync_batchnorm(self.modules)
        self.parameters = [list(mine.parameters()) for mine in self.modules]
        self.optimizers = [check_step(optimizer(list(mine))) for mine in self.parameters]
        self.loss, self.reduction = loss, reduction
        self._clock = StepClock(self.devices, self.options.exact_times)
        # One joint backward pass uses a thread per GPU; separate passes would serialise the GPUs.
        gpus = {device for device in self.devices if device.type == "cuda"}
        self._joint = self.options.sync_batchnorm or len(gpus) > 1
        self._single_values = SingleValueCheck(self.modules[0])
        self._buckets = self._make_buckets()
        self._compiled = self._make_compiled()

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.devices)

    @property
    def seconds(self) -> StepSeconds:
        """The seconds of the parts of the last step."""
        return self._clock.seconds

    def rank_seconds(self) -> list[float]:
        """Return the seconds of every rank's forward and backward passes in the last step.

        Waits until the GPUs have finished those passes.
        """
        return self._clock.rank_seconds()

    def step(self, X: Tensor, y: Tensor, *, shares: Sequence[int] | None = None) -> list[Tensor]:
        """Train on one batch; return each rank's summed loss, on its device.

        X has shape [n, ...] and y [n], on any device; `shares` are the numbers of examples per
        rank, even by default. A loss is a tensor without dimensions; a rank without examples has 0.
        Raises ValueError if X and y differ in length, for shares that do not add up to n, for a
        batch without examples or that `strict` forbids, for a shard of one example under batch
        normalisation, for a loss with dimensions, where torch does not record gradients, and for a
        forward pass that changes parameters in place, differently on the ranks.
        """
        self._clock.begin()
        self._check(len(X))
        shares = shares_of(len(X), [1] * self.world) if shares is None else shares
        if self._compiled and self._compiled.prepare():
            check_split(X, y, self.world, shares)
            self._check_shards(shares, X)
            return self._timed(self._compiled.on_batch(X, y, shares))
        X_shards, y_shards = scatter(X, y, self.devices, shares)
        self._clock.end_of("split")
        return self._train(X_shards, y_shards)

    def step_on_shards(self, X: Sequence[Tensor], y: Sequence[Tensor]) -> list[Tensor]:
        """Train on shards that are already on their ranks' devices; return as `step` does.

        `X[rank]` has shape [k, ...] and `y[rank]` [k]. Raises ValueError unless there is one shard
        of each for every rank, with one label per example, and in the cases of `step`.
        """
        self._clock.begin()
        if [len(part) for part in X] != [len(part) for part in y] or len(X) != self.world:
            raise ValueError("there must be one shard for each rank, with one label per example")
        self._check(sum(map(len, X)))
        if self._compiled and self._compiled.prepare():
            self._check_shards(list(map(len, X)), X[0])
            return self._timed(self._compiled.on_shards(X, y))
        return self._train(X, y)

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
        """Return the fraction of labels that have the highest score, 0..1.

        `batches` has pairs (X, y) of shapes [k, ...] and [k], or [k, ...] for scores
        [k, classes, ...]. Every label counts once and all ranks take part, with rank 0's batch
        statistics. Training mode and the ranks' own statistics are restored. Raises ValueError if
        there are no labels, or if they have another shape than the scores' argmax.
        """
        return accuracy(self.modules, self.devices, batches)

    def state_dict(self) -> dict[str, Any]:
        """Return rank 0's model state, the buffers of all ranks, and rank 0's optimizer state.

        Parameters and optimizers of all ranks are equal. Tensors are not copied.
        """
        return {
            "model": self.modules[0].state_dict(),
            "buffers": [dict(mine.named_buffers()) for mine in self.modules],
            "optimizer": self.optimizers[0].state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all replicas and optimizers to a stored state.

        Raises ValueError for a state of another number of ranks, and torch's errors for a state of
        another model.
        """
        if len(state["buffers"]) != self.world:
            raise ValueError(
                f"the state is for {len(state['buffers'])} ranks, and there are {self.world}"
            )
        mine = zip(self.modules, self.optimizers, state["buffers"], strict=True)
        for module, optimizer, buffers in mine:
            module.load_state_dict(state["model"])
            # torch keeps the given tensors, and no two ranks may share their momentum.
            optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
            with torch.no_grad():
                for name, buffer in module.named_buffers():
                    buffer.copy_(buffers[name])

    def __getstate__(self) -> dict[str, Any]:
        # Hooks and compiled steps are bound to the parameters of this trainer.
        own = {"_buckets": None, "_compiled": None, "_clock": None}
        return {**self.__dict__, **own, "shared_memory": self._shared_memory()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        shared = state.pop("shared_memory")
        self.__dict__.update(state)
        if self._shared_memory() != shared:
            raise ValueError(
                "pickle has separated parameters or buffers that share memory: use torch.save"
            )
        self._clock = StepClock(self.devices, self.options.exact_times)
        self._buckets = self._make_buckets()
        self._compiled = self._make_compiled()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ReplicaTrainer":
        new = memo[id(self)] = object.__new__(type(self))
        for module, device in zip(self.modules, self.devices, strict=True):
            (own,) = copied_tensors(module, [device])
            memo.update(own | {id(module): copied(module, dict(own))})
        with Detached():
            new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return new

    def _shared_memory(self) -> list[list[int]]:
        """Return the numbers of rank 0's tensors that share memory, a list for each memory."""
        tensors = [*self.modules[0].parameters(), *self.modules[0].buffers()]
        return [indices for _, indices in memory_blocks(tensors) if len(indices) > 1]

    def _check(self, n: int) -> None:
        if n == 0:
            raise ValueError("a batch needs at least one example")
        if not torch.is_grad_enabled():
            raise ValueError(
                "a training step records gradients, which is switched off here: call it outside of "
                "torch.no_grad() and torch.inference_mode()"
            )
        if self.options.strict:
            check_strict(n, self.world, self.options.microbatch)

    def _check_shards(self, shares: Sequence[int], example: Tensor) -> None:
        """Raise ValueError if a shard is too small for batch normalisation."""
        self._single_values.check([tuple(shares)], example)

    def _timed(self, losses: list[Tensor]) -> list[Tensor]:
        """Return the losses; all time of a compiled step counts as compute."""
        self._clock.end_of("compute")
        return losses

    def _train(self, X: Sequence[Tensor], y: Sequence[Tensor]) -> list[Tensor]:
        """Run the training step on the shards; return each rank's summed loss."""
        parts = list(self._microbatches(X, y))
        self._single_values.check([tuple(map(len, y_parts)) for _, y_parts in parts], X[0])
        for params in self.parameters:
            for param in params:
                param.grad = None  # unlike zeros, this saves adding the first gradient
        early = self._current_buckets()
        versions = [[param._version for param in params] for params in self.parameters]
        losses: dict[int, Tensor] = {}
        for i, (X_parts, y_parts) in enumerate(parts, 1):
            buckets = early if i == len(parts) else None
            for rank, loss in self._pass(X_parts, y_parts, buckets).items():
                losses[rank] = losses[rank] + loss if rank in losses else loss
        self._check_parameters(versions)
        self._clock.end_of("compute")
        gradients = matching_gradients(self.parameters)
        if early is None:
            with torch.no_grad():
                self.reduction(gradients)
        self._clock.end_of("reduction")
        n = sum(map(len, X))
        for mine, optimizer in zip(gradients, self.optimizers, strict=True):
            torch._foreach_div_(mine, n)
            optimizer.step()
        self._clock.end_of("update")
        return [
            losses[rank] if rank in losses else torch.zeros((), device=device)
            for rank, device in enumerate(self.devices)
        ]

    def _check_parameters(self, before: Sequence[Sequence[int]]) -> None:
        """Raise ValueError if forward passes have changed parameters, to different values."""
        for params, versions in zip(self.parameters, before, strict=True):
            for i, (param, version) in enumerate(zip(params, versions, strict=True)):
                if param._version != version and not all(
                    torch.equal(mine[i].to(param.device), param) for mine in self.parameters
                ):
                    name = [name for name, _ in self.modules[0].named_parameters()][i]
                    raise ValueError(
                        f"forward changes parameter {name} in place, and differently on each rank: "
                        "make it a buffer, of which each rank has its own"
                    )

    def _pass(
        self, X: Sequence[Tensor], y: Sequence[Tensor], buckets: Buckets | None = None
    ) -> dict[int, Tensor]:
        """Run forward and backward on a microbatch; return the summed loss of each busy rank.

        `buckets` is given for the last microbatch of a step; they reduce during its last pass.
        """
        losses: dict[int, Tensor] = {}
        groups = self._groups(X)
        for group in groups:
            with self._clock.ranks(group):
                runs = [partial(self._forward, rank, X[rank], y[rank]) for rank in group]
                synchronized = self.options.sync_batchnorm
                found = run_lockstep(runs) if synchronized else [run() for run in runs]
                last = buckets.during(group) if buckets and group is groups[-1] else nullcontext()
                with last:
                    torch.autograd.backward(found)
            losses |= {rank: loss.detach() for rank, loss in zip(group, found, strict=True)}
        return losses

    def _groups(self, X: Sequence[Tensor]) -> list[list[int]]:
        """Return groups of ranks: each group has one joint backward pass; groups run in turn."""
        if self.options.sync_batchnorm:  # ranks without examples too: the others wait for them
            return [list(range(self.world))]
        busy = [rank for rank in range(self.world) if len(X[rank])]
        # GPU ranks first: their calls return at once, so GPUs work while the CPU ranks run.
        busy.sort(key=lambda rank: self.devices[rank].type == "cpu")
        return [busy] if self._joint else [[rank] for rank in busy]

    def _forward(self, rank: int, X: Tensor, y: Tensor) -> Tensor:
        """Return the summed loss of one rank's examples."""
        device = self.devices[rank]
        # Custom kernels in the module may rely on the current GPU.
        on = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        # With synchronised statistics the layers raise their own error, and shards may be small.
        advice = nullcontext() if self.options.sync_batchnorm else explained(rank, len(X))
        with on, advice:
            return check_scalar(self.loss(self.modules[rank](X), y))

    def _microbatches(
        self, X: Sequence[Tensor], y: Sequence[Tensor]
    ) -> Iterable[tuple[list[Tensor], list[Tensor]]]:
        """Yield the shards (X, y) of every microbatch."""
        shares = tuple(map(len, X))
        sizes = microbatches(shares, self.options.microbatch or sum(shares))
        per_rank = [list(of_rank) for of_rank in zip(*sizes, strict=True)]
        X_cut, y_cut = (
            [torch.split(part, of_rank) for part, of_rank in zip(parts, per_rank, strict=True)]
            for parts in (X, y)
        )
        for i in range(len(sizes)):
            yield [parts[i] for parts in X_cut], [parts[i] for parts in y_cut]

    def _current_buckets(self) -> Buckets | None:
        """Return the buckets of the next step, or None if it does not overlap its reduction."""
        if self._buckets is not None and self._buckets.stale:
            self._buckets.remove()
            self._buckets = self._make_buckets()
        # A CUDA graph has no launch delay to hide, and side streams would only enlarge it.
        return None if is_captured(self.devices[0]) else self._buckets

    def _make_buckets(self) -> Buckets | None:
        """Return new buckets, or None for one rank, a compiled step and without `overlap`."""
        options = self.options
        if self.world == 1 or not options.overlap or options.compile:
            return None
        return Buckets(self.parameters, self.reduction, options.bucket_bytes)

    def _make_compiled(self) -> CompiledStep | None:
        """Return the compiled step, or None without the `compile` option."""
        backend = self.options.backend
        if backend is None:
            return None
        return CompiledStep(
            self.devices, self.parameters, self.optimizers, self._forward, self.reduction, backend
        )
