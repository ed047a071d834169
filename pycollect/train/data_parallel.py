"""nn.DataParallel on the collectives: CPU ranks and repeated devices too, the same bits always.

A forward pass scatters the inputs, copies the parameters to all ranks, runs the replicas and
gathers the outputs. All of it is recorded, so a plain ``backward()`` leaves the gradients of the
whole batch in the one module's parameters, added in rank order by one node for all parameters.

The replicas run in turn. On a CPU each then has all cores (a thread for each was 1.8 times slower);
on GPUs the calls return before the work is done, so that the devices work at the same time all the
same, unless the module waits for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from pycollect import autograd
from pycollect.autograd.along import even
from pycollect.devices import DeviceSpec, devices

Call = tuple[tuple[Any, ...], dict[str, Any]]


class DataParallel(nn.Module):
    """Run a module on a shard of the batch per rank; a stand-in for torch.nn.DataParallel.

    ``device_ids`` is what ``pycollect.devices`` takes (indices of GPUs, "cuda:0*2", "cpu*4"; None:
    every GPU, else two CPU ranks) and may name a device several times. Parameters and buffers are
    on the first. Tensors in the inputs are cut along ``dim``, as by torch.tensor_split, and all
    have one length there; those without dimensions go to every rank, and so does what is no
    tensor. Fewer examples than ranks take fewer ranks; one rank runs the module itself. Outputs
    are joined along ``dim`` on ``output_device`` (default: the first); those without dimensions
    become a vector with an entry for each rank that ran. Tuples, lists and dicts are followed.

    As in torch's: a rank normalises over its own shard, what replicas do to their buffers is kept
    of rank 0 alone, and ``state_dict`` has the prefix ``module.``. Unlike torch's, a parameter that
    no rank used has no gradient. Raises ValueError for a module that is elsewhere, inputs of
    unlike lengths, and outputs that cannot be joined.

    >>> net = DataParallel(nn.Linear(3, 2), "cpu*2")
    >>> net(torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: DeviceSpec = None,
        output_device: torch.device | str | int | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        self.module = module
        self.device_ids = devices(device_ids)
        outputs = devices(self.device_ids[0] if output_device is None else output_device)
        if len(outputs) != 1:
            raise ValueError(
                f"DataParallel: output_device {output_device!r} names {len(outputs)} devices; "
                "needed is one"
            )
        (self.output_device,) = outputs
        self.dim = dim

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return what the module returns for the whole batch."""
        self._check_place()
        calls = _scattered((inputs, kwargs), self.device_ids, self.dim)
        if len(calls) == 1:
            args, options = calls[0]
            outputs = [self.module(*args, **options)]
        else:
            outputs = self._run(calls)
        return self._gathered(outputs)

    def _run(self, calls: Sequence[Call]) -> list[Any]:
        """Run a replica for each call; rank 0's uses the module's own buffers, and updates them."""
        ranks = self.device_ids[: len(calls)]
        names = [name for name, _ in self.module.named_parameters()]
        parameters = autograd.replicate([p for _, p in self.module.named_parameters()], ranks)
        buffers = self._copied_buffers(ranks)
        outputs: dict[int, Any] = {}
        # The calls of a GPU return at once, and those of the CPU do not: GPUs work meanwhile.
        for rank in sorted(range(len(ranks)), key=lambda rank: ranks[rank].type == "cpu"):
            args, kwargs = calls[rank]
            state = dict(zip(names, parameters[rank], strict=True)) | buffers[rank]
            gpu = ranks[rank].type == "cuda"
            with torch.cuda.device(ranks[rank]) if gpu else nullcontext():
                outputs[rank] = functional_call(self.module, state, args, kwargs)
        return [outputs[rank] for rank in range(len(ranks))]

    def _copied_buffers(self, ranks: Sequence[torch.device]) -> list[dict[str, Tensor]]:
        """Return copies of the buffers for every rank but the first, which has none of its own."""
        named = dict(self.module.named_buffers())
        with torch.no_grad():
            copies = autograd.replicate(list(named.values()), ranks[1:])
        return [{}, *(dict(zip(named, rank, strict=True)) for rank in copies)]

    def _gathered(self, outputs: Sequence[Any]) -> Any:
        """Join the outputs of all ranks, which are alike but for the examples."""
        flat = [pytree.tree_flatten(output) for output in outputs]
        spec = flat[0][1]
        if any(other != spec for _, other in flat):
            raise ValueError("DataParallel: the replicas returned values of different structure")
        ranks = zip(*(leaves for leaves, _ in flat), strict=True)
        return pytree.tree_unflatten([self._joined(list(leaf)) for leaf in ranks], spec)

    def _joined(self, ranks: list[Any]) -> Any:
        first = ranks[0]
        if not any(isinstance(value, Tensor) for value in ranks):
            if any(value != first for value in ranks):
                raise ValueError(
                    f"DataParallel: the replicas returned {', '.join(map(repr, ranks))}; only "
                    "tensors are joined, anything else must be equal on all ranks"
                )
            return first
        if len(self.device_ids) == 1:
            same = first.device == self.output_device
            return first if same else autograd.copy(first, self.output_device)
        if first.dim() == 0:
            return autograd.gather([value.reshape(1) for value in ranks], self.output_device)
        return autograd.gather(ranks, self.output_device, dim=self.dim)

    def _check_place(self) -> None:
        first = self.device_ids[0]
        for kind, tensors in (
            ("parameter", self.module.named_parameters()),
            ("buffer", self.module.named_buffers()),
        ):
            for name, tensor in tensors:
                if tensor.device != first:
                    raise ValueError(
                        f"DataParallel: {kind} {name} is on {tensor.device} and rank 0 on {first}; "
                        f"move the module with .to('{first}')"
                    )

    def extra_repr(self) -> str:
        """Name the devices."""
        return f"device_ids=[{', '.join(map(str, self.device_ids))}]"


def _scattered(call: Call, ranks: Sequence[torch.device], dim: int) -> list[Call]:
    """Cut the tensors of a call; return one call for every rank that gets examples."""
    leaves, spec = pytree.tree_flatten(call)
    lengths = {_length(t, dim) for t in leaves if isinstance(t, Tensor) and t.dim()}
    if len(lengths) > 1:
        raise ValueError(
            f"DataParallel: the inputs have {', '.join(map(str, sorted(lengths)))} examples along "
            f"dim {dim}; all tensors that are cut need as many, others go in as a module's buffers"
        )
    length = next(iter(lengths), 0)
    used = list(ranks[: max(1, min(length, len(ranks)))])
    cut = [_for_ranks(leaf, used, even(length, len(used)), dim) for leaf in leaves]
    return [pytree.tree_unflatten([leaf[r] for leaf in cut], spec) for r in range(len(used))]


def _length(tensor: Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"DataParallel: dim is {dim}, and an input has shape {list(tensor.shape)}")
    return tensor.shape[dim]


def _for_ranks(
    leaf: Any, ranks: Sequence[torch.device], lengths: Sequence[int], dim: int
) -> list[Any]:
    if not isinstance(leaf, Tensor):
        return [leaf] * len(ranks)
    if len(ranks) == 1 and leaf.device == ranks[0]:
        return [leaf]
    if leaf.dim() == 0:
        return [copy for [copy] in autograd.replicate([leaf], ranks)]
    return list(autograd.scatter(leaf, ranks, chunk_sizes=lengths, dim=dim))
