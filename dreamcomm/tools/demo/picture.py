"""The demo's picture: both loss curves, and the distribution of the step times."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dreamcomm.tools.demo.compare import BackendRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, QUIET, RULE = "#1f2430", "#6b7280", "#d6d9df"
# The first backend in front in a strong colour, the second behind it in a light one.
FRONT, BEHIND = "#c2410c", "#93b4d8"
COLOURS = (FRONT, BEHIND)


def draw(runs: tuple[BackendRun, BackendRun], entropy: float, headline: str, path: Path) -> None:
    """Writes the picture to ``path``; its ending picks the format (png, svg, pdf)."""
    figure = Figure(figsize=(11, 5), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    figure.subplots_adjust(left=0.065, right=0.975, top=0.78, bottom=0.13, wspace=0.12)
    figure.text(0.065, 0.925, headline, fontsize=14, fontweight="bold", color=INK)
    draw_losses(left, runs, entropy)
    draw_step_times(right, runs)
    figure.savefig(path)


def draw_losses(axes: Axes, runs: tuple[BackendRun, BackendRun], entropy: float) -> None:
    """The smoothed curves, drawn so that both stay visible where they coincide."""
    prepare(axes, "Training loss", "nats per byte, running mean")
    front, behind = runs
    for run, colour, width in ((behind, BEHIND, 7.0), (front, FRONT, 1.6)):
        curve = smooth(run.losses())
        axes.plot(np.arange(1, len(curve) + 1), curve, color=colour, lw=width, label=run.backend)
    steps = len(front.losses())
    axes.axhline(entropy, color=QUIET, lw=1, ls=(0, (4, 3)))
    axes.annotate(
        f"unigram entropy {entropy:.2f}",
        (steps, entropy),
        xytext=(0, 5),
        textcoords="offset points",
        ha="right",
        color=QUIET,
        fontsize=9,
    )
    axes.set_xlim(0, steps)
    axes.set_xlabel("step", color=QUIET)
    axes.grid(axis="y", color=RULE, lw=0.6)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, labelcolor=INK, loc="center right")


def draw_step_times(axes: Axes, runs: tuple[BackendRun, BackendRun]) -> None:
    """One violin per backend, its median marked and written beside it."""
    prepare(axes, "Step time", "each shape is widest where most steps lie")
    times = [1e3 * np.asarray(run.step_times()) for run in runs]
    limit = 1.15 * max(float(np.percentile(values, 98)) for values in times)
    for place, (run, values, colour) in enumerate(zip(runs, times, COLOURS, strict=True)):
        shown = values[values <= limit]
        for body in axes.violinplot(  # type: ignore[attr-defined]
            shown, [place], orientation="horizontal", widths=0.7, showextrema=False
        )["bodies"]:
            body.set(facecolor=colour, edgecolor="none", alpha=0.9)
        middle = median(values.tolist())
        axes.plot([middle, middle], [place - 0.38, place + 0.38], color=INK, lw=1.6)
        share = f"{run.communication_share():.0%} communication"
        heading = axes.text(
            0, place - 0.44, f"{run.backend}  ", fontsize=11, fontweight="bold", color=INK
        )
        axes.annotate(
            f"median {middle:.1f} ms, {share}",
            (1, 0),
            xycoords=heading,
            va="bottom",
            color=QUIET,
            fontsize=10,
        )
    axes.set_xlim(0, limit)
    axes.set_yticks([])
    axes.set_ylim(len(runs) - 0.55, -0.7)
    axes.set_xlabel("ms", color=QUIET)
    axes.grid(axis="x", color=RULE, lw=0.6)


def prepare(axes: Axes, title: str, subtitle: str) -> None:
    """The look that both halves share."""
    axes.set_title(title, loc="left", fontsize=12, color=INK, pad=22)
    axes.text(0, 1.025, subtitle, transform=axes.transAxes, fontsize=9, color=QUIET)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
    axes.tick_params(colors=QUIET, labelsize=9, length=0)
    axes.set_axisbelow(True)


def smooth(losses: list[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """A running mean over the last fiftieth of the run; shorter at the begin."""
    window = max(1, len(losses) // 50)
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    ends = np.arange(1, len(losses) + 1)
    starts = np.maximum(0, ends - window)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))
