"""Exceptions of collectives that fail while they run.

Invalid arguments raise TypeError or ValueError instead, before any data moves.
"""


class CollectiveError(RuntimeError):
    """Raised when a running collective cannot complete, or its group has ended."""


class PeerLost(CollectiveError):
    """Raised when a rank dies, leaves its group or aborts it while other ranks depend on it."""


class Timeout(CollectiveError):
    """Raised when a collective does not complete within its timeout."""
