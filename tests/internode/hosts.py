"""Multi-node groups: of network namespaces, or made by the option `hosts`."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from helpers.pool import Fresh
from helpers.processes import RankProcess, replies, values
from internode.network import Network, enter

Placement = list[list[int]]  # the ranks of each host
TWO_OF_TWO: Placement = [[0, 1], [2, 3]]

_numbers = itertools.count()


def size_of(placement: Placement) -> int:
    return sum(len(ranks) for ranks in placement)


def host_of(placement: Placement, rank: int) -> int:
    return next(host for host, ranks in enumerate(placement) if rank in ranks)


def store_of(where: str, rank: int, size: int, seconds: float) -> dist.Store:
    """At an address of rank 0's host, as torchrun's is kept by one of the hosts, or in a file."""
    kind, _, at = where.partition(":")
    if kind == "file":
        return dist.FileStore(at, size)
    address, port = at.split(":")
    # As init_process_group makes it, and as torchrun's: one thread waits while another asks.
    return dist.TCPStore(address, int(port), size, rank == 0, timedelta(seconds=max(seconds, 30)))


def as_rank(
    rank: int,
    placement: Placement,
    network: list[str],
    store: str,
    seconds: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    """Runs `function` in a multi-node group; `network` names them, or is empty."""
    size = size_of(placement)
    if network:
        enter(network[host_of(placement, rank)])
    else:
        names = [f"h{host_of(placement, other)}" for other in range(size)]
        os.environ["DREAMCOMM_HOSTS"] = ",".join(names)
    dist.init_process_group(
        "dreamcomm",
        store=store_of(store, rank, size, seconds),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()


class Hosts:
    """Starts ranks on hosts of one kind."""

    def __init__(self, fresh: Fresh, folder: Path, network: Network | None) -> None:
        self.fresh = fresh
        self.folder = folder
        self.network = network

    def where(self, kind: str) -> str:
        """The address of a store that no other group has."""
        if kind == "file":
            return f"file:{self.folder / f'store-{next(_numbers)}'}"
        if self.network:
            return f"tcp:10.77.0.1:{29500 + next(_numbers)}"
        with socket.create_server(("127.0.0.1", 0)) as free:
            return f"tcp:127.0.0.1:{free.getsockname()[1]}"

    def start(
        self,
        placement: Placement,
        function: Callable[..., Any],
        *args: Any,
        seconds: float = 30.0,
        store: str = "file",
    ) -> list[RankProcess]:
        """`store`: "file", or "tcp", which rank 0's process keeps."""
        where = self.where(store)
        names = self.network.hosts if self.network else []
        described = (placement, names, where, seconds, function, args)
        return self.fresh.start(as_rank, *described, world=size_of(placement), group=False)

    def run(
        self,
        placement: Placement,
        function: Callable[..., Any],
        *args: Any,
        seconds: float = 30.0,
        timeout: float = 120.0,
        store: str = "file",
    ) -> list[Any]:
        """What `function` returned on each rank."""
        ranks = self.start(placement, function, *args, seconds=seconds, store=store)
        return values(replies(ranks, timeout))
