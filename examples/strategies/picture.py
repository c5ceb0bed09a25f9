"""Draws runs: accuracy and loss over time. It needs matplotlib."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def draw(runs: list, path: Path) -> None:
    """Writes the picture; the path's ending says in which format."""
    figure = Figure(figsize=(9, 3.4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for run in runs:
        seconds = [point.seconds for point in run.points]
        left.plot(seconds, [point.accuracy for point in run.points], label=run.name)
        right.plot(seconds, [point.loss for point in run.points], label=run.name)
    left.set_ylabel("accuracy")
    right.set_ylabel("loss")
    for axes in (left, right):
        axes.set_xlabel("seconds")
        axes.grid(color="#d6d9df", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    figure.savefig(path)
