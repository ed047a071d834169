"""nn.DataParallel on pycollect's collectives: also on CPU ranks, always with the same bits.

A forward pass scatters the inputs, copies the parameters to all ranks, runs the replicas and
gathers the outputs. Autograd records all of it, so a plain ``backward()`` leaves the gradients of
the whole batch in the one module's parameters, added in rank order by one node for all parameters.

The replicas run one after the other. On a CPU each then has all cores (one thread per replica was
1.8 times slower). On GPUs the calls return before the work is done, so the devices still work at
the same time, unless the module waits for one.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from pycollect import autograd
from pycollect.autograd.linear_along_dim import even
from pycollect.devices import DeviceSpec, devices

from .module_replication import (
    PLAIN,
    check_replicable,
    copies_of,
    originals_refused,
    shallow_replica,
)

Call = tuple[tuple[Any, ...], dict[str, Any]]


class DataParallel(nn.Module):
    """Run a module on a shard of the batch per rank; a replacement for torch.nn.DataParallel.

    ``device_ids`` is an argument of ``pycollect.devices`` (GPU indices, "cuda:0*2", "cpu*4"; None:
    every GPU, else two CPU ranks) and may name a device several times. Parameters and buffers are
    on the first device. Input tensors are split along ``dim`` like torch.tensor_split, and must
    have the same length there; tensors without dimensions and other values go to every rank.
    Fewer examples than ranks use fewer ranks; one rank runs the module itself. Output tensors
    are joined along ``dim`` on ``output_device`` (default: the first); tensors without dimensions
    become a vector with an entry for each rank that ran. Tuples, lists, dicts and the classes of
    ``torch.export.register_dataclass`` are traversed; other containers of tensors are refused, and
    so are lists of dicts, which may have an item for each example.

    As in torch, a rank normalises over its own shard, only rank 0's changes to buffers are kept and
    other assignments to the module in ``forward`` are lost, and ``state_dict`` has the prefix
    ``module.``. Unlike in torch, a parameter that no rank used has no gradient. Raises ValueError
    for a module that is not on the first device or has no replicas (TorchScript, parameters without
    a shape), inputs of different lengths, and inputs and outputs that cannot be split or joined;
    RuntimeError if ``forward`` calls the original module in place of its replica.

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
        calls = self._scattered(inputs, kwargs)
        if len(calls) == 1:
            args, options = calls[0]
            outputs = [self.module(*args, **options)]
        else:
            outputs = self._run(calls)
        return self._gathered(outputs)

    def _run(self, calls: Sequence[Call]) -> list[Any]:
        """Run a replica for each call; rank 0's replica uses and updates the module's buffers."""
        ranks = self.device_ids[: len(calls)]
        check_replicable(self.module)
        replicas = self._replicas(ranks)
        outputs: dict[int, Any] = {}
        # GPU ranks first: their calls return at once, so GPUs work while the CPU ranks run.
        with originals_refused(self.module):
            for rank in sorted(range(len(ranks)), key=lambda rank: ranks[rank].type == "cpu"):
                args, kwargs = calls[rank]
                gpu = ranks[rank].type == "cuda"
                with torch.cuda.device(ranks[rank]) if gpu else nullcontext():
                    outputs[rank] = replicas[rank](*args, **kwargs)
        return [outputs[rank] for rank in range(len(ranks))]

    def _replicas(self, ranks: Sequence[torch.device]) -> list[nn.Module]:
        """Return a replica for each rank."""
        parameters, buffers = list(self.module.parameters()), list(self.module.buffers())
        copies = autograd.replicate(parameters, ranks)
        of_ranks = [[], *copies_of(buffers, ranks[1:])]
        found: list[nn.Module] = []
        for mine, own in zip(copies, of_ranks, strict=True):
            tensors = dict(zip(map(id, [*parameters, *buffers]), [*mine, *own], strict=False))
            found.append(shallow_replica(self.module, tensors, shares_buffers=not found))
        return found

    def _gathered(self, outputs: Sequence[Any]) -> Any:
        """Join the outputs of all ranks, which must have the same structure."""
        flat = [pytree.tree_flatten(output, is_leaf=self._is_leaf) for output in outputs]
        spec = flat[0][1]
        if any(other != spec for _, other in flat):
            raise ValueError("DataParallel: the replicas returned values of different structure")
        ranks = [list(leaf) for leaf in zip(*(leaves for leaves, _ in flat), strict=True)]
        for i, leaf in enumerate(ranks):
            self._check_leaf(leaf[0], {"output": outputs[0]}, i, "joined")
        return pytree.tree_unflatten([self._joined(leaf) for leaf in ranks], spec)

    def _joined(self, ranks: list[Any]) -> Any:
        first = ranks[0]
        if not all(isinstance(value, Tensor) for value in ranks):
            if not all(_are_equal(value, first) for value in ranks):
                values = (f"a {_name(v)}" if holds_data(v) else repr(v) for v in ranks)
                raise ValueError(
                    f"DataParallel: the replicas returned {', '.join(values)}; only tensors are "
                    "joined, anything else must be equal on all ranks"
                )
            return first
        if len(self.device_ids) == 1:
            same = first.device == self.output_device
            return first if same else autograd.copy(first, self.output_device)
        if first.dim() == 0:
            return autograd.gather([value.reshape(1) for value in ranks], self.output_device)
        return autograd.gather(ranks, self.output_device, dim=self.dim)

    def _is_leaf(self, value: Any) -> bool:
        """Return whether a container is not to be traversed, as it is more than its items."""
        if isinstance(value, list) and len(self.device_ids) > 1:
            return any(isinstance(item, Mapping) for item in value)
        return has_invariants(value)

    def _check_leaf(self, leaf: Any, tree: dict[str, Any], index: int, done: str) -> None:
        """Raise ValueError for a leaf with tensors that cannot be split or joined.

        It is leaf `index` of the tree; `done` says what would be done to it.
        """
        if isinstance(leaf, Tensor) or len(self.device_ids) == 1 or not holds_data(leaf):
            return
        path: Any = pytree.tree_flatten_with_path(tree, is_leaf=self._is_leaf)[0][index][0]
        where = f"{path[0].key}{pytree.keystr(path[1:])}"
        if isinstance(leaf, list):
            kind, advice = "list of dicts", "if it has not an item for each example, use a tuple"
        elif isinstance(leaf, PackedSequence):
            kind, advice = "PackedSequence", "pass a padded tensor and pack it in the module"
        else:
            kind = _name(leaf)
            advice = "use tensors in tuples, lists and dicts, or torch.export.register_dataclass"
        raise ValueError(f"DataParallel: {where} is a {kind}, which cannot be {done}; {advice}")

    def _scattered(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call]:
        """Split the tensors of a call; return one call for every rank that gets examples."""
        leaves, spec = pytree.tree_flatten((inputs, kwargs), is_leaf=self._is_leaf)
        for i, leaf in enumerate(leaves):
            self._check_leaf(leaf, {"inputs": inputs, "kwargs": kwargs}, i, "split")
        ranks, dim = self.device_ids, self.dim
        lengths = {_length(t, dim) for t in leaves if isinstance(t, Tensor) and t.dim()}
        if len(lengths) > 1:
            raise ValueError(
                f"DataParallel: the inputs have {', '.join(map(str, sorted(lengths)))} examples "
                f"along dim {dim}; tensors to split must have one length, others can be buffers of "
                "the module"
            )
        length = next(iter(lengths), 0)
        used = list(ranks[: max(1, min(length, len(ranks)))])
        split = [_for_ranks(leaf, used, even(length, len(used)), dim) for leaf in leaves]
        return [pytree.tree_unflatten([leaf[r] for leaf in split], spec) for r in range(len(used))]

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


def has_invariants(value: Any) -> bool:
    """Return whether a value is of a named tuple's subclass that makes its own instances.

    >>> has_invariants(nn.utils.rnn.pack_sequence([torch.ones(2)])), has_invariants((1, 2))
    (True, False)
    """
    if not isinstance(value, tuple) or not hasattr(value, "_fields"):
        return False
    plain: Any = next(kind for kind in type(value).__mro__ if "_fields" in vars(kind))
    return type(value).__new__ is not plain.__new__


def holds_data(value: Any, seen: set[int] | None = None) -> bool:
    """Return whether a value is or refers to a tensor, an array with dimensions, or a module.

    >>> holds_data({"a": [torch.ones(2)]}), holds_data([1, "b", torch.float32])
    (True, False)
    """
    seen = set() if seen is None else seen
    if type(value) in PLAIN or isinstance(value, (type, types.ModuleType)) or id(value) in seen:
        return False
    seen.add(id(value))  # the value outlives the call, as the caller refers to it
    if isinstance(value, (Tensor, nn.Module)):
        return True
    if any(hasattr(value, name) for name in ("__dlpack__", "__array__", "__array_interface__")):
        return getattr(value, "shape", None) != ()  # of NumPy's numbers
    parts: list[Any] = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        parts += [getattr(value, s, None) for s in ([slots] if isinstance(slots, str) else slots)]
    if isinstance(value, Mapping):
        parts += value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        parts += value
    return any(holds_data(part, seen) for part in parts)


def _are_equal(value: Any, first: Any) -> bool:
    """Return whether two values without tensors are equal; NaN is equal to itself."""
    if value is first:
        return True
    if holds_data(value) or holds_data(first):
        return False
    return bool(value == first or (value != value and first != first))


def _name(value: Any) -> str:
    return type(value).__name__
