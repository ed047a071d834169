"""Image folders: real files that the test writes, read lazily, refused with one sentence."""

import os
from pathlib import Path

import pytest
import torch

from pycollect.train import Data, DatasetError, load_dataset
from pycollect.train.__main__ import main
from pycollect.train.data import count, fetch
from pycollect.train.data.folder import MEAN, STD, decode

Image = pytest.importorskip("PIL.Image")
COLOURS = {"apple": (255, 0, 0), "banana": (0, 0, 255)}


def write(path: Path, colour: object, size: tuple[int, int] = (50, 40), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three images of each of two classes for training, one each for tests, and ignored files."""
    root = tmp_path / "fruit"
    for name, colour in COLOURS.items():
        for i, ending in enumerate(("png", "JPEG", "bmp")):
            write(root / "train" / name / f"{i}.{ending}", colour)
        write(root / "val" / name / "0.png", colour)
    (root / "train" / "apple" / "notes.txt").write_text("no image")
    (root / "train" / ".hidden").mkdir()
    return root


def plain(image: torch.Tensor) -> torch.Tensor:
    """Undo the image normalisation."""
    return image * STD + MEAN


def test_classes_are_folders(folder: Path) -> None:
    data = load_dataset("folder", folder, 32)
    assert (data.name, data.notice, data.model) == ("fruit", "", "resnet18")
    assert (data.classes, data.num_classes) == (("apple", "banana"), 2)
    assert (count(data.train), count(data.test)) == (6, 2)
    assert data.image_shape == (3, 32, 32)
    X, y = fetch(data.train, torch.tensor([5, 0]))
    assert (X.shape, X.dtype, y.tolist()) == ((2, 3, 32, 32), torch.float32, [1, 0])
    for image, colour in zip(X, ((0, 0, 1), (1, 0, 0)), strict=True):
        assert plain(image).mean(dim=(1, 2)).tolist() == pytest.approx(colour, abs=0.02)


def test_test_may_be_called_test(folder: Path) -> None:
    (folder / "val").rename(folder / "test")
    assert count(load_dataset("folder", folder, 32).test) == 2


def test_the_centre_is_cropped(tmp_path: Path) -> None:
    image = Image.new("RGB", (90, 30), (255, 0, 0))
    image.paste((0, 255, 0), (30, 0, 60, 30))  # the middle third
    image.save(tmp_path / "wide.png")
    found = plain(decode(tmp_path / "wide.png", 30))
    assert found.mean(dim=(1, 2)).tolist() == pytest.approx([0, 1, 0], abs=1e-6)


@pytest.mark.parametrize(
    ("mode", "colour"),
    [("L", 255), ("RGBA", (255, 9, 9, 128)), ("P", 0), ("1", 1), ("I;16", 9)],
)
def test_every_mode_becomes_three_channels(tmp_path: Path, mode: str, colour: object) -> None:
    path = write(tmp_path / "x.png", colour, mode=mode)
    assert decode(path, 8).shape == (3, 8, 8)


@pytest.mark.parametrize("ending", ["png", "tif", "pgm"])
def test_sixteen_bits_keep_their_greys(tmp_path: Path, ending: str) -> None:
    """Pillow's own conversion turns all values above 255 white."""
    path = tmp_path / f"grey.{ending}"
    Image.new("I;16", (9, 9), 0x8000).save(path)
    assert float(plain(decode(path, 8)).mean()) == pytest.approx(0.5, abs=0.004)


@pytest.mark.parametrize(("mode", "colour"), [("F", 0.5), ("I", 1 << 20)])
def test_more_than_sixteen_bits_are_refused(tmp_path: Path, mode: str, colour: float) -> None:
    path = write(tmp_path / "deep.tif", colour, mode=mode)
    with pytest.raises(DatasetError, match=r"deep\.tif cannot be decoded .*32 bits per pixel"):
        decode(path, 8)


def test_hidden_files_are_ignored(folder: Path) -> None:
    (folder / "train" / "apple" / "._0.png").write_text("notes of a file system")
    assert count(load_dataset("folder", folder, 32).train) == 6


def test_an_image_is_decoded_when_it_is_fetched(folder: Path) -> None:
    path = folder / "train" / "banana" / "2.bmp"
    path.write_bytes(b"no image")
    data = load_dataset("folder", folder, 32)
    fetch(data.train, torch.arange(5))
    with pytest.raises(DatasetError, match=r"banana/2\.bmp cannot be decoded as an image"):
        fetch(data.train, torch.tensor([5]))


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "gone"])
@pytest.mark.parametrize("name", ["0.png", "1.JPEG", "2.bmp"])
def test_a_damaged_file_is_one_sentence(folder: Path, name: str, damage: str) -> None:
    path = folder / "train" / "apple" / name
    data = load_dataset("folder", folder, 32)
    whole = path.read_bytes()
    content = {"cut": whole[: len(whole) * 2 // 3], "empty": b"", "text": b"<html>", "gone": None}
    if content[damage] is None:
        path.unlink()
    else:
        path.write_bytes(content[damage])  # type: ignore[arg-type]
    with pytest.raises(DatasetError) as caught:
        fetch(data.train, torch.arange(3))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("replace or delete it")


def test_dead_links_are_counted_and_named(folder: Path) -> None:
    """Otherwise missing images, or a whole missing class, would go unnoticed."""
    apple = folder / "train" / "apple"
    (apple / "5.png").symlink_to("nowhere.png")
    with pytest.raises(
        DatasetError, match=r"apple has 1 link that leads nowhere: 5\.png -> nowhere"
    ):
        load_dataset("folder", folder, 32)
    (apple / "deeper").mkdir()
    for i in range(4):
        (apple / "deeper" / f"{i}.jpg").symlink_to("/no/where.jpg")
    message = (
        r"5 links that lead nowhere: 5\.png -> .*, deeper/0\.jpg -> /no/where\.jpg, .* and 2 more"
    )
    with pytest.raises(DatasetError, match=message):
        load_dataset("folder", folder, 32)
    for link in (apple / "5.png", *(apple / "deeper").iterdir()):
        link.unlink()
    (apple / "notes").symlink_to("nowhere")  # not an image, so it is ignored
    (apple / "5.png").symlink_to("0.png")
    assert len(load_dataset("folder", folder, 32).train) == 7
    (folder / "train" / "cherry").symlink_to("nowhere")
    with pytest.raises(
        DatasetError, match="train has 1 link that leads nowhere: cherry -> nowhere"
    ):
        load_dataset("folder", folder, 32)


def test_a_folder_that_cannot_be_read_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything, so the test makes the system call fail."""
    deeper, scandir = folder / "train" / "apple" / "deeper", os.scandir
    deeper.mkdir()

    def refuse(path: str) -> object:
        if Path(path) == deeper:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DatasetError, match=r"apple/deeper cannot be read \(Permission denied\)"):
        load_dataset("folder", folder, 32)


def test_a_folder_of_another_layout_is_one_sentence(folder: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(DatasetError, match=message):
            load_dataset("folder", folder, 32)

    write(folder / "val" / "cherry" / "0.png", 0)
    refused("cherry is not a class of the training set, which has apple, banana")
    (folder / "train" / "cherry").mkdir()
    refused("cherry holds no image")
    (folder / "val").rename(folder / "elsewhere")
    refused(r"fruit holds no folder val/ or test/; an image folder has")
    (folder / "train").rename(folder / "val")
    refused("fruit holds no folder train/")


def test_a_model_is_trained_on_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--data", "folder", "--data-dir", str(folder), "--image-size", "16"]
    assert main([*arguments, "--epochs", "2", "--devices", "cpu*2", "--batch-size", "4"]) == 0
    header, *_, last = capsys.readouterr().out.splitlines()
    assert header.startswith("ResNet-18 on fruit (6 train, 2 test): batch size 4, lr 0.1")
    assert last.startswith("test acc: ")
    (folder / "train" / "apple" / "0.png").write_bytes(b"")
    assert main([*arguments, "--epochs", "1", "--devices", "cpu*2"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "0.png cannot be decoded as an image" in error


def test_an_image_size_applies_to_folders_only(folder: Path) -> None:
    with pytest.raises(ValueError, match="at least 1 pixel, not 0"):
        load_dataset("folder", folder, 0)
    with pytest.raises(ValueError, match="not for 'digits'"):
        load_dataset("digits", image_size=32)


def test_any_map_style_data_set_is_accepted() -> None:
    class Squares(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
        classes = ("small", "large", "none")

        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.full((1, 4, 4), float(index)), index // 3

    data = Data("squares", Squares(), Squares())
    assert (str(data), data.num_classes, data.image_shape) == (
        "squares (5 train, 5 test)",
        3,
        (1, 4, 4),
    )
    X, y = fetch(data.train, torch.tensor([4, 1]))
    assert (X[:, 0, 0, 0].tolist(), y.tolist(), y.dtype) == ([4, 1], [1, 0], torch.int64)


def test_images_that_are_not_tensors_are_refused() -> None:
    class Pictures:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> tuple[object, int]:
            return Image.new("L", (4, 4)), 0

    data = Data("pictures", Pictures(), Pictures())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"image 0 of the data set is a Image, not a tensor; give"):
        fetch(data.train, torch.tensor([0]))
    with pytest.raises(ValueError, match="the number of classes is not known"):
        _ = data.num_classes


def test_a_batch_of_several_shapes_is_refused() -> None:
    class Growing:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.zeros(1, index + 1), 0

    with pytest.raises(ValueError, match=r"must have one shape, not \[\(1, 1\), \(1, 2\)"):
        fetch(Growing(), torch.arange(3))
