"""Groups that span hosts: of network namespaces, or made by the option `hosts`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from helpers.pool import Fresh
from helpers.processes import RankProcess, replies, values
from spanning.network import Network, enter

Placement = list[list[int]]  # the ranks of each host

_numbers = itertools.count()


def size_of(placement: Placement) -> int:
    return sum(len(ranks) for ranks in placement)


def host_of(placement: Placement, rank: int) -> int:
    return next(host for host, ranks in enumerate(placement) if rank in ranks)


def as_rank(
    rank: int,
    placement: Placement,
    network: list[str],
    store: str,
    seconds: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    """Runs `function` in a group that spans hosts; `network` names them, or is empty."""
    size = size_of(placement)
    if network:
        enter(network[host_of(placement, rank)])
    else:
        names = [f"h{host_of(placement, other)}" for other in range(size)]
        os.environ["DREAMCOMM_HOSTS"] = ",".join(names)
    dist.init_process_group(
        "dreamcomm",
        store=dist.FileStore(store, size),
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

    def start(
        self, placement: Placement, function: Callable[..., Any], *args: Any, seconds: float = 30.0
    ) -> list[RankProcess]:
        store = str(self.folder / f"store-{next(_numbers)}")
        names = self.network.hosts if self.network else []
        described = (placement, names, store, seconds, function, args)
        return self.fresh.start(as_rank, *described, world=size_of(placement), group=False)

    def run(
        self,
        placement: Placement,
        function: Callable[..., Any],
        *args: Any,
        seconds: float = 30.0,
        timeout: float = 120.0,
    ) -> list[Any]:
        """What `function` returned on each rank."""
        return values(replies(self.start(placement, function, *args, seconds=seconds), timeout))
