"""Exceptions of collectives that fail while they run, and of groups that have ended.

Invalid arguments raise TypeError or ValueError instead, before any data moves. After PeerLost, and
after Timeout at a group's timeout, the group has ended for all its ranks: later calls raise the
same cause, and only a new group can be used. Tensors that a failed call would have written have
undefined contents.
"""

import reprlib
from typing import Any


class CollectiveError(RuntimeError):
    """Raised when a running collective or message cannot complete, or its group has ended.

    PeerLost, Timeout and Deadlock are its subclasses. It is raised itself by calls on a destroyed
    group or in a forked child of a rank, and when a group cannot be created or cannot use its GPUs.
    Tensors that the failed call would have written have undefined contents.
    """


class PeerLost(CollectiveError):
    """Raised when a rank dies, leaves its group or aborts it while other ranks depend on it.

    The message names the rank. The group has then ended for all its ranks, and every later call on
    it raises with the same cause. Tensors that the failed call would have written have undefined
    contents.
    """


class Timeout(CollectiveError):
    """Raised when a collective or message does not complete within a timeout.

    At the group's timeout (`timeout=` of init_process_group and new_group), the message names the
    ranks that are missing. The group has then ended for all its ranks, every later call on it
    raises with the same cause, and tensors that the failed call would have written have undefined
    contents. If the timeout of ``Work.wait(timeout)`` is over first, only that wait fails: the call
    keeps running and may be waited for again; until then its tensors have undefined contents.
    """


class Deadlock(CollectiveError):
    """Raised when all ranks of `pycollect.threads.launch` wait and none can continue.

    The message has a line for each rank: the operation for which it waits, its number, group and
    shape, and the line of the program; or that the rank has ended.
    """


class _ShortRepr(reprlib.Repr):
    """`repr` in one line of limited length, without the numbers of tensors and arrays."""

    def repr1(self, x: Any, level: int) -> str:
        try:
            shape = getattr(x, "shape", None)
            if isinstance(shape, tuple) and shape:  # a tensor or another array, not a number
                return f"{type(x).__name__.lower()}{list(shape)}"
            text = super().repr1(x, level)
        except Exception:  # of a class whose shape or repr fails, or an int of too many digits
            return f"<{type(x).__name__}>"
        return f"<{type(x).__name__}>" if "tensor([" in text else " ".join(text.split())


_short = _ShortRepr()
_short.maxstring = _short.maxother = 200


def shown(value: object) -> str:
    """Return a value that the user passed as short text for an error message.

    >>> import torch
    >>> shown("a"), shown([1, torch.ones(2, 3)])
    ("'a'", '[1, tensor[2, 3]]')
    """
    return _short.repr(value)
