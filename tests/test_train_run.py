"""`train` and `compare_reductions` as library calls: results, repeatability, refusals."""

import pytest
import torch

from pycollect.train import Data, compare_reductions, digits, init_lenet, lenet, train
from pycollect.train.records import same_bits


def few(classes, examples=None):
    """The first examples of the first classes of the digits."""
    train, test = (
        (X[y < classes][:examples], y[y < classes][:examples])
        for X, y in (digits().train, digits().test)
    )
    return Data("few digits", train, test, classes=digits().classes)


def test_it_learns_on_three_classes():
    result = train("cpu*2", 8, 0.3, data=few(3), epochs=8, quiet=True)
    assert result.accuracy >= 0.9
    assert result.epochs[-1].loss < 0.3 < result.epochs[0].loss
    assert [epoch.number for epoch in result.epochs] == list(range(1, 9))


def test_the_same_seed_gives_the_same_bits():
    first, again, other = (
        train("cpu*2", 16, 0.3, data=few(10, 50), epochs=2, seed=seed, quiet=True)
        for seed in (5, 5, 6)
    )
    assert all(map(same_bits, first.parameters, again.parameters))
    assert first.losses == again.losses
    assert not same_bits(first.parameters[0], other.parameters[0])


def test_the_loss_is_the_mean_per_example():
    X, y = few(10, 40).train
    expected = torch.nn.functional.cross_entropy(lenet(X, init_lenet(0)), y)
    result = train("cpu*3", 40, 0.1, data=few(10, 40), epochs=1, quiet=True)
    assert result.epochs[0].loss == pytest.approx(float(expected), abs=1e-5)


def test_compare_trains_both_on_the_same_batches(capsys):
    comparison = compare_reductions("cpu*3", 16, 0.3, data=few(10, 40), epochs=2)
    assert comparison.identical
    for run_result in comparison.run_results:
        assert len(run_result.steps) == 2 * 3
        assert min(run_result.reduce_seconds, run_result.step_seconds, run_result.epoch_seconds) > 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" ")[2] for line in lines[:10:5]] == ["naive", "pycollect"]
    assert [lines[i].split(",")[0] for i in (1, 2, 6, 7)] == ["epoch 1", "epoch 2"] * 2
    assert [line.split()[0] for line in lines[10:13]] == ["median", "naive", "pycollect"]
    assert lines[13] == "parameters after 6 steps: the same bits"
    with torch.no_grad():
        list(comparison.run_results[1].modules[2].parameters())[7][0] += 1
    last = str(comparison).splitlines()[-1]
    assert last.endswith("against naive: pycollect by up to 1.0e+00 different")


@pytest.mark.parametrize(
    ("call", "name", "value", "message"),
    [
        (train, "batch_size", 0, "batch size must be at least 1, not 0"),
        (train, "lr", 0.0, "positive number, not 0"),
        (train, "lr", float("nan"), "positive number, not nan"),
        (train, "epochs", -1, "epochs must be at least 1, not -1"),
        (train, "seed", -1, "seed must be from 0"),
        (train, "devices", [], "device"),
        (train, "devices", "banana", "banana"),
        (train, "reduce", "magic", "unknown reduction 'magic'"),
        (train, "data", "cifar", "unknown data set 'cifar'"),
        *(
            (compare_reductions, name, "no/where", f"a comparison does not support {name}")
            for name in ("checkpoint", "resume", "log", "reduce")
        ),
    ],
)
def test_bad_arguments_are_refused(call, name, value, message):
    with pytest.raises(ValueError, match=message):
        call(**{"data": "digits", "quiet": True, name: value})
