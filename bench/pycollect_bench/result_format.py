"""The layout of a result file: an indented header, and every measured row on a line of its own.

Results are kept in git, so a changed row is a changed line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Version of the records, increased whenever a reader of older files would misread a new one.
SCHEMA = 2


def text(record: dict[str, Any]) -> str:
    """Return the record as JSON: a line for each object in a list, and for each inner object
    without objects and lists; other objects are indented.

    >>> rows = [{"way": "a", "time": {"p50": 0.5}}, {"way": "b"}]
    >>> print(text({"noise": {"before": 1, "after": 2}, "rows": rows}), end="")
    {
     "noise": {"before": 1, "after": 2},
     "rows": [
      {"way": "a", "time": {"p50": 0.5}},
      {"way": "b"}
     ]
    }
    """
    return _form(record, "\n", in_row=False) + "\n"


def _form(value: Any, margin: str, in_row: bool) -> str:
    """Return `value` as JSON; `margin` is a line feed and the indentation of the last line."""
    inner = margin + " "
    if isinstance(value, dict) and value:
        plain = not any(isinstance(entry, dict | list) for entry in value.values())
        in_row = in_row or (plain and margin != "\n")
        at = margin if in_row else inner
        entries = [f"{json.dumps(key)}: {_form(entry, at, in_row)}" for key, entry in value.items()]
        if in_row:
            return "{" + ", ".join(entries) + "}"
        return "{" + inner + f",{inner}".join(entries) + margin + "}"
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        rows = [_form(row, inner, in_row=True) for row in value]
        return "[" + inner + f",{inner}".join(rows) + margin + "]"
    return json.dumps(value)


def read(what: str, path: Path) -> dict[str, Any]:
    """Read a record; raise ValueError if the file does not contain a JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"the {what} {path} cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"the {what} {path} holds no JSON object")
    return found
