"""One table of the suite's figures and goals.

    python benchmarks/gpu/table.py OUT

Reads the files that the suite's parts left in the folder OUT, and writes results.json and table.md
there. What is missing is shown as "not measured".
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from figures import Found, figures
from lines import ONE_GPU, read_lines


def as_json(found: Found) -> dict[str, Any]:
    return {
        "label": ONE_GPU,
        "facts": found.facts,
        "parts": found.parts,
        "figures": [asdict(figure) for figure in figures(found)],
        "rows": found.rows,
        "small": found.small,
        "bucket": found.bucket,
        "collectives": found.collectives,
        "versus_nccl": found.versus,
    }


def as_markdown(found: Found) -> str:
    lines = [
        "# The GPU suite",
        "",
        f"**{ONE_GPU}**",
        "",
        *heading(found.facts),
        "",
        "| figure | goal | measured | met |",
        "|---|---|---|---|",
    ]
    met = {True: "yes", False: "NO", None: ""}
    for figure in figures(found):
        cells = (figure.name, figure.goal, figure.measured, met[figure.met])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def heading(facts: dict[str, Any]) -> list[str]:
    """Device, versions and commit, or that they are not known."""
    known = facts.get("versions")
    versions = known if isinstance(known, dict) and "device" in known else {}
    device = versions.get("device", "not known")
    names = ("torch", "cuda", "nccl", "python")
    words = ", ".join(f"{name} {versions.get(name, '?')}" for name in names)
    smi = facts.get("nvidia-smi") or ["not known"]
    nvcc = facts.get("nvcc") or ["not known"]
    return [
        f"- device: {device}; {smi[-1]}",
        f"- versions: {words}; nvcc: {nvcc[-1]}",
        f"- commit: {facts.get('commit', 'not known')}",
    ]


def read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_all(folder: Path) -> Found:
    return Found(
        facts=read_object(folder / "facts.json"),
        parts=read_lines(folder / "parts.jsonl"),
        rows=read_lines(folder / "rows.jsonl"),
        small=read_lines(folder / "small.jsonl"),
        bucket=read_lines(folder / "bucket.jsonl"),
        collectives=read_lines(folder / "collectives.jsonl"),
        versus=read_object(folder / "versus_nccl.json"),
    )


def main(folder: Path) -> None:
    found = read_all(folder)
    (folder / "results.json").write_text(json.dumps(as_json(found), indent=1) + "\n")
    text = as_markdown(found)
    (folder / "table.md").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
