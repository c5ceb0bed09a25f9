"""What must pass: the tests that pass with Gloo, less the exclusions."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from outcomes import Outcome
from selection import Case

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Exclusion:
    """A test that is not asked of the backend, and why."""

    test: str
    reason: str
    pretend_gpus_only: bool = False
    torch_before: tuple[int, ...] = (999,)
    hangs_gloo: bool = False  # not even run for the reference

    def applies(self, case: Case, torch: tuple[int, ...]) -> bool:
        return torch < self.torch_before and (case.pretend_gpus or not self.pretend_gpus_only)


def read_exclusions(path: Path = HERE / "exclusions.toml") -> list[Exclusion]:
    entries: list[dict[str, Any]] = tomllib.loads(path.read_text())["exclude"]
    for entry in entries:
        if "torch_before" in entry:
            entry["torch_before"] = version(entry["torch_before"])
    return [Exclusion(**entry) for entry in entries]


def version(text: str) -> tuple[int, ...]:
    """(2, 13) of "2.13.0+cpu"."""
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])


@dataclass(frozen=True)
class Verdict:
    """One case, judged."""

    passed: list[str]
    failed: list[str]  # names with the reason
    skipped: list[str]  # excluded, or not asked because Gloo fails or skips them too
    beyond: list[str]  # pass here and fail with Gloo


def judge(reference: dict[str, str], outcomes: dict[str, Outcome], excluded: set[str]) -> Verdict:
    """Compares one run with Gloo's, {test: "passed" | "failed" | "skipped"}."""
    verdict = Verdict([], [], [], [])
    for name in sorted(reference):
        outcome = outcomes.get(name)
        wanted = reference[name] == "passed" and name not in excluded
        if outcome and outcome["result"] == "passed":
            (verdict.passed if reference[name] == "passed" else verdict.beyond).append(name)
        elif not wanted:
            verdict.skipped.append(name)
        elif outcome is None:
            verdict.failed.append(f"{name}: did not run")
        else:
            verdict.failed.append(f"{name}: {outcome['result']}: {outcome['why']}")
    return verdict


def reference_path(case: Case, torch: tuple[int, ...], folder: Path) -> Path:
    return folder / f"torch-{'.'.join(map(str, torch))}-{case.label}.json"


def write_reference(path: Path, outcomes: dict[str, Outcome]) -> dict[str, str]:
    reference = {name: outcome["result"] for name, outcome in outcomes.items()}
    path.write_text(json.dumps(reference, indent=0, sort_keys=True) + "\n")
    return reference
