"""What can be chosen about a training step of replicas."""

from dataclasses import dataclass

from .portions import check_strict

# About one bucket is left to wait for when the backward pass is over, so they are small, but large
# enough that LeNet is one and the ResNet-18 seven: a launch costs a GPU microseconds.
BUCKET_BYTES = 4 << 20


@dataclass(frozen=True)
class StepOptions:
    """How a step is done; ValueError for a value out of range.

    `microbatch` is the number of examples of a microbatch over all devices, whose gradients are
    accumulated. `overlap` reduces gradients in buckets of about `bucket_bytes` while the backward
    pass still runs. `sync_batchnorm` takes batch statistics over all ranks. `strict` refuses
    batches that do not divide, as BatchFlow does. `exact_seconds` waits for the devices wherever
    time is taken, which costs a GPU its head start on the CPU.

    The bits are the same with the overlap and without. `bench/train.py` measures both side by side;
    on two cores it shows no gain that could be told from noise.

    >>> StepOptions(microbatch=0)
    Traceback (most recent call last):
    ValueError: a microbatch must have at least 1 example, not 0
    """

    microbatch: int | None = None
    overlap: bool = True
    bucket_bytes: int = BUCKET_BYTES
    sync_batchnorm: bool = False
    strict: bool = False
    exact_seconds: bool = False

    def __post_init__(self) -> None:
        if self.microbatch is not None and self.microbatch < 1:
            raise ValueError(f"a microbatch must have at least 1 example, not {self.microbatch}")
        if self.bucket_bytes < 1:
            raise ValueError(f"a bucket must have at least 1 byte, not {self.bucket_bytes}")

    def check(self, n: int, world: int) -> None:
        """Raise ValueError if n examples on `world` ranks are what strictness forbids."""
        if self.strict:
            check_strict(n, world, self.microbatch)
