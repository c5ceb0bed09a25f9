"""The demo's texts: the description of the runs, the table, and the closing line."""

from __future__ import annotations

from statistics import median

from rich.console import Console
from rich.table import Table

from dreamcomm.tools.demo.compare import BackendRun, Comparison
from dreamcomm.tools.demo.train import Settings

METHOD = (
    "Communication share: 1 - (median step without the gradient exchange) / (median step with it), "
    "over alternating steps after the training; without it means DistributedDataParallel.no_sync()."
)


def print_opening(console: Console, ranks: int, settings: Settings, entropy: float) -> None:
    """Prints what will run."""
    shape = settings.shape
    console.print(
        f"{ranks} processes train a GPT ({shape.layers} layers of width {shape.width}, "
        f"{shape.context} bytes of context) on Python's own help texts, {settings.steps} steps of "
        f"{ranks} x {settings.batch} windows, first with one backend, then with the other.\n"
        f"Knowing only how often each byte occurs, a model would reach a loss of {entropy:.3f} "
        "nats per byte.\n",
        highlight=False,
    )


def print_table(console: Console, runs: list[BackendRun], entropy: float) -> None:
    """One row per backend."""
    table = Table(caption=METHOD, caption_justify="left", caption_style="dim")
    table.add_column("backend")
    for heading in (
        "step time\n(median)",
        "communication\nshare",
        "final\nloss",
        "loss on\nunseen text",
        "unigram\nentropy",
    ):
        table.add_column(heading, justify="right")
    for run in runs:
        table.add_row(
            run.backend,
            f"{1e3 * median(run.step_times()):.1f} ms",
            f"{run.communication_share():.0%}",
            f"{final_loss(run):.4f}",
            f"{run.validation_loss():.4f}",
            f"{entropy:.4f}",
        )
    console.print()
    console.print(table)


def final_loss(run: BackendRun) -> float:
    """The mean of the last twentieth of the steps, as single batches scatter widely."""
    losses = run.losses()
    last = losses[-max(1, len(losses) // 20) :]
    return sum(last) / len(last)


def closing_line(one: BackendRun, other: BackendRun, found: Comparison) -> str:
    """The verdict in one line."""
    if found.equal:
        return (
            f"The losses of the two runs are equal: all {found.values} values, and the final "
            "weights, bit for bit."
        )
    weights = "equal" if found.weights_equal else "not equal"
    line = (
        f"The losses of {one.backend} and {other.backend} are NOT equal: {found.differing} of "
        f"{found.values} values differ, by {found.largest_difference:.3g} at most; the final "
        f"weights are {weights}."
    )
    if len(one.ranks) > 2:
        line += " (With more than two ranks, backends may add in different orders.)"
    return line
