"""Fails if a file has more than 450 lines, or a Python function more than 40 lines of code.

Docstrings of functions do not count. C++ functions are not checked, because that needs a parser.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("build_backend", "csrc", "pycollect", "tests", "bench", "examples", "tools")
SUFFIXES = {".py", ".pyi", ".h", ".cpp", ".cu", ".cuh"}
FILE_LINES = 450  # a file should have fewer than 300, but a class stays in one file
FUNCTION_LINES = 40


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function from `def` on, without its docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return lines


def too_long(path: Path) -> Iterator[str]:
    """Yield one sentence for the file and each of its functions that exceed their limit."""
    text = path.read_text()
    lines = len(text.splitlines())
    if lines > FILE_LINES:
        yield f"{path}: {lines} lines; the limit is {FILE_LINES}"
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = code_lines(node)
            if lines > FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name}() has {lines} lines of {FUNCTION_LINES}"


def main() -> int:
    files = [Path("setup.py")]
    for folder in FOLDERS:
        files += sorted(path for path in Path(folder).rglob("*") if path.suffix in SUFFIXES)
    found = [sentence for path in files for sentence in too_long(path)]
    print("\n".join(found) or f"{len(files)} files are short enough")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
