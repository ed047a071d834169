"""The handwritten digits that ship with scikit-learn: real data without a network."""

import torch

from .dataset import Data, DatasetError, DefaultHyperparameters

LENET = DefaultHyperparameters(batch_size=64, lr=0.3, epochs=40)
RESNET18 = DefaultHyperparameters(batch_size=64, lr=0.1, epochs=5)


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
    X = torch.nn.functional.interpolate(small[:, None], scale_factor=3)
    X = torch.nn.functional.pad(X, (2, 2, 2, 2))
    y = torch.from_numpy(bunch.target).long()
    one_hot = torch.nn.functional.one_hot(y)
    seen = (one_hot.cumsum(dim=0) * one_hot).sum(dim=1)  # position within its class, from 1
    test = seen % 5 == 0
    return Data(
        "digits",
        (X[~test], y[~test]),
        (X[test], y[test]),
        LENET,
        classes=[str(digit) for digit in range(10)],
        tuned={"resnet18": RESNET18},
    )
