"""What a step did on a rank."""

from __future__ import annotations

from dataclasses import dataclass

from dreamcomm.pipeline.layout import Layout
from dreamcomm.pipeline.local import LocalStages
from dreamcomm.pipeline.messages.channel import Channel
from dreamcomm.pipeline.runner import Outcome, Timed
from dreamcomm.pipeline.schedule import Schedule, Span, svg_grid
from dreamcomm.ranks.agree import gather_objects

__all__ = ["Report"]


@dataclass(frozen=True)
class Report:
    """A rank's part of the latest step.

    Attributes:
        schedule: of the pipeline.
        timeline: its actions with times in seconds of :func:`time.perf_counter`, which all
            processes of a host share.
        live_peak: by stage, of how many micro-batches activations were kept at once.
        sent_messages, sent_bytes: since the pipeline was made, headers included.
    """

    schedule: Schedule
    timeline: list[Timed]
    live_peak: dict[int, int]
    sent_messages: int
    sent_bytes: int
    _layout: Layout

    @staticmethod
    def of(
        schedule: Schedule, outcome: Outcome, local: LocalStages, channel: Channel, layout: Layout
    ) -> Report:
        """The report of a step that is over."""
        live = {number: run.live_peak for number, run in local.runs.items()}
        return Report(
            schedule, outcome.timeline, live, channel.sent_messages, channel.sent_bytes, layout
        )

    @property
    def busy(self) -> float:
        """Seconds in which this rank's stages ran."""
        return sum(one.end - one.ready for one in self.timeline)

    def timelines(self) -> list[list[Span]]:
        """The steps of all ranks of this pipeline, from the first one's begin. Collective."""
        everyone = gather_objects(self._layout.group, self.timeline)
        rows = [everyone[peer] for peer in self._layout.peers]
        origin = min((one.ready for row in rows for one in row), default=0.0)
        return [
            [Span(one.action, one.ready - origin, one.end - origin) for one in row] for row in rows
        ]

    def picture(self) -> str:
        """All ranks' steps as SVG, with idle times to be seen. Collective."""
        return svg_grid(self.timelines(), unit="s")

    def __str__(self) -> str:
        live = ", ".join(f"stage {stage}: {count}" for stage, count in self.live_peak.items())
        length = self.timeline[-1].end - self.timeline[0].begin if self.timeline else 0.0
        share = 1.0 - self.busy / length if length else 0.0
        return (
            f"{self.schedule.name}: {len(self.timeline)} actions in {length * 1e3:.1f} ms, "
            f"{share:.0%} of it waiting; activations kept at once: {live}; "
            f"{self.sent_messages} messages, {self.sent_bytes} bytes since the beginning"
        )
