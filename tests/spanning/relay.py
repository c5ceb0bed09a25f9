"""The wire between hosts, for kernels without netem: it delays, and may lose, what it carries.

python relay.py DELAY LOSS HOST...: makes an interface "net0" (a TAP) in each network namespace,
says so in a line, and carries frames between them until its standard input ends. DELAY in seconds,
LOSS the share of frames that are dropped, from 0 to 1.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
SET_INTERFACE, SET_OFFLOAD = 0x400454CA, 0x400454D0  # TUNSETIFF, TUNSETOFFLOAD
TAP, NO_INFO, WITH_HEADER = 0x0002, 0x1000, 0x4000
CHECKSUMS_AND_SEGMENTS = 0x01 | 0x02 | 0x04  # frames up to 64 KiB cross as one
HEADER = 10  # of virtio, before each frame
MOST = 1 << 17
EVERYBODY = 0x01  # in the first byte of an address: a group's


def tap_in(host: str) -> int:
    """A descriptor of a new interface "net0" in the namespace."""
    with open(f"/run/netns/{host}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {host}")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, SET_INTERFACE, struct.pack("16sH", b"net0", TAP | NO_INFO | WITH_HEADER))
    fcntl.ioctl(tap, SET_OFFLOAD, CHECKSUMS_AND_SEGMENTS)
    return tap


class Wire:
    """A switch that learns which interface has which address."""

    def __init__(self, taps: list[int], delay: float, loss: float) -> None:
        self.taps = taps
        self.delay = delay
        self.loss = loss
        self.random = random.Random(1)
        self.ports: dict[bytes, int] = {}
        self.under_way: collections.deque[tuple[float, int, bytes]] = collections.deque()

    def carry(self) -> None:
        while True:
            wait = max(self.under_way[0][0] - time.monotonic(), 0) if self.under_way else None
            ready, _, _ = select.select([*self.taps, 0], [], [], wait)
            if 0 in ready and not os.read(0, 1):
                return
            for tap in ready:
                if tap != 0:
                    self.take(tap)
            self.deliver()

    def take(self, tap: int) -> None:
        try:
            frame = os.read(tap, MOST)
        except BlockingIOError:
            return
        if self.loss and self.random.random() < self.loss:
            return
        target, source = frame[HEADER : HEADER + 6], frame[HEADER + 6 : HEADER + 12]
        self.ports[source] = tap
        known = None if target[0] & EVERYBODY else self.ports.get(target)
        due = time.monotonic() + self.delay
        for other in self.taps if known is None else [known]:
            if other != tap:
                self.under_way.append((due, other, frame))

    def deliver(self) -> None:
        now = time.monotonic()
        while self.under_way and self.under_way[0][0] <= now:
            _, tap, frame = self.under_way.popleft()
            with contextlib.suppress(OSError):  # it is down, or its queue is full: as on a wire
                os.write(tap, frame)


def main() -> None:
    delay, loss, *hosts = sys.argv[1:]
    taps = [tap_in(host) for host in hosts]
    print("there", flush=True)
    Wire(taps, float(delay), float(loss)).carry()


if __name__ == "__main__":
    main()
