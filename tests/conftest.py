"""What every test gets: its own torch state, repeatable examples, loud skips without a GPU."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

# Tests have more threads than there are cores: one that waits lets others run. What libgomp and
# OpenBLAS do of themselves, waiting in a loop, took a quarter of all CPU time of the slow tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch

NO_GPU = "needs a CUDA GPU"
# What a skip for want of hardware or of a package says, and what the summary says of all of these.
MISSING = {
    NO_GPU: "no CUDA GPU here (PYCOLLECT_REQUIRE_CUDA=1 turns this into a failure)",
    "needs two CUDA GPUs": "there are fewer than two CUDA GPUs here",
    "needs CuPy": "CuPy is not installed (pip install 'pycollect[cuda13]')",
    "needs mypy": "mypy is not installed (pip install -e '.[test]')",
    "of GPU memory": "the GPU has too little free memory for them",
    "of free memory": "this machine has too little of it for them",
}

# What leaves the slow tests out (pyproject.toml), what runs them, and how long one takes on two
# cores.
QUICK, SLOW, SECONDS_EACH = "not slow", "python -m pytest -q -n auto -m slow", 1.3
LEFT_OUT = pytest.StashKey[tuple[int, int]]()  # how many, and how many of them would run here

# Derandomized: nearly the same examples in every run, so that a red run is red again (constants of
# the modules that a process has imported are tried, too). No deadline: ranks outnumber cores here,
# and a slow machine is no defect. HYPOTHESIS_PROFILE=explore looks further.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# What the process has loaded that ranks are forked from: torch would take each of them 1.5 s, the
# extension 0.2 s, torch._dynamo, with which DDP begins, 1 s. Said here, before any is forked: a
# process that runs already loads nothing more. Where there are GPUs a rank loads the extension
# itself, which might ask for them.
multiprocessing.set_forkserver_preload(
    ["torch", "torch.distributed", "torch._dynamo", "pytest"]
    + ([] if torch.cuda.is_available() else ["pycollect"])
)

# A shell starts what it puts into the background with Ctrl-C ignored, and programs inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == QUICK:  # done here, so that nothing else is counted as slow
        config.option.markexpr = ""
        config.stash[LEFT_OUT] = 0, 0
    # A worker that dies ends the run: pytest-xdist 3.8 gives the files that it had done to others
    # once more, and then waits for ever for tests that nobody runs.
    if getattr(config.option, "maxworkerrestart", "") is None:
        config.option.maxworkerrestart = "0"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if LEFT_OUT not in config.stash:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    items[:] = (item for item in items if not item.get_closest_marker("slow"))
    run = [i for i in slow if torch.cuda.is_available() or not i.get_closest_marker("cuda")]
    config.stash[LEFT_OUT] = len(slow), len(run)
    config.hook.pytest_deselected(items=slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto`: a worker starts ranks of its own, several at a time. Tests on a GPU share its
    memory, of which some take nearly all: there is no other process beside them."""
    if wanted := os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return int(wanted)
    cores = len(os.sched_getaffinity(0))
    return 0 if torch.cuda.is_available() else min(cores, max(2, cores // 2), 8)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file stays together, so that its pools of ranks are started once."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log) if config.option.dist == "load" else None


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, (0, 0))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker has collected, and left out, the same tests."""
    if hasattr(node, "workeroutput"):  # one that has died says nothing
        node.config.stash[LEFT_OUT] = node.workeroutput["left_out"]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is None or torch.cuda.is_available():
        return
    if os.environ.get("PYCOLLECT_REQUIRE_CUDA") == "1":
        pytest.fail(f"{NO_GPU}, and PYCOLLECT_REQUIRE_CUDA=1 forbids to skip it", pytrace=False)
    pytest.skip(NO_GPU)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # its lines are the last
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
    """What tests and their processes leave in the folder for temporary files goes with pytest's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(autouse=True)
def own_torch_state() -> Iterator[None]:
    """Start from seed 0 and give back the caller's generator and number of threads."""
    threads = torch.get_num_threads()
    generator = torch.random.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.random.set_rng_state(generator)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
