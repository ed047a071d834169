"""vLLM's CPU communicator on a "pycollect" group, with collectives of uneven sizes.

Sizes are not checked here: the group finds those that do not fit before anything moves, and raises
on every rank. An error of a single rank would let the others wait for it.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class PycollectCommunicator(CpuCommunicator):
    """Communicator of one of vLLM's groups of ranks (tensor, pipeline, data, expert parallel)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        backend = dist.get_backend(self.device_group)
        if backend != "pycollect" or self.dist_module is not torch.distributed:
            raise RuntimeError(
                f"vLLM made the group {self.unique_name!r} with {backend!r}, or it uses its own "
                "shared memory; this version of vLLM needs another plugin"
            )
        self.supports_tensor_dict = True
        self._group_name = self.device_group.group_name

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        return False  # vLLM then calls torch.distributed instead of its own shared memory

    def all_reduce(self, input_: Tensor) -> Tensor:
        """Add the tensors of all ranks in place, by the operator that skips torch's Python."""
        torch.ops.pycollect.group_all_reduce_(input_, "sum", self._group_name)
        return input_

    def all_gatherv(
        self, input_: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> Tensor | list[Tensor]:
        """Concatenate the tensors of all ranks along `dim`, on every rank.

        Rank r's tensor has `sizes[r]` rows there; None: as many as this rank's. A list of tensors
        is one call: a list of results. ValueError on every rank if sizes do not fit.
        """
        if isinstance(input_, Tensor):
            return self._gathered(input_, dim, sizes)
        with dist._coalescing_manager(self.device_group, torch.device("cpu")):
            return [self._gathered(tensor, dim, sizes) for tensor in input_]

    def _gathered(self, input_: Tensor, dim: int, sizes: list[int] | None) -> Tensor:
        rows = input_.movedim(dim, 0)  # so that each rank's block is contiguous
        sizes = sizes or [len(rows)] * self.world_size
        output = rows.new_empty((sum(sizes), *rows.shape[1:]))
        dist.all_gather(list(output.split(sizes)), rows, self.device_group)
        return output.movedim(0, dim).contiguous()

    def reduce_scatterv(
        self, input_: Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> Tensor:
        """Add the tensors of all ranks, and return this rank's rows along `dim`: `sizes[rank]`.

        None stands for equal sizes. The sum is the fold in rank order, rounded once. ValueError on
        every rank if sizes do not fit.
        """
        sizes = sizes or [input_.shape[dim] // self.world_size] * self.world_size
        shape = list(input_.shape)
        shape[dim] = sizes[self.rank_in_group]
        output = input_.new_empty(shape)
        # The last chunk gets the rest, so that the group sees sizes with another sum.
        chunks = input_.tensor_split(list(accumulate(sizes[:-1])), dim)
        dist.reduce_scatter(output, list(chunks), group=self.device_group)
        return output

    def send_tensor_dict(self, tensor_dict: dict[str, Tensor], dst: int) -> None:
        """Send named tensors to a rank of the group, for pipeline parallelism."""
        kinds = [(name, t.shape, t.dtype) for name, t in tensor_dict.items()]
        dist.send_object_list([kinds], self.ranks[dst], self.device_group)
        for tensor in tensor_dict.values():
            dist.send(tensor, self.ranks[dst], self.device_group)

    def recv_tensor_dict(self, src: int) -> dict[str, Tensor]:
        """Receive what `send_tensor_dict` sends."""
        received: list[Any] = [None]
        dist.recv_object_list(received, self.ranks[src], self.device_group)
        tensors = {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in received[0]}
        for tensor in tensors.values():
            dist.recv(tensor, self.ranks[src], self.device_group)
        return tensors
