"""pc.devices: the ways to name devices, and the errors for devices that are missing.

Names of GPUs are tested on machines without one; tests that need one are marked cuda.
"""

from __future__ import annotations

import pytest
import torch
from reference import assert_same, randoms

import pycollect as pc

CPU = torch.device("cpu")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tests a machine without a GPU")

FORMS = [
    ("cpu", 1),
    ("CPU", 1),
    ("cpu*1", 1),
    ("cpu*4", 4),
    ("cpu * 4", 4),
    (["cpu"], 1),
    (["cpu", "cpu"], 2),
    (("cpu", "cpu*3"), 4),
    (["cpu*2", CPU, "cpu"], 4),
    (CPU, 1),
    ([CPU, CPU, CPU], 3),
    (torch.device("cpu", 0), 1),
    ("c.u", 1),
]


@pytest.mark.parametrize(("spec", "ranks"), FORMS, ids=str)
def test_forms(spec, ranks):
    found = pc.devices(spec)
    assert type(found) is list
    assert found == [CPU] * ranks


@without_gpu
def test_the_default_without_a_gpu_is_two_cpu_ranks():
    assert pc.devices() == pc.devices(None) == [CPU, CPU]


ABSENT = ["cuda", "cuda:0", "cuda:0*4", "cuda:*", "GPU:*", "GPU:1", "gpu:0", "cuda:[0-3]"]
ABSENT += [["cpu", "cuda:0"], [torch.device("cuda", 0)], torch.device("cuda"), "cuda:.*"]


@without_gpu
@pytest.mark.parametrize("spec", ABSENT, ids=str)
def test_missing_gpus_are_refused(spec):
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)cuda|gpu") as raised:
        pc.devices(spec)
    assert "cpu" in str(raised.value) or "no CUDA device" in str(raised.value)


BAD = ["", " ", "*", "*4", "cpu*0", "cpu*-1", "cpu*x", "cpu*1.5", "cpu:1", "cpu:x", "cpu**2"]
BAD += ["toaster", "toaster*2", "cpu,cpu", "[", "(cpu", "xpu:0", "meta", "cuda:99999", "cuda:-1"]
BAD += ["cpu*99999999999999", [], ["cpu", "toaster"], torch.device("meta"), torch.device("meta", 0)]


@pytest.mark.parametrize("spec", BAD, ids=repr)
def test_invalid_strings_are_refused(spec):
    with pytest.raises(ValueError, match=r"devices") as raised:
        pc.devices(spec)
    named = spec[-1] if isinstance(spec, list) and spec else spec
    assert isinstance(spec, list) or str(named) in str(raised.value), (
        "the message does not quote the argument"
    )


@pytest.mark.parametrize(
    "spec", [1.5, True, object(), ["cpu", None], [["cpu"]], {"cpu": 1.0}.values()]
)
def test_invalid_types_are_refused(spec):
    with pytest.raises((TypeError, ValueError), match="devices"):
        pc.devices(spec)


@pytest.mark.parametrize("spec", ["cpu*3", ["cpu"] * 3, ("cpu", "cpu*2"), [CPU] * 3], ids=str)
def test_every_call_with_devices_accepts_every_form(spec):
    tensor = randoms(1, (7, 2), torch.float32)[0]
    assert_same(pc.scatter(tensor, spec), tensor.tensor_split(3))
    assert_same([mine[0] for mine in pc.replicate([tensor], spec)], [tensor] * 3)
    assert pc.barrier(spec) is None
    tensors = [tensor.clone() for _ in range(3)]
    pc.Communicator(spec).broadcast(tensors)
    assert_same(tensors, [tensor] * 3)


@pytest.mark.parametrize("spec", ["toaster", [], 1.5, "cpu*0"], ids=repr)
def test_every_call_with_devices_refuses_invalid_ones(spec):
    tensor = torch.ones(4)
    calls = (
        lambda: pc.scatter(tensor, spec),
        lambda: pc.replicate([tensor], spec),
        lambda: pc.barrier(spec),
        lambda: pc.Communicator(spec),
    )
    for call in calls:
        with pytest.raises((TypeError, ValueError), match="device"):
            call()


def test_gather_accepts_one_device():
    tensors = randoms(2, (3,), torch.float32)
    for device in (None, "cpu", CPU):
        assert pc.gather(tensors, device).device == CPU
    for bad in ("toaster", "cpu*2", "meta"):
        with pytest.raises(ValueError, match="device"):
            pc.gather(tensors, bad)


@pytest.mark.cuda
def test_every_gpu():
    count = torch.cuda.device_count()
    every = [torch.device("cuda", i) for i in range(count)]
    for spec in (None, "cuda:*", "GPU:*", "gpu:*", r"cuda:\d+"):
        assert pc.devices(spec) == every
    for spec in ("cuda:0*4", ["cuda:0"] * 4, "GPU:0*4"):
        assert pc.devices(spec) == every[:1] * 4
    assert pc.devices(["cpu", "cuda:0"]) == [CPU, *every[:1]]
    with pytest.raises(ValueError, match=f"cuda:{count}"):
        pc.devices(f"cuda:{count}")
