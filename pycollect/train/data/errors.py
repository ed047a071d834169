"""What can be wrong with data that is asked for by name: it is damaged, or it is not there."""


class DataError(RuntimeError):
    """A data set cannot be loaded; the message is one sentence that says why."""


class Unavailable(DataError):
    """A data set is not here and cannot be downloaded."""


def first_line(error: object) -> str:
    """Give the first line of an error's message, or its type when it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(":")
