"""nn.DataParallel on pycollect's collectives: also on CPU ranks, always with the same bits.

A forward pass scatters the inputs, copies the parameters to all ranks, runs the replicas and
gathers the outputs. Autograd records all of it, so a plain ``backward()`` leaves the gradients of
the whole batch in the one module's parameters, added in rank order by one node for all parameters.

The replicas run one after the other. On a CPU each then has all cores (one thread per replica was
1.8 times slower). On GPUs the calls return before the work is done, so the devices still work at
the same time, unless the module waits for one.
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
from pycollect.autograd.linear_along_dim import even
from pycollect.devices import DeviceSpec, devices

Call = tuple[tuple[Any, ...], dict[str, Any]]


class DataParallel(nn.Module):
    """Run a module on a shard of the batch per rank; a replacement for torch.nn.DataParallel.

    ``device_ids`` is an argument of ``pycollect.devices`` (GPU indices, "cuda:0*2", "cpu*4"; None:
    every GPU, else two CPU ranks) and may name a device several times. Parameters and buffers are
    on the first device. Input tensors are split along ``dim`` like torch.tensor_split, and must
    have the same length there; tensors without dimensions and other values go to every rank.
    Fewer examples than ranks use fewer ranks; one rank runs the module itself. Output tensors
    are joined along ``dim`` on ``output_device`` (default: the first); tensors without dimensions
    become a vector with an entry for each rank that ran. Tuples, lists and dicts are traversed.

    As in torch, a rank normalises over its own shard, only rank 0's changes to buffers are kept,
    and ``state_dict`` has the prefix ``module.``. Unlike in torch, a parameter that no rank used
    has no gradient. Raises ValueError for a module that is not on the first device, inputs of
    different lengths, and outputs that cannot be joined.

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
                "pass one"
            )
        (self.output_device,) = outputs
        self.dim = dim

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return what the module returns for the whole batch."""
        self._check_devices()
        calls = _scattered((inputs, kwargs), self.device_ids, self.dim)
        if len(calls) == 1:
            args, options = calls[0]
            outputs = [self.module(*args, **options)]
        else:
            outputs = self._run(calls)
        return self._gathered(outputs)

    def _run(self, calls: Sequence[Call]) -> list[Any]:
        """Run a replica for each call; rank 0's replica uses and updates the module's buffers."""
        ranks = self.device_ids[: len(calls)]
        names = [name for name, _ in self.module.named_parameters()]
        parameters = autograd.replicate([p for _, p in self.module.named_parameters()], ranks)
        buffers = self._copied_buffers(ranks)
        outputs: dict[int, Any] = {}
        # GPU ranks first: their calls return at once, so GPUs work while the CPU ranks run.
        for rank in sorted(range(len(ranks)), key=lambda rank: ranks[rank].type == "cpu"):
            args, kwargs = calls[rank]
            state = dict(zip(names, parameters[rank], strict=True)) | buffers[rank]
            gpu = ranks[rank].type == "cuda"
            with torch.cuda.device(ranks[rank]) if gpu else nullcontext():
                outputs[rank] = functional_call(self.module, state, args, kwargs)
        return [outputs[rank] for rank in range(len(ranks))]

    def _copied_buffers(self, ranks: Sequence[torch.device]) -> list[dict[str, Tensor]]:
        """Return copies of the buffers for each rank; rank 0 gets none and uses the module's."""
        named = dict(self.module.named_buffers())
        with torch.no_grad():
            copies = autograd.replicate(list(named.values()), ranks[1:])
        return [{}, *(dict(zip(named, rank, strict=True)) for rank in copies)]

    def _gathered(self, outputs: Sequence[Any]) -> Any:
        """Join the outputs of all ranks, which must have the same structure."""
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

    def _check_devices(self) -> None:
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
        """Return the devices as shown in the module's repr."""
        return f"device_ids=[{', '.join(map(str, self.device_ids))}]"


def _scattered(call: Call, ranks: Sequence[torch.device], dim: int) -> list[Call]:
    """Split the tensors of a call; return one call for every rank that gets examples."""
    leaves, spec = pytree.tree_flatten(call)
    lengths = {_length(t, dim) for t in leaves if isinstance(t, Tensor) and t.dim()}
    if len(lengths) > 1:
        raise ValueError(
            f"DataParallel: the inputs have {', '.join(map(str, sorted(lengths)))} examples along "
            f"dim {dim}; tensors to split must have one length, others can be buffers of the module"
        )
    length = next(iter(lengths), 0)
    used = list(ranks[: max(1, min(length, len(ranks)))])
    split = [_for_ranks(leaf, used, even(length, len(used)), dim) for leaf in leaves]
    return [pytree.tree_unflatten([leaf[r] for leaf in split], spec) for r in range(len(used))]


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
