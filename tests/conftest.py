"""What every test gets: its own torch state, repeatable examples, loud skips without a GPU."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest
import torch

NO_GPU = "needs a CUDA GPU"
# What a skip for want of hardware or of a package says, and what the summary says of all of these.
MISSING = {
    NO_GPU: "no CUDA GPU here (PYCOLLECT_REQUIRE_CUDA=1 turns this into a failure)",
    "needs two CUDA GPUs": "there are fewer than two CUDA GPUs here",
    "needs CuPy": "CuPy is not installed (pip install 'pycollect[cuda13]')",
    "needs mypy": "mypy is not installed (pip install -e '.[test]')",
    "of GPU memory": "the GPU has too little free memory for them",
}

# What leaves the slow tests out (pyproject.toml), and how long one of them takes on two cores.
QUICK, SECONDS_EACH = "not slow", 2.0
LEFT_OUT = pytest.StashKey[list[pytest.Item]]()

# Derandomized: the same examples in every run, so that a red run is red again. No deadline: ranks
# outnumber cores here, and a slow machine is no defect. HYPOTHESIS_PROFILE=explore looks further.
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
        config.stash[LEFT_OUT] = []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (left_out := config.stash.get(LEFT_OUT, None)) is not None:
        left_out += (item for item in items if item.get_closest_marker("slow"))
        items[:] = (item for item in items if not item.get_closest_marker("slow"))
        config.hook.pytest_deselected(items=left_out)


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
    if left_out := terminalreporter.config.stash.get(LEFT_OUT, []):
        terminalreporter.write_line(say_left_out(left_out))


def say_left_out(items: list[pytest.Item]) -> str:
    run = [i for i in items if torch.cuda.is_available() or not i.get_closest_marker("cuda")]
    minutes = max(1, math.ceil(len(run) * SECONDS_EACH / 60))
    tests = "1 slow test was" if len(items) == 1 else f"{len(items)} slow tests were"
    about = "1 minute" if minutes == 1 else f"{minutes} minutes"
    return f"{tests} left out; about {about}: python -m pytest -q -m slow"


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
