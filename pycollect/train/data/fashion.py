"""Fashion-MNIST: its four IDX files, found in a directory or downloaded by torchvision.

Only downloading needs torchvision, reading does not. Without a network the attempt ends within
NETWORK_TIMEOUT seconds, whether connections are refused or get no answer.
"""

import contextlib
import gzip
import io
import math
import socket
import struct
import sys
import threading
import time
import urllib.parse
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from .dataset import Data, DatasetError, DatasetUnavailable, DefaultHyperparameters, first_line

# Dive into Deep Learning's values: LeNet from scratch (256 images, 0.2), and concise ResNet-18.
LENET = DefaultHyperparameters(batch_size=256, lr=0.2, epochs=10)
RESNET18 = DefaultHyperparameters(batch_size=256, lr=0.1, epochs=10)
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
NETWORK_TIMEOUT = 4.5  # seconds; without a network a run still starts within 5
IDX_UBYTE = 0x08  # the type code of bytes in an IDX header


def fashion_mnist(data_dir: Path) -> Data:
    """Load Fashion-MNIST from its IDX files, which are downloaded if they are missing.

    Raises DatasetUnavailable if they are missing and cannot be downloaded, DatasetError if damaged.
    """
    train, test = (
        (images[:, None].float().div_(255), labels.long()) for images, labels in load(data_dir)
    )
    tuned = {"resnet18": RESNET18}
    return Data("fashion-mnist", train, test, LENET, classes=CLASSES, tuned=tuned)


def find(data_dir: Path) -> list[Path]:
    """Return the four files, plain or with .gz, if one directory has all of them; else []."""
    for place in PLACES:
        paths = [
            next((p for p in (folder, Path(f"{folder}.gz")) if p.is_file()), None)
            for folder in (data_dir / place / name for name in FILES)
        ]
        found = [path for path in paths if path is not None]
        if len(found) == len(FILES):
            return found
    return []


def read_idx(path: Path) -> Tensor:
    """Read an IDX file of bytes, gzipped or not, as a uint8 tensor of the shape in its header.

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
    if len(content) < 4 or content[:3] != bytes((0, 0, IDX_UBYTE)):
        raise DatasetError(f"{path} is not an IDX file of bytes: its first bytes are wrong")
    dims = content[3]
    header = 4 + 4 * dims
    shape = struct.unpack_from(f">{dims}I", content, 4) if len(content) >= header else ()
    expected = header + math.prod(shape)
    if len(content) != expected:
        raise DatasetError(
            f"{path} is damaged: it holds {len(content)} bytes where its header announces "
            f"{expected}; delete it to have it downloaded again"
        )
    return torch.frombuffer(content, dtype=torch.uint8)[header:].reshape(shape)


def read_pair(images_path: Path, labels_path: Path) -> tuple[Tensor, Tensor]:
    """Read images [n, 28, 28] and labels [n] as uint8; DatasetError if they do not fit together."""
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.dim() != 3 or images.shape[1:] != (28, 28) or len(images) == 0:
        raise DatasetError(f"{images_path} holds {list(images.shape)}, not images of 28 x 28")
    if labels.shape != images.shape[:1]:
        raise DatasetError(f"{labels_path} holds {list(labels.shape)}, not {len(images)} labels")
    if int(labels.max()) > 9:
        raise DatasetError(
            f"{labels_path} holds the label {int(labels.max())}; the classes are 0-9"
        )
    return images, labels


def load(data_dir: Path) -> list[tuple[Tensor, Tensor]]:
    """Return the training images and labels, then the test ones; download missing files.

    Raises DatasetUnavailable if they are missing and cannot be downloaded, DatasetError if damaged.
    """
    try:
        paths = find(data_dir)
    except OSError as error:
        raise DatasetError(f"{data_dir} cannot be read ({error})") from error
    if not paths:
        try:
            download(data_dir)
        except DatasetUnavailable as error:
            raise DatasetUnavailable(
                f"Fashion-MNIST is not in {data_dir}/ and cannot be downloaded ({error})"
            ) from error
        paths = find(data_dir)
    return [read_pair(paths[0], paths[1]), read_pair(paths[2], paths[3])]


def download(data_dir: Path, timeout: float = NETWORK_TIMEOUT) -> None:
    """Download the files with torchvision; raise DatasetUnavailable with the reason if it fails."""
    start = time.monotonic()
    try:
        from torchvision.datasets import FashionMNIST
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
        missing = isinstance(error, ModuleNotFoundError) and str(error.name).startswith(
            "torchvision"
        )
        reason = (
            "torchvision is not installed" if missing else f"torchvision fails: {first_line(error)}"
        )
        raise DatasetUnavailable(reason) from error
    url = FashionMNIST.mirrors[0] + FashionMNIST.resources[0][0]
    require_answer(url, max(1.0, timeout - (time.monotonic() - start)))
    try:
        with socket_timeout(timeout), quiet_unless_terminal():
            FashionMNIST(str(data_dir), download=True)
    except (OSError, RuntimeError) as error:
        raise DatasetUnavailable(f"the download failed: {first_line(error)}") from error


def require_answer(url: str, seconds: float) -> None:
    """Return when the server answers; raise DatasetUnavailable after a refusal or `seconds`.

    The request runs in a thread, because no timeout of the standard library covers name resolution.
    """
    host = urllib.parse.urlsplit(url).hostname
    reasons = [f"no answer from {host} within {seconds:.1f} s"]

    def ask() -> None:
        try:
            request = urllib.request.Request(url, method="HEAD")
            with urllib.request.urlopen(request, timeout=seconds):
                reasons.clear()
        except Exception as error:  # every error becomes the reason of DatasetUnavailable
            reasons[:] = [f"no answer from {host}: {first_line(getattr(error, 'reason', error))}"]

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    if reasons:
        raise DatasetUnavailable(reasons[0])


@contextlib.contextmanager
def socket_timeout(seconds: float) -> Iterator[None]:
    """Set a default timeout for new sockets in this context; torchvision itself sets none."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


@contextlib.contextmanager
def quiet_unless_terminal() -> Iterator[None]:
    """Keep torchvision's progress bars out of log files."""
    with contextlib.ExitStack() as stack:
        if not sys.stderr.isatty():
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield
