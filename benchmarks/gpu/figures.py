"""The figures of the suite's parts, compared with the goals. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from lines import Line

NOT_MEASURED = "not measured"

# The checks of the suite's parts.
VERIFIED = {
    "processes": "2 and 4 processes on the device over CUDA IPC, one stuck, one killed",
    "ops": "pack and unpack: the CPU's bits",
    "backend": "torch's collectives, streams, graphs, DDP, hooks, FSDP2; a stuck and a killed rank",
    "kernels": "every kernel on virtual ranks; threads as ranks",
    "hosts": "pretended hosts with NCCL between them, and the group that goes to NCCL",
    "memcheck": "compute-sanitizer memcheck, small sizes",
    "racecheck": "compute-sanitizer racecheck, the kernels with shared memory",
}
CALLS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
VIRTUAL_WORLDS = (2, 4, 8)
WORLDS, DTYPES = (2, 4), ("float32", "bfloat16")
MADE = ("by Python", "by a graph")  # calls of collectives
LISTS = (
    "7 B layer, whole",
    "7 B layer, in buckets of 25 MiB",
    "ResNet-50, whole",
    "ResNet-50, in buckets of 25 MiB",
    "10,000 tiny tensors",
)
PASSES = ("pack", "unpack", "pack and unpack", "unpack, norm")


@dataclass(frozen=True)
class Figure:
    """One figure. ``met`` is None if nothing was measured, or there is no goal."""

    name: str
    goal: str
    measured: str = NOT_MEASURED
    met: bool | None = None


@dataclass(frozen=True)
class Found:
    """The results of the parts."""

    facts: dict[str, Any] = field(default_factory=dict)
    parts: list[Line] = field(default_factory=list)
    rows: list[Line] = field(default_factory=list)
    small: list[Line] = field(default_factory=list)
    bucket: list[Line] = field(default_factory=list)
    collectives: list[Line] = field(default_factory=list)
    versus: dict[str, Any] = field(default_factory=dict)


def figures(found: Found) -> list[Figure]:
    """Every figure of the specification, measured or not."""
    return [
        *verification(found.parts),
        *rows(found.rows),
        *small(found.small),
        *collectives(found.collectives),
        *bucket(found.bucket),
        versus(found.versus, found.parts),
    ]


def verification(parts: list[Line]) -> list[Figure]:
    by_name = {line["part"]: line for line in parts}
    return [verified(words, by_name.get(part)) for part, words in VERIFIED.items()]


def verified(words: str, line: Line | None) -> Figure:
    if line is None:
        return Figure(words, "passes", "not run")
    if line["outcome"] == "not run":
        return Figure(words, "passes", f"not run: {line['why']}")
    passed = line["outcome"] == "ok"
    told = "passed" if passed else f"FAILED ({line['why']})"
    return Figure(words, "passes", f"{told}, {line['seconds']} s", passed)


def judged(
    name: str, goal: str, lines: list[Line], words: Callable[[Line], str], reached: bool
) -> Figure:
    """A figure of several lines, which counts only if their results are right."""
    if not lines:
        return Figure(name, goal)
    text = ", ".join(words(line) for line in lines)
    if not all(line["verified"] for line in lines):
        return Figure(name, goal, f"{text}: WRONG RESULTS", False)
    return Figure(name, goal, text, reached)


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def size(count: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} B"


def grouped(lines: list[Line], *keys: str) -> dict[tuple[Any, ...], list[Line]]:
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line[key] for key in keys), []).append(line)
    return groups


def rows(lines: list[Line]) -> list[Figure]:
    """Each algorithm's bytes of memory over time, as a share of the copy rate."""
    groups = grouped(lines, "call", "row")
    missing = [(call, "every row") for call in CALLS if not any(k[0] == call for k in groups)]
    return [
        row(f"{call}, {name}", at)
        for (call, name), at in [*groups.items(), *((key, []) for key in missing)]
    ]


def row(name: str, lines: list[Line]) -> Figure:
    figure = judged(
        name + (f", {size(lines[0]['bytes'])} a rank" if lines else ""),
        "85 % of the copy rate",
        lines,
        lambda line: f"{line['ranks']} virtual ranks: {percent(line['share'])}",
        all(line["share"] >= line["goal"] for line in lines),
    )
    absent = [n for n in VIRTUAL_WORLDS if n not in {line["ranks"] for line in lines}]
    if not lines or not absent:
        return figure
    words = ", ".join(f"{n} virtual ranks: {NOT_MEASURED}" for n in absent)
    missed = False if figure.met is False else None
    return replace(figure, measured=f"{figure.measured}, {words}", met=missed)


def small(lines: list[Line]) -> list[Figure]:
    """A full all_reduce in a replayed graph, compared with an empty barrier."""
    groups = grouped(lines, "ranks")
    return [
        judged(
            f"small all_reduce, {ranks} virtual ranks",
            "at most 1.5 barriers",
            at := groups.get((ranks,), []),
            lambda line: (
                f"{size(line['bytes'])}: {line['ratio']:.2f} "
                f"({line['us']:.1f} us of {line['barrier_us']:.1f})"
            ),
            all(line["ratio"] <= line["goal"] for line in at),
        )
        for ranks in VIRTUAL_WORLDS
    ]


def collectives(lines: list[Line]) -> list[Figure]:
    """The time relative to the faster of torch's one-shot and two-shot, which is 1."""
    never, mostly = "never slower: 1", "1.2 in the median"
    timed = [line for line in lines if line["ratio"] is not None]
    why = next((f": {line['best_peer']}" for line in lines if line["ratio"] is None), "")
    sharing = next((f"; {line['sharing']}" for line in lines), "")
    groups = grouped(timed, "ranks", "dtype", "made")
    found = [
        judged(
            f"all_reduce {made} beside symmetric memory, {ranks} processes, {dtype}{sharing}",
            never,
            at := groups.get((ranks, dtype, made), []),
            lambda line: f"{size(line['bytes'])}: {line['ratio']:.2f}",
            all(line["ratio"] >= line["goal"] for line in at),
        )
        for made in MADE
        for ranks in WORLDS
        for dtype in DTYPES
    ]
    for made in MADE:
        name, at = f"the same, all cases {made}", [line for line in timed if line["made"] == made]
        if not at:
            found.append(Figure(name, mostly, NOT_MEASURED + why))
            continue
        middle = median(line["ratio"] for line in at)
        reached = all(line["verified"] for line in at) and middle >= at[0]["median_goal"]
        found.append(Figure(name, mostly, f"{middle:.2f}, of {len(at)} cases", reached))
    return found


def bucket(lines: list[Line]) -> list[Figure]:
    """Pack and unpack compared with torch's ways. Cases that bytes do not bound have no goal."""
    groups = grouped([li for li in lines if li["figure"] == "bucket"], "parameters", "pass")
    found: list[Figure] = []
    for name in LISTS:
        for one in PASSES:
            at = groups.get((name, one), [])
            goal = "1.3 x the best of torch's ways, 90 % of the copy rate"
            found += bucket_figures(at[0]) if at else [Figure(f"{one}: {name}", goal)]
    return found


def bucket_figures(line: Line) -> list[Figure]:
    name = f"{line['pass']}: {line['parameters']}"
    speed = f"{line['ratio']:.2f} ({line['best_peer']})"
    share = percent(line["share"])
    if not line["verified"]:
        return [Figure(name, "the CPU's bits", "WRONG RESULTS", False)]
    if not line["bytes_bound"]:
        return [Figure(name, "none: not bound by bytes", f"{speed}, {share} of the copy rate")]
    ratio_goal = f"{line['ratio_goal']} x the best of torch's ways"
    share_goal = f"{percent(line['share_goal'])} of the copy rate"
    return [
        Figure(name, ratio_goal, speed, line["ratio"] >= line["ratio_goal"]),
        Figure(name, share_goal, share, line["share"] >= line["share_goal"]),
    ]


def versus(run: dict[str, Any], parts: list[Line]) -> Figure:
    """Its figures are in versus_nccl.json."""
    name, goal = "collectives beside stock NCCL, one rank a GPU", "never slower: 1"
    part = next((line for line in parts if line["part"] == "versus_nccl"), None)
    if run:
        ratios = [
            row["timings"]["nccl"]["p50"] / row["timings"]["dreamcomm"]["p50"]
            for row in run["rows"]
            if {"nccl", "dreamcomm"} <= set(row["timings"])
        ]
        if ratios:
            told = f"{median(ratios):.2f} in the median of {len(ratios)} cases"
            return Figure(name, goal, f"{told}, at worst {min(ratios):.2f}", min(ratios) >= 1)
        notes = [note for row in run["rows"] for note in row["notes"]]
        return Figure(name, goal, ": ".join([NOT_MEASURED, *notes[:1]]))
    return Figure(name, goal, NOT_MEASURED + (f": {part['why']}" if part else ""))
