"""Checkpoints of training runs, complete enough that a resumed run gives the same bits.

A checkpoint is written to a temporary file and renamed, so a crash leaves the old or the new one.
Reading executes no code from the file; a damaged file raises a one-sentence CheckpointError.
"""

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._files import check_input, replace
from .data import first_line

FORMAT = "pycollect.train"
VERSION = 2  # of the checkpoint layout; `load` refuses any other
PARTS = ("settings", "identity", "source", "run")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or continued; the message is one sentence."""


def save(path: Path | str, state: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically: a reader of the path always sees a complete file.

    Raises CheckpointError if it cannot be written.
    """
    whole = {"format": FORMAT, "version": VERSION, **state}
    try:
        replace(path, lambda file: torch.save(whole, file))
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        raise CheckpointError(f"the checkpoint {path} cannot be written ({error})") from error


def load(path: Path | str) -> dict[str, Any]:
    """Read a checkpoint onto the CPU; CheckpointError if it is missing, damaged or of another kind.

    Only tensors, numbers, strings and containers are unpickled; anything else is refused.
    """
    try:
        check_input("checkpoint", path)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:  # torch.load does not verify the checksums
                raise zipfile.BadZipFile("a checksum is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's own message advises to trust the file
        raise CheckpointError(
            f"{path} is not a checkpoint: it holds more than tensors, numbers, strings "
            "and containers"
        ) from error
    except Exception as error:  # torch.load raises many types for foreign or damaged files
        raise CheckpointError(
            f"{path} is not a checkpoint, or is damaged ({first_line(error)})"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by pycollect.train")
    if state.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has the layout {state.get('version')}, and this version reads {VERSION}"
        )
    missing = [name for name in PARTS if name not in state]
    if missing:
        raise CheckpointError(f"{path} is an incomplete checkpoint: it lacks {', '.join(missing)}")
    return state


def load_model(path: Path | str, module: nn.Module) -> None:
    """Set a module's parameters and buffers to those of rank 0 in a checkpoint of `train`.

    The file says nothing about what trains the module afterwards: it may have another optimizer or
    number of ranks. Raises CheckpointError for a file that is no checkpoint, and if its model has
    other parameters or buffers, by name or shape; the module is then unchanged.
    """
    state = load(path)
    model, own = state["run"]["engine"]["replicas"]["model"], module.state_dict()
    theirs, mine = ({name: _shape(v) for name, v in kept.items()} for kept in (model, own))
    unlike = [name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name)]
    if unlike:
        name, more = unlike[0], f", and {len(unlike) - 1} more differ" if unlike[1:] else ""
        raise CheckpointError(
            f"{path} holds another model ({state['settings']['model']}) than this "
            f"{type(module).__name__}: {name} is {theirs.get(name, 'not there')} in the file and "
            f"{mine.get(name, 'not there')} in the module{more}"
        )
    module.load_state_dict(model)


def _shape(value: Any) -> list[int] | None:
    return list(value.shape) if isinstance(value, Tensor) else None


def differences(stored: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Describe every difference between the stored and the requested values, one string each.

    >>> differences({"lr": 0.1, "seed": 0}, {"lr": 0.2, "seed": 0})
    ['lr 0.1, not 0.2']
    """
    return [
        f"{name.replace('_', ' ')} {stored.get(name)}, not {asked.get(name)}"
        for name in dict.fromkeys([*stored, *asked])
        if stored.get(name) != asked.get(name)
    ]
