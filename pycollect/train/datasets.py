"""Data sets by name: scikit-learn's digits, Fashion-MNIST, and folders of images.

Fashion-MNIST is read from its IDX files; torchvision is needed only to download them. Images of a
folder are decoded by Pillow when their batch is fetched, and none is kept in memory.
"""

import gzip
import io
import math
import os
import socket
import struct
import sys
import zlib
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from .._files import check_input
from ..errors import shown
from .data import (
    USUAL,
    Data,
    DatasetError,
    DatasetUnavailable,
    DefaultHyperparameters,
    first_line,
)

NAMES = ("auto", "digits", "fashion-mnist", "folder")

# The defaults for LeNet.
DIGITS = DefaultHyperparameters(batch_size=64, lr=0.3, epochs=40)
FASHION_MNIST = USUAL
CLASSES = (
    *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
PLACES = ("", "FashionMNIST/raw", "raw")  # subfolders with the files; torchvision uses the second
NETWORK_TIMEOUT = 4.5  # seconds; a run without a network starts soon, with other data

IMAGE_SIZE = 320  # default in pixels: the larger of Imagenette's own sizes, and BatchFlow's
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
# Mean and standard deviation of ImageNet's pixels by channel, the usual values for photographs.
MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
STD = torch.tensor([0.229, 0.224, 0.225])[:, None, None]


def load_dataset(
    name: str = "auto", data_dir: Path | str | None = None, image_size: int | None = None
) -> Data:
    """Load a data set by name.

    "digits" are the handwritten digits of scikit-learn. "fashion-mnist" is read from its IDX files
    below `data_dir` (default data/), and downloaded by torchvision if they are missing. "folder" is
    `image_folder(data_dir, image_size)`, with `image_size` in pixels (default 320). "auto", the
    default, is Fashion-MNIST, or the digits if it is unavailable, for the reason in `notice`.
    Raises ValueError for another name, for a `data_dir` of the digits, which have none, and for an
    image size below 1 or without a folder;
    DatasetUnavailable for "fashion-mnist" that is missing and cannot be downloaded; DatasetError
    for a damaged file, even with "auto", and in the cases of `digits` and `image_folder`.

    >>> load_dataset("digits").name
    'digits'
    """
    check(name, data_dir, image_size)
    folder = Path("data" if data_dir is None else data_dir)
    if name == "digits":
        return digits()
    if name == "folder":
        return image_folder(folder, image_size or IMAGE_SIZE)
    try:
        return fashion_mnist(folder)
    except DatasetUnavailable as error:
        if name == "fashion-mnist":
            raise
        return replace(digits(), notice=f"{error}; using scikit-learn's handwritten digits instead")


def check(name: str, data_dir: Path | str | None, image_size: int | None) -> None:
    """Raise ValueError for arguments that `load_dataset` refuses; loads nothing."""
    if name not in NAMES:
        raise ValueError(f"unknown data set {shown(name)}; allowed are {', '.join(NAMES)}")
    if data_dir is not None and name == "digits":
        raise ValueError("the digits come with scikit-learn and have no folder: leave out data_dir")
    if image_size is not None and name != "folder":
        raise ValueError(f"the image size is for image folders (data 'folder'), not for {name!r}")
    if image_size is not None and image_size < 1:
        raise ValueError(f"the image size must be at least 1 pixel, not {image_size}")


def digits() -> Data:
    """Load the 1,797 handwritten digits that ship with scikit-learn: 1,442 train, 355 test.

    Images are float32 [n, 1, 28, 28] with values from 0 to 1, labels int64 [n] from 0 to 9. An
    image of 8 x 8 becomes 28 x 28: every pixel is repeated three times in each direction, with a
    border of 2, about the usual margin of digits of this size. Every fifth example of each class,
    in the order of the file, is for testing. Raises DatasetError without scikit-learn.

    >>> digits().test[0].shape
    torch.Size([355, 1, 28, 28])
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DatasetError(
            "the digits need scikit-learn, which cannot be imported "
            f"({error}); install pycollect[train]"
        ) from error
    bunch = load_digits()
    small = torch.from_numpy(bunch.images).float().div(16)  # pixel values are 0 to 16
    X = F.pad(F.interpolate(small[:, None], scale_factor=3), (2, 2, 2, 2))
    y = torch.from_numpy(bunch.target).long()
    one_hot = F.one_hot(y)
    seen = (one_hot.cumsum(dim=0) * one_hot).sum(dim=1)  # position within its class, from 1
    test = seen % 5 == 0
    tuned = {"resnet18": DefaultHyperparameters(batch_size=64, lr=0.1, epochs=5)}
    train, held_out = (X[~test], y[~test]), (X[test], y[test])
    return Data("digits", train, held_out, DIGITS, classes=list("0123456789"), tuned=tuned)


def fashion_mnist(data_dir: Path) -> Data:
    """Load Fashion-MNIST from its IDX files, which are downloaded if they are missing.

    Raises DatasetUnavailable if they are missing and cannot be downloaded, DatasetError if damaged.
    """
    paths = _idx_files(data_dir)
    if not paths:
        try:
            download(data_dir)
        except DatasetUnavailable as error:
            raise DatasetUnavailable(
                f"Fashion-MNIST is not in {data_dir}/ and cannot be downloaded ({error})"
            ) from error
        paths = _idx_files(data_dir)
    train, test = _read_pair(*paths[:2]), _read_pair(*paths[2:])
    tuned = {"resnet18": DefaultHyperparameters(batch_size=256, lr=0.1, epochs=10)}
    return Data("fashion-mnist", train, test, FASHION_MNIST, classes=CLASSES, tuned=tuned)


def _idx_files(data_dir: Path) -> list[Path]:
    """Return the four files, plain or with .gz, if one folder has all of them; else []."""
    try:
        for place in PLACES:
            both = [(data_dir / place / name, data_dir / place / f"{name}.gz") for name in FILES]
            found = [path for pair in both for path in [p for p in pair if p.is_file()][:1]]
            if len(found) == len(FILES):
                return found
    except OSError as error:
        raise DatasetError(f"{data_dir} cannot be read ({error})") from error
    return []


def _read_pair(images_path: Path, labels_path: Path) -> tuple[Tensor, Tensor]:
    """Read images [n, 1, 28, 28] from 0 to 1 and labels [n]; DatasetError if they do not fit."""
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if images.shape[1:] != (28, 28) or len(images) == 0:
        raise DatasetError(f"{images_path} holds {list(images.shape)}, not images of 28 x 28")
    if len(labels) != len(images):
        raise DatasetError(f"{labels_path} holds {list(labels.shape)}, not {len(images)} labels")
    if (last := int(labels.max())) > 9:
        raise DatasetError(f"{labels_path} holds the label {last}; the classes are 0-9")
    return images[:, None].float().div_(255), labels.long()


def read_idx(path: Path, dims: int) -> Tensor:
    """Read an IDX file of bytes with `dims` dimensions, gzipped or not, as a uint8 tensor.

    Raises DatasetError if the file cannot be read, is not IDX, or is not as long as its header
    says.
    """
    try:
        raw = path.read_bytes()
        content = bytearray(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(
            f"{path} cannot be read ({error}); delete it to have it downloaded again"
        ) from error
    if content[:4] != bytes((0, 0, 8, dims)):  # 8 is the code of bytes
        raise DatasetError(f"{path} is not an IDX file of bytes: its first bytes are wrong")
    header = 4 + 4 * dims
    shape = struct.unpack_from(f">{dims}I", content.ljust(header), 4)
    if len(content) != header + math.prod(shape):
        raise DatasetError(
            f"{path} is damaged: it holds {len(content)} bytes where its header announces "
            f"{header + math.prod(shape)}; delete it to have it downloaded again"
        )
    return torch.frombuffer(content, dtype=torch.uint8)[header:].reshape(shape)


def download(data_dir: Path) -> None:
    """Download the files with torchvision; raise DatasetUnavailable with the reason if it fails.

    A server that does not answer for NETWORK_TIMEOUT seconds is a failure.
    """
    try:
        from torchvision.datasets import FashionMNIST
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
        raise DatasetUnavailable(f"torchvision cannot be imported: {first_line(error)}") from error
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(NETWORK_TIMEOUT)  # torchvision itself sets none
    try:
        with (
            redirect_stdout(io.StringIO()),
            redirect_stderr(sys.stderr if sys.stderr.isatty() else io.StringIO()),  # a bar
        ):
            FashionMNIST(str(data_dir), download=True)
    except (OSError, RuntimeError) as error:
        raise DatasetUnavailable(f"the download failed: {' '.join(str(error).split())}") from error
    finally:
        socket.setdefaulttimeout(before)


@dataclass(frozen=True)
class ImageFolder:
    """A map-style data set of image files, as `image_folder` makes it: (image, class number).

    An image is float32 [3, size, size] on the CPU, normalised by mean and standard deviation of
    ImageNet's pixels. Its shorter side is scaled to `size` pixels (default 320), and the centre is
    cropped. `files` has a path and `labels` a class number for each image, and `classes` has the
    names of the classes. A file is decoded at each access; DatasetError if it is damaged, or a grey
    image of more than 8 bits.
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
            if image.mode.startswith(("I", "F")):  # convert() would make 16-bit images white
                raise ValueError("it is grey with more than 8 bits")
            coloured = image.convert("RGB")
            fitted = ImageOps.fit(coloured, (size, size), Image.Resampling.BILINEAR)
    # Pillow's decoders raise many exception types for a damaged file, even SyntaxError.
    except Exception as error:
        raise DatasetError(
            f"{path} cannot be decoded as an image ({first_line(error)}); replace or delete it"
        ) from error
    pixels = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
    return pixels.reshape(size, size, 3).permute(2, 0, 1).float().div_(255).sub_(MEAN).div_(STD)


def image_folder(data_dir: Path, image_size: int = IMAGE_SIZE) -> Data:
    """Return the images of `data_dir` as a `Data`: train/ and val/ or test/, a folder per class.

    The classes are the folders of `train/`, in alphabetical order. Both sets are an `ImageFolder`
    with images of `image_size` x `image_size` pixels (default 320), each decoded when its batch is
    fetched. The default model is resnet18, with a batch size of 64, a learning rate of 0.1 and 10
    epochs. Raises DatasetError if a folder is missing or unreadable, if a class has no image or a
    dead link, or without Pillow; ValueError for an image size below 1.
    """
    check("folder", data_dir, image_size)
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise DatasetError(
            f"image folders need Pillow, which cannot be imported ({error}); "
            "install pycollect[train]"
        ) from error
    root = Path(data_dir)
    train = root / "train"
    test = next((root / name for name in ("val", "test") if (root / name).is_dir()), None)
    if not train.is_dir() or test is None:
        missing = "train/" if not train.is_dir() else "val/ or test/"
        raise DatasetError(
            f"{root} holds no folder {missing}; an image folder has train/ and val/ or test/, "
            "each with one folder per class"
        )
    try:
        classes = tuple(folder.name for folder in _folders(train))
        found, held_out = (_scan(parent, classes, image_size) for parent in (train, test))
    except OSError as error:
        raise DatasetError(f"{error.filename} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DatasetError(str(error)) from None
    # BatchFlow's batch size; 0.1 is Dive into Deep Learning's learning rate for ResNet-18.
    defaults = DefaultHyperparameters(batch_size=64, lr=0.1, epochs=10)
    name = root.resolve().name
    return Data(name, found, held_out, defaults, classes=classes, model="resnet18")


def _folders(parent: Path) -> list[Path]:
    """Return the folders in `parent`, sorted, without hidden ones; DatasetError without any.

    A dead link counts as a folder: its class would be missed without an error.
    """
    found = sorted(p for p in parent.iterdir() if p.name[0] != "." and not p.is_file())
    if not found:
        raise DatasetError(f"{parent} holds no folder; there must be one per class")
    return found


def _scan(parent: Path, classes: tuple[str, ...], size: int) -> ImageFolder:
    """Find the images of every class; DatasetError for a class without images or an unknown one."""
    files: list[Path] = []
    labels: list[int] = []
    for folder in _folders(parent):
        if folder.name not in classes:
            raise DatasetError(
                f"{folder} is not a class of the training set, which has {', '.join(classes)}"
            )
        walk = os.walk(folder, onerror=_refuse)
        every = (Path(where, name) for where, _, names in walk for name in names)
        found = sorted(filter(_is_image_name, every))
        for path in found:
            check_input("image", path)
        if not found:
            raise DatasetError(f"{folder} holds no image ({', '.join(SUFFIXES)})")
        files += found
        labels += [classes.index(folder.name)] * len(found)
    return ImageFolder(tuple(files), tuple(labels), classes, size)


def _refuse(error: OSError) -> NoReturn:
    """Raise the error of an unreadable folder, which os.walk skips by itself."""
    raise error


def _is_image_name(path: Path) -> bool:
    """Return whether a file is an image by its name; hidden files are metadata of some systems."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
