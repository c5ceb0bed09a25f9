"""Trains in 0.6 of the memory that a model needs, with its parameters and state in files.

    python benchmarks/offload_memory.py --folder /var/tmp --json offload.json

The ranks join a control group of their own, of version 1 or 2, which needs root. The need is the
group's peak where nothing is limited and nothing lies in files: parameters, two states of AdamW and
gradients, of 4 bytes an element each, and what passes keep. A rank's modules, loaded before it
joins, do not count. Gradients stay in memory in any case. Each run is in processes of its own:

    plain      no limit, no files: the need, and the bits that all others have to have
    in files   limited
    no files   limited: the system has to kill it
    killed     limited, in files: saves, goes on, and ends by SIGKILL between two steps
    resumed    limited, in files: from that save to the same end
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

import dreamcomm
from dreamcomm.tools.bench.measurement import Json, Measurement, World, chosen
from host_memory import control_group, peak_file
from offload_job import KILLED, MODELS, SAVED, Ended, Job, run_rank

SHARE = 0.6  # of the need
DISK_BYTES, DISK_BLOCK = 1 << 30, 4 << 20


@dataclass(frozen=True)
class Run:
    """One run of all ranks: bytes of the group at its peak, and what the ranks or the error say."""

    peak: int
    ranks: list[Ended]
    error: str = ""

    @property
    def bits(self) -> list[tuple[list[float], str]]:
        return [(one.losses, one.digest) for one in self.ranks]

    @property
    def step(self) -> float:
        """Seconds, in the median, of the slowest rank."""
        return max(median(one.seconds) for one in self.ranks)

    def disk(self, which: str) -> float:
        """Bytes of a step, of all ranks: "read" or "written"."""
        return float(sum(getattr(one, which) / len(one.seconds) for one in self.ranks))


def limit(group: Path, nbytes: int) -> None:
    """Of the group's memory, and of memory and swap together where the system counts that."""
    names = ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
    if (group / "memory.max").exists():
        (group / "memory.max").write_text(str(nbytes))
        names, swap = [], group / "memory.swap.max"
        if swap.exists():
            swap.write_text("0")
    for name in names:
        if (group / name).exists():
            (group / name).write_text(str(nbytes))


def run(world: int, limited_to: int | None, **job: Any) -> Run:
    with control_group() as group:
        if limited_to is not None:
            limit(group, limited_to)
        try:
            ranks = dreamcomm.spawn(run_rank, world, args=(Job(group=str(group), **job),))
        except dreamcomm.RankError as error:
            return Run(int(peak_file(group).read_text()), [], str(error).splitlines()[0])
        peaks = [int(peak_file(group).read_text()), *(one.peak_before for one in ranks)]
        return Run(max(peaks), ranks)


def disk_rates(folder: str) -> tuple[float, float]:
    """Bytes a second that the disk reads and writes, past the system's cache."""
    block = mmap.mmap(-1, DISK_BLOCK)
    seconds = []
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        descriptor = os.open(file.name, os.O_RDWR | os.O_DIRECT)
        try:
            for act in (os.pwritev, os.preadv):
                begun = time.monotonic()
                for at in range(0, DISK_BYTES, DISK_BLOCK):
                    act(descriptor, [block], at)
                os.fsync(descriptor)
                seconds.append(time.monotonic() - begun)
        finally:
            os.close(descriptor)
    return DISK_BYTES / seconds[1], DISK_BYTES / seconds[0]


def measure(name: str, world: int, folder: str, saves: str) -> dict[str, Any]:
    """All runs of a model."""
    before = disk_rates(folder)
    same = {"model": name, "saves": saves}
    plain = run(world, None, folder=None, **same)
    most = int(SHARE * plain.peak)
    inside = run(world, most, folder=folder, **same)
    reads, writes = map(max, before, disk_rates(folder))  # other programs may slow one of them
    without = run(world, most, folder=None, **same)
    killed = run(world, most, folder=folder, ends=KILLED, is_killed=True, **same)
    resumed = run(world, most, folder=folder, begins=SAVED, **same)
    on_disk = inside.disk("read") / reads + inside.disk("written") / writes if inside.ranks else 0
    return {
        "model": name,
        "world": world,
        "elements": plain.ranks[0].elements,
        "need": plain.peak,
        "limit": most,
        "peaks": {"in files": inside.peak, "resumed": resumed.peak},
        "peak_of_steps": max((one.peak for one in inside.ranks), default=0),
        "errors": {
            "in files": inside.error,
            "no files": without.error,
            "killed": killed.error,
            "resumed": resumed.error,
        },
        "equal_bits": inside.bits == plain.bits,
        "equal_bits_resumed": [one.digest for one in resumed.ranks]
        == [one.digest for one in plain.ranks],
        "losses": plain.ranks[0].losses,
        "disk_reads": reads,
        "disk_writes": writes,
        "read_each_step": inside.disk("read"),
        "written_each_step": inside.disk("written"),
        "seconds_plain": plain.step,
        "seconds_in_files": inside.step if inside.ranks else None,
        "seconds_of_disk": on_disk,
        "report": [one.report for one in inside.ranks[:1]],
    }


def main(
    folder: Annotated[Path, typer.Option(help="On a disk; files and a save lie there.")],
    model: Annotated[list[str] | None, typer.Option(help="mlp or gpt; both if not given.")] = None,
    world: World = 2,
    json: Json = None,
) -> None:
    """Trains in less memory than a model needs; see the head of this file."""
    names = chosen(model, MODELS, "--model")
    own = tempfile.mkdtemp(prefix="dreamcomm-benchmark-", dir=folder)
    try:
        found = [measure(name, world, own, str(Path(own) / "saves")) for name in names]
    finally:
        shutil.rmtree(own)
    measurement = Measurement(json)
    for one in found:
        show(measurement, one)
    measurement.write(offload_memory=found)
    if not all(one["equal_bits"] and one["equal_bits_resumed"] for one in found):
        raise typer.Exit(1)


def show(measurement: Measurement, one: dict[str, Any]) -> None:
    peaks, errors = one["peaks"], one["errors"]
    measurement.table(
        f"{one['model']}, {one['elements'] / 1e6:.0f} M parameters, {one['world']} ranks, AdamW",
        ("", "limit MB", "peak MB", "result"),
        [
            ("plain", "", f"{one['need'] / 1e6:.0f}", ""),
            *(
                (
                    name,
                    f"{one['limit'] / 1e6:.0f}",
                    f"{peaks[name] / 1e6:.0f}" if name in peaks else "",
                    error or f"equal bits: {one[bits]}",
                )
                for (name, error), bits in zip(
                    errors.items(), ("equal_bits", "", "", "equal_bits_resumed"), strict=True
                )
            ),
        ],
    )
    if one["seconds_in_files"] is not None:
        plain, disk, files = (
            one["seconds_plain"],
            one["seconds_of_disk"],
            one["seconds_in_files"],
        )
        measurement.say(
            f"Steps have {one['peak_of_steps'] / 1e6:.0f} MB at their peak. A step takes "
            f"{files:.2f} s in files, {plain:.2f} s plain. It reads "
            f"{one['read_each_step'] / 1e9:.2f} GB and writes {one['written_each_step'] / 1e9:.2f} "
            f"GB, for which the disk takes {disk:.2f} s: {files / (plain + 2 * disk):.2f} of the "
            "goal, the plain step and twice the disk's time."
        )


if __name__ == "__main__":
    typer.run(main)
