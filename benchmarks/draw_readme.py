"""Draws README's picture from results: all_reduce over size, and training steps as bars.

    python benchmarks/draw_readme.py

It reads cpu-2-cores.json and cpu-2-cores-training.json, and writes readme.png beside them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dreamcomm.tools.bench.plot import INK, LOOKS, OTHER, QUIET, RULE, prepare
from dreamcomm.tools.bench.ranks.variants import CEILING, DREAMCOMM

RESULTS = Path(__file__).parent / "results"
SHARED = "dreamcomm, shared tensors"
LIMIT = "the memory's limit"
BARS = {"gloo": OTHER.colour, DREAMCOMM: LOOKS[DREAMCOMM].colour, "no communication": RULE}


def draw() -> None:
    calls = json.loads((RESULTS / "cpu-2-cores.json").read_text())
    steps = json.loads((RESULTS / "cpu-2-cores-training.json").read_text())
    figure = Figure(figsize=(11, 4.2), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    draw_calls(left, calls["rows"])
    draw_steps(right, steps["training_step"])
    machine = calls["machine"]
    figure.suptitle(
        f"Two processes on {machine['cores']} cores ({machine['cpu']}), torch "
        f"{calls['versions']['torch'].partition('+')[0]}; medians",
        fontsize=10,
        color=QUIET,
    )
    figure.savefig(RESULTS / "readme.png")


def draw_calls(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """A line for Gloo, dreamcomm, dreamcomm with shared tensors, and the limit."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        is_wanted = (row["op"], row["dtype"], row["world"]) == ("all_reduce", "float32", 2)
        if not is_wanted or row["status"] != "measured":
            continue
        shared = row["placement"] == "heap"
        names = (
            {SHARED: DREAMCOMM, LIMIT: CEILING}
            if shared
            else {"Gloo": "gloo", DREAMCOMM: DREAMCOMM}
        )
        for label, name in names.items():
            if name in row["timings"]:
                lines.setdefault(label, []).append((row["bytes"], row["timings"][name]["p50"]))
    ours = LOOKS[DREAMCOMM]
    looks = {"Gloo": OTHER, DREAMCOMM: ours, SHARED: ours, LIMIT: LOOKS[CEILING]}
    for label, look in looks.items():
        points = sorted(lines[label])
        axes.plot(
            *zip(*points, strict=True),
            color=look.colour,
            ls=(0, (2, 2)) if label == SHARED else look.dashes,
            marker=look.marker,
            ms=4,
            lw=1.8,
            label=label,
        )
    prepare(axes, "Time of one all_reduce of float32, over its size")


def draw_steps(axes: Axes, results: list[dict[str, Any]]) -> None:
    """Bars for each model and wrapper of torch."""
    labels = [f"{one['model'].upper()}, {one['wrapper'].upper()}" for one in results]
    width = 0.8 / len(BARS)
    for number, (name, colour) in enumerate(BARS.items()):
        places = [k + (number - 1) * width for k in range(len(results))]
        heights = [one["variants"][name]["p50_ms"] for one in results]
        label = "Gloo" if name == "gloo" else name
        bars = axes.bar(places, heights, width * 0.94, color=colour, label=label)
        axes.bar_label(bars, fmt="%.0f", fontsize=7, color=QUIET, padding=1)
    axes.set_xticks(range(len(results)), labels)
    axes.set_title("Milliseconds of one training step", loc="left", fontsize=9, color=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
    axes.set_yticks([])
    axes.tick_params(colors=QUIET, labelsize=8, length=0)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)


if __name__ == "__main__":
    draw()
