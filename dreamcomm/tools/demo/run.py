"""The demo from its first line to its last."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from dreamcomm.tools.demo.compare import compare, run_backend
from dreamcomm.tools.demo.picture import draw
from dreamcomm.tools.demo.report import closing_line, print_opening, print_table
from dreamcomm.tools.demo.text import load_corpus
from dreamcomm.tools.demo.train import Settings

BACKENDS = ("dreamcomm", "gloo")
# Backends add three or more ranks' gradients in different orders, and training enlarges the last
# bit's difference: that far, in nats, the losses may then part.
ROUNDING_ALLOWANCE = 0.1


def run_demo(
    ranks: int,
    settings: Settings,
    out: Path,
    backends: tuple[str, str] = BACKENDS,
) -> bool:
    """Trains on both backends, prints the comparison and writes the picture to ``out``.

    Returns whether the runs agree: bit for bit with one or two ranks, where there is only one
    order to add in, and up to rounding with more.
    """
    console = Console()
    entropy = load_corpus().unigram_entropy()
    print_opening(console, ranks, settings, entropy)
    first, second = (run_backend(backend, ranks, settings) for backend in backends)
    found = compare(first, second)
    print_table(console, [first, second], entropy)
    millions = first.ranks[0].parameters / 1e6
    headline = (
        f"{ranks} processes train a GPT of {millions:.1f} M parameters on Python's help texts"
    )
    draw((first, second), entropy, headline, out)
    console.print(f"\nPicture: {out}", highlight=False, soft_wrap=True)
    console.print(closing_line(first, second, found), highlight=False, soft_wrap=True)
    return found.equal or (ranks > 2 and found.largest_difference <= ROUNDING_ALLOWANCE)
