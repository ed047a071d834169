"""What the trainer can train on: three data sets by name, and `Data` for anything else."""

from .catalog import NAMES, check, load
from .digits import digits
from .errors import DataError, Unavailable
from .examples import Data, Defaults, Examples, MapStyle, count, fetch
from .fashion import fashion_mnist
from .folder import IMAGE_SIZE, ImageFolder, image_folder

__all__ = [
    "IMAGE_SIZE",
    "NAMES",
    "Data",
    "DataError",
    "Defaults",
    "Examples",
    "ImageFolder",
    "MapStyle",
    "Unavailable",
    "check",
    "count",
    "digits",
    "fashion_mnist",
    "fetch",
    "image_folder",
    "load",
]
