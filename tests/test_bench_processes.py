"""The benchmark between processes: its parts, a whole run, and ranks that fail or die.

No test asserts a speed: that needs a quiet machine, and `--targets`.
"""

import contextlib
import json
import threading
from functools import partial

import programs
import pytest
import torch

import pycollect_bench as bench
from pycollect import _machine, _timing
from pycollect_bench import comparison
from pycollect_bench.processes import candidates, cases, groups, spin_barrier, targets, worker_pool
from pycollect_bench.processes import comparison as between

CPU = torch.device("cpu")
GLOO_ONLY = ["--backend", "gloo", "--peers", "gloo", "-n", "2", "-w", "1"]


@pytest.fixture(autouse=True)
def ranks_have_torch(monkeypatch):
    programs.fork_ranks(monkeypatch)


def empty(count, dtype):
    return torch.empty(count, dtype=dtype)


def sums(world, nbytes, collective="all_reduce", dtype=torch.float32):
    return cases.process_case(collective, nbytes, dtype, "sum", [CPU] * world)


def job(*of, **more):
    effort = _timing.Effort(iterations=1, warmup=1)
    about = {"ours": ("pycollect",), "peers": ("gloo",), "backend": "gloo", "effort": effort}
    about |= {"threads": 1, "no_mpi": "not in this test"}
    return worker_pool.PoolJob(devices=(CPU, CPU), cases=of, **(about | more))


def at_once(world, work):
    """Run work(rank) in one thread per rank; return all results."""
    results = [None] * world

    def run(rank):
        results[rank] = work(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def new_page(tmp_path, world):
    page = tmp_path / "page"
    page.write_bytes(bytes(spin_barrier.page_bytes(world)))
    return str(page)


def test_no_rank_leaves_the_barrier_before_all_have_entered(tmp_path):
    page, entered = new_page(tmp_path, 3), []

    def work(rank):
        barrier = spin_barrier.SpinBarrier(page, rank, 3)
        if rank == 2:
            threading.Event().wait(0.05)
        entered.append(rank)
        barrier.barrier()
        seen = len(entered)
        return seen, barrier.gather(rank + 0.5)

    assert at_once(3, work) == [(3, [0.5, 1.5, 2.5])] * 3
    assert not list(tmp_path.iterdir())


def test_the_barrier_names_missing_ranks(tmp_path):
    page = new_page(tmp_path, 3)

    def work(rank):
        barrier = spin_barrier.SpinBarrier(page, rank, 3, timeout=0.3)
        if rank == 1:
            return None
        with pytest.raises(TimeoutError, match=r"ranks \[1\] did not reach the barrier"):
            barrier.barrier()
        return "raised"

    assert at_once(3, work) == ["raised", None, "raised"]


@pytest.mark.parametrize("broken", [True, False])
def test_a_barrier_that_returns_early_is_wrong(tmp_path, broken):
    page = new_page(tmp_path, 2)

    def work(rank):
        barrier = spin_barrier.SpinBarrier(page, rank, 2)
        early = candidates._early((lambda: None) if broken else barrier.barrier, barrier)
        barrier.publish(-1.0)  # as the next gather does
        return early

    assert at_once(2, work) == ([1, 0] if broken else [0, 0])


@pytest.mark.parametrize("name", [n for n in cases.COLLECTIVES if n != "barrier"])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_parts_fill_the_output(name, world):
    case = sums(world, 4096, name)
    for rank in range(world):
        buffers = cases.Buffers(case, rank, empty)
        parts = cases.COLLECTIVES[name].parts(case, rank)
        assert sum(count for _, _, count in parts) == buffers.output.numel() > 0


def expected_output(buffers, pattern):
    """Rank 1's expected output of 2 ranks for each collective, from its definition."""
    half = buffers.case.count // 2
    inputs = [pattern.rank(r, buffers.case.count) for r in range(2)]
    return {
        "all_reduce": inputs[0] + inputs[1],
        "broadcast": inputs[0],
        "all_gather_into_tensor": torch.cat([i[:half] for i in inputs]),
        "reduce_scatter_tensor": (inputs[0] + inputs[1])[half:],
        "all_to_all_single": torch.cat([i[half:] for i in inputs]),
        "send_recv": inputs[0],
    }[buffers.case.collective]


@pytest.mark.parametrize("name", [n for n in cases.COLLECTIVES if n != "barrier"])
def test_wrong_elements_are_counted(name):
    # Larger than the part that is compared at once.
    buffers = cases.Buffers(sums(2, 5 << 20, name), 1, empty)
    op = "sum" if cases.COLLECTIVES[name].reduces else "max"
    right = expected_output(buffers, cases.Pattern(torch.float32, op, 2))
    assert buffers.wrong(partial(buffers.output.copy_, right)) == 0
    for at in (0, -1):
        almost = right.clone()
        almost[at] += 1
        assert buffers.wrong(partial(buffers.output.copy_, almost)) == 1
    assert buffers.wrong(lambda: None) > buffers.output.numel() // 4


def test_the_smallest_cases_have_an_element_a_part():
    assert sums(16, 4).count == 1
    assert sums(16, 4, "all_to_all_single").count == 16
    assert sums(16, 4, "barrier").nbytes == 0


def test_bandwidths_are_counted_as_nccl_tests_do():
    assert sums(4, 4096).bus_factor == 1.5
    assert sums(4, 4096).minimum_bytes == 8 * 4096
    assert sums(4, 4096, "broadcast").minimum_bytes == 4 * 4096
    assert not sums(4, 4096).one_memory


def test_a_call_takes_as_long_as_on_its_slowest_rank():
    first, second = _timing.Timing(((1.0, 5.0), (3.0,))), _timing.Timing(((2.0, 4.0), (1.0,)))
    slowest = between.slowest_rank([{"a": first}, {"a": second}])
    assert slowest["a"].samples == ((2.0, 5.0), (3.0,))


def result_of(world, nbytes, row=groups.OURS, dtype=torch.float32, seconds=1.0, **ratios):
    timing = _timing.Timing(((seconds,),))
    speedup = {peer: [ratio] for peer, ratio in ratios.items()}
    measured = comparison.Row(row, "pycollect", timing, 0, speedup=speedup)
    return comparison.CaseResult(sums(world, nbytes, dtype=dtype), [measured], {})


def test_targets_are_judged_by_their_worst_point():
    results = [
        result_of(2, 4, gloo=50),
        result_of(2, 1024, gloo=39),
        result_of(2, 4096, gloo=1),  # no target for this one
        result_of(4, 65536, gloo=151, mpi=0.9),
        result_of(4, 1 << 20, groups.ZERO_COPY, mpi=2.6),
        result_of(16, 4, gloo=0.99),
        result_of(4, 1 << 20, seconds=1.0),
        result_of(4, 1 << 20, dtype=torch.bfloat16, seconds=1.5),
    ]
    found = {outcome.what: outcome for outcome in targets.judge(results)}
    small = found["gloo, 2 ranks, to 1 KiB"]
    assert (small.measured, small.met, small.where) == (39, False, "2 ranks, 1 KiB")
    assert found["gloo, 4 ranks, to 64 KiB"].met is True
    assert found["gloo, 4 ranks, at 1 MiB"].met is None
    assert found["gloo, 8 and 16 ranks, everything"].met is False
    assert found["Open MPI, from 64 KiB"].measured == 0.9
    assert found["Open MPI, zero-copy, from 1 MiB"].met is True
    narrow = found["bfloat16, elements a second of float32's"]
    assert narrow.measured == pytest.approx(2 / 1.5)


def test_a_whole_run(tmp_path, capsys):
    path = tmp_path / "run.json"
    args = ["--processes", "2", "-b", "4", "-e", "300K", "-f", "1000", "--json", str(path)]
    assert bench.main([*args, *GLOO_ONLY]) == 0
    text = path.read_text()
    assert str(tmp_path) not in text
    run = json.loads(text)
    assert [case["bytes"] for case in run["cases"]] == [4, 4000, 300 << 10]
    for case in run["cases"]:
        rows = {row["algorithm"]: row for row in case["rows"]}
        assert rows["pycollect"]["wrong"] == rows["gloo"]["wrong"] == 0
        assert rows["pycollect"]["speedup"]["gloo"]["median"] > 0
        assert rows["pycollect"]["busbw"] == pytest.approx(
            case["bytes"] / rows["pycollect"]["time"]["p50"]
        )
    assert run["cases"][-1]["limit"] == "memory"
    output = capsys.readouterr().out
    heading = next(line for line in output.splitlines() if "algorithm" in line)
    assert heading.split()[-3:] == ["%limit", "xgloo", "#wrong"]
    assert "other processes" in output


def test_the_library_itself_is_measured_and_right(tmp_path):
    path = tmp_path / "run.json"
    args = ["--processes", "2,3", "-b", "4", "-e", "300K", "-f", "100000", "--json", str(path)]
    assert bench.main([*args, "--peers", "none", "-n", "2", "-w", "1"]) == 0
    for case in json.loads(path.read_text())["cases"]:
        assert {row["algorithm"]: row["wrong"] for row in case["rows"]}["pycollect"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in cases.COLLECTIVES if n != "all_reduce"])
def test_every_collective_is_measured_and_right(name, capsys):
    args = ["--processes", "3", "--collective", name, "-b", "4", "-e", "1M", "-f", "1000000"]
    assert bench.main([*args, *GLOO_ONLY]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.startswith("     3 ")]
    assert {row[5] for row in rows} >= {"pycollect", "gloo"}
    assert {row[-1] for row in rows} <= {"0", "-"}


def test_a_rank_that_fails_is_quoted():
    ranks = worker_pool.WorkerPool(
        job(cases.ProcessCase("nothing", torch.float32, "sum", (CPU,) * 2, ((1,),)))
    )
    with pytest.raises(RuntimeError, match=r"(?s)rank \d: .*KeyError: 'nothing'"), ranks:
        ranks.result()
    assert all(process.poll() is not None for process in ranks._processes)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run():
    ranks = worker_pool.WorkerPool(job(*[sums(2, 64 << 20)] * 100))

    def run_on():
        with ranks:
            ranks.result()
            ranks._processes[1].kill()
            for _ in range(100):
                ranks.result()

    with pytest.raises(RuntimeError, match=r"ended without an answer|rank 0: "):
        run_on()
    assert all(process.poll() is not None for process in ranks._processes)


def test_an_unknown_backend_is_named_and_fails_the_run(capsys):
    args = ["--processes", "2", "-b", "4", "-e", "4", "--backend", "warp", "--peers", "gloo"]
    assert bench.main([*args, "-n", "1", "-w", "1"]) == 1
    assert "# pycollect not run: torch.distributed has no backend 'warp'" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "2", "--algorithms", "all"], "--algorithms does not go with --processes"),
        (["--processes", "2", "--coalesced", "lenet"], "does not go with --processes"),
        (
            ["--processes", "2", "--collective", "reduce_scatter"],
            "--collective reduce_scatter does not exist between processes",
        ),
        (["--processes", "0"], "positive whole number"),
        (["--processes", "2", "--peers", "naive"], "'naive' is not a peer of processes"),
        (["--processes", "2", "-b", "8", "-e", "4"], "past their end"),
        (["--processes", "2", "--collective", "barrier", "--plot", "x.png"], "no sizes"),
        (["--peers", "gloo"], "'gloo' is not a peer of one process"),
        (["--collective", "barrier"], "--collective barrier does not exist in one process"),
    ],
)
def test_incompatible_options_are_refused(arguments, message, capsys):
    with contextlib.suppress(SystemExit):
        bench.main(arguments)
    captured = capsys.readouterr()
    assert message in captured.err
    assert "algorithm " not in captured.out


def test_folders_are_removed_from_commands():
    command = "/opt/x/bin/python bench/a.py --json /tmp/b.json --plot=/tmp/c.png -e 1M"
    plain = "python bench/a.py --json b.json --plot=c.png -e 1M"
    assert _machine.without_folders(command) == plain
