"""The benchmark of tensor-parallel decoding: its models, the parts of a token's time, a tiny run.

No test asserts a speed.
"""

from __future__ import annotations

import json
from types import ModuleType, SimpleNamespace

import programs
import pytest
import torch
import torch.distributed._functional_collectives as funcol
from test_bench_gpu import script

from pycollect._timing import Timing
from pycollect_bench.tensor_parallel import collectives, llama, report, worker
from pycollect_bench.tensor_parallel.case import Case, CaseResult, Row
from pycollect_bench.tensor_parallel.collectives import Collectives, Stamps
from pycollect_bench.tensor_parallel.variants import ALONE, VARIANTS, Variant

TINY = ["--hidden", "256", "--dtypes", "float32", "--batches", "2", "--ranks", "2", "--layers", "1"]
TINY += ["--vocab", "64", "--prompt", "3", "--tokens", "2", "-n", "1"]


@pytest.fixture
def command() -> ModuleType:
    return script("tensor_parallel")


@pytest.mark.parametrize("moe", [False, True])
def test_the_parts_of_the_ranks_are_the_whole(moe):
    shape = llama.Shape(256, 1, 64, 8, moe)
    whole = llama.weights(shape, torch.float32)
    parts = [llama.weights(shape, torch.float32, rank, 2) for rank in range(2)]
    divided = 0
    for name, weight in whole.items():
        both = [part[name] for part in parts]
        dim = llama.DIVIDED.get(name.split(".")[-2])
        divided += dim is not None
        assert (both[0] if dim is None else torch.cat(both, dim)).equal(weight), name
    assert divided == 8  # q, k, v, o, head, and three of the MLP or of the experts


@pytest.mark.parametrize("moe", [False, True])
def test_tokens_one_by_one_give_the_logits_of_all_at_once(moe):
    shape = llama.Shape(256, 2, 64, 8, moe)
    model = llama.Llama(shape, Collectives(), 1)
    model.load_state_dict(llama.weights(shape, torch.float32))
    ids = torch.randint(64, (2, 5), generator=torch.Generator().manual_seed(0))

    def caches():
        return [llama.Cache(2, shape.kv_heads, 8, torch.float32) for _ in range(2)]

    with torch.no_grad():
        whole, kept = model(ids, 0, caches()), caches()
        model(ids[:, :3], 0, kept)
        model(ids[:, 3:4], 3, kept)
        torch.testing.assert_close(model(ids[:, 4:], 4, kept), whole, rtol=1e-4, atol=1e-5)


@pytest.fixture
def stamps(monkeypatch):
    """Stamps of a torch whose groups are the names of their backends; its calls do nothing."""
    monkeypatch.setattr(collectives.dist, "get_backend", lambda group: group)
    monkeypatch.setattr(funcol, "all_reduce", lambda tensor, op, group: 1)
    monkeypatch.setattr(funcol, "wait_tensor", lambda: 2)
    return Stamps()


def test_the_wait_belongs_to_its_call(stamps, monkeypatch):
    with stamps.of_libraries("gloo"):
        assert (funcol.all_reduce(0, "sum", "gloo"), funcol.wait_tensor()) == (1, 2)
    monkeypatch.setattr(funcol, "all_reduce", lambda *_, group: funcol.wait_tensor())
    with stamps.of_libraries("gloo"):
        assert funcol.all_reduce(0, "sum", group="gloo") == 2
    first, second = stamps.taken()
    assert (len(first), len(second)) == (4, 2)
    assert first + second == sorted(first + second)


def test_times_without_their_waits_are_refused(stamps):
    not_awaited = "1 results of DTensor's collectives were not awaited"
    with pytest.raises(RuntimeError, match=not_awaited), stamps.of_libraries("gloo"):
        funcol.all_reduce(0, "sum", "gloo")


@pytest.mark.parametrize("group", ["gloo", (SimpleNamespace(get_group=lambda dim: "gloo"), 0)])
def test_the_call_of_another_backend_is_refused(stamps, group):
    of_another = "a collective of pycollect is one of gloo"
    with pytest.raises(RuntimeError, match=of_another), stamps.of_libraries("pycollect"):
        funcol.all_reduce(0, "sum", group)


def test_a_row_has_the_slowest_ranks_token_and_the_mean_of_the_parts():
    calls = [[[0, 4_000]], [[3_000, 5_000]]]
    of_ranks = [[worker.Turn(1.0, 2.0, calls[0])], [worker.Turn(3.0, 1.0, calls[1])]]
    job = SimpleNamespace(tokens=1)
    variant = Variant("a", lambda parts, backend: None, against="b")
    row = worker.row(variant, of_ranks, job, 1, 0.5)
    seconds = [getattr(row, name).rounds for name in ("first", "token", "waiting", "moving")]
    assert seconds == [[3.0], [2.0], [1.5e-6], [1.5e-6]]
    assert (row.calls, row.error, row.against) == (1, 0.5, "b")
    with pytest.raises(RuntimeError, match=r"a makes \{1.0\} collectives of a token, not 2"):
        worker.row(variant, of_ranks, job, 2, 0.5)


def result(hidden: int, gloo: float, ours: float, moving: float, **more: object) -> CaseResult:
    """A result with the seconds of tokens through DTensor."""

    def row(name: str, token: float) -> Row:
        first, parts = Timing(((1.0,),)), [Timing(((part,),)) for part in (token, 0.0, moving)]
        return Row(name, "dtensor:gloo", first, *parts, calls=1, error=more.get("error", 0.0))

    case = Case(hidden, torch.float32, more.get("batch", 1), 64, more.get("moe", False))
    return CaseResult(case, 2, [row("dtensor:gloo", gloo), row("dtensor:pycollect", ours)])


def test_targets_take_the_worst_point_of_one_sequence():
    found = report.judge(
        [
            result(1024, 6.0, 2.0, 0.01),
            result(1024, 5.0, 2.0, 0.03),
            result(512, 8.0, 2.0, 0.01),
            result(512, 1.0, 2.0, 1.0, batch=8),
            result(1024, 1.0, 2.0, 1.0, moe=True),
        ]
    )
    assert [outcome.measured for outcome in found] == [2.5, 4.0, 1.5]
    assert [outcome.met for outcome in found] == [True, False, False]
    assert [outcome.met for outcome in report.judge([])] == [None] * 3


def test_logits_of_another_model_are_wrong():
    names = ["dtensor:gloo", "dtensor:pycollect"]
    assert result(512, 1.0, 1.0, 0.0, error=2e-3).wrong == names
    assert result(512, 1.0, 1.0, 0.0, error=float("nan")).wrong == names
    assert result(512, 1.0, 1.0, 0.0, error=1e-6).wrong == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "3"], "3 ranks cannot divide 8 key heads (hidden 1024) evenly"),
        (["--ranks", "1"], "1 rank divides nothing"),
        (["--batches", "1"], "2 ranks cannot divide 1 sequences of experts evenly"),
        (["--vocab", "30"], "4 ranks cannot divide 30 tokens of the vocabulary evenly"),
        (["--hidden", "100"], "100 is not a multiple of 256"),
        (["--variants", "mpi"], "'mpi' is not among alone, dtensor:gloo"),
        (["--tokens", "0"], "--tokens must be positive, not 0"),
    ],
)
def test_wrong_options_are_refused(command, capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    assert message in capsys.readouterr().err


def test_a_tiny_run(command, tmp_path, monkeypatch, capfd):
    pytest.importorskip("matplotlib")
    programs.fork_ranks(monkeypatch)
    files = [str(tmp_path / name) for name in ("run.json", "run.png")]
    arguments = [*TINY, "--targets", "--json", files[0], "--plot", files[1]]
    assert command.main(arguments) == 0, capfd.readouterr().out
    record = json.loads((tmp_path / "run.json").read_text())
    names = [variant.name for variant in VARIANTS if not variant.client]
    calls = {"llama": 3, "moe": 6}
    assert [case["model"] for case in record["tensor_parallel"]] == list(calls)
    for case in record["tensor_parallel"]:
        assert list(case["variants"]) == names
        for name, row in case["variants"].items():
            alone = name == ALONE
            assert row["error"] < 1e-5
            assert row["calls"] == (0 if alone else calls[case["model"]])
            assert 1.01 * row["token"] > row["waiting"] + row["moving"] >= 0
            assert alone or row["xgloo"]["median"] > 0
    assert (tmp_path / "run.png").stat().st_size > 10_000
    assert "DTensor itself computes" in capfd.readouterr().out
