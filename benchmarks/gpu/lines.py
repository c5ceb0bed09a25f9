"""Lines of JSON, each with a label that says what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# As in rows.cu.
ONE_GPU = "one GPU: all ranks share its memory; nothing here is the bandwidth of a link"

Line = dict[str, Any]


def require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU")


def write_lines(path: Path, lines: list[Line], label: str = ONE_GPU) -> None:
    """Writes the lines to a file, and prints them."""
    text = "".join(json.dumps({"label": label, **line}) + "\n" for line in lines)
    path.write_text(text)
    print(text, end="")


def read_lines(path: Path) -> list[Line]:
    """The lines of a file; none if it is missing. A truncated line is left out."""
    found = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found
