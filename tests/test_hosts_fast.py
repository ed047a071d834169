"""Groups with `options(hosts="fast")`: large reductions add the sums of the hosts, in order.

The result is determined by the placement of the ranks: the left fold, in the order of the hosts, of
the left folds of their ranks, rounded once. What does not depend on the order has the usual bits.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from dist_pool import OURS, RankContext
from reference import short
from sites import PROCESSES, only_on

from pycollect.distributed import options

pytestmark = [
    pytest.mark.skipif(not OURS, reason="the option is pycollect's"),
    only_on(PROCESSES, "names its own hosts"),
]

PLACEMENTS = ("aabb", "aab", "abb", "abab", "abca", "abcd", "aabbcc", "aaaabbbb")
QUICK = ("aab", "abab")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)
OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}
# Bytes that go along with the agreement, and the least that two hosts add in this order; elements.
MESSAGE, OF_TWO, LARGE = 32 * 1024, 512 * 1024, 300_000


def data(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    random = torch.Generator().manual_seed(rank + 1)
    return (torch.randn(count, generator=random, dtype=torch.float64) * 10).to(dtype)


def fold(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    result = tensors[0]
    for other in tensors[1:]:
        if op == "max":
            result = torch.maximum(result, other)
        elif result.dtype == torch.bool:
            result = result | other
        else:
            result = result + other
    return result


def expected(inputs: list[torch.Tensor], placement: str, op: str) -> torch.Tensor:
    """Return the hosts' folds, folded: in float32 for narrow floats, and divided at the end."""
    dtype = inputs[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    inputs = [x.to(wide) for x in inputs]
    hosts = [
        fold([x for x, host in zip(inputs, placement, strict=True) if host == name], op)
        for name in dict.fromkeys(placement)
    ]
    result = fold(hosts, op)
    if op == "avg" and dtype.is_floating_point:
        result = result * (1 / len(inputs))
    elif op == "avg":
        result = torch.div(result, len(inputs), rounding_mode="trunc")
    return result.to(dtype)


def calls(
    me: RankContext, x: torch.Tensor, op: str, group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Return the rank's tensors after all_reduce, reduce to rank 1, and reduce_scatter."""
    whole = x.clone()
    dist.all_reduce(whole, OPS[op], group)
    again = x.clone()
    dist.reduce(again, 1, OPS[op], group)
    n = x.numel() // me.world
    part = torch.empty(n, dtype=x.dtype)
    dist.reduce_scatter_tensor(part, x[: n * me.world].clone(), OPS[op], group)
    return [whole, again, part]


def wrong_calls(me: RankContext, placement: str, dtype: torch.dtype) -> list[str]:
    fast = dist.new_group(backend="pycollect", pg_options=options(hosts="fast"))
    wrong = []
    for op in OPS:
        if dtype == torch.bool and op == "avg":
            continue
        for count in (7, 20_000, LARGE):
            inputs = [data(rank, count, dtype) for rank in range(me.world)]
            nbytes = count * inputs[0].itemsize
            two_in_order = list(placement) == sorted(placement) and len(set(placement)) == 2
            exact = nbytes * me.world <= MESSAGE or (two_in_order and nbytes < OF_TWO)
            want = expected(inputs, "a" * me.world if exact else placement, op)
            n = count // me.world
            wanted = [want, want if me.rank == 1 else inputs[me.rank], want[n * me.rank :][:n]]
            for turn in range(2):
                found = calls(me, inputs[me.rank], op, fast)
                wrong += [
                    f"{op} of {count}, call {i}, turn {turn}"
                    for i, (a, b) in enumerate(zip(found, wanted, strict=True))
                    if not torch.equal(a.view(torch.uint8), b.view(torch.uint8))
                ]
    dist.destroy_process_group(fast)
    return wrong


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(
    "placement", [pytest.param(p, marks=[] if p in QUICK else pytest.mark.slow) for p in PLACEMENTS]
)
def test_results_are_the_folds_of_the_hosts(pools, placement, dtype):
    found = pools(len(placement), placement=placement).run(wrong_calls, placement, dtype)
    assert found == [[]] * len(placement)


def test_the_expected_bits_differ_from_those_of_one_host():
    inputs = [data(rank, LARGE, torch.float32) for rank in range(4)]
    assert not torch.equal(expected(inputs, "aabb", "sum"), expected(inputs, "aaaa", "sum"))
    whole = [data(rank, LARGE, torch.int64) for rank in range(4)]
    assert torch.equal(expected(whole, "aabb", "sum"), expected(whole, "aaaa", "sum"))


def mixed_options(me: RankContext, version: str) -> str:
    made = options(hosts="fast" if me.rank == 0 or version else "exact")
    if version and me.rank == 0:
        made._version = version
    try:
        dist.new_group(backend="pycollect", pg_options=made)
    except ValueError as error:
        return str(error)
    return ""


def test_all_ranks_must_give_the_same_option(pools):
    for why in pools(4, placement="aabb").run(mixed_options, ""):
        assert "hosts=fast" in why
        assert "hosts=exact" in why


def test_all_ranks_must_run_the_same_version(pools):
    """Other versions may select other algorithms, and so exchange other messages."""
    for why in pools(4, placement="aabb").run(mixed_options, "0.0.1"):
        assert "rank 0 has" in why
        assert "pycollect=0.0.1" in why
