"""The loader: the order never depends on prefetching, errors surface, and no thread is left."""

import threading
import time

import pytest
import torch
from torch import Tensor

from pycollect.train.loader import Batch, Loader, LoaderOptions

PAIR = torch.arange(11.0)[:, None], torch.arange(11)


class Slow:
    """A slow data set that records the reading threads and the indices read."""

    def __init__(self, seconds: float = 0.0, broken: int | None = None) -> None:
        self.seconds, self.broken = seconds, broken
        self.threads: set[str] = set()
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.threads.add(threading.current_thread().name)
        self.fetched.append(index)
        time.sleep(self.seconds)
        if index == self.broken:
            raise OSError(f"example {index} is damaged")
        return torch.full((1, 2, 2), float(index)), index


def workers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("pycollect-loader")]


def labels(batches: object) -> list[list[int]]:
    return [batch.y.tolist() for batch in batches]  # type: ignore[attr-defined]


@pytest.mark.parametrize("prefetch", [1, 2, 3, 50])
@pytest.mark.parametrize("examples", [PAIR, Slow(0.001)], ids=["memory", "files"])
def test_prefetching_changes_nothing(examples: object, prefetch: int) -> None:
    for epoch in (1, 2):
        plain, ahead = (
            list(Loader(examples, LoaderOptions(4, seed=3, prefetch=n)).epoch(epoch))  # type: ignore[arg-type]
            for n in (0, prefetch)
        )
        assert labels(plain) == labels(ahead)
        assert all(torch.equal(a.X, b.X) for a, b in zip(plain, ahead, strict=True))
    assert not workers()


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        return labels(Loader(PAIR, LoaderOptions(4, seed=seed)).epoch(epoch))

    torch.manual_seed(1)
    first = order(0, 1)
    torch.manual_seed(2)
    assert order(0, 1) == first
    assert len({str(order(seed, epoch)) for seed in (0, 1) for epoch in (1, 2)}) == 4
    assert sorted(label for batch in first for label in batch) == list(range(11))


def test_without_shuffling_the_order_is_that_of_the_data() -> None:
    assert labels(Loader(PAIR, LoaderOptions(4, shuffle=False)).epoch(7)) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10],
    ]


def test_the_last_batch_can_be_dropped() -> None:
    loader = Loader(PAIR, LoaderOptions(4, drop_last=True))
    assert len(loader) == len(list(loader.epoch())) == 2
    assert len(Loader(PAIR, LoaderOptions(11, drop_last=True))) == 1
    with pytest.raises(ValueError, match="leaves no batch: there are 11 examples and a batch has"):
        next(Loader(PAIR, LoaderOptions(12, drop_last=True)).epoch())


@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_epoch_can_start_at_any_batch(prefetch: int) -> None:
    loader = Loader(PAIR, LoaderOptions(2, prefetch=prefetch))
    assert labels(loader.epoch(5, start=4)) == labels(loader.epoch(5))[4:]
    assert labels(loader.epoch(5, start=6)) == []


def test_only_the_own_part_of_each_batch_is_fetched() -> None:
    examples = Slow()
    loader = Loader(examples, LoaderOptions(5, shuffle=False), part=lambda indices, _: indices[3:])
    batches = list(loader.epoch())
    assert labels(batches) == [[3, 4], [8, 9], [13, 14], [18, 19], [23]]
    assert [batch.examples for batch in batches] == [5, 5, 5, 5, 4]
    assert examples.fetched == [3, 4, 8, 9, 13, 14, 18, 19, 23]


def test_a_part_may_be_empty() -> None:
    loader = Loader(Slow(), LoaderOptions(20, shuffle=False), part=lambda indices, _: indices[4:4])
    assert [tuple(batch.X.shape) for batch in loader.epoch()] == [(0, 1, 2, 2)] * 2


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_an_error_is_raised_when_its_batch_is_requested(prefetch: int) -> None:
    seen: list[Batch] = []
    with pytest.raises(OSError, match="example 9 is damaged"):
        seen.extend(
            Loader(Slow(broken=9), LoaderOptions(4, shuffle=False, prefetch=prefetch)).epoch()
        )
    assert not workers()
    batches = Loader(Slow(broken=9), LoaderOptions(4, shuffle=False, prefetch=prefetch)).epoch()
    assert next(batches).y.tolist() == [0, 1, 2, 3]
    assert next(batches).y.tolist() == [4, 5, 6, 7]
    with pytest.raises(OSError, match="example 9"):
        next(batches)


def test_stopping_early_ends_all_threads() -> None:
    examples = Slow(0.002)
    for batch in Loader(examples, LoaderOptions(2, shuffle=False, prefetch=2)).epoch():
        assert workers()
        if batch.y[0] == 2:
            break
    assert not workers()
    fetched = len(examples.fetched)
    assert fetched < 24
    time.sleep(0.02)
    assert len(examples.fetched) == fetched


def test_closing_the_iterator_of_an_interrupted_caller_ends_all_threads() -> None:
    batches = Loader(Slow(0.001), LoaderOptions(2, prefetch=3)).epoch()

    def interrupted() -> None:
        for _ in batches:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert workers()  # the traceback still holds the iterator
    batches.close()
    assert not workers()


def test_waiting_is_measured() -> None:
    slow = [batch.waited for batch in Loader(Slow(0.005), LoaderOptions(4)).epoch()]
    assert all(seconds >= 4 * 0.005 for seconds in slow)
    waited = []
    for batch in Loader(Slow(0.01), LoaderOptions(8, prefetch=2)).epoch():
        waited.append(batch.waited)
        time.sleep(0.5)  # the training step, long enough to load the next batch
    assert waited[0] >= 8 * 0.01
    assert max(waited[1:]) < 8 * 0.01


def test_files_are_decoded_by_several_threads_and_memory_is_read_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pycollect.train.loader._MOST_WORKERS", 3)
    examples = Slow(0.003)
    for _ in Loader(examples, LoaderOptions(2, prefetch=8)).epoch():
        pass
    assert 1 < len(examples.threads) <= 3
    plain = Slow()
    list(Loader(plain, LoaderOptions(2)).epoch())
    assert plain.threads == {threading.current_thread().name}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"batch_size": 0}, "batch size must be at least 1, not 0"), ({"prefetch": -1}, "not -1")],
)
def test_bad_values_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoaderOptions(**{"batch_size": 4, **arguments})


@pytest.mark.cuda
@pytest.mark.parametrize("prefetch", [1, 3])
def test_shards_are_copied_ahead(prefetch: int) -> None:
    X, y = torch.randn(257, 64, 64), torch.arange(257)
    devices = [torch.device("cuda", 0), torch.device("cpu"), torch.device("cuda", 0)]
    loader = Loader(
        (X, y),
        LoaderOptions(32, shuffle=False, prefetch=prefetch),
        devices=devices,
        shares=lambda n: [n - 1 - n // 2, 1, n // 2],
    )
    seen = []
    for batch in loader.epoch():
        assert batch.shards is not None
        assert [shard.device for shard in batch.shards[0]] == devices
        assert sum(map(len, batch.shards[1])) == batch.examples
        # On the current stream, while the next copies run.
        seen += [(shard * 1).cpu() for shard in batch.shards[0]]
    assert torch.equal(torch.cat(seen), X)


@pytest.mark.cuda
def test_without_shares_batches_are_in_pinned_memory() -> None:
    pair = torch.randn(8, 4), torch.arange(8)
    loader = Loader(pair, LoaderOptions(4, prefetch=1), devices=[torch.device("cuda", 0)])
    assert all(batch.X.is_pinned() and batch.y.is_pinned() for batch in loader.epoch())


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_part_gets_the_number_of_steps_before_its_own(prefetch: int) -> None:
    calls: list[tuple[int, int, int]] = []
    done = 0

    def part(indices: torch.Tensor, steps: int) -> torch.Tensor:
        calls.append((int(indices[0]), done, steps))
        return indices

    examples = torch.arange(12.0)[:, None], torch.arange(12)
    loader = Loader(examples, LoaderOptions(2, shuffle=False, prefetch=prefetch), part=part)
    for _ in loader.epoch(1):
        done += 1
    assert [first for first, _, _ in calls] == [0, 2, 4, 6, 8, 10]
    assert all(first // 2 == before + steps for first, before, steps in calls)
    assert max(steps for _, _, steps in calls) == prefetch


def test_more_batches_than_there_are_cost_nothing() -> None:
    for size in (1, 2**62):
        loader = Loader(PAIR, LoaderOptions(size, prefetch=2**62))
        assert sum(len(batch.y) for batch in loader.epoch(1)) == len(PAIR[1])
    for name in ("batch_size", "prefetch"):
        with pytest.raises(ValueError, match=f"LoaderOptions: {name} does not fit 64 bits"):
            LoaderOptions(**{"batch_size": 1, name: 10**20})
