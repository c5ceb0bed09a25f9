"""A cluster in a few numbers: its hosts, and the costs of data within and between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dreamcomm.tools.simulate import defaults
from dreamcomm.tools.simulate.units import parse_rate, parse_time

MOST_RANKS = 16_384


@dataclass(frozen=True)
class Wire:
    """Messages between nodes.

    The defaults are those of WireCosts::fixed (csrc/internode/cost/model.cc).

    latency: seconds of a message without bytes.
    message: seconds of the two ranks for each further message.
    alone: bytes per second that a host sends if one of its ranks sends.
    bandwidth: bytes per second that a host sends, and receives, if all of its ranks do.
    chunk: seconds of all its ranks for each chunk of a tensor, beyond the time of its bytes.
    handling: seconds of all its ranks for each byte that a host sends, besides copies within it.
    overlap: the fraction of the ranks' part of the chunks, or of the wire's part if that is
        shorter, that overlaps with the other: 1 is all; 0 is none, for example because both
        need the same processors.
    by_leaders, by_carriers: factors of the times of measured hosts at some sizes
        (csrc/internode/cost/corrections.h).
    """

    latency: float = 40e-6
    message: float = 10e-6
    alone: float = 1.1e9
    bandwidth: float = 1.1e9
    chunk: float = 50e-6
    handling: float = 0.0
    overlap: float = 1.0
    by_leaders: tuple[float, ...] = (1.0,) * 8
    by_carriers: tuple[float, ...] = (1.0,) * 8

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Wire:
        """Makes the costs from the result of :meth:`numbers`, or from a group's measurement."""
        latency, message, alone, byte, chunk, handling, overlap, *rest = numbers
        half = len(rest) // 2
        corrections = tuple(rest[:half]), tuple(rest[half:])
        costs = chunk, handling, overlap
        return cls(latency, message, 1 / alone, 1 / byte, *costs, *corrections)

    def numbers(self) -> tuple[float, ...]:
        """The numbers in the form that the compiled model takes."""
        rates = 1 / self.alone, 1 / self.bandwidth
        costs = self.latency, self.message, *rates, self.chunk, self.handling, self.overlap
        return (*costs, *self.by_leaders, *self.by_carriers)


@dataclass(frozen=True)
class Cluster:
    """The hosts, and the costs of both levels.

    ranks_on: ranks of each host.
    here: costs within a host, as text (``_C.even_costs``, or a group's measurement).
    """

    ranks_on: tuple[int, ...]
    here: str
    wire: Wire = Wire()

    @property
    def size(self) -> int:
        return sum(self.ranks_on)

    def with_hosts(self, hosts: int) -> Cluster:
        """A cluster of so many hosts like the first of these."""
        return replace(self, ranks_on=self.ranks_on[:1] * hosts)


def within(turn: float, bandwidth: float) -> str:
    """Costs within a host of a turn in seconds and a rank's copies in bytes per second."""
    from dreamcomm._C import even_costs

    return even_costs(turn, 1 / bandwidth)


_KEYS = {
    "": {"hosts", "ranks_per_host", "ranks_on_hosts"},
    "within": {"latency", "bandwidth"},
    "between": {"latency", "message", "bandwidth", "bandwidth_of_a_rank", "chunk"},
}


def described(table: Mapping[str, Any]) -> Cluster:
    """Makes a cluster from the content of a TOML file; only the hosts are required.

    Raises:
        ValueError: something is unknown, missing or out of range; the text says what.
    """
    for name in ("within", "between"):
        if not isinstance(table.get(name, {}), Mapping):
            raise ValueError(
                f'{name} is a section: write [{name}] and below it bandwidth = "10GB/s" or the '
                f"like, got {name} = {table[name]!r}"
            )
    sections = {"": {k: v for k, v in table.items() if not isinstance(v, Mapping)}}
    sections |= {k: dict(v) for k, v in table.items() if isinstance(v, Mapping)}
    for section, entries in sections.items():
        known = _KEYS.get(section)
        if known is None:
            raise ValueError(f"a cluster has no section [{section}]: expected within and between")
        if unknown := sorted(set(entries) - known):
            where = f" in [{section}]" if section else ""
            raise ValueError(f"unknown{where}: {', '.join(unknown)}; known: {sorted(known)}")
    return Cluster(
        ranks_on=_hosts(sections[""]),
        here=_within(sections.get("within", {})),
        wire=_wire(sections.get("between", {})),
    )


def _hosts(entries: dict[str, Any]) -> tuple[int, ...]:
    listed = entries.get("ranks_on_hosts")
    if listed is None:
        hosts = _count(entries, "hosts", defaults.HOSTS, "a cluster has one host at least")
        default = defaults.RANKS_PER_HOST
        ranks = _count(entries, "ranks_per_host", default, "every host has one rank at least")
        _check_ranks(hosts * ranks)  # before there is a list as long as that
        return (ranks,) * hosts
    if len(entries) > 1:
        raise ValueError("ranks_on_hosts says it all: leave hosts and ranks_per_host out")
    if not isinstance(listed, list) or not listed:
        raise ValueError(
            f"ranks_on_hosts lists the ranks of one host at least, as [1, 2], got {listed!r}"
        )
    if any(type(ranks) is not int or ranks < 1 for ranks in listed):
        raise ValueError(f"every host has one rank at least, got {listed[:8]}")
    _check_ranks(sum(listed))
    return tuple(listed)


def _count(entries: dict[str, Any], key: str, default: int, rule: str) -> int:
    found = entries.get(key, default)
    if type(found) is not int or found < 1:  # True is an int, too, but no number of hosts
        raise ValueError(f"{rule}: expected {key} = {default} or the like, got {found!r}")
    return found


def _check_ranks(ranks: int) -> None:
    if ranks > MOST_RANKS:
        raise ValueError(f"the model is for up to {MOST_RANKS:,} ranks in all, got {ranks:,}")


def _within(entries: dict[str, Any]) -> str:
    return within(
        _number(entries, "latency", parse_time, defaults.LATENCY_WITHIN),
        _number(entries, "bandwidth", parse_rate, defaults.BANDWIDTH_WITHIN),
    )


def _wire(entries: dict[str, Any]) -> Wire:
    host = entries.get("bandwidth", defaults.BANDWIDTH_BETWEEN)
    bandwidth = _number(entries, "bandwidth", parse_rate, defaults.BANDWIDTH_BETWEEN)
    alone = _number(entries, "bandwidth_of_a_rank", parse_rate, host)
    if alone > bandwidth:
        raise ValueError(
            "a rank sends no more alone than its host does with all: bandwidth_of_a_rank = "
            f"{entries['bandwidth_of_a_rank']!r} is above bandwidth = {host!r}"
        )
    return Wire(
        latency=_number(entries, "latency", parse_time, defaults.LATENCY_BETWEEN),
        message=_number(entries, "message", parse_time, defaults.MESSAGE_BETWEEN),
        alone=alone,
        bandwidth=bandwidth,
        chunk=_number(entries, "chunk", parse_time, defaults.CHUNK_BETWEEN),
    )


def _number(entries: dict[str, Any], key: str, parse: Any, default: str) -> float:
    text = entries.get(key, default)
    if not isinstance(text, str):
        raise ValueError(f"{key} needs a unit: write it as text, got {text!r}")
    number: float = parse(text)
    return number
