"""Runs a script or module as `__main__` in every rank of a launch, each in a module of its own.

While ranks take turns, each also has its own `sys.argv`, `sys.path` and `print`, which scripts
replace, for example to silence all ranks but one, and its own generators behind the functions of
the modules `random` and `numpy.random`.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import marshal
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .._command import print_error
from ..errors import CollectiveError
from .launcher import Launch

_VARIABLES = (
    ("sys", "argv"),
    ("sys", "path"),
    ("builtins", "print"),
)
FAILED = 1
_OWN_FOLDER = str(Path(__file__).parent) + os.sep


class ScriptError(Exception):
    """Raised if there is no such script or module, or it cannot be read."""


@dataclass
class Script:
    """A compiled program, and the values with which Python would start it."""

    code: bytes  # marshalled: each rank loads code objects of its own, where torch.compile caches
    argv: list[str]
    path: list[str]
    attributes: dict[str, Any]  # of its module `__main__`


def find_script(path: str, arguments: Sequence[str]) -> Script:
    """Compile a file; raises ScriptError, or SyntaxError."""
    file = os.path.abspath(path)
    try:
        code = compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
    except OSError as error:
        raise ScriptError(f"{path} cannot be read ({error.strerror})") from None
    except ValueError as error:  # a null character
        raise ScriptError(f"{path} is no Python program ({error})") from None
    safe_path = getattr(sys.flags, "safe_path", False)  # new in Python 3.11
    folder = str(Path(file).resolve().parent)  # instead of the current folder
    module_path = sys.path if safe_path else [folder, *sys.path[1:]]
    attributes = {
        "__file__": file,
        "__cached__": None,
        "__package__": None,
        "__loader__": SourceFileLoader("__main__", file),
        "__spec__": None,
    }
    return Script(marshal.dumps(code), [path, *arguments], module_path, attributes)


def find_module(name: str, arguments: Sequence[str]) -> Script:
    """Compile a module, or the `__main__` of a package, as `python -m` finds it.

    Raises ScriptError, SyntaxError, or the exceptions of its package, which is imported.
    """
    spec = _find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_spec(f"{name}.__main__")
        if spec is None:
            raise ScriptError(f"{name} is a package without a module __main__")
    if spec is None:
        raise ScriptError(f"there is no module named {name}")
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name)
    if code is None:
        raise ScriptError(f"module {name} has no Python code")
    attributes = {
        "__file__": spec.origin,
        "__cached__": spec.cached,
        "__package__": spec.parent,
        "__loader__": spec.loader,
        "__spec__": spec,
    }
    return Script(marshal.dumps(code), [str(spec.origin), *arguments], sys.path, attributes)


def _find_spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return None


def run(script: Script, launch: Launch, world: int, on_gpu: bool) -> int:
    """Run the script as all ranks, print the first failure, and return the exit status.

    The launch must have been made with `variables=rank_variables()`. With `on_gpu`, LOCAL_RANK is
    the index of the rank's GPU, because scripts choose theirs by it. Raises KeyboardInterrupt after
    Ctrl-C.
    """
    mains = [_main_module(script) for _ in range(world)]
    for rank in range(world):
        launch.variables.set(rank, "sys", "argv", list(script.argv))
        launch.variables.set(rank, "sys", "path", list(script.path))
        _set_generators(launch, rank)

    def run_rank(rank: int, world: int) -> None:
        if on_gpu:
            os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())
        try:
            exec(marshal.loads(script.code), mains[rank].__dict__)
        except SystemExit as stop:
            if stop.code is not None and stop.code != 0:
                raise

    before = sys.argv, sys.path
    sys.argv, sys.path = script.argv, script.path  # of ranks that run in parallel
    try:
        with _main_of_ranks(launch.rank_of_thread, mains):
            launch.run(run_rank, ())
    except SystemExit as stop:
        return _exit_status(stop)
    except Exception as error:
        print_failure(error)
        return FAILED
    finally:
        sys.argv, sys.path = before
    return 0


def _main_module(script: Script) -> ModuleType:
    module = ModuleType("__main__")
    module.__dict__.update(script.attributes, __builtins__=sys.modules["builtins"])
    return module


def rank_variables() -> tuple[tuple[str, str], ...]:
    """Return the module variables of which each rank has its own value."""
    return (*_VARIABLES, *_uses_of_generators())


def _uses_of_generators() -> dict[tuple[str, str], tuple[Any, str]]:
    """Return the variables that hold the random generator of Python or NumPy, or a method of it.

    The values are the generator, and the method's name or "".
    """
    found = [("random", vars(random)["_inst"])]
    numpy = "numpy" in sys.modules  # imported by torch, if it is installed
    if numpy:
        mtrand = importlib.import_module("numpy.random.mtrand")
        found.append(("numpy.random", vars(mtrand)["_rand"]))
    uses = {}
    for module, generator in found:
        for name, value in vars(sys.modules[module]).items():
            if getattr(value, "__self__", None) is generator:
                uses[module, name] = generator, value.__name__
    uses["random", "_inst"] = found[0][1], ""
    if numpy:
        uses["numpy.random.mtrand", "_rand"] = found[1][1], ""
    return uses


def _set_generators(launch: Launch, rank: int) -> None:
    """Give the rank generators of its own, with the present states."""
    uses = _uses_of_generators()
    own = {id(generator): copy.deepcopy(generator) for generator, _ in uses.values()}
    for (module, name), (generator, method) in uses.items():
        value = own[id(generator)]
        launch.variables.set(rank, module, name, getattr(value, method) if method else value)


@contextmanager
def _main_of_ranks(rank_of_thread: Callable[[], int], mains: list[ModuleType]) -> Iterator[None]:
    """Let `sys.modules["__main__"]` stand for the calling rank's module.

    pickle finds classes there, and so do dataclasses and multiprocessing. A thread that a rank has
    started is that rank, also during another rank's turn.
    """
    of_process = sys.modules["__main__"]

    def current() -> ModuleType:
        rank = rank_of_thread()
        return of_process if rank < 0 else mains[rank]

    class MainOfThread(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            return getattr(current(), name)

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(current(), name, value)

        def __delattr__(self, name: str) -> None:
            delattr(current(), name)

        def __dir__(self) -> list[str]:
            return dir(current())

        def __repr__(self) -> str:
            return repr(current())

    sys.modules["__main__"] = MainOfThread("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = of_process


def _exit_status(stop: SystemExit) -> int:
    """Return the status of a rank's `sys.exit`, which Python has not handled; print as it does."""
    if isinstance(stop.code, int):
        status = stop.code & 0xFF or FAILED
    else:
        print_error(str(stop.code))
        status = FAILED
    print_error(f"pycollect.threads: sys.exit with status {status}, {_notes(stop)[0]}")
    return status


def print_failure(error: BaseException) -> None:
    """Print the traceback from the script's first line on, without the frames that started it."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
        frames = frames.tb_next
    if frames is None and not isinstance(error, (CollectiveError, SyntaxError)):
        frames = error.__traceback__  # no failure of the script
    lines = traceback.format_exception(type(error), error, frames)
    if sys.version_info < (3, 11):
        lines += [f"{note}\n" for note in _notes(error)]
    print_error("".join(lines).rstrip("\n"))


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))
