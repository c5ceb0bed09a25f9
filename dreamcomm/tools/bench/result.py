"""A run's outcome, and its JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dreamcomm.tools.bench.cases import Case
from dreamcomm.tools.bench.machine import Machine, Versions
from dreamcomm.tools.bench.statistics import Timing, percentile

FORMAT = 1
UNITS = {"p50": "s", "p99": "s", "algbw": "1e9 B/s", "busbw": "1e9 B/s", "bytes": "B"}


@dataclass(frozen=True)
class Settings:
    """How a run measures.

    ``seconds``: the time for one case, about. ``beside``: busy processes on the ranks' machine.
    """

    seconds: float = 1.0
    versus: str | None = "gloo"
    beside: int = 0


@dataclass(frozen=True)
class Prediction:
    """The cost model's prediction: seconds, and the error against the p50 of the variant ``of``."""

    algorithm: str
    seconds: float
    of: str
    error: float  # predicted / measured - 1


@dataclass(frozen=True)
class CaseResult:
    """``status`` is "measured", "skipped" or "wrong"; ``notes`` say why, or what was left out."""

    case: Case
    status: str
    notes: tuple[str, ...] = ()
    timings: dict[str, Timing] = field(default_factory=dict)
    prediction: Prediction | None = None


@dataclass(frozen=True)
class Run:
    """All results of a run."""

    date: str
    machine: Machine
    versions: Versions
    commit: str | None
    settings: Settings
    results: tuple[CaseResult, ...]

    def wrong(self) -> list[CaseResult]:
        """The cases in which dreamcomm's results were not right."""
        return [result for result in self.results if result.status == "wrong"]


@dataclass(frozen=True)
class PredictionErrors:
    """Absolute relative errors of the cost model over all cases with a prediction."""

    cases: int
    median: float
    worst: float


def prediction_errors(results: tuple[CaseResult, ...]) -> PredictionErrors | None:
    """None if nothing was predicted."""
    errors = [abs(result.prediction.error) for result in results if result.prediction]
    if not errors:
        return None
    return PredictionErrors(len(errors), percentile(errors, 50), max(errors))


def as_json(run: Run) -> dict[str, Any]:
    """The document that ``--json`` writes."""
    errors = prediction_errors(run.results)
    return {
        "format": FORMAT,
        "date": run.date,
        "machine": asdict(run.machine),
        "versions": asdict(run.versions),
        "commit": run.commit,
        "settings": asdict(run.settings),
        "units": UNITS,
        "prediction_errors": None if errors is None else asdict(errors),
        "rows": [row(result) for result in run.results],
    }


def row(result: CaseResult) -> dict[str, Any]:
    """The case's fields side by side with its outcome."""
    outcome = asdict(result)
    case: dict[str, Any] = outcome.pop("case")
    return case | outcome
