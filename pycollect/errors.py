"""What happens while a collective runs, as opposed to what is wrong with its arguments.

Bad arguments are TypeError or ValueError and are raised before anything moves.
"""


class CollectiveError(RuntimeError):
    """A collective that was under way could not be completed, or its group is no more."""


class PeerLost(CollectiveError):
    """A rank died, left its group or aborted it while others depended on it."""


class Timeout(CollectiveError):
    """A collective did not complete within the time that it was given."""
