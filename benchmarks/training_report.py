"""Turns steps' seconds into the printed table."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from dreamcomm.tools.bench import busy
from dreamcomm.tools.bench.measurement import Measurement
from dreamcomm.tools.bench.statistics import percentile
from training_variants import COLLECTIVES, DREAMCOMM, GLOO, OWN, PLAIN, VARIANTS

CAPTION = (
    "Exposed: what a step takes longer than the plain model's, as a share of the step. "
    "No communication: the wrapper and its copies, without the collectives."
)


@dataclass(frozen=True)
class Row:
    """One variant: milliseconds of a step, its slowest rank's, and the exposed share."""

    p50_ms: float
    p99_ms: float
    exposed: float


@dataclass(frozen=True)
class Timing:
    """One model under one wrapper."""

    model: str
    wrapper: str
    world: int
    beside: int  # busy processes
    parameters: int
    steps: int
    largest_weight_difference: float
    gloo_over_dreamcomm: float
    gloo_over_own: float | None
    variants: dict[str, Row]

    @staticmethod
    def of(
        model: str,
        wrapper: str,
        world: int,
        beside: int,
        parameters: int,
        seconds: dict[str, list[float]],
        difference: float,
    ) -> Timing:
        middle = {variant: median(times) for variant, times in seconds.items()}
        rows = {
            variant: Row(
                1e3 * middle[variant],
                1e3 * percentile(times, 99),
                1 - middle[PLAIN] / middle[variant],
            )
            for variant, times in seconds.items()
        }
        ratio = middle[GLOO] / middle[DREAMCOMM]
        own = middle[GLOO] / middle[OWN] if OWN in middle else None
        steps = len(seconds[PLAIN])
        return Timing(
            model, wrapper, world, beside, parameters, steps, difference, ratio, own, rows
        )


def show_timing(measurement: Measurement, timing: Timing) -> None:
    title = [
        f"{timing.model}, {timing.parameters / 1e6:.1f} M parameters, under {timing.wrapper}",
        f"{timing.world} ranks",
        busy.words(timing.beside),
        f"{timing.steps} steps of each",
    ]
    rows = []
    for variant in VARIANTS[timing.wrapper]:
        row = timing.variants[variant]
        exposed = "" if variant in (PLAIN, COLLECTIVES) else f"{row.exposed:.0%}"
        rows.append((variant, f"{row.p50_ms:.1f} ms", f"{row.p99_ms:.1f} ms", exposed))
    title_text, headings = ", ".join(filter(None, title)), ("", "p50", "p99", "exposed")
    measurement.table(title_text, headings, rows, caption=CAPTION)
    own = own_words(timing) if timing.wrapper == "ddp" else ""
    measurement.say(
        f"gloo / dreamcomm: {timing.gloo_over_dreamcomm:.2f}{own}. After the first steps all "
        f"ranks' weights are equal, and as with gloo to {timing.largest_weight_difference:.1g}.\n"
    )


def own_words(timing: Timing) -> str:
    """What dreamcomm's own wrapper reaches, in a few words."""
    p50 = {variant: row.p50_ms for variant, row in timing.variants.items()}
    rest = p50[OWN] - p50[PLAIN] - p50[COLLECTIVES]
    return (
        f", gloo / own: {timing.gloo_over_own:.2f}, dreamcomm / own: "
        f"{p50[DREAMCOMM] / p50[OWN]:.2f}; own - plain - collectives: {rest:.1f} ms"
    )
