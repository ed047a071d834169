"""How `python -m pycollect.threads` ends: exit status, what it prints, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from programs import Program
from threads_command import BEGIN, COMMAND, TIMEOUT, assert_printed, ran, ran_text, written

from pycollect.threads import __main__ as command

# A launch that cannot end waits for a timeout of minutes, or for ever.
AT_ONCE = 20
FAILED = ["sys.exit with status 1, raised by rank 1 of 2"]


@pytest.mark.parametrize(
    ("statement", "status", "error"),
    [
        ("", 0, []),
        ("sys.exit()", 0, []),
        ("sys.exit(0)", 0, []),
        ("if rank == 1: sys.exit(0)", 0, []),
        ("if rank == 1: sys.exit(3)", 3, ["sys.exit with status 3, raised by rank 1 of 2"]),
        ("if rank == 1: sys.exit(256)", 1, FAILED),
        ("if rank == 1: sys.exit('bye')", 1, ["bye", *FAILED]),
        ("raise KeyboardInterrupt", 130, ["interrupted"]),
    ],
)  # fmt: skip
def test_the_exit_status_is_the_one_of_the_first_rank_that_fails(
    tmp_path, statement, status, error
):
    ended = ran_text(tmp_path, f"start()\n{statement}\n")
    lines = [line.removeprefix("pycollect.threads: ") for line in ended.stderr.splitlines()]
    assert (ended.returncode, lines) == (status, error)


def test_an_exception_is_printed_with_its_rank_and_the_frames_of_the_script(tmp_path):
    text = """
        def step():
            if rank == 1: raise ValueError("bad value")
            dist.barrier()
        start()
        step()
        """
    ended = ran_text(tmp_path, text, nproc=3)
    assert ended.returncode == 1
    first, *lines = ended.stderr.splitlines()
    assert first == "Traceback (most recent call last):"
    file = tmp_path / "program.py"
    assert [line for line in lines if line.startswith("  File")] == [
        f'  File "{file}", line 10, in <module>',
        f'  File "{file}", line 7, in step',
    ]
    if sys.version_info >= (3, 11):
        lines = lines[lines.index("ValueError: bad value") + 1 :]
    assert lines[0] == "raised by rank 1 of 3"
    assert any(line.startswith("rank 0 raised PeerLost: ") for line in lines)


def test_errors_of_compilation_are_printed_as_by_python(tmp_path):
    script = written(tmp_path, "x = (")
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True)
    ended = ran(script)
    assert (ended.returncode, ended.stderr) == (1, plain.stderr)


@pytest.mark.parametrize("options", [(), ("--parallel",)], ids=["turns", "parallel"])
def test_a_deadlock_ends_at_once_and_names_ranks_and_lines(tmp_path, options):
    begin = time.monotonic()
    ended = ran_text(
        tmp_path,
        """
        start()
        if rank == 0:
            dist.recv(torch.ones(3), 1)
        else:
            dist.all_reduce(torch.ones(2))
        """,
        options=options,
    )
    assert ended.returncode == 1
    assert time.monotonic() - begin < AT_ONCE
    assert "Deadlock" in ended.stderr
    for rank, line in ((0, 8), (1, 10)):
        found = [text for text in ended.stderr.splitlines() if f"program.py:{line} " in text]
        assert found, ended.stderr
        assert any(f"rank {rank}" in text for text in found)


def test_a_rank_that_ends_early_fails_the_ranks_that_wait_for_it(tmp_path):
    ended = ran_text(tmp_path, "start()\nif rank == 1: sys.exit(0)\ndist.barrier()\n")
    assert ended.returncode == 1
    assert "rank 1" in ended.stderr
    assert "raised by rank 0 of 2" in ended.stderr


def test_a_timeout_names_the_lines_of_the_ranks(tmp_path):
    text = "start()\nif rank == 1:\n    while True: time.sleep(0.01)\ndist.barrier()\n"
    ended = ran_text(tmp_path, text, options=("--timeout", "0.3"))
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "Timeout: launch: the launch has not ended within its timeout" in ended.stderr
    assert "program.py:7 " in ended.stderr


@pytest.mark.parametrize(
    "wait",
    [
        "dist.barrier()",
        "time.sleep(0.01); dist.barrier()",
        pytest.param("time.sleep(0.01)", marks=pytest.mark.slow),
        pytest.param("torch.ones(99).sum()", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_ends_all_ranks(tmp_path, wait):
    script = written(tmp_path, f"{BEGIN}start()\nprint('ready', flush=True)\nwhile True: {wait}\n")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Program([*COMMAND, "--nproc", "3", script], **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=AT_ONCE)
    assert (process.returncode, errors) == (130, "interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize("wait", ["time.sleep(600)", "torch.zeros(1 << 20).exp_()"])
def test_a_rank_that_cannot_be_stopped_ends_with_the_process(tmp_path, wait):
    text = f"""
        time.sleep(0.3)  # until the main thread waits for the ranks
        print("ready", flush=True)
        while True:
            try:
                while True:  # an exception between two turns ends this loop only
                    try: {wait}
                    except BaseException: pass
            except BaseException: pass
        """
    script = written(tmp_path, BEGIN + textwrap.dedent(text))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Program([*COMMAND, "--nproc", "1", script], **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT)
    wanted = "pycollect.threads: rank 0 did not stop, and was left\ninterrupted\n"
    assert (process.returncode, errors) == (130, wanted)


def test_a_script_has_the_standard_output_of_the_process(tmp_path):
    ended = ran_text(tmp_path, "print(sys.stdout is sys.__stdout__)", nproc=1)
    assert_printed(ended, "True")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: --nproc, script.py"),
        (["--nproc", "2"], "the following arguments are required: script.py"),
        (["--nproc", "0", "x.py"], "argument --nproc: '0' is no number of ranks; pass 1 or more"),
        (["--nproc", "gpu", "x.py"], "argument --nproc: 'gpu' is no number of ranks"),
        (["--nproc", "2", "--timeout", "nan", "x.py"], "argument --timeout: 'nan' is no time"),
        (["--nproc", "2", "--timeout", "0", "x.py"], "argument --timeout: '0' is no time"),
        (["--nproc", "2", "--device", "tpu", "x.py"], "error: device is 'tpu'; torch has no such"),
        (["--nproc", "2", "--device", "meta", "x.py"], "error: device is 'meta'; pass None"),
        (["--nproc", "2", "missing.py"], "missing.py cannot be read (No such file or directory)"),
        (["--nproc", "2", "."], ". cannot be read (Is a directory)"),
        (["--nproc", "2", "-m", "missing"], "there is no module named missing"),
        (["--nproc", "2", "-m", "torch.missing.x"], "there is no module named torch.missing.x"),
        (["--nproc", "2", "-m", "multiprocessing"], "is a package without a module __main__"),
    ],
)
def test_bad_options_are_named_in_one_line(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: python -m pycollect.threads --nproc N ")
    assert message in error


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for option in ("--nproc N", "--device", "--parallel", "--timeout SECONDS", "-m, --module"):
        assert option in text
