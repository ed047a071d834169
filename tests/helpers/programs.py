"""Runs Python programs that start with torch imported, forked from one process that imported it.

Importing torch takes 1.5 s of a core, and most programs of the tests do far less work than that.
Otherwise a program is ordinary: it imports pycollect itself, has its own session and one thread,
and exits through normal interpreter shutdown. Not suitable for tests of the torch import or of
interpreter start-up.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch.distributed

if TYPE_CHECKING:
    import pytest

_LARGEST = 1 << 20  # bytes of a request: arguments and an environment


class Program:
    """A running program with the interface of `subprocess.Popen`; command[0] is sys.executable."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        cwd: str | Path | None = None,
        env: dict[str, str] | None = None,
        stdout: int | IO[str] | None = None,
        stderr: int | IO[str] | None = None,
    ) -> None:
        assert command[0] == sys.executable
        self.args = list(map(str, command))
        self.returncode: int | None = None
        environ = dict(os.environ if env is None else env)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        request = pickle.dumps((self.args, str(cwd or Path.cwd()), environ, blocked))
        # Receives the program's pid, later its exit status.
        own_end, other_end = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._status_socket = own_end
        with other_end, contextlib.ExitStack() as passed, open(os.devnull) as nothing:
            self.stdout, out = _pipe(stdout, 1, passed)
            self.stderr, err = _pipe(stderr, 2, passed)
            socket.send_fds(_server(), [request], [nothing.fileno(), out, err, other_end.fileno()])
        self.pid = int(self._status_socket.recv(32))

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._status_socket.settimeout(timeout)
            try:
                output = self._status_socket.recv(32)
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            self.returncode = int(output)
            self._status_socket.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        output: dict[Any, str] = {}
        readers = [
            threading.Thread(target=lambda p=pipe: output.update({p: p.read()}), daemon=True)
            for pipe in (self.stdout, self.stderr)
            if pipe is not None and not pipe.closed
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(timeout)
        return output.get(self.stdout, ""), output.get(self.stderr, "")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.poll() is None and raised[0] is not None:
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()


def run(
    command: Sequence[str | Path], *, timeout: float, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run` does, and capture its output as text."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Program(command, **{**pipes, **more}) as program:
        out, err = program.communicate(timeout)
    return subprocess.CompletedProcess(program.args, program.wait(), out, err)


def fork_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make benchmarks and training comparisons start their processes with torch imported."""
    from pycollect_bench import ranks

    def start(command: Sequence[str], **more: Any) -> Any:
        return (Program if command[0] == sys.executable else subprocess.Popen)(command, **more)

    of_ranks = types.SimpleNamespace(**{**vars(subprocess), "Popen": start})
    monkeypatch.setattr(ranks, "subprocess", of_ranks)
    real = multiprocessing.get_context
    for module in (multiprocessing, torch.multiprocessing):
        monkeypatch.setattr(module, "get_context", lambda method=None: real("forkserver"))


def _pipe(
    wanted: int | IO[str] | None, inherited: int, passed: contextlib.ExitStack
) -> tuple[IO[str] | None, int]:
    """Return the end to read from, if any, and the descriptor that the program writes to."""
    if wanted is None:
        return None, inherited
    if wanted == subprocess.DEVNULL:
        return None, passed.enter_context(open(os.devnull, "w")).fileno()
    if wanted != subprocess.PIPE:
        return None, wanted if isinstance(wanted, int) else wanted.fileno()
    reader, writer = os.pipe()
    passed.callback(os.close, writer)
    return open(reader), writer


@cache
def _server() -> socket.socket:
    """Start the server, which has torch imported, and return the socket to it. The server exits
    when this process closes the socket or ends."""
    own_end, other_end = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with other_end:
        subprocess.Popen(
            [sys.executable, __file__, str(other_end.fileno())],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # not a terminal, so that programs do not line-buffer
            pass_fds=[other_end.fileno()],
            start_new_session=True,
        )
    return own_end


def _serve(control: socket.socket) -> tuple[list[str], str, dict[str, str], set[int]]:
    """Fork a process for each request, until the socket closes; returns only in the programs."""
    assert "pycollect" not in sys.modules
    assert len(os.listdir("/proc/self/task")) == 1, "another thread would be lost in a fork"
    while True:
        request, fds, _, _ = socket.recv_fds(control, _LARGEST, 4)
        if not request:
            os._exit(0)
        first = os.fork()
        if first == 0 and _begin(control, fds):
            return pickle.loads(request)  # type: ignore[no-any-return]
        for fd in fds:
            os.close(fd)
        os.waitpid(first, 0)


def _begin(control: socket.socket, fds: list[int]) -> bool:
    """Fork the program and a reaper that waits for it and sends its status; only the program
    returns."""
    if os.fork():
        os._exit(0)  # orphans the reaper, so that the server need not wait for it
    control.close()
    pid = os.fork()
    *streams, status_fd = fds
    if pid == 0:
        os.setsid()
        os.write(status_fd, b"%d" % os.getpid())
        os.close(status_fd)
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
            os.close(fd)
        return True
    for fd in (*streams, 0, 1, 2):
        os.close(fd)
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # the zombie reserves its pid
    status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    with contextlib.suppress(ConnectionError):
        os.write(status_fd, b"%d" % status)
        os.read(status_fd, 1)  # returns at EOF, when the caller has read the status or has ended
    os.waitpid(pid, 0)
    os._exit(0)


def _run_as_main(
    command: list[str], folder: str, environ: dict[str, str], blocked: set[int]
) -> None:
    """Run a module (-m), code (-c) or a file as __main__ in this freshly forked process."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    sys.orig_argv, sys.argv = command, command[1:]
    sys.path[:1] = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if command[1] == "-m":
        module, sys.argv = command[2], ["-m", *command[3:]]
        sys.path.insert(0, folder)
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]
    elif command[1] == "-c":
        sys.argv = ["-c", *command[3:]]
        sys.path.insert(0, "")
        exec(command[2], main.__dict__)
    else:
        file = main.__file__ = command[1]
        sys.path.insert(0, str(Path(file).parent))
        exec(compile(Path(file).read_bytes(), file, "exec"), main.__dict__)


if __name__ == "__main__":
    gc.collect()
    gc.freeze()  # keeps the final collection of each program from scanning torch's objects
    program = _serve(socket.socket(fileno=int(sys.argv[1])))
    _run_as_main(*program)
