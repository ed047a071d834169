"""`train` and `compare_reductions` as library calls: results, repeatability, refusals."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pycollect.train import Data, compare_reductions, digits, init_lenet, lenet, train
from pycollect.train.records import same_bits


def few(classes: int, examples: int | None = None) -> Data:
    """Return the first examples of the first classes of the digits."""
    parts = [
        (X[y < classes][:examples], y[y < classes][:examples])
        for X, y in (digits().train, digits().test)
    ]
    return Data("few digits", parts[0], parts[1], classes=digits().classes)


def assert_same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    assert len(a) == len(b) > 0
    assert all(map(same_bits, a, b))


def test_it_learns_on_three_classes() -> None:
    result = train("cpu*2", 8, 0.3, data=few(3), epochs=8, quiet=True)
    assert result.accuracy >= 0.9
    assert result.epochs[-1].loss < 0.3 < result.epochs[0].loss
    assert [epoch.number for epoch in result.epochs] == list(range(1, 9))


def test_the_same_seed_gives_the_same_bits() -> None:
    data = few(10, 50)
    first, again, other = (
        train("cpu*2", 16, 0.3, data=data, epochs=2, seed=seed, quiet=True) for seed in (5, 5, 6)
    )
    assert_same_bits(first.parameters, again.parameters)
    assert first.epochs[-1].loss == again.epochs[-1].loss
    assert not same_bits(first.parameters[0], other.parameters[0])


def test_the_loss_is_the_mean_per_example() -> None:
    data = few(10, 40)
    with torch.no_grad():
        scores = lenet(data.train[0], init_lenet(0))
        expected = torch.nn.functional.cross_entropy(scores, data.train[1])
    result = train("cpu*3", 40, 0.1, data=data, epochs=1, quiet=True)
    assert result.epochs[0].loss == pytest.approx(float(expected), abs=1e-5)


def test_compare_trains_both_on_the_same_batches(capsys: pytest.CaptureFixture[str]) -> None:
    comparison = compare_reductions("cpu*3", 16, 0.3, data=few(10, 40), epochs=2)
    assert comparison.identical
    for run_result in comparison.run_results:
        assert len(run_result.steps) == 2 * 3
        assert min(run_result.reduce_seconds, run_result.step_seconds, run_result.epoch_seconds) > 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("epoch 1, time ")
    assert [line.endswith("(naive)") for line in lines[1:5]] == [True, False, True, False]
    assert "ratio" in lines[5]
    assert "ratio" in lines[6]
    assert lines[7] == "parameters after 6 steps: the same bits"
    with torch.no_grad():
        list(comparison.run_results[1].modules[2].parameters())[7][0] += 1
    assert "DIFFERENT" in str(comparison)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("batch_size", 0, "batch size must be at least 1, not 0"),
        ("lr", 0.0, "positive number, not 0"),
        ("lr", float("nan"), "positive number, not nan"),
        ("epochs", -1, "epochs must be at least 1, not -1"),
        ("seed", -1, "seed must be from 0"),
        ("devices", [], "device"),
        ("devices", "banana", "banana"),
        ("reduce", "magic", "unknown reduction 'magic'"),
        ("data", "cifar", "unknown data set 'cifar'"),
    ],
)
def test_bad_arguments_are_refused(name: str, value: object, message: str) -> None:
    arguments: dict[str, object] = {"data": "digits", "quiet": True, name: value}
    with pytest.raises(ValueError, match=message):
        train(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["checkpoint", "resume", "log", "reduce"])
def test_a_comparison_refuses_files_before_it_looks_at_them(name: str) -> None:
    with pytest.raises(ValueError, match=f"a comparison does not support {name}"):
        compare_reductions(data="digits", **{name: "no/where"})  # type: ignore[arg-type]
