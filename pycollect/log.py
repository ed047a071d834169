"""The log: PYCOLLECT_LOG=info logs a line whenever an algorithm is selected for a new kind of call.

PYCOLLECT_LOG, which `import pycollect` reads, is debug, info or warning; unset or empty, nothing is
logged but warnings. The lines go to the logger "pycollect". A handler for stderr is added only if
the variable is set and the program has not configured logging itself.
"""

import logging
import os

from . import _C

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
logger = logging.getLogger("pycollect")
info, warning = logger.info, logger.warning  # the extension calls them


def configure() -> None:
    """Set the log level from PYCOLLECT_LOG: debug, info or warning; unset or empty changes nothing.

    Raises ValueError for another level.
    """
    wanted = os.environ.get("PYCOLLECT_LOG", "").strip().lower()
    if not wanted:
        return
    if wanted not in _LEVELS:
        allowed = ", ".join(_LEVELS)
        raise ValueError(f"PYCOLLECT_LOG is {wanted!r}; allowed are {allowed}")
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("pycollect %(levelname)s: %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(_LEVELS[wanted])
    if _LEVELS[wanted] <= logging.INFO:
        _C.enable_log()
