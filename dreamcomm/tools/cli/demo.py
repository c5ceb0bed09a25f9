"""``dreamcomm demo``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

# Enough for the losses to fall and the machinery to be seen, in seconds.
QUICK_STEPS, QUICK_PAIRS = 60, 5


def demo(
    ranks: Annotated[int, typer.Option(min=1, help="Processes that train together.")] = 2,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps per backend.", show_default="1200")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A run of seconds.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the data order.")] = 1,
    out: Annotated[Path, typer.Option(help="The picture (png, svg or pdf).")] = Path(
        "dreamcomm-demo.png"
    ),
) -> None:
    """Trains a small GPT in several processes, with dreamcomm and with Gloo, and compares.

    Takes about two minutes on two cores. Ends with exit code 1 if the two runs' losses differ.
    """
    from dreamcomm.tools.demo.run import run_demo
    from dreamcomm.tools.demo.train import Settings

    settings = Settings(seed=seed)
    if quick:
        settings = replace(settings, steps=QUICK_STEPS, timed_pairs=QUICK_PAIRS)
    if steps is not None:
        settings = replace(settings, steps=steps)
    if not run_demo(ranks, settings, out):
        raise typer.Exit(1)
