"""The picture of a cluster that grows."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from dreamcomm.tools.bench.plot import INK, QUIET, RULE
from dreamcomm.tools.bench.report import format_time
from dreamcomm.tools.bench.sizes import format_size
from dreamcomm.tools.simulate.scaling import Line

COLOURS = ("#c2410c", "#1d4ed8", "#15803d", "#7e22ce", "#a16207", "#0e7490")
# matplotlib's own, except those that need TeX.
ENDINGS = tuple(f".{kind}" for kind in FigureCanvasAgg.get_supported_filetypes() if kind != "pgf")


def check_ending(path: Path) -> None:
    """Raises ValueError if no picture can be written under this name."""
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"a picture ends in {', '.join(sorted(ENDINGS))}, got {path.name!r}")


def draw(op: str, lines: list[Line], path: Path) -> None:
    """Writes time over ranks to ``path``; beside it the efficiency of training, if described."""
    trains = any(line.step is not None for line in lines)
    figure = Figure(figsize=(11 if trains else 6, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if trains else 1, squeeze=False)[0]
    for number, nbytes in enumerate(lines[0].by_size):
        colour = COLOURS[number % len(COLOURS)]
        ours = [(line.ranks, line.by_size[nbytes].seconds) for line in lines]
        axes[0].plot(*zip(*ours, strict=True), "o-", ms=4, color=colour, label=format_size(nbytes))
        ring = [(line.ranks, line.ring[nbytes]) for line in lines if nbytes in line.ring]
        if ring:
            axes[0].plot(*zip(*ring, strict=True), ls=(0, (2, 2)), color=colour)
    dashed = ", dashed: a flat ring" if any(line.ring for line in lines) else ""
    axes[0].set_title(f"{op}{dashed}", loc="left", fontsize=10, color=INK)
    axes[0].set_yscale("log")
    axes[0].yaxis.set_major_formatter(FuncFormatter(lambda y, _: format_time(y)))
    if any(lines[0].by_size):  # a barrier has no bytes
        axes[0].legend(frameon=False, fontsize=8)
    if trains:
        steps = [(line.ranks, line.step.efficiency) for line in lines if line.step is not None]
        axes[1].plot(*zip(*steps, strict=True), "o-", ms=4, color=COLOURS[0])
        axes[1].set_title("efficiency of a DDP step", loc="left", fontsize=10, color=INK)
        axes[1].set_ylim(0, 1.05)
        axes[1].yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0%}"))
    for one in axes:
        one.set_xscale("log", base=2)
        one.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
        one.set_xlabel("ranks", color=QUIET, fontsize=9)
        one.grid(color=RULE, lw=0.6)
        one.spines[["top", "right"]].set_visible(False)
        one.tick_params(colors=QUIET, labelsize=8)
        one.set_axisbelow(True)
    figure.savefig(path)
