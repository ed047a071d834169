"""Data sets of the trainer: three by name, and `Data` for any other.

The named ones are Fashion-MNIST, scikit-learn's handwritten digits, and image folders.
"""

from dataclasses import replace
from pathlib import Path

from ...errors import shown
from .dataset import (
    Data,
    DatasetError,
    DatasetUnavailable,
    DefaultHyperparameters,
    Examples,
    MapStyle,
    count,
    fetch,
)
from .digits import digits
from .fashion import fashion_mnist
from .folder import IMAGE_SIZE, ImageFolder, image_folder

__all__ = [
    "IMAGE_SIZE",
    "NAMES",
    "Data",
    "DatasetError",
    "DatasetUnavailable",
    "DefaultHyperparameters",
    "Examples",
    "ImageFolder",
    "MapStyle",
    "check",
    "count",
    "digits",
    "fashion_mnist",
    "fetch",
    "image_folder",
    "load_dataset",
]

NAMES = ("auto", "digits", "fashion-mnist", "folder")


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
    if image_size is None:
        return
    if name != "folder":
        raise ValueError(f"the image size is for image folders (data 'folder'), not for {name!r}")
    if image_size < 1:
        raise ValueError(f"the image size must be at least 1 pixel, not {image_size}")
