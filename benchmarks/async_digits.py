"""Times training with one slow worker: an asynchronous model server beside what waits for it.

    python benchmarks/async_digits.py --json async.json --plot async.png      # 8 minutes
    python benchmarks/async_digits.py --rounds 1 --steps 100

The model, the data and the loop are those of examples/strategies: four ranks, or a server and three
workers, on scikit-learn's digits. Each step of one rank takes four times as long. The length of a
step is slept, so that ranks need no core of their own. All ranks together compute as many gradients
under the asynchronous server as under the synchronous one, and N of them move the weights about as
far as one average: the asynchronous server multiplies them by 1/N.

Strategies take turns in one run of the same processes, with another seed in each round. A run has
reached an accuracy when the mean of five points has. A point is a copy of rank 0's model after five
steps of each rank, or after as many gradients. Copies are scored after the run.

Then all strategies train without a slow rank, twice as long, and their accuracies are compared.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import typer

import dreamcomm
from dreamcomm.tools.bench.measurement import Json, Measurement

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "strategies"))
train: Any = importlib.import_module("train")  # examples have no types
picture: Any = importlib.import_module("picture")

RANKS, SLOW = 4, 3
TARGETS = (0.9, 0.93, 0.95)
LONGEST = 0.6  # goal: the asynchronous server's time over the synchronous one's
FURTHEST = 0.01  # goal: gossip's accuracy below DistributedDataParallel's
AVERAGED = 5  # points


@dataclass(frozen=True)
class Reached:
    """Seconds until a strategy has reached an accuracy, in each round; None: never."""

    strategy: str
    accuracy: float
    seconds: list[float | None]

    @property
    def p50(self) -> float | None:
        """The median of the rounds; None if one has not reached it."""
        found = [one for one in self.seconds if one is not None]
        return median(found) if len(found) == len(self.seconds) else None


@dataclass(frozen=True)
class Ratio:
    """The asynchronous server's seconds over the synchronous one's, the median of the rounds'."""

    accuracy: float
    of_rounds: list[float]
    ratio: float


@dataclass(frozen=True)
class Accuracy:
    """A strategy without a slow rank: the accuracy at the end, the mean of the rounds."""

    strategy: str
    accuracy: float
    of_rounds: list[float]


def runs_of(commands: list[str]) -> list[list[Any]]:
    """Runs on every rank."""
    return [train.train_all(train.parse(one.split())) for one in commands]


def by_strategy(command: str, rounds: int) -> dict[str, list[Any]]:
    """Each strategy's runs, as rank 0 has seen them."""
    commands = [f"{command} --seed {seed}" for seed in range(rounds)]
    found = dreamcomm.spawn(runs_of, RANKS, args=(commands,))[0]
    return {runs[0].name: list(runs) for runs in zip(*found, strict=True)}


def seconds_until(points: Sequence[Any], accuracy: float) -> float | None:
    for end in range(AVERAGED, len(points) + 1):
        latest = points[end - AVERAGED : end]
        if mean(point.accuracy for point in latest) >= accuracy:
            return float(latest[-1].seconds)
    return None


def ratio_of(accuracy: float, reached: list[Reached]) -> Ratio | None:
    """None if a run has not reached the accuracy."""
    seconds = {one.strategy: one.seconds for one in reached if one.accuracy == accuracy}
    pairs = zip(seconds["async"], seconds["server"], strict=True)
    found = [a / b for a, b in pairs if a is not None and b is not None]
    return Ratio(accuracy, found, median(found)) if len(found) == len(seconds["async"]) else None


def show_reached(measurement: Measurement, reached: list[Reached], ratios: list[Ratio]) -> None:
    measurement.grid(
        "Seconds until an accuracy is reached, with one slow rank",
        {
            (one.strategy, f"{one.accuracy:.0%}"): "never" if one.p50 is None else f"{one.p50:.1f}"
            for one in reached
        },
    )
    for one in ratios:
        met = "met" if one.ratio <= LONGEST else "missed"
        measurement.say(
            f"async over server at {one.accuracy:.0%}: {one.ratio:.2f} (goal {LONGEST}: {met})"
        )


def show_accuracies(measurement: Measurement, accuracies: list[Accuracy]) -> None:
    found = {one.strategy: one.accuracy for one in accuracies}
    rows = [(name, f"{accuracy:.1%}") for name, accuracy in found.items()]
    measurement.table("Accuracy without a slow rank", ("strategy", "accuracy"), rows)
    below = found["ddp"] - found["gossip"]
    met = "met" if below <= FURTHEST else "missed"
    measurement.say(f"gossip is {below:.1%} below ddp (goal: at most {FURTHEST:.0%}: {met})")


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each strategy.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a rank that none is ahead of.")] = 200,
    pace: Annotated[float, typer.Option(min=1, help="Milliseconds of a quick rank's step.")] = 20.0,
    json: Json = None,
    plot: Annotated[Path | None, typer.Option(help="Where to draw the first round.")] = None,
) -> None:
    """Times training with one slow worker; see the head of this file."""
    runs = by_strategy(
        f"--strategy all --slow {SLOW} --steps {steps} --pace {pace} --every 5", rounds
    )
    reached = [
        Reached(strategy, target, [seconds_until(run.points, target) for run in found])
        for strategy, found in runs.items()
        for target in TARGETS
    ]
    found_ratios = [ratio_of(target, reached) for target in TARGETS]
    ratios = [one for one in found_ratios if one is not None]
    if plot is not None:
        picture.draw([runs[name][0] for name in ("server", "async")], plot)
    level = by_strategy(f"--strategy all --steps {2 * steps} --pace 1", rounds)
    accuracies = [
        Accuracy(strategy, mean(ends), ends)
        for strategy, found in level.items()
        for ends in [[mean(run.accuracies) for run in found]]
    ]
    measurement = Measurement(json)
    show_reached(measurement, reached, ratios)
    show_accuracies(measurement, accuracies)
    measurement.write(
        settings={"rounds": rounds, "steps": steps, "pace_ms": pace, "slow_rank": SLOW},
        reached=[asdict(one) | {"p50": one.p50} for one in reached],
        async_over_server=[asdict(one) for one in ratios],
        accuracies=[asdict(one) for one in accuracies],
    )


if __name__ == "__main__":
    typer.run(main)
