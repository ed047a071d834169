"""Network namespaces of one machine in place of hosts, joined by links of a limited rate.

Two hosts are the ends of one veth pair, more are ports of a bridge. `tc` limits what each host may
send and, through the bridge, receive. Needs root, and `ip` and `tc` of iproute2. The namespaces
share memory, files and cores: only the network is that of several hosts.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pycollect._command import interrupts_kept_from_children

from .ranks import RanksFailed

NAMES = Path("/run/netns")  # where `ip netns` keeps the names of namespaces
PREFIX = "pycollect"  # of our names, which go on with the process id of their owner
# The interface of every namespace that leads to the other ones.
INTERFACE = "eth0"
_NUMBERS = itertools.count()
MOST_HOSTS = 200  # addresses 10.77.0.1 and up, in one subnet
# The token bucket of a link: the bytes of this many seconds at its rate, but at least this many.
# A larger bucket lets messages of its size pass at no rate at all (the bucket of 4 ms at 1 Gbit/s
# is 500 kB); a smaller one does not reach the rate, as a timer fires too late to use it.
_BUCKET_SECONDS, _LEAST_BUCKET = 100e-6, 32 << 10
_QUEUE = "50ms"  # longest time of a packet in the queue: what TCP keeps in it is never dropped


def call(*command: str) -> str:
    """Run a command and return its output; raise RanksFailed with its error if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RanksFailed(f"{' '.join(command)}: {' '.join(done.stderr.split())}")
    return done.stdout


def remove(paths: Iterable[Path]) -> None:
    """Remove namespaces; one that another process removes at the same time is no error."""
    for path in paths:
        subprocess.run(["ip", "netns", "delete", path.name], capture_output=True, check=False)


def remove_stale() -> None:
    """Remove the namespaces of processes that were killed before they could do it."""
    for path in NAMES.glob(f"{PREFIX}-*-*"):
        if not Path("/proc", path.name.split("-")[1]).exists():
            remove([path])


class Namespaces:
    """Context manager of a few namespaces, which are removed at its end, also by Ctrl-C.

    `rate` is that of every link in bits per second and direction; None: no limit.

    Raises:
        RanksFailed: if they cannot be made; the message has the command and its error.
    """

    def __init__(self, hosts: int = 2, rate: float | None = None) -> None:
        if not 2 <= hosts <= MOST_HOSTS:
            raise ValueError(f"{hosts} hosts; there may be 2 to {MOST_HOSTS}")
        self._base = f"{PREFIX}-{os.getpid()}-{next(_NUMBERS)}"
        self.names = [f"{self._base}-{host}" for host in range(hosts)]
        self.addresses = [f"10.77.0.{host + 1}" for host in range(hosts)]
        self._queues = [(name, INTERFACE) for name in self.names]  # where the rate is limited
        self._started: list[subprocess.Popen[str]] = []
        try:
            with interrupts_kept_from_children():
                remove_stale()
                self._make()
            self.limit(rate)
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        for name in self.names:
            call("ip", "netns", "add", name)
        if len(self.names) == 2:
            self._pair(0, INTERFACE, self.names[1])
        else:
            self._bridge()
        for name, address in zip(self.names, self.addresses, strict=True):
            call("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            call("ip", "-n", name, "link", "set", "lo", "up")
            # Without addresses of IPv6 no packet is counted that nobody has sent.
            call("ip", "-n", name, "link", "set", INTERFACE, "addrgenmode", "none", "up")

    def _pair(self, host: int, peer: str, name: str) -> None:
        """Make the interface of a host; its other end is `peer` in the namespace `name`."""
        pair = ("type", "veth", "peer", "name", peer, "netns", name)
        call("ip", "-n", self.names[host], "link", "add", INTERFACE, *pair)

    def _bridge(self) -> None:
        switch = f"{self._base}-bridge"
        call("ip", "netns", "add", switch)
        quiet = ("mcast_snooping", "0")  # otherwise the bridge sends queries of its own
        call("ip", "-n", switch, "link", "add", "bridge", "type", "bridge", *quiet)
        call("ip", "-n", switch, "link", "set", "bridge", "addrgenmode", "none", "up")
        for host in range(len(self.names)):
            port = f"port{host}"
            self._pair(host, port, switch)
            up = ("master", "bridge", "addrgenmode", "none", "up")
            call("ip", "-n", switch, "link", "set", port, *up)
            self._queues.append((switch, port))

    def limit(self, rate: float | None) -> None:
        """Limit all links to `rate` bits per second and direction; None: not at all."""
        for name, interface in self._queues:
            at = ("dev", interface, "root")
            if rate is None:
                call("tc", "-n", name, "qdisc", "replace", *at, "noqueue")
                continue
            bucket = max(_LEAST_BUCKET, round(rate / 8 * _BUCKET_SECONDS))
            how = ("rate", f"{round(rate)}bit", "burst", f"{bucket}b", "latency", _QUEUE)
            call("tc", "-n", name, "qdisc", "replace", *at, "tbf", *how)

    def link_down(self, host: int) -> None:
        """Disconnect a host: its packets to other hosts get lost, and theirs to it."""
        call("ip", "-n", self.names[host], "link", "set", INTERFACE, "down")

    def link_up(self, host: int) -> None:
        """Connect a host again."""
        call("ip", "-n", self.names[host], "link", "set", INTERFACE, "up")

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` on a host."""
        return ["ip", "netns", "exec", self.names[host], *command]

    def environ(self, host: int) -> dict[str, str]:
        """Return the variables that tell a rank its host, its interface and the first host."""
        return {
            "PYCOLLECT_HOST": self.names[host],
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "MASTER_ADDR": self.addresses[0],
        }

    def start(
        self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None, **more: Any
    ) -> subprocess.Popen[str]:
        """Start a program on a host; `env` is added to `environ`. `close` kills it if it runs."""
        variables = {**os.environ, **self.environ(host), **(env or {})}
        started = subprocess.Popen(self.command(host, command), env=variables, text=True, **more)
        self._started.append(started)
        return started

    def run(
        self,
        host: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        timeout: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on a host to its end, and capture its output as text."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        program = self.start(host, command, env, **pipes)
        try:
            out, err = program.communicate(timeout=timeout)
        finally:
            program.kill()
        return subprocess.CompletedProcess(program.args, program.returncode, out, err)

    def close(self) -> None:
        """Kill the programs that `start` has started, and remove the namespaces."""
        with interrupts_kept_from_children():
            for program in self._started:
                program.kill()
                program.wait()
            remove(NAMES.glob(f"{self._base}-*"))

    def __enter__(self) -> Namespaces:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def two_hosts(rate: float | None = None) -> Namespaces:
    """Return two hosts whose link has `rate` bits per second and direction."""
    return Namespaces(2, rate)


def why_no_namespaces() -> str:
    """Return the reason why no namespaces with limited links can be made here, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"network namespaces need {tool}, which was not found; install iproute2"
    try:
        two_hosts(rate=1e9).close()
    except RanksFailed as error:
        return str(error)
    return ""
