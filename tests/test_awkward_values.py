"""Any number, string or object as an argument gives a result or a one-sentence error, in time."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import programs
import pytest
import torch

import pycollect as pc
from pycollect import cli

AWKWARD, PARTS = Path(__file__).parent / "helpers/awkward_calls.py", 2  # the parts run in parallel


def start(command: list[Any]) -> programs.Program:
    return programs.Program([sys.executable, *command], stdout=subprocess.PIPE, stderr=-1)


@pytest.mark.slow
def test_every_argument_of_every_call() -> None:
    all_tried = 0
    for process in [start([AWKWARD, part, PARTS]) for part in range(PARTS)]:
        out, errors = process.communicate(timeout=900)
        status, last = process.returncode, errors.splitlines()[-1:]
        assert status == 0, f"exit status {status} after {last}: {errors[-3000:]}"
        *wrong, (_, tried) = map(json.loads, out.splitlines())
        assert wrong == []
        all_tried += tried
    assert all_tried > 5000


WRAPPING = [1 << 62] * 4  # sums to 0 in 64 bits
EMPTY = [torch.zeros(0, 4) for _ in range(4)]
LONG = (torch.zeros(1).expand(1 << 62), torch.zeros(1 << 62, 0))
OVERFLOWING = [  # call, arguments, options, words
    *[
        (pc.all_to_all, (EMPTY,), {"split_sizes": sizes, "async_op": async_op}, "split_sizes")
        for sizes in (WRAPPING, [WRAPPING] * 4, [(1 << 63) - 1, 1] * 2)
        for async_op in (False, True)
    ],
    (pc.scatter, (EMPTY[0], "cpu*4"), {"chunk_sizes": WRAPPING}, "chunk_sizes"),
    *[(pc.all_gather, ([long] * 4,), {}, "all_gather: the lengths along dim") for long in LONG],
    *[(pc.gather, ([long] * 4,), {}, "gather: the lengths along dim") for long in LONG],
]


@pytest.mark.parametrize(("call", "arguments", "options", "words"), OVERFLOWING)
def test_sizes_whose_sum_overflows_are_refused(
    call: Any, arguments: Any, options: dict[str, Any], words: str
) -> None:
    needed = "; needed are 4 that sum to 0" if options else ""
    with pytest.raises(ValueError, match=f"{words} .* 64 bits{needed}"):
        call(*arguments, **options)


def test_huge_timeouts_do_not_expire_at_once() -> None:
    """A timeout beyond the clock's range does not expire at once."""
    for seconds in (math.inf, 1e300, 1e10):
        work = pc.all_reduce([torch.ones(1 << 22) for _ in range(4)], async_op=True)
        assert work.wait(seconds) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("4 --pieces 99999999", "pieces is 99999999; 4 ranks allow at most 65536"),
        ("4 --pieces 99999999999999999999", "pieces does not fit 64 bits"),
        ("4 --pieces 0", "pieces is 0; pass at least one piece"),
        ("4 --pieces nan", "invalid int value: 'nan'"),
        ("4 --pieces " + "9" * 5000, "invalid int value"),
        ("99999999", "world is 99999999; at most 1024 ranks are allowed"),
        ("99999999999999999999", "world does not fit 64 bits"),
        ("1.0", "invalid int value: '1.0'"),
        ("4 --root 4", "root 4 is not a rank of a world of 4"),
        ("4 --root=-1", "root -1 is not a rank of a world of 4"),
        ("4 --root 99999999999999999999", "root does not fit 64 bits"),
        ("4 --bytes 99999999999G", "nbytes does not fit 64 bits"),
        ("4 --bytes -1", "bytes"),
        ("4 --bytes 1e9", "'1e9' is not a size"),
        ("4 --bytes 0", "'0' is not a size"),
        ("4 --model inf", "invalid choice: 'inf'"),
    ],
)
def test_numbers_of_the_plan_command_are_checked(
    options: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["plan", "all_reduce", "--algorithm", "chain", *options.split()])
    assert left.value.code == 2
    *_, errors = capsys.readouterr().err.splitlines()
    assert words in errors


@pytest.mark.slow
def test_the_largest_plans_are_built_and_verified_in_little_memory() -> None:
    program = """
import resource, sys, pycollect as pc
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
before = peak()
plan = pc.plan("all_reduce", int(sys.argv[1]), algorithm="chain", pieces=int(sys.argv[2]))
str(plan), plan.predict()
assert plan.verify() is None
print(peak() - before)
"""
    started = []
    for world in (2, 64, 1024):
        with pytest.raises(
            ValueError, match=rf"pieces .* {world} ranks allow at most \d+"
        ) as raised:
            pc.plan("all_reduce", world, algorithm="chain", pieces=1 << 30)
        most = re.findall(r"\d+", str(raised.value))[-1]
        started.append(start(["-c", program, world, most]))
    for process in started:
        out, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        assert int(out) < 3 << 30
