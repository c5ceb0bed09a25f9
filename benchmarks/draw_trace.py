"""Draws a part of a trace that dreamcomm.trace wrote, for a page that cannot open Perfetto.

python benchmarks/draw_trace.py run.json picture.png --call 7
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer

matplotlib.use("Agg")  # files only
import matplotlib.pyplot as plt

COLORS = {"wait": "#d9d9d9", "copy in": "#8da0cb", "reduce": "#66c2a5", "copy out": "#fc8d62"}
CALL = "#bdbdbd"
Event = dict[str, Any]


def events_of_call(events: list[Event], call: int) -> list[Event]:
    """The first group's events with a duration, within the call and a little around it."""
    found = [event for event in events if event["ph"] == "X" and event["tid"] <= len(COLORS)]
    picked = [e for e in found if e["args"]["call"] == call]
    if not picked:
        raise SystemExit(f"draw_trace: no call {call} in the trace")
    return picked


def draw(events: list[Event], path: Path) -> None:
    ranks = sorted({event["pid"] for event in events})
    lanes = [(rank, lane) for rank in ranks for lane in ("call", *COLORS)]
    begin = min(event["ts"] for event in events)
    figure, axes = plt.subplots(figsize=(10, 0.32 * len(lanes) + 1))
    for event in events:
        lane = event["name"] if event["name"] in COLORS else "call"
        y = len(lanes) - lanes.index((event["pid"], lane))
        x = event["ts"] - begin
        axes.broken_barh([(x, event["dur"])], (y - 0.4, 0.8), color=COLORS.get(lane, CALL))
        if lane == "call":
            told = event["args"]
            text = f"{event['name']}, {told['bytes']:,} bytes, {told.get('algorithm', '')}"
            axes.text(x + event["dur"] / 2, y, text, ha="center", va="center", fontsize=8)
    names = [f"rank {rank}: {lane}" for rank, lane in lanes]
    axes.set_yticks(range(len(lanes), 0, -1), names, fontsize=8)
    axes.set_xlabel("microseconds")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main(
    trace: Annotated[Path, typer.Argument(help="A file that dreamcomm.trace wrote.")],
    picture: Annotated[Path, typer.Argument(help="The picture to write.")],
    call: Annotated[int, typer.Option(help="The number of a collective.")] = 1,
) -> None:
    """Draws one collective of all ranks; see the head of this file."""
    events = json.loads(trace.read_text())["traceEvents"]
    draw(events_of_call(events, call), picture)


if __name__ == "__main__":
    typer.run(main)
