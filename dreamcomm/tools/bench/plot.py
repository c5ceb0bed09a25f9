"""The picture of a run: time over size, one panel per collective, dtype, world and placement."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from dreamcomm.tools.bench import busy
from dreamcomm.tools.bench.ranks.variants import CEILING, CORE, DREAMCOMM
from dreamcomm.tools.bench.report import by_title, format_time
from dreamcomm.tools.bench.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dreamcomm.tools.bench.result import CaseResult, Run

INK, QUIET, RULE = "#1f2430", "#6b7280", "#d6d9df"
FORMATS = (".png", ".svg", ".pdf")
COLUMNS = 3
PANEL_WIDTH, PANEL_HEIGHT, HEAD_HEIGHT = 4.4, 3.4, 0.9  # inches


@dataclass(frozen=True)
class Look:
    """How a variant's line is drawn."""

    colour: str
    dashes: str | tuple[int, tuple[int, ...]]
    marker: str


OTHER = Look("#93b4d8", "-", "o")
LOOKS = {
    DREAMCOMM: Look("#c2410c", "-", "o"),
    CORE: Look("#c2410c", (0, (2, 2)), "."),
    CEILING: Look(QUIET, (0, (5, 3)), ""),
}


def draw(run: Run, path: Path) -> bool:
    """Writes the picture to ``path``; its ending is one of FORMATS.

    Returns False, and writes nothing, if no case was measured that has a size.
    """
    panels = panels_of(run)
    if not panels:
        return False
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    height = PANEL_HEIGHT * rows + HEAD_HEIGHT
    figure = Figure(
        figsize=(PANEL_WIDTH * columns, height), dpi=130, facecolor="white", layout="constrained"
    )
    FigureCanvasAgg(figure)
    figure.suptitle(title_of(run), fontsize=12, color=INK)
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for axes, (title, results) in zip(grid, panels, strict=False):
        draw_panel(axes, title, results)
    for axes in list(grid)[len(panels) :]:
        axes.set_axis_off()
    figure.savefig(path)
    return True


def title_of(run: Run) -> str:
    """The title of the picture, and the machine."""
    here = [run.machine.cpu, f"{run.machine.cores} cores", busy.words(run.settings.beside)]
    return f"Time of one call over its size\n{', '.join(filter(None, here))}"


def panels_of(run: Run) -> list[tuple[str, list[CaseResult]]]:
    """The measured cases that have a size, grouped by their common properties."""
    measured = [r for r in run.results if r.status == "measured" and r.case.bytes > 0]
    return list(by_title(measured).items())


def draw_panel(axes: Axes, title: str, results: list[CaseResult]) -> None:
    """Draws a line for each variant: the median, with both axes logarithmic."""
    names = list(dict.fromkeys(name for result in results for name in result.timings))
    for name in names:
        points = [
            (result.case.bytes, result.timings[name].p50)
            for result in results
            if name in result.timings
        ]
        look = LOOKS.get(name, OTHER)
        axes.plot(
            *zip(*points, strict=True),
            color=look.colour,
            ls=look.dashes,
            marker=look.marker if len(points) > 1 else "o",
            ms=4,
            lw=1.6,
            label=name,
        )
    prepare(axes, title)


def prepare(axes: Axes, title: str) -> None:
    """Scales, ticks and the legend."""
    axes.set_title(title, loc="left", fontsize=9, color=INK)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=16, numticks=8))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_size(round(x))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: format_time(y)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(color=RULE, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(RULE)
    axes.tick_params(colors=QUIET, labelsize=8, length=0)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)
