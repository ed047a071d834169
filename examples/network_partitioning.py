"""Network partitioning: LeNet's convolutions on one rank, its dense layers on the next.

    python examples/network_partitioning.py ["cpu*2" | "cuda:*" | cuda:0 cpu | ...]

Activations are copied from the first rank to the second, and their gradients back. A batch is split
into microbatches: while the second GPU works on one, the first works on the next.
"""

import sys
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import pycollect as pc
from pycollect.train import digits, init_lenet, lenet

BATCH, STEPS, MICROBATCHES = 64, 60, 4
START = [10 * p for p in init_lenet()]  # ten times the book's, so that a few steps lower the loss
CONVOLUTIONAL = 4  # of LeNet's eight parameters, the first four belong to the convolutions


def convolutions(images: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Return the features of every image: [n, 1, 28, 28] to [n, 800]."""
    w1, b1, w2, b2 = params
    hidden = F.avg_pool2d(F.relu(F.conv2d(images, w1, b1)), 2)
    return F.avg_pool2d(F.relu(F.conv2d(hidden, w2, b2)), 2).flatten(1)


def dense(features: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Return the ten scores of every image: [n, 800] to [n, 10]."""
    w3, b3, w4, b4 = params
    return F.linear(F.relu(F.linear(features, w3, b3)), w4, b4)


def place(params: Sequence[Tensor], devices: Sequence[torch.device]) -> list[Tensor]:
    """Copy the parameters of each part to its rank."""
    first, second = devices
    homes = [first if i < CONVOLUTIONAL else second for i in range(len(params))]
    copies = [pc.autograd.copy(p, home) for p, home in zip(params, homes, strict=True)]
    return [copy.detach().requires_grad_() for copy in copies]


def forward(X: Tensor, params: Sequence[Tensor], microbatches: int = MICROBATCHES) -> list[Tensor]:
    """Return the scores of every microbatch, on the second rank.

    No call waits for a GPU, so the next microbatch is issued while this one runs.
    """
    first, second = params[0].device, params[CONVOLUTIONAL].device
    scores = []
    for microbatch in X.tensor_split(microbatches):
        features = convolutions(pc.autograd.copy(microbatch, first), params[:CONVOLUTIONAL])
        scores.append(dense(pc.autograd.copy(features, second), params[CONVOLUTIONAL:]))
    return scores


def loss_of(scores: Sequence[Tensor], y: Tensor) -> Tensor:
    """Return the mean cross-entropy over all microbatches; backward runs them in reverse order."""
    labels = pc.autograd.copy(y, scores[0].device).tensor_split(len(scores))
    pairs = zip(scores, labels, strict=True)
    return torch.stack([F.cross_entropy(s, t, reduction="sum") for s, t in pairs]).sum() / len(y)


def difference(X: Tensor, y: Tensor, devices: Sequence[torch.device]) -> float:
    """Return the largest difference between these gradients and those on a single device."""
    single = [p.clone().requires_grad_() for p in START]
    split = place(single, devices)
    expected = torch.autograd.grad(F.cross_entropy(lenet(X, single), y), single)
    found = torch.autograd.grad(loss_of(forward(X, split), y), split)
    pairs = zip(found, expected, strict=True)
    return max(float((f.cpu() - e).abs().max()) for f, e in pairs)


def train(X: Tensor, y: Tensor, params: list[Tensor], steps: int = STEPS) -> list[float]:
    """Train both parts with momentum; return the loss of every step."""
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        batch = torch.randint(len(X), (BATCH,))
        optimizer.zero_grad()
        loss = loss_of(forward(X[batch], params), y[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def main(arguments: Sequence[str]) -> None:
    """Train on the digits; print losses, accuracy and the difference of the gradients."""
    devices = pc.devices(arguments or None)[:2]
    if len(devices) < 2:
        raise SystemExit("two ranks are needed; name two devices, or one twice: cuda:0*2")
    torch.manual_seed(0)
    data = digits()
    X, y = data.train
    deviation = difference(X[:BATCH], y[:BATCH], devices)
    params = place(START, devices)
    began = time.perf_counter()
    losses = train(X, y, params)
    seconds = time.perf_counter() - began
    with torch.no_grad():
        scores = torch.cat(forward(data.test[0], params)).cpu()
    accuracy = float((scores.argmax(1) == data.test[1]).float().mean())
    print(
        f"convolutions on {devices[0]}, dense layers on {devices[1]}, {MICROBATCHES} microbatches:"
    )
    print(
        f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, test acc {accuracy:.2f}, {STEPS} steps in "
        f"{seconds:.1f} s; gradients as on one device to {deviation:.0e}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
