"""Spans as an SVG picture: a row for each rank, a box for each step, time from left to right.

The picture has no scripts and no fonts of its own. Its text follows the reader's light or dark
colours, and its boxes are readable on both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from dreamcomm.pipeline.schedule.actions import Kind
from dreamcomm.pipeline.schedule.grid import step_label
from dreamcomm.pipeline.schedule.simulate import Span

__all__ = ["svg_grid"]

# The class, the legend's text and the kinds of each colour.
COLOURS = (
    ("f", "F forward", (Kind.F,)),
    ("b", "B backward", (Kind.B,)),
    ("i", "I backward for inputs", (Kind.I,)),
    ("w", "W backward for weights", (Kind.W,)),
    ("m", "message", (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)),
    ("o", "other", (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD, Kind.OVERLAP_F_B)),
)
STYLE = """
text { font: 12px sans-serif; fill: #222 }
.in { fill: #111; text-anchor: middle; font-size: 11px }
.tick { text-anchor: middle }
.axis { stroke: #888; stroke-width: 1 }
.idle { fill: #8882 }
.box { stroke: #444; stroke-width: 0.5 }
.f { fill: #8ab8f0 } .b { fill: #f0a868 } .i { fill: #f2c94c } .w { fill: #86cf9a }
.m { fill: #c9a3e0 } .o { fill: #bbb }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .in { fill: #111 } }
"""
LEFT, RIGHT, TOP, ROW, GAP, LETTER = 64, 32, 34, 26, 6, 7
FAINTEST = 0.7  # opacity of the last stage of a rank


def svg_grid(
    spans: Sequence[Sequence[Span]],
    *,
    title: str = "",
    unit: str = "",
    width: int = 960,
) -> str:
    """Draws simulated or measured spans.

    Args:
        spans: the steps of each rank with their times, of a simulation or measured.
        title: above the picture.
        unit: of the times, for the axis; such as "s".
        width: of the picture, in pixels.

    Returns:
        The text of an SVG file. The pointer over a box shows its step and times.
    """
    origin = float(min((span.start for row in spans for span in row), default=0))
    length = float(max((span.end for row in spans for span in row), default=0)) - origin or 1.0
    scale = (width - LEFT - RIGHT) / length
    with_stage = any(len({span.action.stage for span in row}) > 1 for row in spans)
    bottom = TOP + len(spans) * (ROW + GAP)
    parts = [_text(LEFT, 20, title)] if title else []
    for rank, row in enumerate(spans):
        top = TOP + rank * (ROW + GAP)
        parts.append(_text(8, top + 17, f"rank {rank}"))
        parts.append(_box("idle", LEFT, top, length * scale))
        parts += _row(row, top, origin, scale, unit, with_stage)
    parts += _axis(length, scale, bottom, unit)
    parts += _legend(spans, with_stage, bottom + 44)
    size = f'viewBox="0 0 {width} {bottom + 60}" width="{width}" height="{bottom + 60}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([opening, f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def _row(
    row: Sequence[Span], top: float, origin: float, scale: float, unit: str, with_stage: bool
) -> list[str]:
    shades = _shades(row)
    parts = []
    for span in row:
        begin, end = float(span.start) - origin, float(span.end) - origin
        tip = f"{span.action}: {begin:.6g} to {end:.6g} {unit}".rstrip()
        left, size = LEFT + begin * scale, (end - begin) * scale
        name = next(name for name, _, kinds in COLOURS if span.action.kind in kinds)
        inside = f"<title>{escape(tip)}</title>"
        box = _box(f"box {name}", left, top, size, inside, shades[span.action.stage])
        label = _label(span, with_stage, size)
        parts.append(box + (_text(left + size / 2, top + 17, label, "in") if label else ""))
    return parts


def _shades(row: Sequence[Span]) -> dict[int, float]:
    """The opacity of each stage of a rank: later ones are fainter."""
    stages = sorted({span.action.stage for span in row})
    fade = (1 - FAINTEST) / max(1, len(stages) - 1)
    return {stage: 1 - fade * index for index, stage in enumerate(stages)}


def _label(span: Span, with_stage: bool, size: float) -> str:
    """The longest name that fits into a box: step, else micro-batch, else none."""
    microbatch = span.action.microbatch
    names = (step_label(span.action, with_stage), "" if microbatch is None else str(microbatch))
    return next((name for name in names if len(name) * LETTER <= size), "")


def _axis(length: float, scale: float, top: float, unit: str) -> list[str]:
    parts = [f'<path class="axis" d="M{LEFT} {top}H{LEFT + length * scale:.2f}"/>']
    step = _tick(length)
    for index in range(math.floor(length / step + 1e-9) + 1):
        left = LEFT + index * step * scale
        parts.append(f'<path class="axis" d="M{left:.2f} {top}v5"/>')
        parts.append(_text(left, top + 18, f"{index * step:.6g} {unit}".rstrip(), "tick"))
    return parts


def _tick(length: float) -> float:
    """A round time of which about ten fit into the length: 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(length / 10))
    return next((power * n for n in (1, 2, 5) if power * n * 10 >= length), power * 10)


def _legend(spans: Sequence[Sequence[Span]], with_stage: bool, top: float) -> list[str]:
    kinds = {span.action.kind for row in spans for span in row if span.end > span.start}
    entries = [(f"box {name}", label) for name, label, own in COLOURS if kinds.intersection(own)]
    parts = []
    left = float(LEFT)
    for name, label in [*entries, ("idle", "idle")]:
        parts.append(f'<rect class="{name}" x="{left}" y="{top - 11}" width="14" height="14"/>')
        parts.append(_text(left + 20, top, label))
        left += 40 + LETTER * len(label)
    if with_stage:
        parts.append(_text(left, top, "fainter: a later stage of the rank"))
    return parts


def _box(
    name: str, left: float, top: float, size: float, inside: str = "", shade: float = 1
) -> str:
    opacity = f' fill-opacity="{shade:.2f}"' if shade < 1 else ""
    place = f'x="{left:.2f}" y="{top}" width="{size:.2f}" height="{ROW}"'
    return f'<rect class="{name}" {place}{opacity}>{inside}</rect>'


def _text(left: float, top: float, text: str, name: str = "") -> str:
    chosen = f' class="{name}"' if name else ""
    return f'<text{chosen} x="{left:.2f}" y="{top}">{escape(text)}</text>'
