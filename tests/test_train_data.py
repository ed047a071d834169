"""The trainer's data: valid and damaged IDX files, a missing network, the split of the digits."""

import gzip
import socket
import struct
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pycollect.train import (
    Data,
    DatasetError,
    DatasetUnavailable,
    RunResult,
    digits,
    load_dataset,
    train,
)
from pycollect.train.data import fashion as fashion_module
from pycollect.train.data.fashion import FILES, read_idx, require_answer

TRAIN, TEST = 30, 12


def idx(*shape: int, content: bytes | None = None) -> bytes:
    """An IDX file of bytes; by default its content counts up."""
    count = int(torch.tensor(shape).prod())
    data = bytes(i % 10 for i in range(count)) if content is None else content
    return struct.pack(f">4B{len(shape)}I", 0, 0, 8, len(shape), *shape) + data


def write_fashion(folder: Path, *, gzipped: bool = False) -> Path:
    """Write four small files with pixels of 255 in the first image of the training set."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in zip(FILES, (TRAIN, TRAIN, TEST, TEST), strict=True):
        shape = (count, 28, 28) if "images" in name else (count,)
        content = bytes([255]) * 784 + bytes(784 * (TRAIN - 1)) if name == FILES[0] else None
        data = idx(*shape, content=content)
        path = folder / (f"{name}.gz" if gzipped else name)
        path.write_bytes(gzip.compress(data) if gzipped else data)
    return folder


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(data_dir: Path) -> None:
        raise DatasetUnavailable("no answer from example.org")

    monkeypatch.setattr(fashion_module, "download", refuse)


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"


@pytest.mark.parametrize("gzipped", [False, True])
@pytest.mark.parametrize("place", ["", "FashionMNIST/raw", "raw"])
def test_fashion_mnist_is_found_in_every_folder(tmp_path: Path, place: str, gzipped: bool) -> None:
    write_fashion(tmp_path / place, gzipped=gzipped)
    data = load_dataset("auto", tmp_path)
    assert (data.name, data.notice) == ("fashion-mnist", "")
    (X, y), (X_test, y_test) = data.train, data.test
    assert (X.shape, X.dtype) == ((TRAIN, 1, 28, 28), torch.float32)
    assert X[0].min() == X.max() == 1
    assert not X[1:].any()
    assert X_test.shape == (TEST, 1, 28, 28)
    assert (y.dtype, y.tolist()) == (torch.int64, [i % 10 for i in range(TRAIN)])
    assert len(y_test) == TEST


def test_defaults_belong_to_the_data_set(tmp_path: Path) -> None:
    fashion = load_dataset("fashion-mnist", write_fashion(tmp_path)).defaults
    assert (fashion.batch_size, fashion.lr, fashion.epochs) == (256, 0.2, 10)
    small = load_dataset("digits").defaults
    assert (small.batch_size, small.lr, small.epochs) == (64, 0.3, 40)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx(TRAIN, 28, 28)[:-1], r"damaged: it holds 23535 bytes where .* 23536; delete"),
        (idx(TRAIN, 28, 28) + b"x", "damaged: it holds 23537 bytes"),
        (idx(TRAIN, 28, 28)[:9], "damaged: it holds 9 bytes"),
        (b"", "not an IDX file"),
        (b"<html>not found</html>", "not an IDX file"),
        (idx(TRAIN, 28, 27), r"\[30, 28, 27\], not images of 28 x 28"),
        (idx(0, 28, 28), r"\[0, 28, 28\], not images"),
        (idx(TRAIN - 1, 28, 28), "not 29 labels"),
    ],
)
@pytest.mark.parametrize("name", ["auto", "fashion-mnist"])
def test_a_damaged_file_is_one_clear_sentence(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (write_fashion(tmp_path) / FILES[0]).write_bytes(content)
    with pytest.raises(DatasetError, match=message) as caught:
        load_dataset(name, tmp_path)
    assert not isinstance(caught.value, DatasetUnavailable)
    assert "\n" not in str(caught.value)
    assert FILES[0].split("-")[0] in str(caught.value)


def test_labels_beyond_nine_are_refused(tmp_path: Path) -> None:
    (write_fashion(tmp_path) / FILES[1]).write_bytes(idx(TRAIN, content=bytes([10]) * TRAIN))
    with pytest.raises(DatasetError, match="the label 10"):
        load_dataset("auto", tmp_path)


@pytest.mark.parametrize("change", ["cut", "flip", "plain"])
def test_a_damaged_gzip_file_is_one_clear_sentence(tmp_path: Path, change: str) -> None:
    path = tmp_path / "labels.gz"
    whole = gzip.compress(idx(100))
    flipped = bytearray(whole)
    flipped[-6] ^= 1  # the checksum at the end
    path.write_bytes({"cut": whole[:-12], "flip": bytes(flipped), "plain": idx(100)}[change])
    with pytest.raises(DatasetError, match=r"labels\.gz cannot be read .*; delete it"):
        read_idx(path)


@pytest.mark.usefixtures("no_network")
def test_without_a_network_auto_takes_the_digits_with_a_notice(tmp_path: Path) -> None:
    data = load_dataset("auto", tmp_path)
    assert data.name == "digits"
    assert "\n" not in data.notice
    for word in ("Fashion-MNIST", str(tmp_path), "no answer from example.org", "digits"):
        assert word in data.notice


@pytest.mark.usefixtures("no_network")
def test_without_a_network_fashion_mnist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        DatasetUnavailable, match=r"cannot be downloaded \(no answer from example.org\)"
    ):
        load_dataset("fashion-mnist", tmp_path)


def test_incomplete_files_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(data_dir: Path) -> None:
        write_fashion(data_dir / "FashionMNIST" / "raw")

    (write_fashion(tmp_path) / FILES[2]).unlink()
    monkeypatch.setattr(fashion_module, "download", finish)
    assert load_dataset("fashion-mnist", tmp_path).name == "fashion-mnist"


def test_a_missing_torchvision_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.delitem(sys.modules, "torchvision.datasets", raising=False)
    assert "torchvision is not installed" in load_dataset("auto", tmp_path).notice


def fake_torchvision(monkeypatch: pytest.MonkeyPatch, mirror: str) -> None:
    """Install a fake torchvision whose download fails if it is ever called."""

    class FashionMNIST:
        mirrors = (mirror,)
        resources = ((f"{FILES[0]}.gz", "md5"),)

        def __init__(self, root: str, download: bool) -> None:
            raise RuntimeError("Error downloading it:\nTried everything")

    datasets = types.ModuleType("torchvision.datasets")
    datasets.FashionMNIST = FashionMNIST  # type: ignore[attr-defined]
    torchvision = types.ModuleType("torchvision")
    torchvision.datasets = datasets  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", torchvision)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", datasets)


def test_a_silent_network_times_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_server: str
) -> None:
    fake_torchvision(monkeypatch, silent_server)
    assert fashion_module.NETWORK_TIMEOUT < 5
    start = time.monotonic()
    with pytest.raises(DatasetUnavailable, match=r"no answer from 127\.0\.0\.1"):
        fashion_module.download(tmp_path, timeout=0.2)
    assert time.monotonic() - start < 4  # waits 1 s; torchvision alone would wait forever


def test_a_name_lookup_that_hangs_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(request: object, timeout: float) -> None:
        time.sleep(2)  # a name lookup has no timeout

    monkeypatch.setattr("urllib.request.urlopen", hang)
    start = time.monotonic()
    with pytest.raises(DatasetUnavailable, match=r"no answer from example\.org within 0\.1 s"):
        require_answer("http://example.org/", 0.1)
    assert time.monotonic() - start < 1.5


def test_a_refused_connection_is_reported_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(DatasetUnavailable, match=r"no answer from 127\.0\.0\.1: .*refused"):
        require_answer(f"http://127.0.0.1:{port}/", 4)


def test_a_failed_download_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torchvision(monkeypatch, "http://127.0.0.1/")
    monkeypatch.setattr(fashion_module, "require_answer", lambda url, seconds: None)
    before = socket.getdefaulttimeout()
    with pytest.raises(DatasetUnavailable) as caught:
        fashion_module.download(tmp_path)
    assert str(caught.value) == "the download failed: Error downloading it"
    assert socket.getdefaulttimeout() == before


def test_the_digits_are_split_by_class() -> None:
    (X, _), (X_test, y_test) = digits().train, digits().test
    assert X.shape == (1442, 1, 28, 28)
    assert X_test.shape == (355, 1, 28, 28)
    assert X.min() == 0
    assert X.max() == 1
    counts = y_test.bincount(minlength=10)
    assert counts.min() >= 34
    assert counts.max() <= 36
    border = torch.ones(28, 28, dtype=torch.bool)
    border[2:-2, 2:-2] = False
    assert not X[:, 0, border].any()
    small = X[:, 0, 2:-2, 2:-2]
    assert torch.equal(small[:, ::3, ::3], small[:, 2::3, 2::3])


def test_data_must_fit_together() -> None:
    images, labels = torch.zeros(3, 1, 28, 28), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"test set .* 3 images and 2 labels"):
        Data("mine", (images, labels), (images, labels[:2]))
    with pytest.raises(ValueError, match=r"train set .* 0 images"):
        Data("mine", (images[:0], labels[:0]), (images, labels))


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [
        (torch.tensor([0, -1, 2]), (), r"the train set has labels from -1 to 2; classes are"),
        (torch.arange(3), ("a", "b"), r"labels from 0 to 2 and 2 classes; classes are numbered"),
        (torch.arange(3.0), (), r"must be whole numbers \[n\], .*, not float32 \[3\]"),
        (torch.eye(3, dtype=torch.int64), (), r"not int64 \[3, 3\]"),
    ],
    ids=str,
)
def test_labels_are_numbers_of_classes(
    labels: torch.Tensor, classes: tuple[str, ...], message: str
) -> None:
    images = torch.zeros(3, 1, 4, 4)
    with pytest.raises(ValueError, match=message):
        Data("mine", (images, labels), (images, torch.zeros(3).long()), classes=classes)


def test_without_scikit_learn_the_digits_name_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DatasetError, match=r"install pycollect\[train\]"):
        digits()


IMAGES, LABELS = torch.rand(6, 1, 4, 4), torch.arange(6) % 2


@pytest.mark.parametrize(
    "given",
    [
        (IMAGES, LABELS),
        [IMAGES.clone().requires_grad_(), LABELS],
        TensorDataset(IMAGES, LABELS),
        list(zip(IMAGES, LABELS.tolist(), strict=True)),
    ],
    ids=["tuple", "list", "data set", "list of pairs"],
)
@pytest.mark.parametrize("test", [True, False])
def test_any_examples_train(given: Any, test: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def run(**options: Any) -> RunResult:
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        return train("cpu*2", 4, 0.1, model=model, epochs=1, **options)

    result = run(data=given, test_data=given if test else None)
    notice, *lines = capsys.readouterr().out.splitlines()
    assert ("there is no test set (test_data)" in notice) == (not test)
    for line in (lines[-3], lines[-1]):  # that of the epoch, and the last
        assert ("test acc" if test else "train acc") in line
    pair = Data("mine", (IMAGES, LABELS), (IMAGES, LABELS))
    assert result.losses == run(data=pair).losses


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"data": (IMAGES, LABELS.numpy())}, TypeError, "data is a pair of Tensor and ndarray"),
        ({"data": (IMAGES,)}, TypeError, "data has 1 parts; pass two tensors"),
        ({"data": DataLoader(TensorDataset(IMAGES))}, TypeError, "data is a DataLoader; pass"),
        ({"data": IMAGES}, TypeError, "data is a Tensor; pass a map-style data set"),
        ({"data": {"x": 1}}, TypeError, "data is a dict; pass"),
        ({"data": (IMAGES, LABELS), "test_data": 3}, TypeError, "test_data is a int; pass"),
        ({"data": TensorDataset(IMAGES)}, TypeError, "example 0 of the data set is a tuple, not a"),
        ({"data": [{"x": IMAGES[0]}]}, TypeError, "example 0 of the data set is a dict, not"),
        ({"data": TensorDataset(IMAGES, LABELS / 2)}, TypeError, "label . .* is a Tensor and no"),
        ({"data": TensorDataset(IMAGES, LABELS - 100)}, ValueError, r"is -\d+; classes are"),
        ({"data": (IMAGES, LABELS), "data_dir": "x"}, ValueError, "data_dir is for data by name"),
        ({"data": (IMAGES, LABELS), "image_size": 4}, ValueError, "image_size is for data by name"),
        ({"data": "digits", "test_data": (IMAGES, LABELS)}, ValueError, "test_data goes with data"),
        ({"data": "digits", "data_dir": "x"}, ValueError, "have no folder: leave out data_dir"),
        (
            {"data": Data("mine", (IMAGES, LABELS), (IMAGES, LABELS)), "test_data": 3},
            ValueError,
            "has a test set already",
        ),
        (
            {"data": (IMAGES, LABELS), "test_data": (IMAGES[:, :, :3], LABELS)},
            ValueError,
            r"images of float32 \[1, 4, 4\], and the test set of float32 \[1, 3, 4\]",
        ),
        ({"data": (IMAGES, LABELS), "model": "lenet"}, ValueError, "LeNet takes images of 28 x 28"),
        ({"data": (IMAGES[:, 0, 0], LABELS), "model": None}, ValueError, r"float32 \[4\]: convert"),
        ({"data": (IMAGES.byte(), LABELS), "model": None}, ValueError, r"has uint8 \[1, 4, 4\]"),
        ({"data": TensorDataset(IMAGES, LABELS), "model": None}, ValueError, "or a model of your"),
    ],
)  # fmt: skip
def test_examples_that_cannot_train_are_named(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    with pytest.raises(error, match=message):
        train("cpu*2", 4, 0.1, **{"model": model, "epochs": 1, "quiet": True, **options})


def test_load_dataset_ignores_no_argument() -> None:
    with pytest.raises(ValueError, match="have no folder: leave out data_dir"):
        load_dataset("digits", "x")
