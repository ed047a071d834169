"""Marks functions that torch.compile must run outside of graphs.

torch.compiler.disable does the same, but it loads the compiler when it is applied, which takes a
second at import, and wraps every call, which takes 1 us. The marks below are those that it sets.
With a torch that ignores one of them, torch.compile still breaks the graph, and prints a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])


def skip_compile(reason: str) -> Callable[[F], F]:
    """Mark a function whose calls break the graph of torch.compile; it is not wrapped.

    torch.compile gives the reason where a program wants a full graph.
    """

    def mark(function: F) -> F:
        if isinstance(function, FunctionType):
            function.__dict__["_torchdynamo_disable"] = True  # its callers do not trace into it
            function.__dict__["_torchdynamo_disable_msg"] = reason
            _skip(function.__code__)
        return function

    return mark


def _skip(code: CodeType) -> None:
    """Keep torch.compile from compiling the frame of a call and the frames below it."""
    try:
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
    except (AttributeError, TypeError):  # another torch, which then only prints the warning
        return
