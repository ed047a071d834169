"""Fails if a name has two definitions in the library: one name, one meaning.

Checks classes, structs, enumerations and aliases in `csrc`, and classes in `pycollect`, each
language separately. Declarations, template specialisations and parameters are not definitions.
Constants are checked where several sources are compiled as one file, which are those with torch,
and in the headers that they may include: a file's own constant would hide a header's in the next
file.
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
TYPE = re.compile(
    r"""(?<![<,]\s) (?<!friend\s)
        \b(?:class|struct|enum|union)\s+ (?:class\s+|struct\s+)? (?:alignas\([^)]*\)\s+)?
        (?P<name>[A-Za-z_]\w*) (?:\s+final)? \s* (?::(?!:)[^;{]*)? \{
      | ^using\s+ (?P<alias>[A-Za-z_]\w*) \s* =""",
    re.VERBOSE | re.MULTILINE,
)

CONSTANT = re.compile(
    r"^(?:inline\s+)?constexpr\s[^;={(]*?\b(k[A-Z]\w*)\s*(?:\[[^]]*\]\s*)?[={]", re.MULTILINE
)


def cxx_constants(text: str) -> list[str]:
    return CONSTANT.findall(COMMENT_OR_STRING.sub(" ", text))


def cxx_types(text: str) -> list[str]:
    code = COMMENT_OR_STRING.sub(" ", text)
    return [match["name"] or match["alias"] for match in TYPE.finditer(code)]


def python_types(text: str) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]


def defined_twice(root: Path) -> list[str]:
    complaints = []
    for patterns, names_in in (
        (["csrc/**/*.h", "csrc/**/*.c*"], cxx_types),
        (["csrc/**/*.h", "csrc/torch/**/*.cpp"], cxx_constants),
        (["pycollect/**/*.py"], python_types),
    ):
        where = defaultdict(list)
        for path in sorted({path for pattern in patterns for path in root.glob(pattern)}):
            for name in names_in(path.read_text(encoding="utf-8")):
                where[name].append(str(path.relative_to(root)))
        complaints += [
            f"{name}: {', '.join(files)}" for name, files in sorted(where.items()) if len(files) > 1
        ]
    return complaints


def main() -> int:
    complaints = defined_twice(Path(__file__).resolve().parent.parent)
    for complaint in complaints:
        print(f"defined more than once: {complaint}")
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
