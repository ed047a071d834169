"""Objects with __dlpack__ are accepted in place of tensors: NumPy arrays, and bare capsules."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import programs
import pytest
import torch
from reference import assert_same, expected, left_fold

import pycollect as pc
from pycollect import interop

NUMPY = [
    np.dtype(kind) for kind in ("f8", "f4", "f2", "i1", "i2", "i4", "i8", "u1", "?", "c8", "c16")
]
IN_PLACE = ("all_reduce", "reduce", "broadcast")
OUT_OF_PLACE = ("all_gather", "reduce_scatter", "all_to_all")


class Capsule:
    """The minimum that the DLPack protocol requires."""

    def __init__(self, owner):
        self.owner = owner

    def __dlpack__(self, **options):
        return self.owner.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.owner.__dlpack_device__()


class OldCapsule(Capsule):
    """An object of the protocol before versions: __dlpack__ takes a stream and nothing else."""

    def __dlpack__(self, stream=None):
        return self.owner.__dlpack__()


def arrays(dtype=np.float32, shape=(6, 4)):
    """Arrays of three ranks."""
    count = int(np.prod(shape))
    return [(np.arange(count).reshape(shape) % (5 + r)).astype(dtype) for r in range(3)]


def tensors_of(values):
    return [torch.tensor(v) for v in values]


def read_only(values):
    for v in values:
        v.flags.writeable = False
    return values


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("collective", IN_PLACE)
def test_arrays_are_written_in_place(collective, dtype):
    mine = arrays(dtype)
    wanted = expected(collective, tensors_of(mine))
    assert getattr(pc, collective)(mine) is None
    assert_same(tensors_of(mine), wanted)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("collective", OUT_OF_PLACE)
@pytest.mark.parametrize("guard", [list, read_only], ids=["writeable", "read-only"])
def test_arrays_as_inputs_give_tensors(collective, guard):
    mine = guard(arrays())
    kept = tensors_of(mine)
    got = getattr(pc, collective)(mine, dim=1)
    assert_same(got, expected(collective, kept, dim=1))
    assert_same(tensors_of(mine), kept)
    assert all(not np.shares_memory(g.numpy(), m) for g in got for m in mine)


def test_read_only_arrays_are_read_after_earlier_asynchronous_calls():
    mine = arrays(np.int64, (1500, 1001))
    wanted = left_fold(tensors_of(mine), "sum")
    view = read_only([mine[0].view()])
    work = pc.all_reduce(mine, async_op=True)
    got = pc.all_gather(view, async_op=True)
    assert_same(got.wait(), [wanted])
    work.wait()


def test_arrays_as_outputs():
    mine = arrays()
    for collective in OUT_OF_PLACE:
        wanted = expected(collective, tensors_of(mine))
        out = [np.zeros(w.shape, np.float32) for w in wanted]
        got = getattr(pc, collective)(mine, out=out)
        assert_same(got, wanted, collective)
        assert_same(tensors_of(out), wanted, collective)
        assert all(np.shares_memory(g.numpy(), o) for g, o in zip(got, out, strict=True))


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_read_only_array_is_refused_as_an_output(position):
    src = (position + 1) % 3
    roots = {"all_reduce": {}, "reduce": {"dst": position}, "broadcast": {"src": src}}
    for collective, root in roots.items():
        mine = arrays()
        read_only(mine[position : position + 1])
        kept = tensors_of(mine)
        with pytest.raises(ValueError, match=rf"\[{position}\].*read-only"):
            getattr(pc, collective)(mine, **root)
        assert_same(tensors_of(mine), kept, collective)
    with pytest.raises(ValueError, match="read-only"):
        pc.copy_(mine[position], torch.zeros(6, 4))
    out = [np.zeros((18, 4), np.float32) for _ in range(3)]
    read_only(out[position : position + 1])
    with pytest.raises(ValueError, match=rf"out\[{position}\].*read-only"):
        pc.all_gather(arrays(), out=out)
    assert all((o == 0).all() for o in out)


def test_read_only_arrays_are_accepted_where_they_are_only_read():
    mine = arrays()
    wanted = {c: expected(c, tensors_of(mine), root=1) for c in ("reduce", "broadcast")}
    read_only(mine[::2])
    pc.reduce(mine, dst=1)
    assert_same(tensors_of(mine), wanted["reduce"])
    mine = arrays()
    read_only(mine[1:2])
    pc.broadcast(mine, src=1)
    assert_same(tensors_of(mine), wanted["broadcast"])


def test_a_read_only_array_behind_a_bare_capsule_is_refused_or_an_error():
    mine = [Capsule(a) for a in read_only(arrays())]
    with pytest.raises((ValueError, BufferError)):
        pc.all_reduce(mine)
    assert_same(tensors_of([c.owner for c in mine]), tensors_of(arrays()))


def test_arrays_and_tensors_mixed():
    values = arrays()
    mine = [values[0].copy(), torch.tensor(values[1]), Capsule(values[2].copy())]
    pc.all_reduce(mine)
    wanted = left_fold(tensors_of(values), "sum")
    assert_same([torch.tensor(mine[0]), mine[1], torch.tensor(mine[2].owner)], [wanted] * 3)


@pytest.mark.parametrize("kind", [Capsule, OldCapsule])
@pytest.mark.parametrize("owner", [torch.tensor, np.array], ids=["torch", "numpy"])
def test_bare_capsules(kind, owner):
    mine = [kind(owner(v)) for v in arrays()]
    pc.all_reduce(mine)
    wanted = left_fold(tensors_of(arrays()), "sum")
    assert_same([torch.as_tensor(c.owner) for c in mine], [wanted] * 3)
    assert_same([pc.gather(mine)], [torch.cat([wanted] * 3)])


def test_strided_arrays():
    bases = [np.ones((6, 9), np.float32) for _ in range(3)]
    views = [base[:, 1::2] for base in bases]
    for view, values in zip(views, arrays(), strict=True):
        view[...] = values
    pc.all_reduce(views)
    assert_same(tensors_of(views), [left_fold(tensors_of(arrays()), "sum")] * 3)
    assert all((base[:, ::2] == 1).all() for base in bases)


def test_negative_strides_are_refused():
    # In a process of its own: torch.from_dlpack ends a process that passes negative strides.
    script = (
        "import numpy as np, pycollect as pc\n"
        "class Bare:\n"  # an array without attributes, as far as the caller knows
        "    def __init__(self, a):\n"
        "        self.__dlpack__, self.__dlpack_device__ = a.__dlpack__, a.__dlpack_device__\n"
        "x = [np.arange(6.0)[::-1], np.arange(6.0)]\n"
        "for call in (pc.all_reduce, pc.all_gather) * 2:\n"
        "    try: call(x)\n"
        "    except ValueError as e: assert '[0]' in str(e) and 'strides' in str(e), e\n"
        "    else: raise SystemExit('not refused')\n"
        "    x[0] = Bare(np.arange(6.0)[::-1])\n"
        "assert (x[1] == np.arange(6.0)).all()\n"
    )
    done = programs.run([sys.executable, "-c", script], timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_overlapping_arrays_are_refused():
    storage = np.arange(20, dtype=np.float32)
    kept = storage.copy()
    with pytest.raises(ValueError, match="share"):
        pc.all_reduce([storage[:8], torch.from_numpy(storage)[7:15]])
    assert (storage == kept).all()


def test_other_calls_accept_arrays():
    values = arrays()
    assert_same(pc.scatter(values[0], "cpu*3"), list(torch.tensor(values[0]).tensor_split(3)))
    assert_same(pc.replicate(values, "cpu*2")[1], tensors_of(values))
    assert_same([pc.gather(values)], [torch.cat(tensors_of(values))])
    target = np.zeros((6, 4), np.float32)
    pc.copy_(target, values[2])
    assert_same([torch.tensor(target)], tensors_of(values[2:]))
    lists = [[v, v[0].copy()] for v in arrays()]
    pc.all_reduce_coalesced(lists)
    assert_same(tensors_of([mine[0] for mine in lists]), [left_fold(tensors_of(values), "sum")] * 3)


def test_non_numeric_arrays_are_refused():
    for bad in (np.array(["a"]), np.array([object()]), np.zeros(3, np.uint16)):
        with pytest.raises((TypeError, ValueError, BufferError)):
            pc.all_reduce([bad, bad.copy()])
    with pytest.raises(TypeError, match=r"\[0\].*list"):
        pc.all_reduce([[1.0, 2.0], [3.0, 4.0]])


@pytest.mark.parametrize("library", ["jax", "jaxlib._jax", "mlx.core", "pyarrow.lib", "tensorflow"])
def test_arrays_of_libraries_with_immutable_arrays_are_inputs_only(library):
    """Their capsules have no read-only flag; a call that wrote them would change all aliases."""
    owner = type("ArrayImpl", (Capsule,), {"__module__": library})
    mine = [owner(array) for array in arrays()]
    for call in (
        lambda: pc.all_reduce(mine),
        lambda: pc.broadcast(mine, 1),
        lambda: pc.reduce([mine[0], *arrays()[1:]]),
        lambda: pc.all_reduce_coalesced([[t] for t in mine]),
        lambda: pc.all_gather(arrays(), out=[owner(np.zeros((18, 4), np.float32))] * 3),
        lambda: pc.gather(arrays(), out=owner(np.zeros((18, 4), np.float32))),
        lambda: pc.copy_(mine[0], mine[1]),
    ):
        with pytest.raises(ValueError, match=r"ArrayImpl of (jax|mlx|pyarrow|tensor).*immutable"):
            call()
    assert_same([torch.tensor(array.owner) for array in mine], tensors_of(arrays()))
    assert_same(pc.all_gather(mine), expected("all_gather", tensors_of(arrays())))
    target = np.zeros((6, 4), np.float32)
    pc.copy_(target, mine[2])
    pc.broadcast([mine[0], target])
    assert_same([torch.tensor(target)], tensors_of(arrays()[:1]))


def test_an_array_may_be_dropped_while_the_result_lives():
    out = np.zeros(6, np.float32)
    got = pc.gather([np.ones(3, np.float32), np.ones(3, np.float32)], out=out)
    del out
    assert got.sum() == 6


class OnGpu:
    """An array on a GPU that notes which stream `__dlpack__` gets, and shares CPU memory."""

    def __init__(self, **interface):
        self.tensor, self.streams = torch.ones(4), []
        if interface:
            self.__cuda_array_interface__ = {"version": 3, **interface}

    def __dlpack_device__(self):
        return (2, 0)  # DLPack's kDLCUDA

    def __dlpack__(self, *, stream=None, max_version=None):
        self.streams.append(stream)
        return torch.utils.dlpack.to_dlpack(self.tensor)


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize(("handle", "wanted"), [(0, 1), (77, 77)])
def test_an_unknown_stream_is_ordered_by_dlpack_before_torchs(
    monkeypatch, handle, wanted, captures
):
    """DLPack's name of the default stream is 1; -1 orders nothing, as a capture needs it."""
    current = SimpleNamespace(cuda_stream=handle)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: current)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    array = OnGpu()
    pc.all_reduce([array, torch.ones(4)])
    assert array.streams == [-1 if captures else wanted]


def test_a_known_stream_is_ordered_by_the_call():
    array = OnGpu(stream=5)
    assert interop.producer_stream(array) == 5
    pc.all_reduce([array, torch.ones(4)])
    assert array.streams == [-1]


def test_the_stream_of_an_array_is_that_of_its_device():
    """CuPy names the current stream of the current device."""

    class Device:
        current = 0

        def __enter__(self):
            Device.current = 3

        def __exit__(self, *_):
            Device.current = 0

    class Array:
        device = Device()

        @property
        def __cuda_array_interface__(self):
            return {"stream": 100 + Device.current}

    assert interop.producer_stream(Array()) == 103
    assert interop.producer_stream(np.ones(3)) is None
    assert Device.current == 0
