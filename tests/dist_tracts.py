"""Tensors in GPU memory that a group's processes reach, for tests whose GPU is not there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from dist_fake import alive
from dist_pool import Me, backend_of
from torch import Tensor

GPU = "cuda:0"  # that is not there
LARGE = 300_000  # elements: more than are copied to slots in any collective


def make(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    import pycollect

    return pycollect.empty(*size, dtype=dtype, device=GPU)


def reached(x: Tensor) -> bool:
    import pycollect

    return pycollect._C.in_tract(backend_of(), x)


def use() -> Any:
    import pycollect

    return pycollect.Allocator(device=GPU).usage()


def listened() -> list[str]:
    """The lines that the log gets from now on."""
    import pycollect

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    pycollect.log.logger.addHandler(handler)
    pycollect.log.logger.setLevel(logging.INFO)
    pycollect._C.listen()
    return lines


def launches(me: Me, call: Callable[[], Any]) -> int:
    """How many this rank makes for it."""
    before = me.fake.gpu.books().get("launch", 0)
    call()
    return me.fake.gpu.books().get("launch", 0) - before


def in_the_end(fake: Any) -> dict[str, int]:
    """What is still given out when the streams have let go of what they have done."""
    end = time.monotonic() + 2.0
    while alive(fake) and time.monotonic() < end:
        time.sleep(0.001)
    return alive(fake)
