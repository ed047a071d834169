"""The compiler's machine code for the kernels; needs a CUDA toolkit, but no GPU.

Three defects show only here: packets that are stored in parts, additions between the loads, which
then wait for each other, and registers that are kept in memory.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pycollect_configure as configure
import pytest

ROOT = Path(__file__).parents[1]
SOURCE = f"""
#include "{ROOT}/csrc/cuda/kernels_bools_and_copy.cu"
namespace pycollect::cuda {{
template const void* fold_kernel<float, Avg>();
template const void* fold_kernel<BFloat16, Avg>();
template const void* fold_kernel<Complex<float>, Prod>();
}}
"""
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
# Of each kernel in ptxas' output: its name, the compute capability, and its memory for registers.
FRAME = re.compile(r"entry function '(\w+)' for 'sm_(\d+)'\n.*\n +(.*spill loads)")
NO_FRAME = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
SUMS = {"float, Avg": 4, "BFloat16, Avg": 8}  # elements per packet


def tools(*names: str) -> list[str]:
    """Find nvcc and cuobjdump, also in the packages of Triton and NVIDIA."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    folders += [f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin", "/usr/local/cuda/bin"]
    for package in ("triton", "nvidia"):
        spec = importlib.util.find_spec(package)
        for place in (spec and spec.submodule_search_locations) or []:
            folders += [str(p.parent) for p in Path(place).glob("**/bin/cuobjdump")]
    found = []
    for tool in names:
        path = shutil.which(tool, path=os.pathsep.join(folders))
        if path is None:
            pytest.skip(f"no {tool} on PATH, in CUDA_HOME, or in the packages of Triton and NVIDIA")
        found.append(path)
    return found


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The operations of each kernel, in code order."""
    (nvcc, cuobjdump), folder = tools("nvcc", "cuobjdump"), tmp_path_factory.mktemp("sass")
    command = configure.nvcc_command({}, Path(nvcc).parents[1], ["-arch=sm_90"])
    (folder / "probe.cu").write_text(SOURCE)
    compile_it = [*command, "-cubin", "-o", "probe.cubin", "probe.cu"]
    subprocess.run(compile_it, cwd=folder, check=True)
    show = [cuobjdump, "-sass", folder / "probe.cubin"]
    return dict(parsed(subprocess.check_output(show, text=True)))


def parsed(sass: str) -> Iterator[tuple[str, list[str]]]:
    for part in sass.split("Function : ")[1:]:
        name = part.split(maxsplit=1)[0]
        if "Bit" not in name:
            yield readable(name), INSTRUCTION.findall(part)


def readable(mangled: str) -> str:
    """The short name, such as float, Avg, from the mangled name of a kernel."""
    if "copy_level" in mangled:
        return "copy"
    operation = next(op for op in ("Avg", "Prod") if op in mangled)
    kind = next(t for t in ("BFloat16", "Complex", "float") if t in mangled or t == "float")
    return f"{kind}, {operation}"


def memory(operations: list[str]) -> list[tuple[str, str]]:
    """The kind and width of each access: "LDG" or "STG"; "128" is 16 bytes, "" is 4."""
    found = [re.match(r"(LDG|STG)\.E(?:\.EF)?\.?(\w*)", op) for op in operations]
    return [(m[1], m[2]) for m in found if m]


def bursts(operations: list[str], load: str = "LDG.E.128") -> list[tuple[int, int]]:
    """Loads without an addition between them, and the number of additions that follow."""
    waits = [op for op in operations if op.startswith(("FADD", "STG")) or op == load]
    runs = [(kind, len(list(run))) for kind, run in groupby(op.split(".")[0] for op in waits)]
    return [
        (n, runs[i + 1][1] if i + 1 < len(runs) and runs[i + 1][0] == "FADD" else 0)
        for i, (kind, n) in enumerate(runs)
        if kind == "LDG"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", SUMS)
def test_all_loads_come_before_the_first_addition(kernels: dict[str, list[str]], name: str):
    found = bursts(kernels[name])
    for world in (2, 4, 8):
        packets = 8 // world
        assert (8, packets * (world - 1) * SUMS[name]) in found, f"{world} sources: {found}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "load"), [("float, Avg", "LDG.E"), ("BFloat16, Avg", "LDG.E.U16")]
)
def test_16_units_are_loaded_before_the_first_addition(
    kernels: dict[str, list[str]], name: str, load: str
):
    """For ranks at different alignments, in tensors of one row and of several rows."""
    assert bursts(kernels[name], load).count((16, 16)) == 2


@pytest.mark.slow
def test_packets_are_loaded_and_stored_whole(kernels: dict[str, list[str]]):
    """Stores are as wide as the loads before them: 16 bytes, or one element at the edges."""
    edges = {"float, Avg": {""}, "BFloat16, Avg": {"U16"}, "Complex, Prod": {""}}
    edges["copy"] = {"64", "", "U16", "U8"}
    for name, operations in kernels.items():
        accesses = memory(operations)
        assert {width for _, width in accesses} == {"128", *edges[name]}, name
        width = ""
        for kind, wide in accesses:
            if kind == "LDG":
                width = wide
            else:
                assert wide == width, f"{name}: loads of {width or 32}, stores of {wide or 32}"


@pytest.mark.slow
def test_no_contractions_or_cached_loads(kernels: dict[str, list[str]]):
    assert sorted(kernels) == ["BFloat16, Avg", "Complex, Prod", "copy", "float, Avg"]
    for name, operations in kernels.items():
        bad = [op for op in operations if op.startswith(("FFMA", "DFMA"))]
        bad += [op for op in operations if op.startswith("LD") and "CONSTANT" in op]
        assert not bad, f"{name}: {set(bad)}"
        generic = {op for op in operations if re.match(r"(LD|ST)\.", op)}
        assert not generic, f"{name}: not known to be global memory: {generic}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "source", sorted(ROOT.glob("csrc/cuda/kernels_*.cu")), ids=lambda p: p.stem
)
def test_all_values_are_kept_in_registers(source: Path, tmp_path: Path):
    """In every kernel, for the oldest capability and for those that are built without a GPU."""
    built = sorted({target.partition("_")[2] for target in configure.USUAL_TARGETS})
    targets = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in built]
    (nvcc,) = tools("nvcc")
    command = configure.nvcc_command({}, Path(nvcc).parents[1], targets)
    compile_it = [*command, "-Xptxas=-v", "-fatbin", "-o", "kernels.fatbin", source]
    done = subprocess.run(compile_it, cwd=tmp_path, check=True, capture_output=True, text=True)
    output = done.stdout + done.stderr
    found = FRAME.findall(output)
    assert len(found) == output.count("entry function")
    assert {capability for _, capability, _ in found} == {*built}
    assert [kernel for kernel in found if kernel[-1] != NO_FRAME] == []
