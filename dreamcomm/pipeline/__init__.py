"""Pipelines: a model in stages over ranks.

See :class:`Pipeline`. Schedules are values, made and checked by pure functions in
:mod:`dreamcomm.pipeline.schedule`.
"""

from __future__ import annotations

from dreamcomm.pipeline.compute.skip import Skip
from dreamcomm.pipeline.errors import Failure, PipelineError
from dreamcomm.pipeline.pipeline import Pipeline
from dreamcomm.pipeline.report import Report
from dreamcomm.pipeline.schedule import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
    make_schedule,
    read_csv,
    simulate,
    svg_grid,
    text_grid,
    write_csv,
)
from dreamcomm.pipeline.split import MicroBatches, measure_costs, partition

__all__ = [
    "Action",
    "Failure",
    "Kind",
    "MicroBatches",
    "Pipeline",
    "PipelineError",
    "Report",
    "Schedule",
    "ScheduleError",
    "Skip",
    "make_schedule",
    "measure_costs",
    "partition",
    "read_csv",
    "simulate",
    "svg_grid",
    "text_grid",
    "write_csv",
]
