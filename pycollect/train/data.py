"""The data sets: Fashion-MNIST when it can be had, else the handwritten digits of scikit-learn.

Each brings its own hyperparameters, because a learning rate belongs to a data set. Images are
float32 [n, 1, 28, 28] between 0 and 1, labels int64 [n] below 10; all of it is in memory.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import fashion
from .fashion import DataError, Unavailable

NAMES = ("auto", "digits", "fashion-mnist")


@dataclass(frozen=True)
class Defaults:
    """The hyperparameters that a data set is known to train well with."""

    batch_size: int
    lr: float
    epochs: int


DIGITS = Defaults(batch_size=64, lr=0.3, epochs=40)
FASHION_MNIST = Defaults(batch_size=256, lr=0.2, epochs=10)


@dataclass(frozen=True)
class Data:
    """Images and labels to train on and to test with; ValueError if they do not fit together.

    >>> images, labels = torch.zeros(3, 1, 28, 28), torch.tensor([0, 1, 2])
    >>> Data("mine", (images, labels), (images, labels)).defaults.batch_size
    256
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    defaults: Defaults = FASHION_MNIST

    def __post_init__(self) -> None:
        for part, (X, y) in (("train", self.train), ("test", self.test)):
            if len(X) != len(y) or len(X) == 0:
                raise ValueError(
                    f"{self.name}: the {part} set needs one label per image and at least one "
                    f"image, not {len(X)} images and {len(y)} labels"
                )

    def __str__(self) -> str:
        return f"{self.name} ({len(self.train[0])} train, {len(self.test[0])} test)"


def digits() -> Data:
    """Load the 1,797 handwritten digits that ship with scikit-learn: 1,442 train, 355 test.

    An image of 8 x 8 becomes 28 x 28: every pixel three times in each direction, with a border
    of 2, about the margin that digits of this size usually have. Every fifth example of each
    class, in the order of the file, is for testing. Raises DataError without scikit-learn.

    >>> digits().test[0].shape
    torch.Size([355, 1, 28, 28])
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "the digits need scikit-learn, which cannot be imported "
            f"({error}); install pycollect[train]"
        ) from error
    bunch = load_digits()
    small = torch.from_numpy(bunch.images).float().div(16)  # the file counts ink from 0 to 16
    X = torch.nn.functional.interpolate(small[:, None], scale_factor=3)
    X = torch.nn.functional.pad(X, (2, 2, 2, 2))
    y = torch.from_numpy(bunch.target).long()
    one_hot = torch.nn.functional.one_hot(y)
    seen = (one_hot.cumsum(dim=0) * one_hot).sum(dim=1)  # 1 for the first of its class
    test = seen % 5 == 0
    return Data("digits", (X[~test], y[~test]), (X[test], y[test]), DIGITS)


def fashion_mnist(data_dir: Path) -> Data:
    """Load Fashion-MNIST from its IDX files, which are downloaded when they are not there.

    Raises Unavailable if there is no way to get it, DataError if a file is damaged.
    """
    parts = [
        (images[:, None].float().div_(255), labels.long())
        for images, labels in fashion.load(data_dir)
    ]
    return Data("fashion-mnist", parts[0], parts[1], FASHION_MNIST)


def load(name: str = "auto", data_dir: Path | str = "data") -> tuple[Data, str]:
    """Load a data set by name; give it and the sentence on what was used instead, or "".

    Only `auto` chooses: Fashion-MNIST, or the digits if it is unavailable. A damaged file is a
    DataError even then. Raises ValueError for a name that is not in NAMES.

    >>> load("digits")[0].name
    'digits'
    """
    if name not in NAMES:
        raise ValueError(f"unknown data set {name!r}; there are {', '.join(NAMES)}")
    if name == "digits":
        return digits(), ""
    try:
        return fashion_mnist(Path(data_dir)), ""
    except Unavailable as error:
        if name == "fashion-mnist":
            raise
        return digits(), f"{error}; using scikit-learn's handwritten digits instead"
