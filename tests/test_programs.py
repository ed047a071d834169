"""Programs forked from a process with torch start and end as any other program."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import programs
import pytest
from dist_pool import RankContext, fresh

BEGIN = "import atexit, os, sys; atexit.register(print, 'the end'); "
ENDS = {
    "by itself": ("print(sys.argv, os.environ['HERE'], os.getcwd())", 0),
    "with a status": ("sys.exit(7)", 7),
    "with an error": ("raise ValueError('wrong')", 1),
    "by Ctrl-C": ("raise KeyboardInterrupt", -signal.SIGINT),
    "by a signal": ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_program_ends_as_any_other(tmp_path: Path, how: str) -> None:
    code, status = ENDS[how]
    command = [sys.executable, "-c", BEGIN + code, "word"]
    ended = programs.run(command, cwd=tmp_path, env={"HERE": "there"}, timeout=60)
    assert ended.returncode == status
    assert ended.stdout.endswith("the end\n") == (how != "by a signal")
    assert ("Traceback" in ended.stderr) == (how in ("with an error", "by Ctrl-C"))
    if how == "by itself":
        assert ended.stdout.splitlines()[0] == f"['-c', 'word'] there {tmp_path}"


def test_the_pid_of_an_ended_program_is_reserved_until_its_status_is_read() -> None:
    with programs.Program([sys.executable, "-c", "0"]) as program:
        stat = Path(f"/proc/{program.pid}/stat")
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        time.sleep(0.1)  # time for a waiter to notice the end
        os.kill(program.pid, signal.SIGKILL)
        assert program.wait(60) == 0


def test_blocked_signals_are_inherited() -> None:
    """A program inherits the caller's blocked signals, not those of the first program's start."""
    code = "import signal; print(2 in signal.pthread_sigmask(signal.SIG_BLOCK, []))"

    def blocked() -> str:
        return programs.run([sys.executable, "-c", code], timeout=60).stdout

    programs._server.cache_clear()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        assert blocked() == "True\n"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert blocked() == "False\n"


def _begins_with_torch(me: RankContext) -> bool:
    return "torch._dynamo" in sys.modules  # importing torch alone does not import it


def test_ranks_start_with_torch_imported() -> None:
    """Also if other tests have forked programs before."""
    with fresh(1, group=False) as pool:
        assert pool.run(_begins_with_torch) == [True]
