"""Schedules of pipelines: made, read, written, checked, simulated and drawn. All pure functions."""

from __future__ import annotations

from dreamcomm.pipeline.schedule.actions import BACKWARDS, COMPUTES, MESSAGES, Action, Kind
from dreamcomm.pipeline.schedule.check import check, live_bound
from dreamcomm.pipeline.schedule.csv_files import read_csv, write_csv
from dreamcomm.pipeline.schedule.errors import ScheduleError
from dreamcomm.pipeline.schedule.generate import NAMES, gpipe, make_schedule, one_f_one_b
from dreamcomm.pipeline.schedule.grid import text_grid
from dreamcomm.pipeline.schedule.interleaved import interleaved_1f1b
from dreamcomm.pipeline.schedule.lower import with_messages
from dreamcomm.pipeline.schedule.schedule import Schedule
from dreamcomm.pipeline.schedule.simulate import Deadlock, Simulation, Span, simulate
from dreamcomm.pipeline.schedule.svg import svg_grid
from dreamcomm.pipeline.schedule.zero_bubble import zero_bubble_h1

__all__ = [
    "BACKWARDS",
    "COMPUTES",
    "MESSAGES",
    "NAMES",
    "Action",
    "Deadlock",
    "Kind",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "Span",
    "check",
    "gpipe",
    "interleaved_1f1b",
    "live_bound",
    "make_schedule",
    "one_f_one_b",
    "read_csv",
    "simulate",
    "svg_grid",
    "text_grid",
    "with_messages",
    "write_csv",
    "zero_bubble_h1",
]
