"""Examples for training and testing: tensors in memory, or any map-style data set.

Examples in memory are one pair of tensors, images [n, C, H, W] and labels [n]. A map-style data set
is indexed one example at a time, and decodes the example's file then.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor


class DatasetError(RuntimeError):
    """A data set cannot be loaded; the message is one sentence with the reason."""


class DatasetUnavailable(DatasetError):
    """A data set is not on disk and cannot be downloaded."""


def first_line(error: object) -> str:
    """Return the first line of an error's message, or its type if the message is empty.

    >>> first_line(ValueError("it is not there:\\nlook elsewhere"))
    'it is not there'
    """
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(":")


class MapStyle(Protocol):
    """A `torch.utils.data.Dataset` with a length that returns (image, label) by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]: ...


Examples: TypeAlias = tuple[Tensor, Tensor] | MapStyle


@dataclass(frozen=True)
class DefaultHyperparameters:
    """Hyperparameters with which a model trains well on a data set.

    `batch_size` counts the examples of all ranks together, `lr` is the learning rate of SGD on the
    mean loss, and `epochs` the number of passes over the training set. The values are checked only
    when `train` uses them.

    >>> DefaultHyperparameters(batch_size=256, lr=0.2, epochs=10).lr
    0.2
    """

    batch_size: int
    lr: float
    epochs: int


# Dive into Deep Learning's values for Fashion-MNIST, and the first guess for untested data sets.
USUAL = DefaultHyperparameters(batch_size=256, lr=0.2, epochs=10)


@dataclass(frozen=True)
class Data:
    """Images and labels for training and testing, for `train(data=...)`.

    `train` and `test` are each a pair of tensors or a map-style data set. A pair has images
    [n, C, H, W], of the dtype that the model takes, and labels [n], int64 or uint8, which are class
    numbers from 0. A map-style data set has a length, and `data_set[i]` is an image tensor
    [C, H, W] and an integer label; it is called in loader threads if batches are prepared ahead.
    All images have one shape.

    `name` is for messages, and `notice` is a sentence for the user, such as the reason for which
    this data set replaces another. `classes` names the classes; by default their number comes from
    the `classes` of the training set, or from the largest label of tensors. `model` is the default
    model (lenet). `defaults` applies to every model that is not a key of `tuned`; by default it is
    a batch size of 256, a learning rate of 0.2 and 10 epochs. `evaluated` names the set that
    `test` is, "test" (the default), or "train" if there is no other.

    Raises TypeError for sets of another kind, and ValueError for an empty set, for numbers of
    images and labels that differ, and for label tensors of another shape or dtype, below 0, or not
    below the number of `classes`. Examples of map-style data sets are checked when they are
    fetched, and their labels only for being whole numbers from 0.

    >>> images, labels = torch.zeros(3, 1, 28, 28), torch.tensor([0, 1, 2])
    >>> data = Data("mine", (images, labels), (images, labels))
    >>> data.defaults.batch_size, data.image_shape, data.num_classes
    (256, (1, 28, 28), 3)
    """

    name: str
    train: Examples
    test: Examples
    defaults: DefaultHyperparameters = USUAL
    classes: Sequence[str] = ()
    tuned: Mapping[str, DefaultHyperparameters] = field(default_factory=dict)
    model: str = "lenet"  # the default model for this data set
    notice: str = ""
    evaluated: str = "test"

    @classmethod
    def of(cls, train: Any, test: Any = None) -> "Data":
        """Return the `Data` of a training set and a test set: pairs of tensors or map-style sets.

        Without a test set the model is evaluated on the training set. A `Data` is returned as it
        is. Raises TypeError for anything else, ValueError for a `Data` with a test set.

        >>> pair = torch.zeros(3, 1, 28, 28), torch.tensor([0, 1, 2])
        >>> Data.of(pair).notice
        'there is no test set (test_data): the accuracy is that of the training set'
        """
        if isinstance(train, Data):
            if test is not None:
                raise ValueError("this data has a test set already: leave out test_data")
            return train
        first = _examples("data", train)
        name = "tensors" if isinstance(first, tuple) else type(first).__name__
        if test is not None:
            return cls(name, first, _examples("test_data", test))
        notice = "there is no test set (test_data): the accuracy is that of the training set"
        return cls(name, first, first, notice=notice, evaluated="train")

    def __post_init__(self) -> None:
        for part, examples in (("train", self.train), ("test", self.test)):
            examples = _examples(part, examples)
            object.__setattr__(self, part, examples)  # the class is frozen
            labels = count(examples)
            images = len(examples[0]) if isinstance(examples, tuple) else labels
            if images != labels or images == 0:
                raise ValueError(
                    f"{self.name}: the {part} set needs one label per image and at least one "
                    f"image, not {images} images and {labels} labels"
                )
            if isinstance(examples, tuple):
                self._check_labels(part, examples[1])

    def _check_labels(self, part: str, labels: Tensor) -> None:
        """Raise ValueError for labels that the loss would refuse only during a step."""
        kind = str(labels.dtype).removeprefix("torch.")
        if labels.dim() != 1 or kind not in ("int64", "uint8"):  # those that cross-entropy accepts
            raise ValueError(
                f"{self.name}: the labels of the {part} set must be whole numbers [n], the number "
                f"of the class of each image, not {kind} {list(labels.shape)}"
            )
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or (self.classes and high >= len(self.classes)):
            known = f" and {len(self.classes)} classes" if self.classes else ""
            raise ValueError(
                f"{self.name}: the {part} set has labels from {low} to {high}{known}; classes are "
                "numbered from 0"
            )

    def __str__(self) -> str:
        test = "no" if self.evaluated == "train" else count(self.test)
        return f"{self.name} ({count(self.train)} train, {test} test)"

    def defaults_for(self, model: str) -> DefaultHyperparameters:
        """Return the hyperparameters for a model by name, `defaults` if it is not in `tuned`."""
        return self.tuned.get(model, self.defaults)

    @cached_property
    def first_image(self) -> Tensor:
        """The first image of the training set."""
        return fetch(self.train, torch.tensor([0]))[0][0]

    def check_test_image(self) -> None:
        """Raise ValueError if the first images of both sets differ in shape or dtype."""
        image = fetch(self.test, torch.tensor([0]))[0][0]
        first = self.first_image
        if (image.shape, image.dtype) != (first.shape, first.dtype):
            kinds = [f"{str(i.dtype)[6:]} {list(i.shape)}" for i in (first, image)]
            raise ValueError(
                f"{self.name}: the training set has images of {kinds[0]}, and the test set of "
                f"{kinds[1]}"
            )

    @property
    def image_shape(self) -> tuple[int, ...]:
        """The shape of the first image of the training set."""
        return tuple(self.first_image.shape)

    @cached_property
    def num_classes(self) -> int:
        """The number of classes; ValueError if neither class names nor label tensors are given."""
        classes = self.classes or getattr(self.train, "classes", ())
        if classes:
            return len(classes)
        if known := [part[1] for part in (self.train, self.test) if isinstance(part, tuple)]:
            return 1 + max(int(labels.max()) for labels in known)
        raise ValueError(
            f"{self.name}: the number of classes is not known; give the training set a list "
            "`classes`, pass Data(..., classes=[...]), or a model of your own"
        )


def _examples(what: str, given: Any) -> Examples:
    """Return a pair of tensors or a map-style data set as it is; TypeError for anything else."""
    if isinstance(given, tuple | list):
        if len(given) == 2 and all(isinstance(part, Tensor) for part in given):
            return given[0].detach(), given[1]
        if isinstance(given, tuple):
            kinds = ", ".join(type(part).__name__ for part in given)
            raise TypeError(f"{what} is a tuple of {kinds}; pass two tensors, images and labels")
    is_other = isinstance(given, str | bytes | Mapping | Tensor)
    if is_other or not all(hasattr(type(given), name) for name in ("__len__", "__getitem__")):
        raise TypeError(
            f"{what} is a {type(given).__name__}; pass a map-style data set, with a length and "
            "(image, label) at every index, or a pair of tensors, images and labels"
        )
    return given  # type: ignore[no-any-return]


def count(examples: Examples) -> int:
    """Return the number of examples.

    >>> count((torch.zeros(3, 1), torch.zeros(3)))
    3
    """
    return len(examples[1]) if isinstance(examples, tuple) else len(examples)


def fetch(examples: Examples, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the images [k, C, H, W] and labels [k] of k examples.

    Raises TypeError for an example that is not an image tensor and a whole number, and ValueError
    for a label below 0 and for images of different shapes.

    >>> fetch((torch.arange(4.0)[:, None], torch.tensor([7, 8, 9, 6])), torch.tensor([2, 0]))
    (tensor([[2.],
            [0.]]), tensor([9, 7]))
    """
    if isinstance(examples, tuple):
        images, labels = examples
        return images[indices], labels[indices]
    found = [_checked(i, examples[i]) for i in indices.tolist()]
    try:
        images = torch.stack([image for image, _ in found])
    except RuntimeError as error:
        shapes = sorted({tuple(image.shape) for image, _ in found})
        raise ValueError(f"the images of a batch must have one shape, not {shapes}") from error
    return images, torch.tensor([label for _, label in found], dtype=torch.int64)


def _checked(index: int, example: Any) -> tuple[Tensor, int]:
    """Return the image and the label of an example of a map-style data set."""
    if not isinstance(example, tuple | list) or len(example) != 2:
        raise TypeError(
            f"example {index} of the data set is a {type(example).__name__}, not a pair: an image "
            "tensor and its class number"
        )
    image, label = example
    if not isinstance(image, Tensor):
        raise TypeError(
            f"image {index} of the data set is a {type(image).__name__}, not a tensor; give the "
            "data set a transform that makes one, such as torchvision.transforms.ToTensor()"
        )
    try:
        number = operator.index(label)
    except TypeError:
        kind = type(label).__name__
        raise TypeError(f"label {index} of the data set is a {kind} and no whole number") from None
    if number < 0:  # torch's loss would skip the example at -100
        raise ValueError(f"label {index} of the data set is {number}; classes are numbered from 0")
    return image, number
