"""Layer-wise partitioning: every rank has a part of the channels of every layer of LeNet.

    python examples/layerwise_partitioning.py ["cpu*2" | "cuda:*" | cuda:0 cpu | ...]

A layer split by its outputs needs all inputs, so an all_gather precedes it. A layer split by its
inputs leaves partial sums, so a reduce_scatter follows it; the last one leaves each rank the scores
of its own examples.
"""

import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import pycollect as pc
from pycollect import autograd
from pycollect.train import digits, init_lenet, lenet

BATCH, STEPS = 64, 60
START = [10 * p for p in init_lenet()]  # ten times the book's, so that a few steps lower the loss
# The dimension along which each of LeNet's parameters is split over the ranks. w3 is viewed as
# [128, 50, 16], because its 800 inputs are 16 pixels of 50 channels. b4 stays on rank 0.
SPLIT_DIM = (0, 0, 0, 0, 1, 0, 1, None)


@torch.no_grad()
def split(params: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    """Split every parameter over the ranks; return parts[parameter][rank]."""
    parts = []
    for param, dim in zip(params, SPLIT_DIM, strict=True):
        whole = param.unflatten(1, (50, 16)) if param.shape == (128, 800) else param
        if dim is None:
            parts.append([copy for [copy] in pc.replicate([whole], devices[:1])])
        else:
            parts.append(pc.scatter(whole, devices, dim=dim))
    return [[part.requires_grad_() for part in ranks] for ranks in parts]


def forward(X: Tensor, parts: list[list[Tensor]]) -> list[Tensor]:
    """Return each rank's scores of its share of the examples: [n, 1, 28, 28] to [n / W, 10] each.

    Only the second convolution has all channels of the layer before it on every rank.
    """
    w1, b1, w2, b2, w3, b3, w4, b4 = parts
    devices = [part.device for part in w1]
    images = [copy for [copy] in autograd.replicate([X], devices)]

    def convolve(inputs: list[Tensor], w: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        ranks = zip(inputs, w, b, strict=True)
        return [F.avg_pool2d(F.relu(F.conv2d(x, w, b)), 2) for x, w, b in ranks]

    def partial(inputs: list[Tensor], w: list[Tensor]) -> list[Tensor]:
        return [F.linear(x.flatten(1), w.flatten(1)) for x, w in zip(inputs, w, strict=True)]

    hidden = convolve(images, w1, b1)  # [n, 20 / W, 13, 13]: split by outputs
    hidden = convolve(autograd.all_gather(hidden, dim=1), w2, b2)  # [n, 50 / W, 4, 4]: by outputs
    sums = autograd.reduce_scatter(partial(hidden, w3), dim=1)  # [n, 128 / W]: by inputs
    hidden = [F.relu(s + b) for s, b in zip(sums, b3, strict=True)]
    scores = autograd.reduce_scatter(partial(hidden, w4), dim=0)  # [n / W, 10]: by inputs
    biases = autograd.replicate(b4, devices)
    return [s + b for s, [b] in zip(scores, biases, strict=True)]


def losses_of(scores: Sequence[Tensor], y: Tensor) -> list[Tensor]:
    """Return each rank's part of the mean cross-entropy, for one joint backward pass."""
    labels = pc.scatter(y, [s.device for s in scores])
    pairs = zip(scores, labels, strict=True)
    return [F.cross_entropy(s, t, reduction="sum") / len(y) for s, t in pairs]


def difference(X: Tensor, y: Tensor, devices: Sequence[torch.device]) -> float:
    """Return the largest difference between these gradients and those on a single device."""
    single = [p.clone().requires_grad_() for p in START]
    expected = torch.autograd.grad(F.cross_entropy(lenet(X, single), y), single)
    parts = split(single, devices)
    torch.autograd.backward(losses_of(forward(X, parts), y))
    deviation = 0.0
    for ranks, dim, whole in zip(parts, SPLIT_DIM, expected, strict=True):
        found = pc.gather([part.grad for part in ranks], "cpu", dim=dim or 0)
        deviation = max(deviation, float((found.view_as(whole) - whole).abs().max()))
    return deviation


def train(X: Tensor, y: Tensor, parts: list[list[Tensor]], steps: int = STEPS) -> list[float]:
    """Train all parts with momentum; return the loss of every step."""
    optimizer = torch.optim.SGD([p for ranks in parts for p in ranks], lr=0.1, momentum=0.9)
    history = []
    for _ in range(steps):
        batch = torch.randint(len(X), (BATCH,))
        optimizer.zero_grad()
        losses = losses_of(forward(X[batch], parts), y[batch])
        torch.autograd.backward(losses)
        optimizer.step()
        history.append(sum(float(loss.detach()) for loss in losses))
    return history


def main(arguments: Sequence[str]) -> None:
    """Train on the digits; print losses, accuracy and the difference of the gradients."""
    devices = pc.devices(arguments or None)
    torch.manual_seed(0)
    data = digits()
    deviation = difference(data.train[0][:BATCH], data.train[1][:BATCH], devices)
    parts = split(START, devices)
    losses = train(*data.train, parts)
    with torch.no_grad():
        scores = pc.gather(forward(data.test[0], parts), "cpu")
    accuracy = float((scores.argmax(1) == data.test[1]).float().mean())
    print(f"channels of every layer over {', '.join(map(str, devices))}:")
    print(
        f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, test acc {accuracy:.2f}, after {STEPS} steps; "
        f"gradients as on one device to {deviation:.0e}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
