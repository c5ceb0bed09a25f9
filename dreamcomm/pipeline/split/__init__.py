"""Splits a module into the parts of a pipeline, and a batch into micro-batches."""

from dreamcomm.pipeline.split.chunks import MicroBatches, split_batch, split_targets
from dreamcomm.pipeline.split.costs import choose_cuts, measure_costs, parameter_costs
from dreamcomm.pipeline.split.merge import merge_outputs
from dreamcomm.pipeline.split.part import StagePart
from dreamcomm.pipeline.split.partition import partition
from dreamcomm.pipeline.split.stages import Splittable, make_parts, unit_names

__all__ = [
    "MicroBatches",
    "Splittable",
    "StagePart",
    "choose_cuts",
    "make_parts",
    "measure_costs",
    "merge_outputs",
    "parameter_costs",
    "partition",
    "split_batch",
    "split_targets",
    "unit_names",
]
