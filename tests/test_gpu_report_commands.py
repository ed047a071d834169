"""Every command line of bench/gpu_report.sh works: options parse, selections select tests.

The slow tests run the benchmarks with the script's arguments in this process; the CPU replaces the
GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import programs
import pytest
from gpu_machine import ROOT, Machine
from test_bench_gpu import script

from pycollect_bench import gpu

# Prints the ids of the tests that each command line of pytest selects; all in one process, because
# the import of the tests takes most of the time. A plugin of pytest is left out that collects
# garbage, which takes longer than most selections.
COLLECT = """
import contextlib, io, json, sys
import pytest
found = {}
for name, arguments in json.load(sys.stdin).items():
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        pytest.main(["--collect-only", "-p", "no:unraisableexception", *arguments])
    found[name] = [line for line in text.getvalue().splitlines() if "::" in line]
json.dump(found, sys.stdout)
"""
ALL = "all CUDA tests"


class Parsed(BaseException):
    """Raised once the options of a command have been read."""


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    machine = Machine(tmp_path_factory.mktemp("machine"))
    machine.fake("compute-sanitizer", "#!/bin/sh\n")
    return machine


@pytest.fixture(scope="module")
def selected(machine):
    """The arguments and the ids of the tests that each step selects, by name of the step."""
    steps = {
        name: words[2:] for name, words in machine.commands("all").items() if "pytest" in words
    }
    done = subprocess.run(
        [sys.executable, "-c", COLLECT],
        input=json.dumps(steps | {ALL: ["-q", "-p", "no:cacheprovider", "-m", "cuda"]}),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    ids = json.loads(done.stdout)
    return {name: (steps.get(name, []), ids[name]) for name in ids}


def test_every_step_selects_tests(selected):
    assert [name for name, (_, ids) in selected.items() if not ids] == []
    assert len(selected["sanitize-memcheck"][1]) > 20
    smoke = {name: ids for name, (_, ids) in selected.items() if name.startswith("smoke-")}
    assert len(smoke) >= 5
    assert {name: len(ids) for name, ids in smoke.items() if len(ids) > 2} == {}


def test_every_part_of_a_selection_selects_a_test(selected):
    """A test that was renamed leaves an expression with a part that matches nothing."""
    everything = selected[ALL][1]
    for words, _ in selected.values():
        if "-k" in words:
            names = set(words[words.index("-k") + 1].split()) - {"and", "or", "not"}
            assert [n for n in names if not any(n in one for one in everything)] == []


def test_every_test_on_a_gpu_belongs_to_one_step(selected):
    taken = [
        one
        for name, (_, ids) in selected.items()
        if name != ALL and not name.startswith(("smoke-", "sanitize-"))
        for one in ids
    ]
    cuda = set(selected[ALL][1])
    assert sorted(cuda - set(taken)) == []
    assert sorted(one for one in cuda if taken.count(one) > 1) == []


@pytest.mark.parametrize("quick", [0, 1])
def test_every_benchmark_reads_its_options(machine, quick, monkeypatch):
    read = argparse.ArgumentParser.parse_args

    def parse(parser, *arguments):
        read(parser, *arguments)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.chdir(ROOT)
    commands = machine.commands("all", QUICK=quick)
    ours = {name: words for name, words in commands.items() if words[0].startswith("bench/")}
    assert len(ours) > 20
    for name, (file, *arguments) in ours.items():
        assert arguments[-2:] == ["--json", f"{machine.out}/{name}.json"]
        with pytest.raises(Parsed):
            script(Path(file).stem).main(arguments)


# Programs of these need a GPU; tests of their own run the programs on a fake one.
ON_GPUS = ("gpu_waits.py", "reduce_kernels.py", "pinned_ring.py")


@pytest.fixture
def contents(machine, monkeypatch):
    """A function that returns the JSON output of a stage's benchmarks, by name of the run."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(gpu, "graph_of", lambda run, calls: lambda: [run() for _ in range(calls)])
    programs.fork_ranks(monkeypatch)

    def of(stage):
        found = {}
        for name, (file, *arguments) in machine.commands(stage).items():
            assert file.startswith("bench/")
            assert not file.endswith(ON_GPUS)
            assert script(Path(file).stem).main(arguments) in (0, 3), name
            found[name] = json.loads(Path(arguments[-1]).read_text())
            assert found[name]["schema"] == 2
        return found

    return of


@pytest.mark.slow
def test_the_benchmarks_of_speed_accept_the_scripts_arguments(contents):
    found = contents("speed")
    assert len(found) == 9
    assert {case["dtype"] for case in found["all_reduce-bfloat16"]["cases"]} == {"bfloat16"}
    rows = found["dist-large"]["cases"][0]["rows"]
    assert {row["clock"] for row in rows} == {"wall", "return", "gpu"}
    assert found["rank_threads"]["rank_threads"]["all_reduce"]
    assert found["train_step"]["steps"]
    assert found["graph_replay"]["replays"]
    names = [row["way"] for row in found["dist-train"]["training"][0]["rows"]]
    assert "DDP, gloo" in names


@pytest.mark.slow
def test_the_other_benchmarks_accept_the_scripts_arguments(contents):
    found = contents("bench")
    assert len(found) == 10
    assert found["copies"]["copies"]
    assert found["overlap"]["overlap"]
    assert found["train"]["training"]
    assert found["dist-worlds"]["cases"]
    assert found["thread_programs"]["rank_threads"]["programs"]
