"""nn.DataParallel on pycollect's collectives: also on CPU ranks, always with the same bits.

A forward pass scatters the inputs, copies the parameters to all ranks, runs the replicas and
gathers the outputs. Autograd records all of it, so a plain ``backward()`` leaves the gradients of
the whole batch in the one module's parameters, added in rank order by one node for all parameters.

The replicas run one after the other. On a CPU each then has all cores (one thread per replica was
1.8 times slower). On GPUs the calls return before the work is done, so the devices still work at
the same time, unless the module waits for one.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, MappingView, Sequence
from contextlib import nullcontext
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from pycollect import autograd
from pycollect.autograd.linear_along_dim import even
from pycollect.devices import DeviceSpec, devices
from pycollect.errors import shown

from .module_replication import as_copy, check_replicable, copies_of, in_memory_of
from .shallow_replica import ModuleReferences, parts_of

Call = tuple[tuple[Any, ...], dict[str, Any]]
# Bytes of earlier passes' replicas at which a collection of 50 to 100 ms takes less than they do.
_MOST_BYTES = 1 << 30
# Types of values that refer to no tensor.
_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}


class DataParallel(nn.Module):
    """Run a module on a shard of the batch per rank; a replacement for torch.nn.DataParallel.

    ``device_ids`` is an argument of ``pycollect.devices`` (GPU indices, "cuda:0*2", "cpu*4"; None:
    every GPU, else two CPU ranks) and may name a device several times. Parameters and buffers are
    on the first device. Input tensors are split along ``dim`` like torch.tensor_split, and must
    have the same length there; tensors without dimensions and other values go to every rank.
    Fewer examples than ranks use fewer ranks; one rank runs the module itself. Output tensors
    are joined along ``dim`` on ``output_device`` (default: the first); tensors without dimensions
    become a vector with an entry for each rank that ran. Tuples, lists, dicts and the classes of
    ``torch.export.register_dataclass`` are traversed; other objects with tensors and iterators are
    refused, and so are lists of dicts, numbers or strings, which may have an item for each example.

    As in torch, a rank normalises over its own shard, only rank 0's changes to buffers are kept and
    other assignments to the module in ``forward`` are lost, and ``state_dict`` has the prefix
    ``module.``. Unlike in torch, a parameter that no rank used has no gradient. Raises ValueError
    for a module that is not on the first device or has no replicas (TorchScript, parameters without
    a shape), inputs of different lengths, and inputs and outputs that cannot be split or joined;
    RuntimeError if ``forward`` changes parameters differently on the ranks, or changes buffers of
    the module itself in place of its replica's.

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
                f"DataParallel: output_device {shown(output_device)} names {len(outputs)} devices; "
                "pass one"
            )
        (self.output_device,) = outputs
        self.dim = dim
        self._passes = _Passes()

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
        replicas = _Replicas(self.module, ranks)
        alone = self._passes.begin(replicas)
        outputs: dict[int, Any] = {}
        try:
            # GPU ranks first: their calls return at once, so GPUs work while the CPU ranks run.
            for rank in sorted(range(len(ranks)), key=lambda rank: ranks[rank].type == "cpu"):
                args, kwargs = calls[rank]
                gpu = ranks[rank].type == "cuda"
                with torch.cuda.device(ranks[rank]) if gpu else nullcontext():
                    outputs[rank] = replicas.run(rank, args, kwargs, alone)
        finally:
            self._passes.end()
        replicas.keep_parameters()
        return [outputs[rank] for rank in range(len(ranks))]

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
            return _is_of_examples(value)
        return has_invariants(value)

    def _check_leaf(self, leaf: Any, tree: dict[str, Any], index: int, done: str) -> None:
        """Raise ValueError for a leaf with tensors that cannot be split or joined.

        It is leaf `index` of the tree; `done` says what would be done to it.
        """
        known = isinstance(leaf, Tensor) or len(self.device_ids) == 1
        if known or not (isinstance(leaf, list) or holds_data(leaf)):
            return
        path: Any = pytree.tree_flatten_with_path(tree, is_leaf=self._is_leaf)[0][index][0]
        where = f"{path[0].key}{pytree.keystr(path[1:])}"
        if isinstance(leaf, list):
            kind = "list of dicts, numbers or strings"
            advice = "if its items are not those of the examples, use a tuple"
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


class _Passes:
    """The forward passes of a DataParallel: how many run, and the replicas of earlier ones.

    Replicas that refer to themselves, as by a bound method, live until a collection, and Python's
    collector counts objects, not the bytes of their tensors. After a collection that frees little,
    because the caller keeps the outputs, the next one waits for twice the bytes.
    """

    def __init__(self) -> None:
        self._alive: list[tuple[weakref.ref[nn.Module], int]] = []  # a replica, bytes of its pass
        self._most_bytes = _MOST_BYTES
        self._begun = self._running = 0

    def __reduce__(self) -> Any:
        return _Passes, ()

    def begin(self, replicas: _Replicas) -> Callable[[], bool]:
        """Begin a pass; return a function that tells whether no other thread has run one since."""
        self._alive = [(ref, n) for ref, n in self._alive if ref() is not None]
        if sum(n for _, n in self._alive) >= self._most_bytes:
            gc.collect()
            self._alive = [(ref, n) for ref, n in self._alive if ref() is not None]
            self._most_bytes = max(_MOST_BYTES, 2 * sum(n for _, n in self._alive))
        self._alive.append((weakref.ref(replicas.modules[0]), replicas.nbytes))
        self._begun, self._running = self._begun + 1, self._running + 1
        mine, others = self._begun, self._running - 1
        return lambda: others == 0 and self._begun == mine

    def end(self) -> None:
        """End a pass."""
        self._running -= 1


class _Replicas:
    """The replicas of a module for one forward pass.

    Every rank has copies of what is differentiated. Rank 0's other tensors are the module's, and
    the other ranks have copies of them.
    """

    def __init__(self, module: nn.Module, ranks: Sequence[torch.device]) -> None:
        self._module, references = module, ModuleReferences(module)
        tensors = references.tensors
        scripts = any(isinstance(part, torch.jit.ScriptModule) for part in references.modules)
        if scripts or any(map(nn.parameter.is_lazy, tensors)):
            check_replicable(module)
        # A computed tensor is left to the module that computes it, unless it is a buffer.
        buffers = {id(t) for part in references.modules for t in part._buffers.values()}
        tensors = [t for t in tensors if t.is_leaf or id(t) in buffers]
        tensors = [t for t in tensors if t.device == ranks[0]]
        # Rank 0 has the buffers themselves, also those that are differentiated.
        self._differentiated = [t for t in tensors if t.requires_grad and id(t) not in buffers]
        moved = [t for t in tensors if t.requires_grad and id(t) in buffers]
        self._shared = [t for t in tensors if not t.requires_grad]
        held = set(map(id, references.tensors))
        helpers = [t for t in references.all_tensors if id(t) not in held and not t.requires_grad]
        self._shared += in_memory_of(self._shared, helpers)
        self._watched = [*self._shared, *in_memory_of(self._differentiated, helpers)]
        self._watched += _of_other_modules(references)
        self._copies = autograd.replicate(self._differentiated, ranks)
        self._versions = [_versions(copies) for copies in self._copies]
        self.nbytes = sum(t.nbytes for copies in self._copies for t in copies)
        graphs = [[], *autograd.replicate(moved, ranks[1:])]
        others = [[], *copies_of(self._shared, ranks[1:])]
        self.modules: list[nn.Module] = []
        for mine, graph, own in zip(self._copies, graphs, others, strict=True):
            new: dict[int, Tensor] = {}
            differentiated = self._differentiated + (moved if graph else [])
            for tensor, copied in zip(differentiated, [*mine, *graph], strict=True):
                copied.__dict__.update(tensor.__dict__)  # attributes that libraries have set
                new[id(tensor)] = copied
            for tensor, copied in zip(self._shared if own else [], own, strict=True):
                new[id(tensor)] = as_copy(tensor, copied)
            self.modules.append(references.copy(new, shares_buffers=not self.modules))

    def run(
        self, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any], alone: Callable[[], bool]
    ) -> Any:
        """Run a rank's replica; RuntimeError if it has changed the module's own tensors.

        `alone` tells whether no other pass changes them at the same time.
        """
        before = _versions(self._watched)
        output = self.modules[rank](*args, **kwargs)
        for tensor, then, now in zip(self._watched, before, _versions(self._watched), strict=True):
            if rank > 0 and then != now and alone():
                raise RuntimeError(
                    f"DataParallel: while rank {rank} ran, {self._name(tensor)} has changed, which "
                    "all replicas share: forward reaches it by a global variable or another object "
                    "that is no part of the module"
                )
        return output

    @torch.no_grad()
    def keep_parameters(self) -> None:
        """Keep what the forward pass has changed parameters to, if all ranks have done the same."""
        after = [_versions(copies) for copies in self._copies]
        for i, tensor in enumerate(self._differentiated):
            if all(now[i] == before[i] for now, before in zip(after, self._versions, strict=True)):
                continue
            first, *others = (copies[i].detach() for copies in self._copies)
            if not all(torch.equal(first, other.to(first.device)) for other in others):
                raise RuntimeError(
                    f"DataParallel: forward changes {self._name(tensor)} in place, and differently "
                    "on each rank: make it a buffer, of which rank 0's changes are kept"
                )
            tensor.copy_(first)

    def _name(self, tensor: Tensor) -> str:
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        found = (name for name, t in named if t is tensor)
        return next(found, f"a tensor of shape {list(tensor.shape)}")


def _of_other_modules(references: ModuleReferences) -> list[Tensor]:
    """Return the parameters and buffers of modules that all replicas share."""
    known = {id(part) for part in references.modules}
    parts = [part for part in references.all_modules if id(part) not in known]
    found = (t for p in parts for t in (*p._parameters.values(), *p._buffers.values()))
    return [t for t in found if t is not None and not nn.parameter.is_lazy(t)]


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each tensor has been changed in place; 0 if that is not counted."""
    return [0 if t.is_inference() else t._version for t in tensors]


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


def _is_of_examples(items: list[Any]) -> bool:
    """Return whether a list may have an item for each example: dicts, numbers or strings."""
    if any(isinstance(item, Mapping) for item in items):
        return True
    return bool(items) and all(isinstance(item, (str, bytes, Number)) for item in items)


def has_invariants(value: Any) -> bool:
    """Return whether a value is of a named tuple's subclass that makes its own instances.

    >>> has_invariants(nn.utils.rnn.pack_sequence([torch.ones(2)])), has_invariants((1, 2))
    (True, False)
    """
    if not isinstance(value, tuple) or not hasattr(value, "_fields"):
        return False
    plain: Any = next(kind for kind in type(value).__mro__ if "_fields" in vars(kind))
    return type(value).__new__ is not plain.__new__


def holds_data(value: Any) -> bool:
    """Return whether a value is or refers to tensors, arrays with dimensions, modules or iterators.

    >>> holds_data({"a": [torch.ones(2)]}), holds_data([1, "b", torch.float32])
    (True, False)
    """
    stack, seen = [value], {}
    while stack:
        item = stack.pop()
        if type(item) in _PLAIN or isinstance(item, (type, types.ModuleType)) or id(item) in seen:
            continue
        seen[id(item)] = item  # keeps the id valid
        if isinstance(item, (Tensor, nn.Module, Iterator)):
            return True
        if any(hasattr(item, name) for name in ("__dlpack__", "__array__", "__array_interface__")):
            if getattr(item, "shape", None) != ():  # of NumPy's numbers
                return True
        else:
            parts: Any = item if isinstance(item, MappingView) else parts_of(item)
            stack.extend(parts)
    return False


def _are_equal(value: Any, first: Any) -> bool:
    """Return whether two values without tensors are equal; NaN is equal to itself."""
    if value is first:
        return True
    if holds_data(value) or holds_data(first):
        return False
    return bool(value == first or (value != value and first != first))


def _name(value: Any) -> str:
    return type(value).__name__
