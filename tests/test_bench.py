"""The benchmarks, run as users run them, with tiny sizes: tables, records, pictures, failures.

No test asserts a speed. A GPU's clocks are tested on the CPU, the report's stages in a rehearsal.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import programs
import pytest
import torch
import torch.distributed as dist

import gpu_report
import pycollect
from pycollect import gpus
from pycollect_bench import cases, clocks, lists, ranks, report, training
from pycollect_bench.namespaces import why_no_namespaces

BENCH = Path(__file__).parents[1] / "bench"
RECORDS = sorted((BENCH / "results").glob("*.json"))
LINES = 1_600  # limit of the lines of all result files together, to keep unused numbers out of git
MISSED = 3  # exit status if a speed target is missed, as on any machine that is not quiet
ONCE = "-n 1 -w 1"
LISTS = f"allreduce_bandwidth {ONCE} -b 4K -e 16K --world 2,3 --targets"
PROCESSES = f"allreduce_bandwidth {ONCE} -b 4 -e 300K -f 1000 --processes 2 --targets"
THREADS = "allreduce_bandwidth -n 1 --threads 2 -e 4"
HOSTS = f"allreduce_bandwidth {ONCE} --hosts 2x2 --rates 1 -e 1K"
DECODING = "tensor_parallel --hidden 256 --dtypes float32 --batches 1,2 --ranks 2 --layers 1"
DECODING += " --vocab 64 --prompt 3 --tokens 2 -n 1"
ALL_COLLECTIVES = "|# broadcast,|# all_to_all,|# send_recv,|# barrier,"
# A run, and what its table shows.
ALONE = {
    "algorithms": (f"{LISTS} --algorithms all", "|".join(pycollect.algorithms("all_reduce"))),
    "processes": (PROCESSES, f"pycollect|zero-copy|operator|gloo|memory{ALL_COLLECTIVES}"),
    "decoding": (f"{DECODING} --targets",
                 "alone|dtensor:gloo|dtensor:pycollect|plain:gloo|plain:direct|plain:zero-copy"),
    "hosts": (HOSTS, "gloo|hsdp|pycollect|link"),
    "hosts' maxima": (f"{HOSTS} -d int16,float32 -o max", "# hsdp not run: Invalid|hsdp|pycollect"),
    "executor": ("executor_bandwidth --world 2 -e 1M -n 1 --targets", "copy|zero-copy|barrier"),
}  # fmt: skip
ON_DEVICE = {
    "lists": (LISTS, "default|naive|stack|all_reduce, 4 ranks x 4 elements"),
    **{name: (f"allreduce_bandwidth {ONCE} -e 4K --collective {name}", "default|naive")
       for name, spec in cases.COLLECTIVES.items() if spec.lists and name[:5] != "all_r"},
    "clocks": (PROCESSES, f"pycollect:gpu|pycollect:return|gloo|gloo:gpu{ALL_COLLECTIVES}"),
    "copies": (f"copies -b 64K -e 64K {ONCE} --world 3 --targets", "pycollect|to|copy_ device"),
    "threads": (f"{THREADS} --targets",
                "threads, parallel|processes, gloo|processes, pycollect|list"),
    "train": ("train --models lenet --worlds 1 2 --batch 6 -n 1 --targets",
              "one replica, whole batch|naive loop|pycollect, overlapped|DDP, gloo"),
    "overlap": ("copies --overlap 8 -n 1",
                "products, then blocking copies to the CPU|products and non-blocking copies"),
}  # fmt: skip
ON_CPU, ON_GPU = ({f"{n}-{of}": r for n, r in ON_DEVICE.items()} for of in ("cpu", "cuda:0"))
ON_CPU["threads-cpu"] = (ON_CPU["threads-cpu"][0], f"{ON_CPU['threads-cpu'][1]}|2 processes")
SMOKE = ALONE | ON_CPU | ON_GPU
PICTURES = ("processes", "decoding", "lists-cpu", "train-cpu")
SLOW, CUDA = [pytest.mark.slow], [pytest.mark.cuda]
NO_HOSTS = (why := why_no_namespaces()) and f"needs network namespaces: {why}"
ON_HOSTS = [*SLOW, pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS)]
MARKS = {
    "hosts": ON_HOSTS,
    "hosts' maxima": ON_HOSTS,
    "executor": [*SLOW, pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")],
    "clocks-cpu": SLOW,
    "decoding": SLOW,
    **dict.fromkeys(ON_GPU, CUDA),
}


@pytest.fixture(autouse=True)
def ranks_have_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    programs.fork_ranks(monkeypatch)


def marked(names: dict[str, object]) -> list[object]:
    """Return the names as parameters with their marks."""
    return [pytest.param(name, marks=MARKS.get(name, [])) for name in names]


def run(command: str, *more: str | Path) -> int | str:
    """Run a script of bench/ in this process; return its exit status, or the message of it."""
    script, *arguments = command.split()
    try:
        return importlib.import_module(script).main([*arguments, *map(str, more)])
    except SystemExit as stop:
        return stop.code


def read(path: Path) -> dict[str, object]:
    """Read a record, which has the layout, and medians without the rounds behind them."""
    text = path.read_text()
    record = json.loads(text)
    assert text == report.text(record)
    assert record["schema"] == report.SCHEMA
    assert not re.search(r"\[-?[0-9]+[.e]", text), "a list of numbers"
    return record


@pytest.mark.parametrize("name", marked(SMOKE))
def test_a_script_prints_its_table_and_writes_its_files(name, tmp_path, capfd, monkeypatch):
    command, shown = SMOKE[name]
    path, first, again = (tmp_path / file for file in ("run.json", "run.png", "again.png"))
    more = ["--json", path]
    if name not in ALONE:
        more += ["--devices", name.partition("-")[2]]
    if name == "executor":
        monkeypatch.setattr("executor_bandwidth.LEVEL", "-O0")
        more += ["--build", tmp_path]
    if name in PICTURES:
        pytest.importorskip("matplotlib")
        more += ["--plot", first]
    status = run(command, *more)
    printed = capfd.readouterr().out
    assert status in (0, MISSED), printed
    table = printed.partition("# command")[2].replace("\n", " ")
    assert [words for words in shown.split("|") if f" {words} " not in table] == []
    record = read(path)
    assert all(row["time"]["p50"] > 0 for case in record["cases"] for row in case["rows"])
    assert (record["interrupted"], bool(record["cases"])) == (False, True)
    assert {"machine", "gpus", "commit", "command"} <= record["environment"].keys()
    assert str(tmp_path) not in path.read_text()
    assert not list(Path("/run/netns").glob(f"pycollect-{os.getpid()}-*"))
    if name in PICTURES:
        assert run(f"{command.split()[0]} --redraw", path, "--plot", again) == 0
        assert first.read_bytes() == again.read_bytes()


def test_the_table_has_its_columns(capsys):
    assert run(f"allreduce_bandwidth -b 4K -e 16K --world 2,3 {ONCE} --peers naive") == 0
    lines = capsys.readouterr().out.splitlines()
    columns = "world size count type redop algorithm time p99 algbw moved %limit xnaive #wrong"
    assert ["#", *columns.split()] in [line.split() for line in lines]
    rows = [line.split() for line in lines if " default " in line]
    sizes = [("4096", "1024"), ("16384", "4096")]
    wanted = [[world, *size, "float32", "sum", "0"] for world in "23" for size in sizes]
    assert [row[:5] + row[-1:] for row in rows] == wanted
    assert all(float(cell) > 0 for row in rows for cell in row[6:-1])


def test_results_have_the_layout():
    assert sum(len(path.read_text().splitlines()) for path in RECORDS) < LINES
    assert not any(read(path).get("interrupted") for path in RECORDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [p for p in RECORDS if p.with_suffix(".png").exists()], ids=lambda path: path.name
)
def test_a_result_has_its_picture(path, tmp_path):
    kept, again = path.with_suffix(".png"), tmp_path / "again.png"
    matplotlib = pytest.importorskip("matplotlib")
    imread = importlib.import_module("matplotlib.image").imread
    assert run(f"{json.loads(path.read_text())['script']} --redraw", path, "--plot", again) == 0
    drawn = imread(again)
    assert len(set(drawn[..., 0].flat)) > 10
    # Other versions of matplotlib draw other edges and letters.
    if f"Matplotlib version{matplotlib.__version__}".encode() in kept.read_bytes():
        assert (imread(kept) == drawn).all()


WRONG_SUMS = """
import os, runpy
import torch.distributed as dist
right = dist.all_reduce
def all_reduce(tensor, *args, **options):
    work = right(tensor, *args, **options)
    tensor.mul_(2)
    return work
dist.all_reduce = all_reduce
runpy.run_module(os.environ["RIGHT_PROGRAM"], run_name="__main__", alter_sys=True)
"""


def wrong_sums(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Give ranks the program with wrong sums."""
    (folder / "wrong_sums.py").write_text(WRONG_SUMS)
    patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    patch.setenv("RIGHT_PROGRAM", ranks.WORKER)
    patch.setattr(ranks, "WORKER", "wrong_sums")


def without_effect(owner: object, name: str) -> Callable[[pytest.MonkeyPatch, Path], None]:
    """Return a function that lets this function of a module do nothing."""
    return lambda patch, folder: patch.setattr(owner, name, lambda *_, **__: None)


def no_reduction(patch: pytest.MonkeyPatch, folder: Path) -> None:
    none = {**training.GRADIENT_REDUCTIONS, "pycollect": lambda gradients: None}
    patch.setattr(training, "GRADIENT_REDUCTIONS", none)


def failing_program(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr("executor_bandwidth.build", lambda *_: ("false", []))
    patch.setattr("executor_bandwidth.mpi.find_all", list)


# How a collective is made wrong, the run that notices it, and words of its output.
WRONG = {
    "lists": (without_effect(pycollect, "all_reduce"),
              f"allreduce_bandwidth -e 4K --world 2 {ONCE}", " 2048\n"),
    "processes": (wrong_sums, f"allreduce_bandwidth --processes 2 -b 4K -e 4K --peers gloo {ONCE}",
                  " 2048\n"),
    "decoding": (wrong_sums, f"{DECODING} --models llama --variants alone,plain:gloo", "    1\n"),
    "hosts": (wrong_sums, f"{HOSTS} --peers gloo", " 1024\n"),
    "copies": (without_effect(pycollect, "scatter"),
               f"copies -b 64K -e 64K --devices cpu {ONCE}", " 16384\n"),
    "train": (no_reduction,  # LeNet has eight parameters on each of two ranks
              f"train --models lenet --worlds 2 --batch 4 --no-ddp {ONCE}", " 16\n"),
    "DDP": (lambda patch, folder: patch.setattr(training, "BACKENDS", {"DDP, gloo": "warp"}),
            f"train --models lenet --worlds 2 --batch 4 {ONCE}", "# FAILED: DDP, gloo: rank "),
    "threads": (without_effect(dist, "all_reduce"), THREADS,
                "threads not run: all_reduce of 1 elements is wrong on rank"),
    "executor": (failing_program, "executor_bandwidth --world 2 -e 1M", "exit status 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", marked(WRONG))
def test_wrong_numbers_are_counted_and_fail_the_run(name, tmp_path, capfd, monkeypatch):
    set_wrong, command, says = WRONG[name]
    set_wrong(monkeypatch, tmp_path)
    assert run(command) == 1
    assert says in capfd.readouterr().out


RANKS = """
import os, time
def work(rank, task):
    if task == "ends" and rank.number:
        os._exit(7)
    if task == "fails at its end" and rank.number:
        raise ValueError("out of order")
    for seconds in rank.requests():
        time.sleep(seconds)
        rank.send(rank.slowest(seconds + rank.number))
"""


def test_ranks_that_fail_are_an_error_of_the_run(tmp_path, monkeypatch):
    """Also a late answer is, which must not be taken for that to the next request.

    Ranks that do not fail answer with the time of the slowest one.
    """
    (tmp_path / "program_of_ranks.py").write_text(RANKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    start = partial(ranks.Ranks, 2, "program_of_ranks:work")
    with pytest.raises(ranks.RanksFailed, match="ended without an answer"), start("ends") as pool:
        pool.ask(0)
    with pytest.raises(ranks.RanksFailed, match="out of order"), start("fails at its end"):
        pass
    late = partial(pytest.raises, ranks.RanksFailed, match="did not answer within")
    with late(), start() as pool:
        assert pool.ask(0.0) == [1.0, 1.0]
        for seconds in (0.5, 0.0):
            with late():
                pool.ask(seconds, 0.1)
            time.sleep(0.5)


@pytest.mark.parametrize("name", cases.COLLECTIVES)
def test_a_call_without_effect_has_wrong_results(name):
    dtypes = (torch.bool, torch.int8, torch.float8_e5m2, torch.complex64)
    for dtype, op in product(dtypes, ("sum", "prod", "max", "bxor")):
        case = cases.sized_case(name, 8000, dtype, op, [cases.CPU] * 2)
        of_ranks = [cases.Buffers(case, r, torch.empty) for r in (0, 1)]
        wrong = cases.run_checked(of_ranks, lambda: None, lambda: None)
        every = case.spec.in_place or sum(one.output.numel() for one in of_ranks)
        assert wrong >= every or name == "barrier"


# What fails, the run, its exit status, and words of a line about what was measured nevertheless.
FAILING = {
    "stack": ("lists.peer", f"allreduce_bandwidth -e 4K {ONCE} --peers stack", 0, "default"),
    "list": ("threads.pycollect.all_reduce", f"{THREADS} --peers none", 0, "threads"),
    "threads": ("threads.nothing", f"{THREADS} --peers none", 1, "threads, parallel"),
    "pycollect": ("", f"allreduce_bandwidth --processes 2 -e 4 --backend warp --peers gloo {ONCE}",
                  1, "gloo"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILING)
def test_a_candidate_that_fails_is_named_and_does_not_end_the_run(name, monkeypatch, capfd):
    attribute, command, status, measured = FAILING[name]

    def fails(*arguments: object) -> None:
        raise RuntimeError("out of order")

    if attribute:
        monkeypatch.setattr(f"pycollect_bench.{attribute}", fails)
    assert run(command) == status
    lines = capfd.readouterr().out.splitlines()
    reason = "out of order" if attribute else "torch.distributed has no backend 'warp'"
    assert any(f"{name} not run: " in line and reason in line for line in lines)
    assert any(f" {measured} " in line for line in lines if not line.startswith("#"))


KEPT = {
    "lists": f"allreduce_bandwidth -b 4K --world 2 {ONCE}",
    "copies": f"copies -b 64K --world 2 --devices cpu {ONCE}",
    "training": f"train --models lenet --worlds 1 2 --batch 8 --no-ddp {ONCE}",
    "processes": "allreduce_bandwidth -b 4 -f 2 --processes 2 --peers gloo",
}


@pytest.mark.parametrize("name", KEPT)
def test_results_measured_so_far_are_kept(name, tmp_path):
    """They are in the file before the run ends, for one that is killed, and after SIGTERM."""
    path, texts = tmp_path / "run.json", [""]

    def terminate() -> None:
        while not texts[-1].endswith("\n}\n"):  # the other thread may be writing it
            time.sleep(0.01)
            texts.append(path.read_text() if path.exists() else "")
        os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.signal(signal.SIGTERM, lambda number, frame: None)  # of a run that has ended
    thread = threading.Thread(target=terminate, daemon=True)
    thread.start()
    status = run(KEPT[name], "--json", path)
    thread.join(60)
    signal.signal(signal.SIGTERM, handler)
    assert status == 128 + signal.SIGTERM
    before, after = json.loads(texts[-1]), read(path)
    assert before["interrupted"] is after["interrupted"] is True
    assert after["cases"][: len(before["cases"])] == before["cases"] != []


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("allreduce_bandwidth --peers gloo", "'gloo' is not a peer on lists"),
        ("allreduce_bandwidth --threads 2 -o max", "--op has no effect with --threads"),
        ("allreduce_bandwidth --coalesced lenet --plot a.png", "no sizes are measured"),
        ("allreduce_bandwidth --redraw bench/results/train.json --plot a.png", "has no results of"),
        ("copies --overlap -b 4K", "--minbytes has no effect with --overlap"),
        ("tensor_parallel --ranks 3", "--ranks 3 cannot divide llama 1024 evenly"),
        ("allreduce_bandwidth --threads 2 --devices cuda:99", "'cuda:99' does not exist"),
        ("allreduce_bandwidth --threads 2 --processes 2", "not allowed with argument"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(command, message, capsys):
    assert run(command) == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert "error: " in sentence
    assert message in sentence


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure lists on the CPU as if on a GPU, whose clock advances by a second per call."""
    fake = SimpleNamespace(now=0.0, _sleep=lambda cycles: None, synchronize=lambda device: None)

    def recorded(device: torch.device) -> SimpleNamespace:
        at = fake.now
        return SimpleNamespace(at=at, elapsed_time=lambda end: (end.at - at) * 1e3)

    def ticking(run, rewrite, devices, calls=1):
        def tick() -> object:
            fake.now += calls
            return run()

        return clocks.gpu_time(tick, rewrite, [torch.device("cuda:0")], calls)

    monkeypatch.setattr(clocks, "_cuda", fake)
    monkeypatch.setattr(gpus, "_cuda", fake)
    monkeypatch.setattr(clocks, "_recorded", recorded)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(cases.Case, "on_gpus", True)
    monkeypatch.setattr(lists, "gpu_time", ticking)
    monkeypatch.setattr(lists, "graph_of", lambda run, calls: lambda: [run() for _ in range(calls)])


def test_rows_by_the_clocks_of_a_gpu(as_gpu, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "run.json", tmp_path / "run.png"
    command = f"{LISTS} --devices cpu --peers naive"
    assert run(command, "--json", path, "--plot", picture) in (0, MISSED)
    assert "relative to `memcpy`" in capsys.readouterr().out
    rows = {row["name"]: row for row in read(path)["cases"][0]["rows"]}
    clocks = {f"{name}:{row['clock']}" for name, row in rows.items() if ":" not in name}
    assert clocks == {"default:wall", "naive:wall", "memcpy:wall"}
    by_gpu = ["default:gpu", "default:graph", "naive:gpu", "memcpy:gpu"]
    assert [name for name in rows if name.endswith(f":{rows[name]['clock']}")] == by_gpu
    for name in by_gpu:
        assert rows[name]["time"]["p50"] == rows[name]["speedup"]["naive"] == 1.0


def reported(out: Path, *arguments: str) -> tuple[int | str, list[dict[str, object]]]:
    """Run bench/gpu_report.py; return its exit status and the records."""
    status = run("gpu_report", out, *arguments)
    return status, [json.loads(line) for line in (out / "report.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_every_command_of_the_report_runs(tmp_path):
    """A selection without a test would fail, as an option that a benchmark does not know."""
    status, records = reported(tmp_path, "--rehearse", "--seconds", "900")
    failed = [r for r in records if r["status"] not in (0, gpu_report.MISSED)]
    assert ({r["name"]: r["output"] for r in failed}, status) == ({}, 0)
    assert list(dict.fromkeys(record["stage"] for record in records)) == list(gpu_report.STAGES)
    assert len(list(tmp_path.glob("*.json"))) == len(gpu_report.BENCHMARKS)


def test_a_report_needs_no_xdist(tmp_path, monkeypatch):
    for installed in (True, False):
        monkeypatch.setattr(gpu_report, "find_spec", lambda name, found=installed: found or None)
        commands = [case.command for case in gpu_report.all_cases(tmp_path, False)]
        assert any("pytest" in c and "-n" in c for c in commands) == installed


def test_a_report_goes_on_after_a_failure_unless_it_is_the_builds(tmp_path, monkeypatch):
    commands = {"hangs": "echo begun; sleep 60", "fails": "exit 7", "misses": "exit 3"}
    of_report = [
        gpu_report.Case("lists", name, 0.5, ["sh", "-c", c]) for name, c in commands.items()
    ]
    monkeypatch.setattr(gpu_report, "all_cases", lambda out, rehearse: of_report)
    status, records = reported(tmp_path / "new", "lists")
    assert status == 1
    assert [record["status"] for record in records] == [gpu_report.STOPPED, 7, 3]
    assert (records[0]["output"], records[0]["command"][0]) == (["begun"], "sh")
    of_report.insert(0, gpu_report.Case("build", "build", 9, ["false"]))
    assert len(reported(tmp_path / "next")[1]) == 1
    assert run("gpu_report", tmp_path, "warp") == 2
