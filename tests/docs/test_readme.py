"""The README is short, its links lead somewhere, and its figures are those of the results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MIB = 1 << 20
SIZES = {"1 KiB": 1 << 10, "32 KiB": 1 << 15, "1 MiB": MIB, "64 MiB": 64 * MIB}
STEPS = {
    "MLP of 25 M parameters, DDP": ("mlp", "ddp"),
    "MLP of 25 M parameters, FSDP2": ("mlp", "fsdp2"),
    "GPT of 10 M parameters, DDP": ("gpt", "ddp"),
    "GPT of 10 M parameters, FSDP2": ("gpt", "fsdp2"),
}


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    return found


def cells(first: str) -> list[str]:
    """The other cells of the README's row that begins with this one."""
    (row,) = re.findall(rf"^\| {re.escape(first)} \|(.*)\|$", README, re.M)
    return [cell.strip() for cell in row.split("|")]


def in_unit_of(cell: str, seconds: float) -> str:
    """The seconds as the cell writes them: in its unit, with as many digits."""
    number, unit = cell.split()
    digits = len(number.partition(".")[2])
    return f"{seconds * {'us': 1e6, 'ms': 1e3}[unit]:.{digits}f} {unit}"


def test_the_readme_is_read_in_a_minute() -> None:
    assert len(README.splitlines()) <= 130


def test_the_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert len(links) > 15
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("size", SIZES)
def test_the_times_of_calls_are_measured(size: str) -> None:
    of = {
        row["placement"]: row["timings"]
        for row in results("cpu-2-cores.json")["rows"]
        if (row["op"], row["dtype"], row["world"]) == ("all_reduce", "float32", 2)
        and row["bytes"] == SIZES[size]
    }
    seconds = [
        of["private"]["gloo"]["p50"],
        of["private"]["dreamcomm"]["p50"],
        of["heap"]["dreamcomm"]["p50"],
    ]
    written = cells(size)
    assert written == [in_unit_of(*pair) for pair in zip(written, seconds, strict=True)]


@pytest.mark.parametrize("step", STEPS)
def test_the_times_of_steps_are_measured(step: str) -> None:
    (of,) = (
        row["variants"]
        for row in results("cpu-2-cores-training.json")["training_step"]
        if (row["model"], row["wrapper"]) == STEPS[step]
    )
    seconds = [of[name]["p50_ms"] / 1e3 for name in ("gloo", "dreamcomm", "no communication")]
    written = cells(step)
    assert written == [in_unit_of(*pair) for pair in zip(written, seconds, strict=True)]


@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_the_times_of_the_own_wrapper_are_measured(model: str) -> None:
    (found,) = (
        timing
        for timing in results("cpu-2-cores-wrapper.json")["training_step"]
        if (timing["model"], timing["wrapper"]) == (model, "ddp")
    )
    title = {"mlp": "MLP of 25 M parameters", "gpt": "GPT of 10 M parameters"}[model]
    written = cells(f"own wrapper, {title}")
    variants = ("gloo", "dreamcomm", "dreamcomm's own wrapper", "plain")
    for cell, variant in zip(written, variants, strict=True):
        assert cell == in_unit_of(cell, found["variants"][variant]["p50_ms"] / 1e3)
