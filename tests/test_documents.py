"""README and docs are correct: Python blocks run and type-check, commands parse, links are good.

The blocks of a section form one program, in order, as for a reader. Programs for process groups are
started by torchrun, as README says. .ci/run tests the installation.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path

import programs
import pytest
import torch
from torch.distributed.run import get_args_parser

from pycollect import cli
from pycollect.train.__main__ import main as train

ROOT = Path(__file__).resolve().parent.parent
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDER_READMES = [
    *sorted((ROOT / "csrc").rglob("README.md")),
    ROOT / "tests/README.md",
    ROOT / "bench/README.md",
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
# Shell commands in prose, between backquotes.
COMMAND = re.compile(r"(python|pycollect|torchrun|pytest|pip|export) .+|bench/\w+\.(py|sh)\b.*")


def sections() -> dict[str, list[tuple[str, str]]]:
    """Return the blocks of each section, as language and text."""
    found = {}
    for path in DOCUMENTS:
        parts = re.split(r"^##+ (.*)$", path.read_text(), flags=re.M)
        for title, text in zip(["", *parts[1::2]], parts[0::2], strict=True):
            found[f"{path.name} {title}".strip()] = BLOCK.findall(text)
    return found


BLOCKS = [block for blocks in sections().values() for block in blocks]
PROGRAMS = {
    title: "\n".join(code for language, code in blocks if language == "python")
    for title, blocks in sections().items()
    if any(language == "python" for language, _ in blocks)
}


def commands() -> Iterator[str]:
    """Yield every command of the documents, from blocks and from prose."""
    for language, text in BLOCKS:
        for line in text.splitlines() if language == "sh" else ():
            yield from (part.strip() for part in line.split("#")[0].split("&&"))
    for path in DOCUMENTS:
        prose = BLOCK.sub("", path.read_text())
        yield from (span for span in re.findall(r"`([^`\n]+)`", prose) if COMMAND.fullmatch(span))


COMMANDS = list(dict.fromkeys(commands()))
TRAININGS = [c for c in COMMANDS if re.match(r"(python|torchrun) .*pycollect\.train ", c)]


def test_every_block_is_of_a_tested_kind() -> None:
    assert {language for language, _ in BLOCKS} == {"python", "diff", "sh", "text", ""}
    assert len(PROGRAMS) >= 4
    assert len(COMMANDS) >= 20
    (printed,) = [text for language, text in BLOCKS if not language]
    assert "test acc: " in printed, "a block without a language must be the output of a training"


@pytest.mark.parametrize("path", [*DOCUMENTS, *FOLDER_READMES], ids=lambda path: str(path)[-30:])
def test_links_and_files_of_folders_exist(path: Path) -> None:
    text = path.read_text()
    assert path.name != "README.md" or text.count("\n") <= 150, "a README is short"
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", BLOCK.sub("", text)):
        assert target.startswith("http") or (path.parent / target).exists(), target
    for name in re.findall(r"`([\w./*]+\.(?:h|cpp|cuh))`", text) if path in FOLDER_READMES else ():
        assert list(path.parent.glob(name)), name


def test_times_and_ratios_of_tables_are_those_of_the_linked_records() -> None:
    for section in (ROOT / "docs/performance.md").read_text().split("\n## ")[1:]:
        known = set()
        linked = [p for p in (ROOT / "bench/results").glob("*.json") if p.name in section]
        cases = [case for path in linked for case in json.loads(path.read_text())["cases"]]
        for row, batch in ((row, case.get("batch", 0)) for case in cases for row in case["rows"]):
            time, ratios = row["time"]["p50"], row.get("speedup", {}).values()
            units = ((1e6 * time, " us, "), (1e3 * time, " ms, "), (batch / time, ", "))
            heads = {"", *(f"{value:.{n}f}{unit}" for value, unit in units for n in (0, 1))}
            known |= {f"{head}{x:.{n}f}x" for head in heads for x in ratios for n in range(3)}
            share = 100 * row.get("reduction", 0) / time  # of a step, whose ratio is of times
            known |= {f"{1 / x:.2f}x ({share:.2g} %)" for x in ratios}
        cell = r"(?:[\d.]+ [um]s, |\d+, )?[\d.]+x(?: \([\d.]+ %\))?"
        assert set(re.findall(cell, "".join(re.findall(r"^\|.*", section, re.M)))) <= known


def test_all_benchmarks_are_listed() -> None:
    text = (ROOT / "bench/README.md").read_text()
    scripts = {path.name for path in (ROOT / "bench").glob("*.*") if path.suffix in (".py", ".sh")}
    assert scripts == set(re.findall(r"`(\w+\.(?:py|sh))`", text))


def test_pre_commit_has_the_versions_of_the_dev_extra() -> None:
    pins = re.findall(r'"([\w-]+==[\d.*]+)"', (ROOT / ".pre-commit-config.yaml").read_text())
    extra = {line.partition(";")[0] for line in metadata("pycollect").get_all("Requires-Dist")}
    assert pins
    assert set(pins) <= extra


def test_every_source_folder_has_a_readme() -> None:
    folders = {path.parent for path in (ROOT / "csrc").rglob("*.cpp")}
    assert not {folder for folder in folders if not (folder / "README.md").exists()}


def without_comments(program: str) -> str:
    return re.sub(r"#.*", "", program)


@pytest.mark.parametrize(
    "title",
    [
        pytest.param(
            title,
            marks=[pytest.mark.cuda] * ('"cuda' in without_comments(code))
            + [pytest.mark.slow] * (not title.startswith("README")),
        )
        for title, code in PROGRAMS.items()
    ],
)
def test_python_blocks_run(title: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAMS[title])
    several = "init_process_group" in PROGRAMS[title]
    start = [*TORCHRUN, "2"] if several else [sys.executable]
    ran = programs.run([*start, script], cwd=tmp_path, env=os.environ | ONE_THREAD, timeout=600)
    assert ran.returncode == 0, ran.stderr
    accuracies = re.findall(r"^test acc: ([\d.]+)", ran.stdout, re.M)
    assert all(float(accuracy) >= 0.9 for accuracy in accuracies), "an example learns"
    for shown in re.findall(r"^print\(.*\)  # (tensor\(.*\))$", PROGRAMS[title], re.M):
        assert shown in ran.stdout


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy")
def test_python_blocks_and_all_calls_have_types(tmp_path: Path) -> None:
    scripts = [Path(__file__).parent / "helpers/typed_calls.py"]
    for number, program in enumerate(PROGRAMS.values()):
        scripts.append(tmp_path / f"section_{number}.py")
        scripts[-1].write_text(program)
    # mypy needs the checkout as its folder: it does not see an editable installation.
    command = [sys.executable, "-m", "mypy", "--strict", *scripts]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stdout + ran.stderr


class Parsed(BaseException):
    """Raised when the command line has been parsed, before anything runs."""


def assert_parses(monkeypatch: pytest.MonkeyPatch, program: str, arguments: list[str]) -> None:
    """Run a module or script of this repository until its command line is parsed."""
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *given: object) -> None:
        parse(self, *given)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    is_script = program.endswith(".py")
    start = runpy.run_path if is_script else runpy.run_module
    with pytest.raises(Parsed):
        start(str(ROOT / program) if is_script else f"{program}.__main__", run_name="__main__")


def check_pytest(config: pytest.Config, words: list[str]) -> None:
    for word in words:
        if "/" in word:
            assert list(ROOT.glob(word)), f"there is no {word}"
    if "-m" in words:
        marker = words[words.index("-m") + 1]
        assert any(line.startswith(f"{marker}:") for line in config.getini("markers"))


def check_torchrun(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    args = get_args_parser().parse_args(words)
    if args.module:
        assert_parses(monkeypatch, args.training_script, args.training_script_args)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    program, *words = shlex.split(command.replace(".venv/bin/", ""))
    if program.startswith("python") and words[0] == "-m":
        _, program, *words = words
    elif program == "python":
        program, *words = words
    if program == "pip":
        assert words[0] in ("install", "wheel")  # tests/test_wheel.py makes a wheel
        if words[0] == "install":
            (what,) = re.findall(r"^-e \.(?:\[(\w+)\])?$", " ".join(words[1:]))
            assert not what or what in metadata("pycollect").get_all("Provides-Extra")
    elif program == "pytest":
        check_pytest(pytestconfig, words)
    elif program == "torchrun":
        check_torchrun(monkeypatch, words)
    elif program == "pycollect":
        monkeypatch.chdir(tmp_path)
        assert cli.main(words) == 0
    elif program.endswith(".sh"):
        subprocess.run(["bash", "-n", ROOT / program], check=True)
    elif program not in ("venv", "export"):
        assert_parses(monkeypatch, program, words)


@pytest.mark.slow
def test_the_trainers_commands_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One epoch each, or one more where a run is continued; a ResNet's would take minutes.

    Only commands with several processes are started as programs here, unlike test_train_cli.py.
    """
    assert len(TRAININGS) >= 8
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    for command in (c for c in TRAININGS if "resnet" not in c):
        words = [*shlex.split(command), "--epochs", "2" if "--resume" in command else "1"]
        if words[0] == "torchrun":
            command_line = [*TORCHRUN[:-1], *words[1:]]
            ran = programs.run(command_line, env=os.environ | ONE_THREAD, timeout=600)
            assert ran.returncode == 0, f"{command}: {ran.stderr}"
        else:
            assert words[:3] == ["python", "-m", "pycollect.train"]
            assert train(words[3:]) == 0, command
    assert {"run.pt", "run.png", "run.jsonl", "both.png"} <= {p.name for p in tmp_path.iterdir()}


ADDED = r"""
#include <cmath>
#include <cstdio>

#include "csrc/cpu/fold.h"
#include "csrc/cuda/elements.h"

using namespace pycollect;

template <class T>
void print_fold(DType dtype, ReduceOp op, const T (&a)[4], const T (&b)[4]) {
  T result[4];
  void *dst = result, *srcs[] = {const_cast<T*>(a), const_cast<T*>(b)};
  cpu::find_fold(dtype, op)({&dst, 1}, {srcs, 2}, 4, {.world = 2});
  std::printf("%s %s", name(dtype), name(op));
  for (const T x : result) std::printf(" %g", static_cast<double>(x));
  std::printf("\n");
}

int main() {
  const float a[] = {-3, 1, NAN, 2}, b[] = {2, -4, 1, -2};
  const uint16_t c[] = {1, 40000, 65535, 7}, d[] = {2, 40000, 1, 7};
  print_fold(DType::f32, ReduceOp::absmax, a, b);
  print_fold(DType::u16, ReduceOp::absmax, c, d);
  print_fold(DType::u16, ReduceOp::sum, c, d);
  print_fold(DType::u16, ReduceOp::max, c, d);
  std::printf("%d %d %s\n", reduces(DType::c64, ReduceOp::absmax),
              is_kernel_type<uint16_t, AbsMax>, kAllDTypeNames[15]);
  for (int i = 0; i < 4; ++i)
    std::printf("%g ", cuda::Arithmetic<float, AbsMax>::combined(a[i], b[i]));
}
"""


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.slow
def test_a_reduction_and_a_dtype_are_added_as_the_document_says(tmp_path):
    for room in ("cpu", "cuda", "plan"):
        shutil.copytree(ROOT / "csrc" / room, tmp_path / "csrc" / room)
    changes = [code for language, code in BLOCKS if language == "diff"]
    for change in changes:
        patch = ["git", "apply", "-"]
        subprocess.run(patch, cwd=tmp_path, input=change, text=True, check=True)
    (tmp_path / "main.cpp").write_text(ADDED)
    command = ["g++", "-std=c++20", "-O0", "-I.", "main.cpp", "-o", "main"]
    folds = [str(path) for path in tmp_path.glob("csrc/cpu/fold*.cpp")]
    subprocess.run([*command, *folds], cwd=tmp_path, check=True)
    printed = subprocess.run(tmp_path / "main", check=True, capture_output=True, text=True).stdout
    assert len(changes) == 2
    assert printed.splitlines() == [
        "float32 absmax -3 -4 nan -2",
        "uint16 absmax 2 40000 65535 7",
        "uint16 sum 3 14464 0 14",
        "uint16 max 2 40000 65535 7",
        "0 1 uint32",
        "-3 -4 nan -2 ",
    ]
