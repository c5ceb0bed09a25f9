"""What a pipeline stage computes with: backward passes, batch norm, random numbers and skips.

Nothing here knows of process groups. Each file stands alone but :mod:`.backward`, which uses
:mod:`.entry`, :mod:`.partition` and :mod:`.saved`.
"""

from __future__ import annotations

from dreamcomm.pipeline.compute.backward import Pending, backward_input, full_backward
from dreamcomm.pipeline.compute.batch_norm import DeferredBatchNorm
from dreamcomm.pipeline.compute.entry import StageEntry, enter
from dreamcomm.pipeline.compute.randomness import BlockRandomness
from dreamcomm.pipeline.compute.skip import Skip, find_skips

__all__ = [
    "BlockRandomness",
    "DeferredBatchNorm",
    "Pending",
    "Skip",
    "StageEntry",
    "backward_input",
    "enter",
    "find_skips",
    "full_backward",
]
