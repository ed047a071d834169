"""The trainer's data: examples of any kind, the digits, IDX files and image folders."""

import gzip
import math
import os
import shutil
import socket
import struct
import sys
import threading
import types
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pycollect.train import Data, DatasetError, DatasetUnavailable, datasets, load_dataset, train
from pycollect.train.__main__ import main
from pycollect.train.data import count, fetch
from pycollect.train.datasets import FILES, MEAN, STD, decode

Image = pytest.importorskip("PIL.Image")
TRAIN, TEST = 30, 12
IMAGES, LABELS = torch.rand(6, 1, 4, 4), torch.arange(6) % 2
PAIR = IMAGES, LABELS


def idx(*shape: int, first: int = 0) -> bytes:
    """An IDX file of bytes that count up to 9 again and again."""
    content = bytes((first + i) % 10 for i in range(math.prod(shape)))
    return struct.pack(f">4B{len(shape)}I", 0, 0, 8, len(shape), *shape) + content


def write_fashion(folder: Path, ending: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, images in zip(FILES, (TRAIN, TRAIN, TEST, TEST), strict=True):
        data = idx(images, 28, 28) if "images" in name else idx(images, first=3)
        (folder / f"{name}{ending}").write_bytes(gzip.compress(data) if ending else data)
    return folder


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("place", ["", "FashionMNIST/raw"])
def test_fashion_mnist_is_found_in_every_folder(tmp_path: Path, place: str, ending: str) -> None:
    write_fashion(tmp_path / place, ending)
    data = load_dataset("auto", tmp_path)
    assert (data.name, data.notice) == ("fashion-mnist", "")
    for (X, y), n in ((data.train, TRAIN), (data.test, TEST)):
        assert (X.dtype, y.dtype) == (torch.float32, torch.int64)
        assert torch.equal(X, (torch.arange(n * 784) % 10 / 255).view(n, 1, 28, 28))
        assert y.tolist() == [(i + 3) % 10 for i in range(n)]


def fake_torchvision(monkeypatch: pytest.MonkeyPatch, work: Any) -> None:
    """Install a torchvision whose download calls the given function."""
    fake: Any = types.ModuleType("torchvision.datasets")
    fake.FashionMNIST = lambda root, download: work(Path(root))
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", fake)


def test_missing_files_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (write_fashion(tmp_path) / FILES[2]).unlink()
    fake_torchvision(monkeypatch, lambda root: write_fashion(root / "FashionMNIST" / "raw"))
    assert load_dataset("fashion-mnist", tmp_path).name == "fashion-mnist"


def test_without_a_network_auto_takes_the_digits_with_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that never answers is no answer after a while: torchvision alone would wait."""

    def ask(root: Path) -> None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{silent.getsockname()[1]}/")
        except OSError as error:
            raise RuntimeError(f"Error:\nTried it, {error}") from error

    before = socket.getdefaulttimeout()
    fake_torchvision(monkeypatch, ask)
    monkeypatch.setattr(datasets, "NETWORK_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        end = threading.Timer(5, silent.shutdown, [socket.SHUT_RDWR])  # of a wait without a limit
        end.start()
        data = load_dataset("auto", tmp_path)
        with pytest.raises(DatasetUnavailable, match="timed out"):
            load_dataset("fashion-mnist", tmp_path)
        end.cancel()
    assert (data.name, socket.getdefaulttimeout()) == ("digits", before)
    assert data.notice == (
        f"Fashion-MNIST is not in {tmp_path}/ and cannot be downloaded (the download failed: "
        "Error: Tried it, timed out); using scikit-learn's handwritten digits instead"
    )


@pytest.mark.parametrize(
    ("package", "name", "message"),
    [
        ("torchvision.datasets", "fashion-mnist", "torchvision cannot be imported"),
        ("sklearn.datasets", "digits", r"cannot be imported .*; install pycollect\[train\]"),
        ("PIL.Image", "folder", r"Pillow, which cannot be imported .*; install pycollect\[train\]"),
    ],
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DatasetError, match=message):
        load_dataset(name, None if name == "digits" else tmp_path)


def test_the_digits_are_split_by_class() -> None:
    data = load_dataset("digits")
    (X, _), (X_test, y_test) = data.train, data.test
    assert (X.shape, X_test.shape) == ((1442, 1, 28, 28), (355, 1, 28, 28))
    assert (X.min(), X.max()) == (0, 1)
    counts = y_test.bincount(minlength=10)
    assert 34 <= counts.min() <= counts.max() <= 36
    small = X[:, 0, 2:-2, 2:-2]
    assert small.sum() == X.sum(), "the border is empty"
    assert torch.equal(small[:, ::3, ::3], small[:, 2::3, 2::3])
    assert (data.defaults.batch_size, data.defaults.lr, data.defaults.epochs) == (64, 0.3, 40)


@pytest.mark.parametrize(
    "given",
    [
        PAIR,
        [IMAGES.clone().requires_grad_(), LABELS],
        TensorDataset(*PAIR),
        list(zip(IMAGES, LABELS.tolist(), strict=True)),
    ],
    ids=["tuple", "list", "data set", "list of pairs"],
)
@pytest.mark.parametrize("test", [True, False])
def test_any_examples_train(given: Any, test: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def losses(**options: Any) -> list[float]:
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
        torch.nn.init.zeros_(model[1].weight)
        torch.nn.init.zeros_(model[1].bias)
        return train("cpu*2", 4, 0.1, model=model, epochs=1, **options).losses

    found = losses(data=given, test_data=given if test else None)
    notice, *lines = capsys.readouterr().out.splitlines()
    assert ("there is no test set (test_data)" in notice) == (not test)
    for line in (lines[-3], lines[-1]):  # that of the epoch, and the last
        assert ("test acc" if test else "train acc") in line
    assert found == losses(data=Data("mine", PAIR, PAIR))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"data": (IMAGES, LABELS.numpy())}, TypeError, "data is a tuple of Tensor, ndarray; pass"),
        ({"data": DataLoader(TensorDataset(IMAGES))}, TypeError, "data is a DataLoader; pass"),
        ({"data": IMAGES}, TypeError, "data is a Tensor; pass a map-style data set"),
        ({"data": PAIR, "test_data": 3}, TypeError, "test_data is a int; pass"),
        ({"data": [{"x": IMAGES[0]}]}, TypeError, "example 0 of the data set is a dict, not"),
        ({"data": [(Image.new("L", (4, 4)), 0)]}, TypeError, "image 0 .* is a Image, not a tensor"),
        ({"data": TensorDataset(IMAGES, LABELS / 2)}, TypeError, "label . .* is a Tensor and no"),
        ({"data": TensorDataset(IMAGES, LABELS - 100)}, ValueError, r"is -\d+; classes are"),
        ({"data": [(torch.zeros(1, n), 0) for n in (1, 2)]}, ValueError,
         r"have one shape, not \[\(1, 1\), \(1, 2\)"),
        ({"data": (IMAGES[:0], LABELS[:0])}, ValueError, "train set .* not 0 images and 0 labels"),
        ({"data": PAIR, "test_data": (IMAGES, LABELS[:2])}, ValueError, "test set .* and 2 labels"),
        ({"data": (IMAGES, LABELS - 1)}, ValueError, "labels from -1 to 0; classes are"),
        ({"data": (IMAGES, LABELS / 2)}, ValueError, r"must be whole numbers .* float32 \[6\]"),
        ({"data": (IMAGES, torch.ones(6, 6).long())}, ValueError, r"not int64 \[6, 6\]"),
        ({"data": PAIR, "data_dir": "x"}, ValueError, "data_dir is for data by name"),
        ({"data": "digits", "test_data": PAIR}, ValueError, "test_data goes with data"),
        ({"data": "digits", "data_dir": "x"}, ValueError, "have no folder: leave out data_dir"),
        ({"data": "digits", "image_size": 32}, ValueError, "not for 'digits'"),
        ({"data": "folder", "image_size": 0}, ValueError, "at least 1 pixel, not 0"),
        ({"data": "mnist"}, ValueError, "unknown data set 'mnist'; allowed are auto, digits"),
        ({"data": Data("x", PAIR, PAIR), "test_data": 3}, ValueError, "has a test set already"),
        (
            {"data": PAIR, "test_data": (IMAGES[:, :, :3], LABELS)},
            ValueError,
            r"images of float32 \[1, 4, 4\], and the test set of float32 \[1, 3, 4\]",
        ),
        ({"data": PAIR, "model": "lenet"}, ValueError, "LeNet takes images of 28 x 28"),
        ({"data": (IMAGES[:, 0, 0], LABELS), "model": None}, ValueError, r"float32 \[4\]: convert"),
        ({"data": (IMAGES.byte(), LABELS), "model": None}, ValueError, r"has uint8 \[1, 4, 4\]"),
        ({"data": TensorDataset(*PAIR), "model": None}, ValueError, "number of classes is not kn"),
    ],
)  # fmt: skip
def test_examples_that_cannot_train_are_named(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    with pytest.raises(error, match=message):
        train("cpu*2", 4, 0.1, **{"model": model, "epochs": 1, "quiet": True, **options})


def test_labels_are_below_the_number_of_classes() -> None:
    with pytest.raises(ValueError, match="labels from 0 to 1 and 1 classes; classes are numbered"):
        Data("mine", PAIR, PAIR, classes=["a"])


def write(path: Path, colour: object, size: tuple[int, int] = (50, 40), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three images of each of two classes for training, one each for tests, and ignored files."""
    root = tmp_path / "fruit"
    for name, colour in {"apple": (255, 0, 0), "banana": (0, 0, 255)}.items():
        for i, ending in enumerate(("png", "JPEG", "bmp")):
            write(root / "train" / name / f"{i}.{ending}", colour)
        write(root / "val" / name / "0.png", colour)
    (root / "train" / "apple" / "notes.txt").write_text("no image")
    (root / "train" / "apple" / "._0.png").write_text("notes of a file system")
    (root / "train" / ".hidden").mkdir()
    (root / "train" / "README").write_text("no class")
    return root


def plain(image: torch.Tensor) -> torch.Tensor:
    """Undo the image normalisation."""
    return image * STD + MEAN


@pytest.mark.parametrize("held_out", ["val", "test"])
def test_classes_are_folders(folder: Path, held_out: str) -> None:
    (folder / "val").rename(folder / held_out)
    (folder / "train" / "apple" / "link.png").symlink_to("0.png")
    data = load_dataset("folder", folder, 32)
    assert (data.name, data.notice, data.model) == ("fruit", "", "resnet18")
    assert (data.classes, data.num_classes) == (("apple", "banana"), 2)
    assert (count(data.train), count(data.test)) == (7, 2)
    assert data.image_shape == (3, 32, 32)
    X, y = fetch(data.train, torch.tensor([6, 0]))
    assert (X.shape, X.dtype, y.tolist()) == ((2, 3, 32, 32), torch.float32, [1, 0])
    for image, colour in zip(X, ((0, 0, 1), (1, 0, 0)), strict=True):
        assert plain(image).mean(dim=(1, 2)).tolist() == pytest.approx(colour, abs=0.02)
    (folder / "train" / "apple" / "0.png").unlink()  # decoded when it is fetched, and not before
    fetch(data.train, torch.tensor([1, 2]))
    with pytest.raises(DatasetError, match=r"0\.png cannot be decoded as an image"):
        fetch(data.train, torch.tensor([0, 1]))


def test_images_are_cropped_at_the_centre_and_have_three_channels(tmp_path: Path) -> None:
    image = Image.new("RGB", (90, 30), (255, 0, 0))
    image.paste((0, 255, 0), (30, 0, 60, 30))  # the middle third
    image.save(tmp_path / "wide.png")
    found = plain(decode(tmp_path / "wide.png", 30))
    assert found.mean(dim=(1, 2)).tolist() == pytest.approx([0, 1, 0], abs=1e-6)
    for mode, colour, grey in (("L", 255, 1), ("RGBA", (255,) * 3 + (128,), 1), ("P", 0, 0)):
        found = plain(decode(write(tmp_path / "x.png", colour, mode=mode), 8))
        assert found.shape == (3, 8, 8)
        assert float(found.mean()) == pytest.approx(grey, abs=0.004)


def holds(content: bytes) -> Callable[[Path], object]:
    """Return a change of a file: it has this content."""
    return lambda path: path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def become_a_dead_link(path: Path) -> None:
    path.symlink_to("nowhere")


def become_sixteen_bits(path: Path) -> None:
    Image.new("I;16", (9, 9), 0x8000).save(path)


LABEL_FILE = gzip.compress(idx(TRAIN), mtime=0)  # so that names of tests are repeatable
FLIPPED = bytes([*LABEL_FILE[:-6], LABEL_FILE[-6] ^ 1, *LABEL_FILE[-5:]])  # in the checksum
NO_IMAGE = "cannot be decoded as an image .*; replace or delete it"
BAD = [
    (FILES[0], holds(idx(TRAIN, 28, 28)[:-1]), "it holds 23535 bytes where .* 23536; delete it"),
    (FILES[0], holds(idx(TRAIN, 28, 28) + b"x"), "is damaged: it holds 23537 bytes"),
    (FILES[0], holds(idx(TRAIN, 28, 28)[:9]), "is damaged: it holds 9 bytes"),
    (FILES[0], holds(b"<html>not found</html>"), "is not an IDX file"),
    (FILES[0], holds(idx(TRAIN, 28, 27)), r"holds \[30, 28, 27\], not images of 28 x 28"),
    (FILES[0], holds(idx(0, 28, 28)), r"holds \[0, 28, 28\], not images"),
    (FILES[1], holds(idx(TRAIN - 1)), r"holds \[29\], not 30 labels"),
    (FILES[1], holds(idx(TRAIN)[:-1] + b"\n"), "holds the label 10; the classes are 0-9"),
    (f"{FILES[1]}.gz", cut, "cannot be read .*; delete it"),
    (f"{FILES[1]}.gz", holds(LABEL_FILE[:10] + b"\xff" * 40), "cannot be read .*; delete it"),
    (f"{FILES[1]}.gz", holds(FLIPPED), "cannot be read .*; delete it"),
    *((f"train/apple/{file}", cut, NO_IMAGE) for file in ("0.png", "1.JPEG", "2.bmp")),
    ("train/apple/0.png", holds(b"<html>"), NO_IMAGE),
    ("train/apple/0.png", become_sixteen_bits, "more than 8 bits"),  # Pillow would make it white
    ("train/apple/deeper/5.png", become_a_dead_link, "is a link to nowhere, which is not there"),
    ("train/apple/5.png", os.mkfifo, "is a FIFO"),
    ("train/cherry", become_a_dead_link, r"cannot be read \(No such file or directory\)"),
    ("train/cherry", Path.mkdir, "holds no image"),
    ("val/cherry", Path.mkdir, "is not a class of the training set, which has apple, banana"),
    ("val", shutil.rmtree, r"holds no folder val/ or test/; an image folder has"),
    ("train", shutil.rmtree, r"holds no folder train/; an image folder has"),
]


@pytest.mark.parametrize(("file", "change", "message"), BAD)
def test_bad_data_is_one_sentence_with_the_file(
    folder: Path, tmp_path: Path, file: str, change: Callable[[Path], object], message: str
) -> None:
    """Also for "auto", which must not train on other data than the file's.

    A dead link is an error: a missing image, or a whole missing class, would go unnoticed.
    """
    name, root = "folder", folder
    if file.startswith(FILES):
        name, root = "auto", write_fashion(tmp_path, Path(file).suffix)
    path = root / file
    path.parent.mkdir(exist_ok=True)
    change(path)
    with pytest.raises(DatasetError, match=message) as caught:
        fetch(load_dataset(name, root).train, torch.arange(3))
    assert not isinstance(caught.value, DatasetUnavailable)
    assert str(path if path.exists() or path.is_symlink() else root) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unreadable_folder_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deeper, scandir = folder / "train" / "apple" / "deeper", os.scandir
    deeper.mkdir()

    def refuse(path: Any) -> Any:  # root may read everything, so the system call fails
        if Path(path) == deeper:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DatasetError, match=r"apple/deeper cannot be read \(Permission denied\)"):
        load_dataset("folder", folder, 32)


def test_a_model_is_trained_on_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--data", "folder", "--data-dir", str(folder), "--image-size", "16"]
    assert main([*command, "--epochs", "2", "--devices", "cpu*2", "--batch-size", "4"]) == 0
    header, *_, last = capsys.readouterr().out.splitlines()
    assert header.startswith("ResNet-18 on fruit (6 train, 2 test): batch size 4, lr 0.1")
    assert last.startswith("test acc: ")
    (folder / "train" / "apple" / "0.png").write_bytes(b"")
    assert main([*command, "--epochs", "1", "--devices", "cpu*2"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "0.png cannot be decoded as an image" in error
