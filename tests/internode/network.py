"""Hosts that are network namespaces, joined by one bridge."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_numbers = itertools.count()


class NoNetwork(Exception):
    """Why there can be none here."""


class Network:
    """`hosts` namespaces with an interface "net0" each, all on one bridge or on one relay.

    rate: of each host's link, as tc writes it ("1gbit"), or None for what the machine gives.
    delay: seconds that a frame takes, beyond that. loss: the share of frames that never come.
    congestion: the name of TCP's congestion control in the hosts, or None for the machine's.
    Raises NoNetwork on entry where the kernel, or a missing program, forbids it.
    """

    def __init__(
        self,
        hosts: int,
        rate: str | None = None,
        delay: float = 0.0,
        loss: float = 0.0,
        congestion: str | None = None,
    ) -> None:
        number = next(_numbers)
        self.bridge = f"dcb{os.getpid() % 10**6}x{number}"
        self.hosts = [f"dc{os.getpid()}x{number}h{host}" for host in range(hosts)]
        self.rate = rate
        self.delay = delay
        self.loss = loss
        self.congestion = congestion
        self.relay: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Network:
        try:
            self._make()
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__(None, None, None)
            words = getattr(error, "stderr", None) or str(error)
            raise NoNetwork(f"no network namespaces here: {words.strip()}") from None
        return self

    def _make(self) -> None:
        for host in self.hosts:
            _ip("netns", "add", host)
        if self.delay or self.loss:
            self._make_relay()
        else:
            self._make_bridge()
        for number, host in enumerate(self.hosts):
            _ip("-n", host, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "net0")
            for name in ("lo", "net0"):
                _ip("-n", host, "link", "set", name, "up")
            if self.congestion:
                setting = f"echo {self.congestion} > /proc/sys/net/ipv4/tcp_congestion_control"
                _run("ip", "netns", "exec", host, "sh", "-c", setting)
            if self.rate:
                limit = ("tbf", "rate", self.rate, "burst", "256kb", "latency", "100ms")
                _run(
                    "ip", "netns", "exec", host, "tc", "qdisc", "add", "dev", "net0", "root", *limit
                )

    def _make_bridge(self) -> None:
        _ip("link", "add", self.bridge, "type", "bridge")
        _ip("link", "set", self.bridge, "up")
        for number, host in enumerate(self.hosts):
            outside = f"{self.bridge[2:]}v{number}"[:15]
            _ip("link", "add", outside, "type", "veth", "peer", "name", "net0", "netns", host)
            _ip("link", "set", outside, "master", self.bridge, "up")

    def _make_relay(self) -> None:
        source = Path(__file__).with_name("relay.cc")
        with tempfile.TemporaryDirectory() as folder:
            program = f"{folder}/relay"
            _run("c++", "-std=c++20", "-O2", "-o", program, str(source))
            self.relay = subprocess.Popen(
                [program, str(self.delay), str(self.loss), *self.hosts],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert self.relay.stdout is not None
            if not self.relay.stdout.readline():
                raise OSError("the relay could not make its interfaces")

    def cut(self, host: int) -> None:
        """The host's link is down from now on."""
        _ip("-n", self.hosts[host], "link", "set", "net0", "down")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.relay is not None:
            self.relay.communicate()
        for host in self.hosts:
            subprocess.run(["ip", "netns", "del", host], capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)


def enter(host: str) -> None:
    """Moves this thread, and those it starts, into a host. Before any socket is made."""
    library = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{host}") as namespace:
        if library.setns(namespace.fileno(), _NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {host}")
    os.environ["GLOO_SOCKET_IFNAME"] = "net0"


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
