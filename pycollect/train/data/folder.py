"""Image folders like Imagenette: `train/` and `val/` (or `test/`) with one folder per class.

A file is decoded when its batch is fetched, in the fetching thread; no image is kept in memory.
Pillow always decodes, even if torchvision is installed, so equal files give equal bits.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .dataset import Data, DatasetError, DefaultHyperparameters, first_line

_SIXTEEN_BITS = 65_535
IMAGE_SIZE = 320  # default in pixels: the larger of Imagenette's own sizes, and BatchFlow's
_NAMED_LINKS = 3  # dead links that an error names; the others are only counted
TEST_NAMES = ("val", "test")
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
# Mean and standard deviation of ImageNet's pixels by channel, the usual values for photographs.
MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
STD = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
# BatchFlow's batch size; 0.1 is Dive into Deep Learning's learning rate for ResNet-18.
RESNET18 = DefaultHyperparameters(batch_size=64, lr=0.1, epochs=10)


@dataclass(frozen=True)
class ImageFolder:
    """A map-style data set of image files, as `image_folder` makes it: (image, class number).

    An image is float32 [3, size, size] on the CPU, normalised by mean and standard deviation of
    ImageNet's pixels. Its shorter side is scaled to `size` pixels (default 320), and the centre is
    cropped. `files` has a path and `labels` a class number for each image, and `classes` has the
    names of the classes. A file is decoded at each access; DatasetError if it is damaged.
    """

    files: tuple[Path, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...] = field(repr=False)
    size: int = IMAGE_SIZE

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return decode(self.files[index], self.size), self.labels[index]


def decode(path: Path, size: int) -> Tensor:
    """Decode an image file to float32 [3, size, size], normalised; DatasetError if damaged."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            # draft() decodes a JPEG at an eighth, a quarter or half of its size, which is cheaper.
            image.draft("RGB", (2 * size, 2 * size))
            fitted = ImageOps.fit(_in_colour(image), (size, size), Image.Resampling.BILINEAR)
    # Pillow's decoders raise many exception types for a damaged file, even SyntaxError.
    except Exception as error:
        raise DatasetError(
            f"{path} cannot be decoded as an image ({first_line(error)}); replace or delete it"
        ) from error
    pixels = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
    return pixels.reshape(size, size, 3).permute(2, 0, 1).float().div_(255).sub_(MEAN).div_(STD)


def _in_colour(image: Any) -> Any:
    """Convert an image to three channels of 8 bits; ValueError for more than 16 bits per pixel.

    Pillow's own conversion clips values above 255, which turns a 16-bit image white.
    """
    if image.mode == "F" or (image.mode == "I" and image.getextrema()[1] > _SIXTEEN_BITS):
        raise ValueError("it has 32 bits per pixel, and at most 16 are supported")
    if image.mode.startswith("I"):  # older versions of Pillow open 16-bit images in mode "I"
        image = image.convert("I").point(lambda grey: grey * (255 / _SIXTEEN_BITS)).convert("L")
    return image.convert("RGB")


def image_folder(data_dir: Path, image_size: int = IMAGE_SIZE) -> Data:
    """Return the images of `data_dir` as a `Data`: train/ and val/ or test/, a folder per class.

    The classes are the folders of `train/`, in alphabetical order. Both sets are an `ImageFolder`
    with images of `image_size` x `image_size` pixels (default 320), each decoded when its batch is
    fetched. The default model is resnet18, with a batch size of 64, a learning rate of 0.1 and 10
    epochs. Raises DatasetError if a folder is missing or unreadable, if a class has no image or a
    dead link, or without Pillow; ValueError for an image size below 1.
    """
    if image_size < 1:
        raise ValueError(f"the image size must be at least 1 pixel, not {image_size}")
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise DatasetError(
            f"image folders need Pillow, which cannot be imported ({error}); "
            "install pycollect[train]"
        ) from error
    root = Path(data_dir)
    train = root / "train"
    test = next((root / name for name in TEST_NAMES if (root / name).is_dir()), None)
    if not train.is_dir() or test is None:
        missing = "train/" if not train.is_dir() else "val/ or test/"
        raise DatasetError(
            f"{root} holds no folder {missing}; an image folder has train/ and val/ or test/, "
            "each with one folder per class"
        )
    try:
        classes = tuple(folder.name for folder in folders(train))
        found, held_out = (scan(parent, classes, image_size) for parent in (train, test))
    except OSError as error:
        raise DatasetError(f"{error.filename} cannot be read ({error.strerror})") from error
    name = root.resolve().name
    return Data(name, found, held_out, RESNET18, classes=classes, model="resnet18")


def folders(parent: Path) -> list[Path]:
    """Return the folders in `parent`, sorted, without hidden ones; DatasetError without any."""
    there = sorted(p for p in parent.iterdir() if not p.name.startswith("."))
    _refuse_dead_links(parent, there)
    found = [p for p in there if p.is_dir()]
    if not found:
        raise DatasetError(f"{parent} holds no folder; there must be one per class")
    return found


def scan(parent: Path, classes: tuple[str, ...], size: int) -> ImageFolder:
    """Find the images of every class; DatasetError for a class without images or an unknown one."""
    numbers = {name: i for i, name in enumerate(classes)}
    found: list[tuple[Path, int]] = []
    for folder in folders(parent):
        if folder.name not in numbers:
            raise DatasetError(
                f"{folder} is not a class of the training set, which has {', '.join(classes)}"
            )
        named = sorted(filter(_is_image_name, _files_below(folder)))
        _refuse_dead_links(folder, named)
        files = [p for p in named if p.is_file()]
        if not files:
            raise DatasetError(f"{folder} holds no image ({', '.join(SUFFIXES)})")
        found += [(path, numbers[folder.name]) for path in files]
    paths, labels = zip(*found, strict=True)
    return ImageFolder(paths, labels, classes, size)


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield all files below `folder`; OSError for unreadable folders, which rglob would skip."""

    def refuse(error: OSError) -> None:
        raise error

    for where, _, names in os.walk(folder, onerror=refuse):
        yield from (Path(where, name) for name in names)


def _is_image_name(path: Path) -> bool:
    """Return whether a file is an image by its name; hidden files are metadata of some systems."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def _refuse_dead_links(parent: Path, paths: Sequence[Path]) -> None:
    """Raise DatasetError for dead links: skipping them would silently train on other data."""
    dead = [path for path in paths if path.is_symlink() and not path.exists()]
    if not dead:
        return
    shown = [f"{path.relative_to(parent)} -> {os.readlink(path)}" for path in dead[:_NAMED_LINKS]]
    more = f" and {len(dead) - _NAMED_LINKS} more" if len(dead) > _NAMED_LINKS else ""
    links = "1 link that leads" if len(dead) == 1 else f"{len(dead)} links that lead"
    raise DatasetError(
        f"{parent} has {links} nowhere: {', '.join(shown)}{more}; fix or delete them"
    )
