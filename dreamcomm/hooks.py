"""The public name of :mod:`dreamcomm.ddp.hooks`."""

from dreamcomm.ddp.hooks import State, average, bf16, bf16_feedback, fp16, fp16_feedback
from dreamcomm.ddp.hooks import __doc__ as __doc__

__all__ = ["State", "average", "bf16", "bf16_feedback", "fp16", "fp16_feedback"]
