"""Random collectives for minutes, in ranks that are killed, stopped and started again.

    python benchmarks/soak.py                                # 20 minutes
    python benchmarks/soak.py --minutes 1 --seed 7 --json soak.json

Every result is compared bit for bit with NumPy. tests/endurance describes an episode; soak.md
beside this file explains the figures. Ends with exit code 1 if a result was wrong, a rank hung, a
death was reported late or wrongly, or anything was left over.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

# The soak's parts are the test suite's, which runs a short one.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from endurance.report import Figures
from endurance.supervisor import Supervisor

from dreamcomm.tools.bench.measurement import Json, Measurement

SHOWN_EVERY = 60.0  # seconds


class Progress:
    """Prints a line each minute, and errors at once."""

    def __init__(self, figures: Figures) -> None:
        self.figures = figures
        self.shown = 0  # problems and leaks
        self.next = time.monotonic() + SHOWN_EVERY

    def show(self) -> None:
        found = self.figures.problems + self.figures.leaks
        if len(found) > self.shown:
            self.shown = len(found)
            print("\n".join(found), flush=True)
        if time.monotonic() < self.next:
            return
        self.next += SHOWN_EVERY
        figures = self.figures
        print(
            f"{figures.episodes} episodes, {sum(figures.calls.values())} operations, "
            f"{figures.killed} processes killed, {len(figures.problems)} problems, "
            f"{len(figures.leaks)} leaks",
            flush=True,
        )


def main(
    minutes: Annotated[float, typer.Option(min=0.05, help="How long.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Seed of everything random except the clock.")] = 1,
    hosts: Annotated[
        float, typer.Option(min=0, max=1, help="Share of episodes with a virtual host per rank.")
    ] = 0.0,
    json: Json = None,
) -> None:
    """Runs a soak; see the head of this file."""
    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="dreamcomm-soak-") as folder:
        supervisor = Supervisor(seed, Path(folder), figures, hosts)
        supervisor.run(60 * minutes, Progress(figures).show)
    print(figures)
    settings = {"minutes": minutes, "seed": seed, "hosts": hosts}
    Measurement(json).write(settings=settings, **figures.as_dict())
    if not figures.is_clean:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
