"""Calls every public callable with each awkward value in place of each argument, one at a time.

A separate program, because it limits its own address space before it starts. Arguments: the index
(from 0) of the part of the calls to try, and the number of parts. Prints one JSON line for each
outcome that is neither success nor a proper TypeError, ValueError or CollectiveError.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import inspect
import itertools
import json
import math
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import pycollect as pc
from pycollect import autograd
from pycollect.train import (
    CheckpointError,
    GluonTrainer,
    OutputError,
    ReplicaTrainer,
    sgd_factory,
    train,
)
from pycollect.train.options import Options

MEMORY = 3 << 30  # bytes of address space allowed beyond the process's size after initialisation
CHARACTERS = 1500  # of the longest message, without a long string that was passed
SECONDS = 120.0  # time limit of one call, on a machine whose cores are shared with other tests

NUMBERS: dict[str, Any] = {
    **{repr(n): n for n in (True, -1, 0, 1.0, math.nan, math.inf, -math.inf, 1e300, 5e-324, 1j)},
    "2**31": 2**31,
    "2**53 + 1": 2**53 + 1,
    "2**62": 2**62,
    "2**63": 2**63,
    "-2**63 - 1": -(2**63) - 1,
    "2**64": 2**64,
    "2**64 + 1": 2**64 + 1,
    "10**400": 10**400,
    "tensor(1)": torch.tensor(1),
    "tensor(True)": torch.tensor(True),
    "tensor([1, 2])": torch.tensor([1, 2]),
    "tensor(nan)": torch.tensor(math.nan),
    "int64(1)": np.int64(1),
    "uint64(2**64 - 1)": np.uint64(2**64 - 1),
    "float32(nan)": np.float32(math.nan),
    "bool_(True)": np.True_,
}
DIGITS = "9" * 5000
AWKWARD: dict[str, Any] = NUMBERS | {
    **{repr(v): v for v in (None, "3", "", "nan", "1e9", DIGITS, b"3", [], {}, ...)},
    "lone surrogate": "\ud800",
    "10**20": 10**20,
    "tensor of 1,600 numbers": torch.rand(40, 40),
    "list of tensors": [torch.rand(40, 40)] * 8,
    "pair of tensors": (torch.rand(40, 40), torch.rand(40)),
    "object": object(),
    "type": int,
    "op": dist.ReduceOp.MAX,
}
# Arguments that accept one number per rank; they are also tried with lists of awkward numbers.
LISTS = {"split_sizes", "chunk_sizes", "sizes", "size", "devices", "spec", "tensors", "streams"}
# Arguments that take an int: True, 1.0 and "3" are refused, NumPy integers are accepted.
INTS = {"dst", "src", "dim", "world", "root", "pieces", "nbytes", "batch_size", *LISTS}
INTS -= {"devices", "spec", "tensors", "streams"}
NOT_INTS = ("True", "1.0", "nan", "'3'", "None", "tensor(True)", "bool_(True)")
Case = tuple[str, Callable[..., object], Callable[[], dict[str, Any]]]


def two() -> list[torch.Tensor]:
    return [torch.ones(4), torch.ones(4)]


def lists() -> list[list[torch.Tensor]]:
    return [two(), two()]


# The arguments of calls that are not left at their defaults, for both pycollect and its autograd.
GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    **dict.fromkeys(("all_reduce", "reduce", "broadcast"), lambda: {"tensors": two()}),
    **dict.fromkeys(("all_gather", "reduce_scatter"), lambda: {"tensors": two()}),
    "all_reduce_coalesced": lambda: {"tensor_lists": lists()},
    "broadcast_coalesced": lambda: {"tensor_lists": lists()},
    "all_to_all": lambda: {"tensors": two(), "split_sizes": [2, 2]},
    "scatter": lambda: {"tensor": torch.ones(2), "devices": "cpu*2", "chunk_sizes": [1, 1]},
    "gather": lambda: {"tensors": two(), "device": "cpu"},
    "replicate": lambda: {"tensors": two(), "devices": "cpu*2"},
    "copy_": lambda: {"dst": torch.ones(4), "src": torch.ones(4)},
    "copy": lambda: {"tensor": torch.ones(2), "device": "cpu"},
    "barrier": lambda: {"devices": "cpu*2"},
    "tree_sum": lambda: {"tensors": two()},
}
NOT_BOUND = {"tree_sum"}  # it has no devices


def arguments(function: Callable[..., object], given: dict[str, Any]) -> dict[str, Any]:
    """Every argument of a function: as given, or its default."""
    known = inspect.signature(function).parameters.values()
    return {p.name: given.get(p.name, p.default) for p in known}


PLAN = {"collective": "broadcast", "world": 2, "algorithm": "chain", "nbytes": 64, "pieces": 2}
EXAMPLES = torch.rand(6, 1, 2, 2), torch.arange(6) % 2
TRAINING = {option.name: option.default for option in dataclasses.fields(Options)} | {
    "devices": "cpu*2",
    "batch_size": 4,
    "lr": 0.1,
    "epochs": 1,
    "model": nn.Sequential(nn.Flatten(), nn.Linear(4, 2)),
    "momentum": 0.5,
    "weights": "1,1",
    "microbatch": 2,
    "data": EXAMPLES,
    "test_data": EXAMPLES,
    "reduce": "naive",
    "prefetch": 1,
}
MODEL = {"alpha": 1e-6, "port": 1e9, "memory": 1e9, "bridge": 1e9}
# Names of __all__ that are not called: modules, types that only the library creates, exceptions.
NOT_CALLED = {"CollectiveError", "Deadlock", "PeerLost", "Plan", "Timeout", "Work", "__version__"}
NOT_CALLED |= {"autograd", "distributed"}


def calls_of(module: Any, prefix: str = "") -> Iterator[Case]:
    for name in GIVEN:
        if name in module.__all__:
            function = getattr(module, name)
            yield prefix + name, function, lambda f=function, n=name: arguments(f, GIVEN[n]())


def bound() -> Iterator[Case]:
    """Yield a communicator's methods: the module functions without the `devices` argument."""
    communicator = pc.Communicator("cpu*2")

    def without_devices(good: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in good().items() if name != "devices"}

    for name, _, good in calls_of(pc):
        if name in NOT_BOUND:
            continue
        method = getattr(communicator, name)
        yield f"Communicator.{name}", method, functools.partial(without_devices, good)


def models(**figures: Any) -> object:
    """Build a CostModel from the figures and use it: predict and plot a plan with it."""
    model = pc.CostModel(**figures)
    plan = pc.plan("all_reduce", 2)
    plan.predict(model)
    plan.plot(FOLDER / "plan.svg", model)
    return model


def planned(**numbers: Any) -> object:
    plan = pc.plan(**numbers)
    return str(plan), plan.verify(), plan.predict()


def trained(**numbers: Any) -> object:
    replicas = ReplicaTrainer(nn.Linear(1, 1), "cpu*2", optimizer=sgd_factory(0.1))
    trainer = GluonTrainer([list(module.parameters()) for module in replicas.modules], "sgd")
    for module in replicas.modules:
        module(torch.ones(1, 1)).sum().backward()
    trainer.set_learning_rate(numbers.pop("lr"))
    trainer.step(**numbers)
    return trainer.learning_rate


def briefly(**options: Any) -> object:
    """Train for an epoch; a large number of epochs is right, and takes as long as it says."""
    if isinstance(options["epochs"], int) and 1 < options["epochs"] < 2**63:
        options["epochs"] = 1
    try:
        return train(quiet=True, **options)
    except (CheckpointError, OutputError) as error:  # a file: one sentence, as for a bad value
        raise ValueError(str(error)) from error


def cases() -> Iterator[Case]:
    yield from calls_of(pc)
    yield from calls_of(autograd, "autograd.")
    yield from bound()
    work = pc.all_reduce(two(), async_op=True)
    made = pc.plan("all_reduce", 2)
    yield "Work.wait", work.wait, lambda: {"timeout": 1.0}
    yield "Work.result", work.result, lambda: {"timeout": 1.0}
    yield "Communicator", pc.Communicator, lambda: {"devices": "cpu*2", "peer_access": None}
    yield "devices", pc.devices, lambda: {"spec": "cpu*2"}
    yield "algorithms", pc.algorithms, lambda: {"collective": "all_reduce"}
    yield "plan", planned, lambda: arguments(pc.plan, PLAN)
    yield "CostModel", models, lambda: dict(MODEL)
    yield "Plan.predict", made.predict, lambda: {"model": "nvlink"}
    yield "Plan.plot", made.plot, lambda: {"path": FOLDER / "a.svg", "model": "nvlink"}
    yield "SymmetricAllocator", pc.SymmetricAllocator, lambda: {"group": None, "device": None}
    yield (
        "symmetric_empty",
        lambda size, **how: pc.symmetric_empty(size, **how),
        lambda: {"size": [2], "dtype": None},
    )
    numbers = {"lr": 0.1, "batch_size": 2, "ignore_stale_grad": False}
    yield "train.GluonTrainer", trained, lambda: dict(numbers)
    yield "train.train", briefly, lambda: dict(TRAINING)


def missing() -> list[str]:
    """Return the public callables, and the arguments of callables, that `cases` does not cover."""
    table = {name: (function, set(good())) for name, function, good in cases()}
    public = {*pc.__all__} - NOT_CALLED | {f"autograd.{name}" for name in autograd.__all__}
    forgotten = [name for name in sorted(public) if name not in table]
    for name, (function, given) in table.items():
        try:
            signature = inspect.signature(pc.plan if function is planned else function)
        except ValueError:  # compiled functions have no signature
            continue
        known = signature.parameters.values()
        named = {p.name for p in known if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        named -= {"devices"} if name.startswith("Communicator.") else set()
        forgotten += [f"{name}({argument})" for argument in sorted(named - given)]
    return forgotten


def outcome(name: str, function: Callable[..., object], arguments: dict[str, Any]) -> str:
    """Call the function: return "" on success, "refused", or a description of a bad failure."""
    rest = dict(arguments)
    # A communicator's methods take their first argument only by position.
    by_position = list(rest)[: name.startswith("Communicator.")]
    first = [rest.pop(argument) for argument in by_position]
    try:
        function(*first, **rest)
    except (TypeError, ValueError, pc.CollectiveError) as error:
        complaint = str(error)
        pybinds = (
            "incompatible" in complaint
            or "Invoked with" in complaint
            or "Unable to cast" in complaint
        )
        if pybinds or not complaint:
            return f"pybind11's message: {complaint}"
        if "tensor([" in complaint or len(complaint.replace(DIGITS, "")) > CHARACTERS:
            return f"a message of {len(complaint)} characters: {complaint}"
        return "refused"
    except RuntimeError as error:
        # A size that fits 64 bits but not the memory is refused by the allocator or the device.
        wants_memory = "allocate memory" in str(error) or "does not fit into" in str(error)
        return "refused" if wants_memory else f"{type(error).__name__}: {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def wrong(call: str, argument: str, what: str, result: str, in_list: bool) -> str:
    """Return a description of a wrong outcome, or "" if the outcome is right."""
    is_int = argument in INTS and not call.endswith("copy_")
    optional = call == "train.train"
    is_int = is_int and not (what == "None" and optional)
    if is_int and what in NOT_INTS and not result and (in_list or argument not in LISTS):
        return "was accepted as an int"
    return "" if result == "refused" else result


def values(argument: str) -> Iterator[tuple[str, Any, bool]]:
    for what, value in AWKWARD.items():
        yield what, value, False
    if argument in LISTS:
        for what, value in NUMBERS.items():
            yield what, [value] * 2, True


def main() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    torch.set_num_threads(1)
    os.chdir(FOLDER)  # where a number can be the name of a file
    dist.init_process_group("pycollect", store=dist.HashStore(), rank=0, world_size=1)
    pc.plan("all_reduce", 2).plot(FOLDER / "a.svg")  # loads matplotlib before the limit is set
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    for name in missing():
        print(json.dumps([name, "", "is not in the table"]))
    tried = 0
    part, parts = map(int, sys.argv[1:])
    for name, function, good in itertools.islice(cases(), part, None, parts):
        if result := outcome(name, function, good()):
            print(json.dumps([name, "good", result]))
        for argument in good():
            for what, value, in_list in values(argument):
                # If a call hangs or the process is killed, the last line on stderr names the call.
                print(name, argument, what, "in a list" * in_list, file=sys.stderr, flush=True)
                faulthandler.dump_traceback_later(SECONDS, exit=True)
                result = outcome(name, function, good() | {argument: value})
                tried += 1
                plain = [1, 1] if in_list else 1
                if what == "int64(1)" and result != outcome(
                    name, function, good() | {argument: plain}
                ):
                    result = "the outcome differs from that of a Python int"
                if complaint := wrong(name, argument, what, result, in_list):
                    print(
                        json.dumps(
                            [name, f"{argument}={'list of ' * in_list}{what}", complaint[:300]]
                        )
                    )
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()
    print(json.dumps(["tried", tried]))


with tempfile.TemporaryDirectory() as made:
    FOLDER = Path(made)
    if __name__ == "__main__":
        main()
