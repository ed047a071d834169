"""Helpers for tests of ranks as threads: launch a wrong program and read its diagnosis."""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pycollect import threads
from pycollect.threads import launcher

PARALLEL = pytest.mark.parametrize("parallel", [False, True])
LARGE = 100_000  # elements of a message that is not eager


def total(rank: int, world: int) -> float:
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    return x.item()


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The exception of a launch and its notes."""

    error: BaseException
    waits: dict[int, str]  # what each rank waits for, as a Deadlock says it
    source: dict[int, str]  # the source line that the message names for the rank
    others: dict[int, str]  # the exceptions of the other ranks, as notes say them
    by: int  # the rank that raised


def diagnose(program: Callable[..., Any], world: int = 3, **options: Any) -> Diagnosis:
    """Launch a wrong program, check that it ends at once, and that a launch works afterwards."""
    begin = time.monotonic()
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - the tests check which one
        threads.launch(program, world, timeout=10, **options)
    assert time.monotonic() - begin < 5
    assert threads.launch(total, 3) == [3.0] * 3
    error = caught.value
    notes = list(getattr(error, "__notes__", []))
    raised = re.fullmatch(rf"raised by rank (\d) of {world}", notes[0])
    assert raised, notes
    others = dict(
        _numbered(r"rank (\d) raised (.*)", note) for note in notes[1:] if " raised " in note
    )
    waits, source = {}, {}
    for line in str(error).splitlines()[1:]:
        if found := re.fullmatch(r"  rank (\d) waits for (.*?)(?:, at (.+):(\d+) in \w+)?", line):
            waits[int(found[1])] = found[2]
            source[int(found[1])] = linecache.getline(found[3] or "", int(found[4] or 0)).strip()
    return Diagnosis(error, waits, source, others, int(raised[1]))


def _numbered(pattern: str, text: str) -> tuple[int, str]:
    found = re.fullmatch(pattern, text, re.DOTALL)
    assert found, text
    return int(found[1]), found[2]


@contextlib.contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """Check the duration; a launch interrupts its ranks soon, and leaves those that hang."""
    begin = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "_INTERRUPT_SECONDS", 0.2)
        patch.setattr(launcher, "_ABANDON_SECONDS", 2.0)
        yield
    assert time.monotonic() - begin < seconds
