"""What examples/vllm_plugin uses of vLLM: the package itself, or modules in its place with the same
names and attributes (read in vLLM 0.32 and 0.33).
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

PLUGIN = Path(__file__).resolve().parents[2] / "examples/vllm_plugin"
COMMUNICATORS = "vllm.distributed.device_communicators"
INSTALLED = importlib.util.find_spec("vllm") is not None


class CpuPlatform:
    """As `type(vllm.platforms.current_platform)` on a machine without GPUs."""

    dist_backend = "gloo"

    def is_cpu(self) -> bool:
        return True

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return f"{COMMUNICATORS}.cpu_communicator.CpuCommunicator"


class CpuCommunicator:
    """As vLLM's: it calls `dist_module`, its own shared memory unless the method says False."""

    def __init__(
        self,
        cpu_group: dist.ProcessGroup,
        device: torch.device | None = None,
        device_group: dist.ProcessGroup | None = None,
        unique_name: str = "",
        use_all2all: bool = False,
    ) -> None:
        self.device_group, self.unique_name = device_group, unique_name
        self.world_size = dist.get_world_size(cpu_group)
        self.ranks = dist.get_process_group_ranks(cpu_group)
        self.rank_in_group = dist.get_group_rank(cpu_group, dist.get_rank())
        shared = self._all_group_ranks_share_shm_group_name()
        self.dist_module: Any = object() if shared else torch.distributed
        self.supports_tensor_dict = shared

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        return True


def plugin() -> Any:
    """Import the plugin, beside vLLM or its replacement."""
    if str(PLUGIN) not in sys.path:
        sys.path.insert(0, str(PLUGIN))
    if not INSTALLED and "vllm" not in sys.modules:
        platforms, cpu = ModuleType("vllm.platforms"), ModuleType("cpu_communicator")
        platforms.current_platform = CpuPlatform()  # type: ignore[attr-defined]
        cpu.CpuCommunicator = CpuCommunicator  # type: ignore[attr-defined]
        sys.modules |= {f"{COMMUNICATORS}.cpu_communicator": cpu, "vllm.platforms": platforms}
        for package in ("vllm", "vllm.distributed", COMMUNICATORS):
            sys.modules[package] = ModuleType(package)
    import pycollect_vllm

    return pycollect_vllm


def communicator() -> Any:
    """Make the plugin's communicator for the default group."""
    plugin()
    from pycollect_vllm.communicator import PycollectCommunicator

    world = dist.group.WORLD
    return PycollectCommunicator(
        cpu_group=world, device=torch.device("cpu"), device_group=world, unique_name="ep:0"
    )
