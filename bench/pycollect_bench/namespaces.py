"""Network namespaces of one machine in place of hosts, joined by links of a limited rate.

Two hosts are the ends of one veth pair, more are ports of a bridge. `tc` limits what each host may
send and, through the bridge, receive. Needs root, and `ip` and `tc` of iproute2. The namespaces
share memory, files and cores: only the network is that of several hosts.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pycollect._command import interrupts_kept_from_children

from .ranks import RanksFailed, output

NAMES = Path("/run/netns")  # where `ip netns` keeps the names of namespaces
PREFIX = "pycollect"  # of our names, which go on with the process id of their owner
# The interface of every namespace that leads to the other ones.
INTERFACE = "eth0"
MOST_HOSTS = 200  # addresses 10.77.0.1 and up, in one subnet
# The token bucket of a link: the bytes of this many seconds at its rate, but at least this many.
# A larger bucket lets messages of its size pass at no rate at all (the bucket of 4 ms at 1 Gbit/s
# is 500 kB); a smaller one does not reach the rate, as a timer fires too late to use it.
_BUCKET_SECONDS, _LEAST_BUCKET = 100e-6, 32 << 10
_QUEUE = "50ms"  # longest time of a packet in the queue: what TCP keeps in it is never dropped


def remove() -> None:
    """Remove the namespaces of this process, and those of others that were killed."""
    for path in NAMES.glob(f"{PREFIX}-*-*"):
        owner = path.name.split("-")[1]
        if owner == str(os.getpid()) or not Path("/proc", owner).exists():
            # Another process may remove it at the same time.
            command = ["ip", "netns", "delete", path.name]
            subprocess.run(command, capture_output=True, check=False)


class Namespaces:
    """Context manager of a few namespaces, which are removed at its end, also by Ctrl-C.

    There is one at a time in a process. `rate` is that of every link in bits per second and
    direction; None: no limit.

    Raises:
        RanksFailed: if they cannot be made; the message has the command and its error.
    """

    def __init__(self, hosts: int = 2, rate: float | None = None) -> None:
        self._base = f"{PREFIX}-{os.getpid()}"
        self.names = [f"{self._base}-{host}" for host in range(hosts)]
        self.addresses = [f"10.77.0.{host + 1}" for host in range(hosts)]
        self._queues = [(name, INTERFACE) for name in self.names]  # where the rate is limited
        self._started: list[subprocess.Popen[str]] = []
        try:
            with interrupts_kept_from_children():
                remove()
                self._make()
            self.limit(rate)
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        for name in self.names:
            output("ip", "netns", "add", name)
        if len(self.names) == 2:
            self._pair(self.names[0], INTERFACE, self.names[1])
        else:
            self._bridge(f"{self._base}-bridge")
        for name, address in zip(self.names, self.addresses, strict=True):
            output("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            output("ip", "-n", name, "link", "set", "lo", "up")
            # Without addresses of IPv6 no packet is counted that nobody has sent.
            output("ip", "-n", name, "link", "set", INTERFACE, "addrgenmode", "none", "up")

    def _pair(self, name: str, peer: str, of_peer: str) -> None:
        """Make a host's interface; its other end is `peer` in the namespace `of_peer`."""
        pair = ("type", "veth", "peer", "name", peer, "netns", of_peer)
        output("ip", "-n", name, "link", "add", INTERFACE, *pair)

    def _bridge(self, switch: str) -> None:
        output("ip", "netns", "add", switch)
        quiet = ("mcast_snooping", "0")  # otherwise the bridge sends queries of its own
        output("ip", "-n", switch, "link", "add", "bridge", "type", "bridge", *quiet)
        up = ("addrgenmode", "none", "up")
        output("ip", "-n", switch, "link", "set", "bridge", *up)
        for host, name in enumerate(self.names):
            port = f"port{host}"
            self._pair(name, port, switch)
            output("ip", "-n", switch, "link", "set", port, "master", "bridge", *up)
            self._queues.append((switch, port))

    def limit(self, rate: float | None) -> None:
        """Limit all links to `rate` bits per second and direction; None: not at all."""
        how: tuple[str, ...] = ("noqueue",)
        if rate is not None:
            bucket = max(_LEAST_BUCKET, round(rate / 8 * _BUCKET_SECONDS))
            how = ("tbf", "rate", f"{round(rate)}bit", "burst", f"{bucket}b", "latency", _QUEUE)
        for name, interface in self._queues:
            output("tc", "-n", name, "qdisc", "replace", "dev", interface, "root", *how)

    def link(self, host: int, state: str) -> None:
        """Connect a host ("up"), or disconnect it ("down"): packets from and to it get lost."""
        output("ip", "-n", self.names[host], "link", "set", INTERFACE, state)

    def start(
        self, host: int, command: Sequence[str], env: Mapping[str, str], **more: Any
    ) -> subprocess.Popen[str]:
        """Start a program on a host; `close` kills it if it runs.

        Variables tell it its host, its interface and the first host's address, before those of
        `env`.
        """
        name = self.names[host]
        of_host = {"PYCOLLECT_HOST": name, "MASTER_ADDR": self.addresses[0]}
        variables = {**os.environ, **of_host, "GLOO_SOCKET_IFNAME": INTERFACE, **env}
        command = ["ip", "netns", "exec", name, *command]
        self._started.append(subprocess.Popen(command, env=variables, text=True, **more))
        return self._started[-1]

    def close(self) -> None:
        """Kill the programs that `start` has started, and remove the namespaces."""
        with interrupts_kept_from_children():
            for program in self._started:
                program.kill()
                program.wait()
            remove()

    def __enter__(self) -> Namespaces:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def why_no_namespaces() -> str:
    """Return the reason why no namespaces with limited links can be made here, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        Namespaces(2, rate=1e9).close()
    except (OSError, RanksFailed) as error:
        return f"ip and tc of iproute2 make no network namespaces: {error}"
    return ""
